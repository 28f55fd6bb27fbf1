"""Which tasks to draw next, from what training made of the last ones. Host, numpy; the state is the caller's.

Both trackers are state that a checkpoint must keep. Evaluation never feeds them.
"""

from collections.abc import Sequence

import numpy as np

DRIFT_HALF_LIFE = 0.06  # SPO: the KL at which half of a task's history is forgotten
FORGETTING = (0.875, 0.96)
SPO_FLOOR = 0.05  # of a task's sampling weight


def dump_probs(
    advantages: Sequence[Sequence[float]],
    counts: np.ndarray,
    *,
    window: int = 300,
    tau: float = 0.1,
    floor: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(probs, scores, mean |advantage|) of each distribution: score = mean + sqrt(2 ln(N + 1) / (n + 1)).

    Args:    advantages: per distribution its responses' mean token advantages, oldest first, the last `window` count.
             counts: responses seen in all.  tau: softmax temperature.  floor: share of a uniform mixture (ours).
    Source:  DUMP arXiv:2504.09710. An empty window has mean 0.
    """
    counts = np.asarray(counts, np.float64)
    recent = [np.abs(np.asarray(own[-window:], np.float64)) for own in advantages]
    means = np.array([own.mean() if len(own) else 0.0 for own in recent])
    scores = means + np.sqrt(2.0 * np.log(counts.sum() + 1.0) / (counts + 1.0))
    weights = np.exp((scores - scores.max()) / tau)
    probs = weights / weights.sum()
    return (1.0 - floor) * probs + floor / len(probs), scores, means


def spo_advantages(
    alpha: np.ndarray, beta: np.ndarray, rewards: np.ndarray, *, eps: float = 1e-8
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(normalised, raw, baseline): raw = r - alpha / (alpha + beta); normalised over the batch, ddof 1; flat -> 0.

    One response a task; the task's Beta tracker is the baseline.
    Source:  SPO arXiv:2509.13232.
    """
    alpha, beta = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    baseline = alpha / (alpha + beta)
    raw = np.asarray(rewards, np.float64) - baseline
    if len(raw) < 2 or raw.max() == raw.min():
        return np.zeros_like(raw), raw, baseline
    return (raw - raw.mean()) / (raw.std(ddof=1) + eps), raw, baseline


def spo_update(
    alpha: np.ndarray, beta: np.ndarray, rewards: np.ndarray, drift: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(alpha, beta, rho) after the rewards: rho = clip(2^(-drift / 0.06), 0.875, 0.96), alpha = rho alpha + r.

    Args:    drift: KL between the policy now and the one that last met the task.
    """
    rho = np.clip(np.exp2(-np.asarray(drift, np.float64) / DRIFT_HALF_LIFE), *FORGETTING)
    rewards = np.asarray(rewards, np.float64)
    return rho * np.asarray(alpha) + rewards, rho * np.asarray(beta) + 1.0 - rewards, rho


def spo_probs(alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Sampling weights of tasks: sqrt(p (1 - p)) + 0.05, normalised, p = alpha / (alpha + beta)."""
    p = np.asarray(alpha, np.float64) / (np.asarray(alpha) + np.asarray(beta))
    weights = np.sqrt(p * (1.0 - p)) + SPO_FLOOR
    return weights / weights.sum()
