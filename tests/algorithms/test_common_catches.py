"""test_common.py against faulty algorithms: each is refused by the check that is there for it."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS, GRPO, Entry
from rl_jax.algorithms.grpo import Grpo
from rl_jax.algorithms.policy import PolicyAlgorithm
from rl_jax.algorithms.segments import run_mean, run_starts
from rl_jax.algorithms.token_losses import TokenLoss, clipped_surrogate, ppo_clip
from tests.algorithms import test_common


class ByPosition(PolicyAlgorithm):
    """Every four rewards are a group."""

    def estimate(self, scored):
        rewards = np.pad(scored.totals[0], (0, -len(scored.rewards) % 4)).reshape(-1, 4)
        centred = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
        return scored.spread(centred[: len(scored.rewards)])


class BlocksOfSizes(PolicyAlgorithm):
    """Groups are runs of one id, not all members that have it."""

    def estimate(self, scored):
        rewards, groups, valid = scored.totals
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        out = np.zeros(len(rewards))
        for block in np.split(np.arange(len(rewards)), starts[1:]):
            own = block[valid[block]]
            flat = len(own) < 2 or np.ptp(rewards[own]) == 0
            out[own] = 0 if flat else rewards[own] - rewards[own].mean()
        return scored.spread(out)


class Noise(PolicyAlgorithm):
    """Nothing is said of groups without a signal: rounding over eps, and a raw reward."""

    def estimate(self, scored):
        rewards, groups, valid = scored.totals
        out = np.zeros(len(rewards))
        for group in np.unique(groups):
            own = np.flatnonzero((groups == group) & valid)
            centred = rewards[own] - (rewards[own].mean() if len(own) > 1 else 0.0)
            out[own] = centred / (rewards[own].std() + 1e-6 if len(own) > 1 else 1.0)
        return scored.spread(out)


class Divides(Grpo):
    def loss(self, x):
        out = super().loss(x)
        return TokenLoss(out.loss / jnp.maximum(x.mask.sum(), 1), out.parts)


class RowRatio(Grpo):
    """One ratio a row, whatever sequences lie in it."""

    def loss(self, x):
        d = jnp.where(x.mask, x.logprobs, 0.0) - jnp.where(x.mask, x.old, 0.0)
        row = run_starts(jnp.zeros(x.mask.shape, jnp.int32))
        ratio = jnp.exp(jnp.clip(run_mean(d, x.mask, row), -20.0, 20.0))
        advantages = jnp.where(x.mask, x.advantages, 0.0)
        return TokenLoss(clipped_surrogate(ratio, advantages, x.mask, (0.2, 0.28, None))[0], {})


class Unclamped(Grpo):
    def loss(self, x):
        d = jnp.where(x.mask, x.logprobs, 0.0) - jnp.where(x.mask, x.old, 0.0)
        return TokenLoss(-jnp.where(x.mask, x.advantages, 0.0) * jnp.exp(d), {})


class Multiplies(Grpo):
    """The mask as a factor, which keeps a NaN."""

    def loss(self, x):
        return TokenLoss(-x.advantages * x.logprobs * x.mask, {})


class Scalar(Grpo):
    def loss(self, x):
        out = ppo_clip(x.logprobs, x.old, x.advantages, x.mask, clip_low=0.2, clip_high=0.28)
        return TokenLoss(out[0].sum(), {})


class Differs(Grpo):
    """More on later tokens, and not declared."""

    def estimate(self, scored):
        return [
            values * np.arange(len(values), dtype=np.float32) for values in super().estimate(scored)
        ]


CAUGHT = {
    ByPosition: "test_order_of_groups_and_members_changes_no_pairing",
    BlocksOfSizes: "test_members_of_a_group_need_not_stand_side_by_side",
    Noise: "test_a_group_without_a_signal_has_advantage_exactly_0",
    Divides: "test_a_microbatch_knows_nothing_of_the_others",
    RowRatio: "test_sequences_of_one_row_do_not_speak_to_each_other",
    Unclamped: "test_loss_and_gradient_are_finite_at_any_ratio",
    Multiplies: "test_what_stands_off_the_mask_changes_nothing",
    Scalar: "test_sums_count_the_trained_tokens",
    Differs: "test_advantages_stand_on_the_sampled_tokens_only",
}
SUITE = {name: check for name, check in vars(test_common).items() if name.startswith("test_")}


@pytest.fixture
def plant(monkeypatch):
    """A line of the table for a class of this file."""

    def put(kind):
        entry = Entry(f"{__name__}:{kind.__name__}", GRPO)
        monkeypatch.setitem(ALGORITHMS, kind.__name__, entry)
        return test_common.make(kind.__name__)

    yield put
    test_common.jitted.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUGHT, ids=lambda kind: kind.__name__)
def test_a_faulty_algorithm_is_refused(plant, kind):
    with pytest.raises((AssertionError, ValueError)):
        SUITE[CAUGHT[kind]](plant(kind))


@pytest.mark.slow
def test_a_sound_one_is_taken_and_every_check_takes_an_algorithm(plant):
    assert all(
        list(inspect.signature(check).parameters) == ["algorithm"] for check in SUITE.values()
    )
    for check in set(CAUGHT.values()):
        SUITE[check](plant(Grpo))
