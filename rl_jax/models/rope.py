"""Rotary frequencies stretched for contexts beyond those of pretraining, as transformers computes them."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.settings import RopeSettings


def scaled(
    frequencies: Float[Array, " half"], theta: float, rope: RopeSettings
) -> tuple[Float[Array, " half"], float]:
    """(frequencies, what cosines and sines are multiplied by). frequencies: theta ** (-i / half)."""
    if rope.scaling == "none":
        return frequencies, 1.0
    if rope.scaling == "linear":
        return frequencies / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _by_wavelength(frequencies, rope), 1.0
    assert rope.scaling == "yarn", f"rope.scaling={rope.scaling} has no formula"
    return _by_turns(frequencies, theta, rope), rope.attention_factor or _yarn_factor(rope.factor)


def _by_wavelength(frequencies: jax.Array, rope: RopeSettings) -> jax.Array:
    """Long waves by the factor, short ones not, those between by a part of it. Source: Llama 3.1."""
    waves = rope.original_context * frequencies / (2 * math.pi)  # in the context of pretraining
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = jnp.clip((waves - low) / (high - low), 0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _by_turns(frequencies: jax.Array, theta: float, rope: RopeSettings) -> jax.Array:
    """Dimensions below that of beta_fast turns as they are, above that of beta_slow by the factor.

    Source: YaRN, arXiv:2309.00071, section 3.2. Differs, as its code does: the ramp is linear in the dimension.
    """
    half = frequencies.shape[0]

    def dimension(turns: float) -> float:
        return half * math.log(rope.original_context / (turns * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), 2 * half - 1)
    width = high - low or 1e-3
    stretched = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / width, 0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _yarn_factor(factor: float) -> float:
    """Source: YaRN, section 3.4; the square root of its 1 / t, once in queries and once in keys."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
