"""Every setting of an algorithm does something, or is refused: nothing that is accepted is ignored.

A setting is changed beside others that give it something to do (CHANGES). Where rules() accepts both, whatever the
algorithm makes of one batch must differ: its arrays, loss weights and state, its loss and gradients.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS, RATIO, STD, options
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.algorithms.rules import rules
from rl_jax.metrics import Metric
from rl_jax.settings import AlgorithmSettings
from rl_jax.testing.trajectories import fake_group
from rl_jax.types import Outcome
from tests.algorithms.test_common import make
from tests.algorithms.test_whole_batch import members_of, trained_batch, with_parts

RECOMPUTE, RATIOS = {"old_policy": "recompute"}, {"correction.reject_stat": "ratio"}
WEIGHTS = RECOMPUTE | {"correction.level": "token"}
REJECT = RATIOS | {"correction.reject_high": 1.1}
KL, LONG = {"kl.coef": 0.3}, {"overlong.buffer": 4, "overlong.max_tokens": 6}
KL_REWARD = KL | {"kl.where": "reward"}
BAND = {"cov_low": -0.5, "cov_high": 0.5}
ADAPTS = {"entropy.target": 0.5, "entropy_coef": 0.01}

# key -> (its value, what stands beside it both times)
CHANGES = {
    "clip_low": (0.02, {}),
    "clip_high": (0.03, {}),
    "dual_clip": (1.05, {}),
    "aggregation": ("group-mean-token-mean", {}),
    "old_policy": ("one_update", {}),
    "gamma": (0.5, {}),
    "lam": (0.5, {}),
    "omega": (0.3, {}),
    "ratio_min": (0.95, {}),
    "ratio_max": (1.05, {}),
    "tau": (0.5, {}),
    "tau_pos": (2.0, {}),
    "tau_neg": (2.0, {}),
    "divergence": ("kl", {"div_low": 0.01, "div_high": 0.01}),
    "div_low": (0.01, {}),
    "div_high": (0.01, {}),
    "bootstrap": (True, {}),
    "critic_lam": (0.5, {}),
    "lam_alpha": (0.5, {}),
    "nll_coef": (0.3, {}),
    "episode_roles": (("policy",), {}),
    "decay": (0.5, {}),
    "advantage_clip": (0.3, {}),
    "positive_weight": (0.5, {}),
    "negative_weight": (0.5, {}),
    "weight_level": ("token", {}),
    "preference": ("ipo", {}),
    "beta": (0.5, {}),
    "jsd_beta": (0.1, {}),
    "label_smoothing": (0.2, {}),
    "center_coef": (0.1, {}),
    "reward_coef": (0.3, {}),
    "teacher_coef": (0.3, {}),
    "cov_share": (0.5, BAND),
    "cov_coef": (0.3, {}),
    "cov_low": (0.0, BAND | {"cov_share": 0.3}),
    "cov_high": (0.01, BAND | {"cov_share": 0.3}),
    "reward_weights": ({"form": 1.0}, {}),
    "reward_model_coef": (0.5, {}),
    "reward_model_at": ("turns", {"reward_model_coef": 0.5}),
    "entropy_coef": (0.3, {}),
    "max_response_tokens": (
        7,
        {"aggregation": "seq-mean-token-sum-norm", "max_response_tokens": 6},
    ),
    "overlong_filter": (True, {}),
    "std_scope": ("batch", {}),
    "std_eps": (0.3, {}),
    "normalize": (True, {}),
    "correction.level": ("geometric", WEIGHTS),
    "correction.mode": ("mask", WEIGHTS | {"correction.high": 1.1}),
    "correction.low": (1.05, WEIGHTS),
    "correction.high": (1.05, WEIGHTS),
    "correction.reject_stat": ("k3", REJECT),
    "correction.reject_level": ("seq_sum", REJECT),
    "correction.reject_low": (0.95, RATIOS),
    "correction.reject_high": (1.1, RATIOS),
    "correction.veto": (0.9, {}),
    "correction.opsm_delta": (0.001, {}),
    "correction.max_token_age": (1, {}),
    "correction.denominator": ("after_filter", RECOMPUTE | REJECT),
    "correction.m2po": (0.01, RECOMPUTE),
    "correction.batch_normalize": (True, WEIGHTS),
    "kl.coef": (0.3, {}),
    "kl.where": ("reward", KL | {"kl.kind": "k3"}),
    "kl.kind": ("k2", KL),
    "kl.target": (0.5, KL_REWARD),
    "kl.horizon": (100, KL_REWARD | {"kl.target": 0.5}),
    "entropy.target": (0.5, {"entropy_coef": 0.01}),
    "entropy.delta": (0.001, ADAPTS),
    "entropy.low": (0.008, ADAPTS),
    "entropy.high": (0.012, ADAPTS),
    "overlong.buffer": (2, LONG),
    "overlong.max_tokens": (7, LONG),
    "overlong.factor": (0.1, LONG),
    "filter.equal_rewards": (True, {}),
    "filter.mean_above": (0.4, {}),
    "filter.mean_below": (0.45, {}),
    "filter.min_reward": (0.5, {}),
    "filter.best_of": (1, {}),
}
SHARED = {*RATIO, *STD}
OF_ALL = ("grpo", "topr", "opd", "ppo")  # a name of each form in which policy.py's options are read


def batch_groups():
    """Unequal and equal rewards, parts of them, and members of several turns, one of them cut."""
    groups = [
        fake_group(0, [0.0, 1.0, 0.3, 0.1], [8, 12, 9, 15]),
        fake_group(1, [0.5, 0.5, 0.5], [8, 8, 20]),
        fake_group(2, [0.0, 2.0, -1.0, None], [11, 7, 30, 9]),
    ]
    groups = [
        with_parts(g, [{"form": (i * i) % 3, "answer": i} for i in range(len(g.trajectories))])
        for g in groups
    ]
    cut = replace(groups[0].trajectories[3], outcome=Outcome.TRUNCATED, truncated_by="length")
    groups[0] = replace(groups[0], trajectories=(*groups[0].trajectories[:3], cut))
    return groups


def microbatch():
    """Two sequences a row, turns of two tokens, ratios on both sides of 1 and ages of 0 to 2."""
    rng = np.random.default_rng(0)
    shape = (2, 8)
    slots = np.broadcast_to(np.arange(8), shape)
    mask = slots < np.array([[8], [7]])
    draw = {n: np.where(mask, rng.normal(size=shape), 0).astype(np.float32) for n in "abcdef"}
    logprobs = np.where(mask, -0.3 - np.abs(draw["a"]), 0).astype(np.float32)
    return LossInputs(
        logprobs=logprobs,
        entropy=np.abs(draw["b"]),
        behaviour_logprobs=np.where(mask, logprobs + 0.3 * draw["c"] + [[-0.2], [0.2]], 0).astype(
            np.float32
        ),
        advantages=np.where(mask, np.where(slots < 4, 1.0, -1.0) * (1 + np.abs(draw["d"])), 0),
        mask=mask,
        segment_ids=np.where(mask, 1 + slots // 4, 0).astype(np.int32),
        turn_ids=np.where(mask, slots // 2, 0).astype(np.int32),
        old_logprobs=np.where(mask, logprobs + 0.2 * draw["e"], 0),
        reference_logprobs=np.where(mask, logprobs + 0.3 * draw["f"], 0),
        teacher_logprobs=np.where(mask, logprobs - 0.3 * draw["f"], 0),
        teacher_divergence=np.abs(draw["f"]),
        lag=np.where(mask, slots % 3, 0).astype(np.int32),
        selected=(mask & (slots % 2 == 0)).astype(np.float32),
    )


@cache
def figures(settings):
    """What the algorithm makes of one batch and one microbatch."""
    algorithm = make(settings.name, **{k: v for k, v in vars(settings).items() if k != "name"})
    groups, dropped = algorithm.select(batch_groups())
    batch, state = trained_batch(algorithm, groups)
    learned = [algorithm.learned(state, {"policy/entropy": Metric(h, 1)}) for h in (0.1, 0.9)]
    members = members_of(batch_groups())
    told = [dropped, state, learned, sorted(algorithm.needs), [*map(algorithm.trains, members)]]
    arrays = [batch.targets_mask, batch.advantages, batch.loss_weights]
    arrays += [batch.extras[name] for name in sorted(batch.extras)]
    x = microbatch()
    if hasattr(algorithm, "divergence"):
        logits = np.random.default_rng(1).normal(size=(2, 4, 9)).astype(np.float32)
        arrays.append(algorithm.divergence(*logits))

    def total(logprobs, entropy):
        loss, _ = algorithm.token_loss(replace(x, logprobs=logprobs, entropy=entropy))
        return (loss * (1 + jnp.arange(8))).sum()

    variables = (jnp.asarray(x.logprobs), jnp.asarray(x.entropy))
    arrays += jax.tree.leaves(jax.value_and_grad(total, argnums=(0, 1))(*variables))
    return repr(told), tuple(np.asarray(a).tobytes() for a in arrays)


def changed(name, key):
    """(the settings with what stands beside the key, the same with the key changed); None beside what it refuses."""
    value, beside = CHANGES[key]
    settings = options.with_value(AlgorithmSettings(), "name", name)
    reads = ALGORITHMS[name].defaults
    for other, its in beside.items():
        if other not in BAND or other in reads:
            settings = options.with_value(settings, other, its)
    if options.get(options.resolved(settings), key) == value:
        value = {True: False, "mask": "truncate"}[value]  # the other one
    after = options.with_value(settings, key, value)
    if list(rules(settings, 4)):
        return None, after
    return hashable(settings), hashable(after)


def hashable(settings):
    """reward_weights is a mapping, which a cache's key must not hold."""
    weights = settings.reward_weights
    return settings if weights is None else replace(settings, reward_weights=Weights(weights))


class Weights(dict):
    def __hash__(self):
        return hash(tuple(self.items()))


def test_every_key_is_here():
    assert set(CHANGES) | {"name"} == set(options.KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_setting_of_its_own_has_an_effect(name):
    own = ALGORITHMS[name].defaults
    keys = [k for k in own if name in OF_ALL or own[k] != RATIO.get(k, STD.get(k)) or k in STD]
    for key in keys:
        before, after = changed(name, key)
        if before is not None and not list(rules(after, 4)):
            assert figures(before) != figures(after), key
        elif key not in SHARED:
            pytest.fail(f"{key}: {[*rules(after, 4)]}")


@pytest.mark.parametrize("key", CHANGES)
@pytest.mark.parametrize(
    "name", [n if n == "grpo" else pytest.param(n, marks=pytest.mark.slow) for n in OF_ALL]
)
def test_what_is_accepted_has_an_effect(name, key):
    before, after = changed(name, key)
    if before is not None and not list(rules(after, 4)):
        assert figures(before) != figures(after)


@pytest.mark.parametrize("key", CHANGES)
def test_what_no_other_value_refuses_is_read_or_refused_by_each(key):
    """And by somebody it is read, so the change says something."""
    readers = [
        name
        for name, (before, after) in ((n, changed(n, key)) for n in ALGORITHMS)
        if before is not None and not list(rules(after, 4))
    ]
    assert readers
    for name in readers:
        entry = ALGORITHMS[name]
        assert entry.policy or key in entry.defaults or key == "max_response_tokens"
