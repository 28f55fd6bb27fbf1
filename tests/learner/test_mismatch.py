"""Mismatch by lag and by pure or mixed KV, by hand."""

import jax
import numpy as np
import pytest

from rl_jax.learner.mismatch import mismatch_metrics, mismatch_totals
from rl_jax.metrics import unknown_names

TOTALS = jax.jit(mismatch_totals)


def metrics_of(d, lag=0, mixed=False, mask=True):
    """Metrics for log-ratios d; behaviour log-probs are -1."""
    d = np.atleast_1d(np.asarray(d, np.float32))
    slots = 1000  # one shape, so one program, for all tests: the rest is masked
    d = np.pad(d, (0, slots - len(d)), constant_values=np.nan)
    full = [np.resize(x, len(d)) if np.ndim(x) else np.full(len(d), x) for x in (lag, mixed)]
    mask = np.isfinite(d) & (np.pad(mask, (0, slots - len(mask))) if np.ndim(mask) else mask)
    arrays = (d - 1, np.full_like(d, -1), mask, *full, np.ones(len(d), np.int32))
    return mismatch_metrics(jax.device_get(TOTALS(*(a[None, None] for a in arrays))))


@pytest.mark.slow
def test_each_token_falls_into_one_bucket():
    d = np.array([0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 9.0])
    lag = np.array([0, 0, 1, 2, 9, 12, 0])
    mixed = np.array([0, 1, 0, 0, 0, 0, 0], bool)
    mask = np.array([1, 1, 1, 1, 1, 1, 0], bool)
    metrics = metrics_of(d, lag, mixed, mask)
    means = {n: (m.mean, m.count) for n, m in metrics.items() if n.startswith("mismatch/abs_mean_")}
    want = {
        "mismatch/abs_mean_lag0_pure": (0.1, 1),
        "mismatch/abs_mean_lag0_mixed": (0.2, 1),
        "mismatch/abs_mean_lag1_pure": (0.3, 1),
        "mismatch/abs_mean_lag2_pure": (0.4, 1),
        "mismatch/abs_mean_lag9_pure": (0.55, 2),
    }
    assert means.keys() == want.keys()  # a bucket nothing fell into is absent, never 0
    for name, (mean, count) in want.items():
        assert means[name] == (pytest.approx(mean, rel=1e-6), count)
    shares = {n: m.mean for n, m in metrics.items() if n.startswith("staleness/share_")}
    assert shares == {f"staleness/share_lag{n}": k / 6 for n, k in {0: 2, 1: 1, 2: 1, 9: 2}.items()}
    assert not unknown_names(metrics)
    assert metrics["mismatch/abs_mean"].count == 6
    assert metrics["mismatch/abs_max"].mean == pytest.approx(0.6)


def test_estimators_by_hand():
    metrics = metrics_of([0.5, -0.5])
    w = np.exp([0.5, -0.5])
    assert metrics["mismatch/k1"].mean == pytest.approx(0.0, abs=1e-7)
    assert metrics["mismatch/k3"].mean == pytest.approx(np.mean(w - 1 - [0.5, -0.5]), rel=1e-5)
    assert metrics["mismatch/k2"].mean == pytest.approx(0.125, rel=1e-6)
    assert metrics["mismatch/chi2"].mean == pytest.approx(np.mean(w**2) - 1, rel=1e-5)
    assert metrics["policy/ratio"].mean == pytest.approx(w.mean(), rel=1e-6)
    assert metrics["is/ess"].mean == pytest.approx(w.sum() ** 2 / (2 * (w**2).sum()), rel=1e-6)


def test_measures_of_sequences_by_hand():
    """Two in one row, one alone in the next beside an empty slot: products of weights, and perplexities."""
    segments = np.array([[[1, 1, 2, 2], [1, 1, 1, 0]]])
    d = np.array([[[0.5, 0.1, -0.3, 0.1], [0.2, 0.2, -0.1, 9.0]]], np.float32)
    mask = segments > 0
    behaviour = np.array([[[-1.0, -2.0, -3.0, -1.0], [-0.5, -1.0, -1.5, -7.0]]], np.float32)
    zeros = np.zeros(d.shape, np.int32)
    given = (behaviour + d, behaviour, mask, zeros, zeros > 0, segments)
    metrics = mismatch_metrics(jax.device_get(TOTALS(*given)))
    w = np.exp([0.6, -0.2, 0.3])
    assert metrics["is/ess_sequence"].mean == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()))
    assert metrics["mismatch/chi2_sequence"].mean == pytest.approx(np.mean(w**2) - 1, rel=1e-5)
    rollout, gap = np.array([1.5, 2.0, 1.0]), -np.array([0.3, -0.1, 0.1])
    for name, want in {
        "rollout_ppl": np.exp(rollout),
        "train_ppl": np.exp(rollout + gap),
        "ppl_gap": gap,
        "ppl_gap_abs": np.abs(gap),
        "ppl_ratio": np.exp(gap),
    }.items():
        assert metrics[f"mismatch/{name}"].mean == pytest.approx(want.mean(), rel=1e-5), name
        assert metrics[f"mismatch/{name}"].count == 3
    own, of = np.exp((behaviour + d)[mask]), np.exp(behaviour[mask])
    assert metrics["mismatch/abs_prob"].mean == pytest.approx(np.abs(own - of).mean(), rel=1e-5)
    mult = np.exp(np.abs(d[mask])).mean()
    assert metrics["mismatch/mult_prob_error"].mean == pytest.approx(mult, rel=1e-5)
    assert not unknown_names(metrics)


def test_effective_sample_sizes_of_each_age():
    d, lag = np.array([0.5, -0.5, 0.2, 0.0]), np.array([0, 0, 3, 3])
    metrics = metrics_of(d, lag)
    for age in (0, 3):
        w = np.exp(d[lag == age])
        want = w.sum() ** 2 / (2 * (w**2).sum())
        assert metrics[f"is/ess_lag{age}"].mean == pytest.approx(want, rel=1e-6)
    assert "is/ess_lag1" not in metrics


def test_equal_logprobs_have_no_mismatch():
    metrics = metrics_of(np.zeros(5))
    assert metrics["is/ess"].mean == 1.0
    for name in ("abs_mean", "abs_max", "abs_p50", "abs_p99", "k1", "k2", "k3", "chi2"):
        assert metrics[f"mismatch/{name}"].mean == 0.0


@pytest.mark.parametrize(
    ("num", "rank", "middle"), [(1, 1, 1), (50, 50, 25), (100, 99, 50), (1000, 990, 500)]
)
def test_percentiles_are_the_nearest_ranks(num, rank, middle):
    d = np.random.default_rng(0).permutation(num) + 1.0
    metrics = metrics_of(d / num)
    assert metrics["mismatch/abs_p99"].mean == pytest.approx(rank / num)
    assert metrics["mismatch/abs_p50"].mean == pytest.approx(middle / num)


def test_nothing_measured_is_nothing_said():
    assert metrics_of([1.0, 2.0], mask=False) == {}
    assert mismatch_metrics({}) == {}
