"""A token that a correction drops trains nothing, whatever a loss takes of its turn or sequence; the others go on as
they were, divided by what was counted before."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms import ALGORITHMS, options
from rl_jax.algorithms.algorithm import LossInputs
from rl_jax.settings import AlgorithmSettings, CorrectionSettings
from tests.algorithms.test_common import following, make

NAMES = [name for name, entry in ALGORITHMS.items() if entry.policy]
# One algorithm a loss and its own settings; the others differ in their advantages.
POLICIES = list(
    {
        (type(a := make(n)).loss, a.settings.aggregation, a.settings.clip_low): n for n in NAMES
    }.values()
)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 2, 2]])
TURNS = np.array([[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 1]])
MASK = SEGMENTS > 0
DROPPED = MASK & np.isin(np.arange(16).reshape(2, 8), [1, 4, 8, 11, 12])
DROPS = {
    "reject": CorrectionSettings(reject_stat="ratio", reject_low=0.2, reject_high=5.0),
    "icepop": CorrectionSettings(level="token", mode="mask", low=0.2, high=5.0),
    "age": CorrectionSettings(max_token_age=2),
    "m2po": CorrectionSettings(m2po=0.04),
}


def inputs(far, near):
    """DROPPED is far from the sampler, old, and not kept; the others are near, and all are near the step's start."""
    rng = np.random.default_rng(3)
    logprobs = np.where(MASK, -1.0 - rng.random(MASK.shape), 0).astype(np.float32)
    noise = (rng.normal(size=MASK.shape) * near).astype(np.float32)
    gap = np.where(DROPPED, np.float32(-far), noise)
    drawn = rng.normal(size=(4, *MASK.shape)).astype(np.float32)
    each = np.where(SEGMENTS == 1, drawn[0, :, :1], drawn[0, :, 1:2])  # one a sequence
    fields = {
        "logprobs": logprobs,
        "entropy": np.abs(drawn[1]),
        "behaviour_logprobs": logprobs + gap,
        "advantages": each,
        "old_logprobs": logprobs + noise,
        "teacher_logprobs": logprobs + 0.3 * drawn[2],
        "teacher_divergence": np.abs(drawn[2]),
        "selected": (drawn[3] > 0).astype(np.float32),
        "kept": 1.0 - DROPPED,
    }
    fields = {n: np.where(MASK, v, 0).astype(np.float32) for n, v in fields.items()}
    lag = np.where(DROPPED, 3, 1) * MASK
    return LossInputs(mask=MASK, segment_ids=SEGMENTS, turn_ids=TURNS, lag=lag, **fields)


def weights_of(name, mask=MASK):
    """The algorithm's own aggregation of rows with several sequences."""
    out = np.zeros(mask.shape, np.float32)
    is_mean = options.resolved(AlgorithmSettings(name=name)).aggregation == "seq-mean-token-mean"
    for row, segment in zip(*np.nonzero(np.diff(SEGMENTS, prepend=0) > 0), strict=True):
        own = (SEGMENTS[row] == SEGMENTS[row, segment]) & mask[row]
        out[row][own] = 1 / (4 * own.sum()) if is_mean else 1.0
    return out


def gradient(algorithm, x, weights):
    def total(logprobs):
        loss, _ = algorithm.token_loss(following(x, logprobs))
        return jnp.where(x.mask, weights * loss, 0.0).sum()

    fast = {"xla_backend_optimization_level": 0}
    return np.asarray(jax.jit(jax.grad(total), compiler_options=fast)(x.logprobs))


def algorithm_of(name, correction):
    old = {"old_policy": "recompute"} if "old_policy" in ALGORITHMS[name].defaults else {}
    return make(name, entropy_coef=0.0, correction=correction, **old)


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_dropped_token_has_exactly_no_gradient(name, drop):
    x = inputs(far=3.0, near=1e-5)
    got = gradient(algorithm_of(name, DROPS[drop]), x, weights_of(name))
    assert not got[DROPPED].any()
    assert got[MASK & ~DROPPED].any()


@pytest.mark.parametrize("name", POLICIES)
def test_the_other_tokens_keep_the_gradient_that_they_had(name):
    """Where the policies are one, so that no mean or sum of log-ratios changes with its tokens."""
    x, weights = inputs(far=0.0, near=0.0), weights_of(name)
    none = CorrectionSettings()
    want = gradient(algorithm_of(name, none), x, weights)
    got = gradient(algorithm_of(name, DROPS["age"]), x, weights)
    assert want[DROPPED].any() and not got[DROPPED].any()
    np.testing.assert_allclose(got, np.where(DROPPED, 0, want), rtol=2e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_loss_is_that_of_the_tokens_that_stay(name):
    """Off policy, against the same rows without the dropped tokens; their sequences count as they did."""
    x = inputs(far=0.5, near=0.1)
    got = gradient(algorithm_of(name, DROPS["age"]), x, weights_of(name))
    mask = MASK & ~DROPPED
    num = np.array([[(SEGMENTS[r] == s).sum() for s in SEGMENTS[r]] for r in range(2)])
    left = np.array([[((SEGMENTS[r] == s) & mask[r]).sum() for s in SEGMENTS[r]] for r in range(2)])
    means = options.resolved(AlgorithmSettings(name=name)).aggregation == "seq-mean-token-mean"
    weights = weights_of(name, mask)
    if means and name != "kimi":  # a mean over fewer tokens; a sum is what it is
        weights = weights * left / num
    want = gradient(algorithm_of(name, CorrectionSettings()), replace(x, mask=mask), weights)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


@pytest.mark.slow
def test_after_filter_divides_by_what_stays():
    x, mask = inputs(far=3.0, near=1e-5), MASK & ~DROPPED
    for name in ("kimi", "gspo", "grpo"):
        after = replace(DROPS["icepop"], denominator="after_filter")
        algorithm = algorithm_of(name, after)
        got = gradient(algorithm, x, weights_of(name, mask))
        assert not got[DROPPED].any() and got[mask].any()
    sums = algorithm.token_loss(x)[1]
    assert [float(v) for v in sums["is/rejected"]] == [DROPPED.sum(), MASK.sum()]
