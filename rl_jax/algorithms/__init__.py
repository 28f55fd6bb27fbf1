"""Algorithms: what a group's rewards make of each token, and the loss of a token.

ALGORITHMS is a literal table, name -> Entry: where its class is, what it needs computed before the step, which settings
it reads and their values for it. It stands here, in a file that imports no jax, so that config can refuse what the mesh
plan cannot feed or the algorithm would ignore, before anything is compiled (options.py). The attribute is called with
AlgorithmSettings and gives an `Algorithm` (algorithm.py).

To add one: a file with a class, usually of policy.PolicyAlgorithm with two methods, and one line here; it then runs in
tests/algorithms/test_common.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    target: str  # "module:attribute"
    defaults: Mapping[
        str, Any
    ]  # the settings it reads whose default is its own: dotted key -> value
    needs: frozenset[str] = frozenset()  # extras of learner.score, whatever the options
    compares: bool = (
        True  # episodes of one task with each other: rollout.group_size must be above 1
    )
    policy: bool = True  # takes the options that all policy algorithms share (policy.py)
    # what it learns from rows of data.path: chat | pairs | ends (data/examples.py); "" = it reads none
    rows: str = ""


_SHARED = {
    "aggregation": "token-mean",
    "correction.level": "none",
    "correction.mode": "truncate",
    "correction.low": 0.0,
    "correction.high": 2.0,
}
_RATIO = {**_SHARED, "old_policy": "behaviour"}
_CLIP = {**_RATIO, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}
_EVEN = {**_CLIP, "clip_high": 0.2}
_SEQUENCE = {"aggregation": "seq-mean-token-mean"}
_ROOT = {"clip_low": 3e-4, "clip_high": 4e-4}  # of the mean ratio of many tokens
_DECOUPLED = {
    "old_policy": "recompute",
    "correction.level": "token",
    "correction.mode": "mask",
    "correction.high": 5.0,
}
_DPPO = {"divergence": "tv", "div_low": 0.2, "div_high": 0.2, "ratio_max": 20.0}
_DPO = {
    "aggregation": "seq-mean-token-sum",
    "preference": "sigmoid",
    "beta": 0.1,
    "label_smoothing": 0.0,
}
_A = "rl_jax.algorithms."

ALGORITHMS: dict[str, Entry] = {
    "grpo": Entry(_A + "grpo:Grpo", _CLIP),
    "dr_grpo": Entry(_A + "dr_grpo:DrGrpo", _CLIP),
    "rloo": Entry(_A + "rloo:Rloo", _CLIP),
    "opo": Entry(_A + "opo:Opo", _CLIP),
    "maxrl": Entry(_A + "maxrl:MaxRl", _CLIP),
    "ppo": Entry(
        _A + "ppo:Ppo", {**_EVEN, "gamma": 1.0, "lam": 1.0}, frozenset({"values"}), compares=False
    ),
    "reinforce_pp": Entry(
        _A + "reinforce_pp:ReinforcePp", {**_EVEN, "gamma": 1.0}, compares=False
    ),
    "reinforce_pp_baseline": Entry(_A + "reinforce_pp_baseline:ReinforcePpBaseline", _EVEN),
    "grpo_passk": Entry(_A + "grpo_passk:GrpoPassk", _CLIP),
    "gdpo": Entry(_A + "gdpo:Gdpo", {**_CLIP, "reward_weights": {}}),
    "otb": Entry(_A + "otb:Otb", _CLIP, frozenset({"old_logprobs", "sum_squares"})),
    "kl_cov": Entry(
        _A + "kl_cov:KlCov", {**_RATIO, "cov_share": 2e-4, "cov_coef": 1.0},
        frozenset({"old_logprobs"}),
    ),
    "clip_cov": Entry(
        _A + "clip_cov:ClipCov", {**_EVEN, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        frozenset({"old_logprobs"}),
    ),
    "gspo": Entry(_A + "gspo:Gspo", {**_CLIP, **_SEQUENCE, **_ROOT}),
    "turn_ppo": Entry(_A + "turn_ppo:TurnPpo", {**_CLIP, **_ROOT}),
    "cispo": Entry(_A + "cispo:Cispo", {**_RATIO, "ratio_min": 0.0, "ratio_max": 5.0}),
    "aipo": Entry(_A + "aipo:Aipo", {**_SHARED, "ratio_max": 2.0}),
    "gmpo": Entry(_A + "gmpo:Gmpo", {**_RATIO, **_SEQUENCE, "clip_low": 0.4, "clip_high": 0.4}),
    "sapo": Entry(_A + "sapo:Sapo", {**_RATIO, **_SEQUENCE, "tau_pos": 1.0, "tau_neg": 1.05}),
    "dppo": Entry(_A + "dppo:Dppo", {**_RATIO, **_DPPO}),
    "kimi": Entry(_A + "kimi:Kimi", {**_RATIO, **_SEQUENCE, "tau": 0.1}),
    "vespo": Entry(_A + "vespo:Vespo", _RATIO),
    "topr": Entry(
        _A + "topr:Topr",
        {**_SHARED, "aggregation": "seq-mean-token-sum", "weight_level": "sequence"},
    ),
    "decoupled_ppo": Entry(_A + "decoupled_ppo:DecoupledPpo", {**_EVEN, **_DECOUPLED}),
    "gigpo": Entry(_A + "gigpo:Gigpo", {**_CLIP, "gamma": 0.95, "omega": 1.0}),
    "turn_reinforce": Entry(_A + "turn_reinforce:TurnReinforce", {**_CLIP, "gamma": 1.0}),
    "opd": Entry(
        _A + "opd:Opd", {**_SHARED, "ratio_max": 2.0}, frozenset({"teacher_logprobs"}), compares=False
    ),
    "dpo": Entry(
        _A + "dpo:Dpo", _DPO, frozenset({"old_logprobs", "reference_logprobs"}), policy=False,
        rows="pairs",
    ),
    "rm": Entry(
        _A + "rm:Rm", {"aggregation": "seq-mean-token-sum", "center_coef": 0.0},
        frozenset({"rewards"}), policy=False, rows="ends",
    ),
    "sft": Entry(
        _A + "sft:Sft", {"aggregation": "token-mean"}, compares=False, policy=False, rows="chat"
    ),
}  # fmt: skip
