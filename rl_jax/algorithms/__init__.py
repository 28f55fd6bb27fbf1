"""Algorithms: what a group's rewards make of each token, and the loss of a token.

ALGORITHMS is a literal table, name -> Entry: where its class is, what it needs computed before the step, which settings
it reads and their values for it. It stands here, in a file that imports no jax, so that config can refuse what the mesh
plan cannot feed or the algorithm would ignore, before anything is compiled (rules.py). The attribute is called with
AlgorithmSettings and gives an `Algorithm` (algorithm.py).

To add one: a file with a class, usually of policy.PolicyAlgorithm with two methods, and one line here; it then runs in
tests/algorithms/test_common.py. A plugin's class says as attributes what its line would (options.entry_of).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    target: str  # "module:attribute"
    # the settings it reads that not every algorithm does, and its values for them: dotted key -> value
    defaults: Mapping[str, Any]
    needs: frozenset[str] = frozenset()  # extras of learner.score, whatever the options
    # episodes of one task with each other: rollout.group_size must be above 1
    compares: bool = True
    policy: bool = True  # takes the options that all policy algorithms share (policy.py)
    # what it learns from rows of data.path: chat | pairs | ends (data/examples.py); "" = it reads none
    rows: str = ""
    reads_reward: bool = True  # else nothing that shapes a reward has an effect
    pulls: bool = False  # its loss acts on tokens without an advantage too
    # it pulls back to what its ratio is taken against, so that must be older than the policy that trains
    needs_lag: bool = False
    makes_scores: bool = False  # what it trains is a reward model
    by_token: bool = False  # its advantages may differ within an episode
    whitens: bool = False  # over the step's tokens, which moves the 0 of a group without a signal


TAUGHT = {
    "aggregation": "token-mean",
    "entropy_coef": 0.0,
    "reward_model_coef": 0.0,
    "reward_model_at": "end",
    "overlong_filter": False,
    "correction.level": "none",
    "correction.mode": "truncate",
    "correction.low": 0.0,
    "correction.high": 2.0,
}
# and of all that have advantages from rewards
SHARED = {**TAUGHT, "advantage_clip": 0.0, "positive_weight": 1.0, "negative_weight": 1.0}
RATIO = {**SHARED, "old_policy": "behaviour"}
CLIP = {**RATIO, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}
STD = {"std_scope": "group", "std_eps": 1e-6}  # of what divides by the std of the group
GRPO = {**CLIP, **STD}
_EVEN = {"clip_high": 0.2}
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
    "overlong_filter": False,
}
_A = "rl_jax.algorithms."

ALGORITHMS: dict[str, Entry] = {
    "grpo": Entry(_A + "grpo:Grpo", GRPO),
    "dr_grpo": Entry(_A + "dr_grpo:DrGrpo", CLIP),
    "rloo": Entry(_A + "rloo:Rloo", {**CLIP, "normalize": False, "std_eps": 1e-4}),
    "opo": Entry(_A + "opo:Opo", CLIP),
    "maxrl": Entry(_A + "maxrl:MaxRl", CLIP),
    "ppo": Entry(
        _A + "ppo:Ppo", {
            **CLIP, **_EVEN, "gamma": 1.0, "lam": 1.0, "bootstrap": False, "critic_lam": None, "lam_alpha": 0.0,
            "nll_coef": 0.0,
        },
        frozenset({"values"}), compares=False, by_token=True, whitens=True,
    ),
    "reinforce_pp": Entry(
        _A + "reinforce_pp:ReinforcePp", {**CLIP, **_EVEN, "gamma": 1.0}, compares=False, by_token=True,
        whitens=True,
    ),
    "reinforce_pp_baseline": Entry(
        _A + "reinforce_pp_baseline:ReinforcePpBaseline", {**CLIP, **_EVEN}, whitens=True
    ),
    "grpo_passk": Entry(_A + "grpo_passk:GrpoPassk", {**CLIP, "normalize": True, "std_eps": 1e-6}),
    "gdpo": Entry(_A + "gdpo:Gdpo", {**CLIP, "reward_weights": {}, "std_eps": 1e-6}),
    "otb": Entry(_A + "otb:Otb", CLIP, frozenset({"old_logprobs", "sum_squares"}), by_token=True),
    "kl_cov": Entry(
        _A + "kl_cov:KlCov", {**RATIO, **STD, "cov_share": 2e-4, "cov_coef": 1.0},
        frozenset({"old_logprobs"}), pulls=True, needs_lag=True,
    ),
    "clip_cov": Entry(
        _A + "clip_cov:ClipCov",
        {**GRPO, **_EVEN, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        frozenset({"old_logprobs"}), by_token=True,
    ),
    "gspo": Entry(_A + "gspo:Gspo", {**GRPO, **_SEQUENCE, **_ROOT}),
    "gspo_token": Entry(_A + "gspo_token:GspoToken", {**GRPO, **_SEQUENCE, **_ROOT}),
    "turn_ppo": Entry(_A + "turn_ppo:TurnPpo", {**GRPO, **_ROOT}),
    "cispo": Entry(_A + "cispo:Cispo", {**RATIO, **STD, "ratio_min": 0.0, "ratio_max": 5.0}),
    "aipo": Entry(
        _A + "aipo:Aipo", {**SHARED, "normalize": False, "std_eps": 1e-4, "ratio_max": 2.0}
    ),
    "gmpo": Entry(
        _A + "gmpo:Gmpo", {**RATIO, **STD, **_SEQUENCE, "clip_low": 0.4, "clip_high": 0.4}
    ),
    "sapo": Entry(
        _A + "sapo:Sapo", {**RATIO, **STD, **_SEQUENCE, "tau_pos": 1.0, "tau_neg": 1.05}
    ),
    "dppo": Entry(_A + "dppo:Dppo", {**RATIO, **STD, **_DPPO}),
    "kimi": Entry(_A + "kimi:Kimi", {**RATIO, **_SEQUENCE, "tau": 0.1}, pulls=True),
    "vespo": Entry(_A + "vespo:Vespo", {**RATIO, **STD}),
    "topr": Entry(
        _A + "topr:Topr",
        {**SHARED, "aggregation": "seq-mean-token-sum", "weight_level": "sequence"},
    ),
    "decoupled_ppo": Entry(_A + "decoupled_ppo:DecoupledPpo", {**GRPO, **_EVEN, **_DECOUPLED}),
    "gigpo": Entry(_A + "gigpo:Gigpo", {**GRPO, "gamma": 0.95, "omega": 1.0}, by_token=True),
    "turn_reinforce": Entry(_A + "turn_reinforce:TurnReinforce", {**GRPO, "gamma": 1.0}, by_token=True),
    "process_grpo": Entry(
        _A + "process_grpo:ProcessGrpo", {**CLIP, "std_eps": 1e-6}, by_token=True
    ),
    "role_groups": Entry(
        _A + "role_groups:RoleGroups", {**CLIP, "episode_roles": ()}, by_token=True
    ),
    "role_ema": Entry(
        _A + "role_ema:RoleEma", {**CLIP, "decay": 0.95}, compares=False, by_token=True
    ),
    "opd": Entry(
        _A + "opd:Opd", {**TAUGHT, "ratio_max": 2.0}, frozenset({"teacher_logprobs"}),
        compares=False, reads_reward=False, pulls=True, by_token=True,
    ),
    "opd_mixed": Entry(
        _A + "opd_mixed:OpdMixed",
        {**SHARED, **STD, "ratio_max": 2.0, "reward_coef": 1.0, "teacher_coef": 1.0}, pulls=True,
    ),
    "distill": Entry(
        _A + "distill:Distill", {**TAUGHT, "jsd_beta": 0.5}, frozenset({"teacher_divergence"}),
        compares=False, reads_reward=False, pulls=True,
    ),
    "dpo": Entry(
        _A + "dpo:Dpo", _DPO, frozenset({"old_logprobs", "reference_logprobs"}), policy=False,
        rows="pairs",
    ),
    "rm": Entry(
        _A + "rm:Rm", {"aggregation": "seq-mean-token-sum", "center_coef": 0.0},
        frozenset({"rewards"}), policy=False, rows="ends", makes_scores=True,
    ),
    "sft": Entry(
        _A + "sft:Sft", {"aggregation": "token-mean"}, compares=False, policy=False, rows="chat",
        reads_reward=False, pulls=True,
    ),
}  # fmt: skip
