"""Corrections that read every trained token of a step at once, so they are computed on the host, before rows are cut.

M2PO's mask and the normalisation of importance weights by their mean over the batch. Both need the proximal policy at
step start (old_policy=recompute). The normalisation acts through the advantages, and every loss that takes them is
linear in |advantage|. A token that M2PO drops has no advantage, and `batch_kept` tells the loss, which keeps it out of
the mean of its turn or sequence; it stays in every denominator and keeps its KL and entropy terms.
Must not: be used where a loss pulls without an advantage (options.rules refuses it).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rl_jax.algorithms import correction
from rl_jax.algorithms.advantages import Scored
from rl_jax.settings import CorrectionSettings


def correct_batch(
    scored: Scored, advantages: Sequence[np.ndarray], c: CorrectionSettings
) -> list[np.ndarray]:
    """The advantages (f32[T] a member) after the whole-batch corrections of `c`; unchanged if it has none.

    Raises: ValueError without old_logprobs in scored.extras.
    """
    if not (c.m2po or c.batch_normalize):
        return list(advantages)
    if "old_logprobs" not in scored.extras:
        raise ValueError(
            "correction.m2po and correction.batch_normalize need old_policy=recompute: learner.score computes it"
        )
    values, mask = scored.padded(advantages), scored.mask
    if c.batch_normalize:
        proximal = scored.padded(scored.extras["old_logprobs"])
        behaviour = scored.padded([member.logprobs for member in scored.members])
        values = values * _normaliser(scored, proximal, behaviour, c)
    if c.m2po:
        values = np.where((scored.padded(batch_kept(scored, c)) > 0) | ~mask, values, 0.0)
    return scored.unpadded(values)


def batch_kept(scored: Scored, c: CorrectionSettings) -> list[np.ndarray]:
    """M2PO's mask: f32[T] a member, 1 on the trained tokens that it keeps."""
    proximal = scored.padded(scored.extras["old_logprobs"])
    behaviour = scored.padded([member.logprobs for member in scored.members])
    return scored.unpadded(correction.m2po_keep(proximal, behaviour, scored.mask, c.m2po))


def _normaliser(
    scored: Scored, proximal: np.ndarray, behaviour: np.ndarray, c: CorrectionSettings
) -> float:
    """1 / the mean importance weight of the batch: over tokens at token level, else over sequences."""
    mask = scored.mask
    turn_ids = scored.padded([member.turn_ids for member in scored.members])
    gap = correction.gap(
        *(jnp.asarray(x) for x in (proximal, behaviour, mask, np.ones_like(turn_ids), turn_ids))
    )
    weights, _ = correction.importance_weights(
        gap, level=c.level, mode=c.mode, high=c.high, low=c.low
    )
    total = float(weights.sum())
    return (
        float(correction.normalised_weights(weights, gap, c.level).sum()) / total if total else 1.0
    )
