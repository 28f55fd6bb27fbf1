"""FLOPs against a count of XLA's own, and peaks of known devices."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.learner.flops import matrix_weights, peak_flops, seen_pairs, train_flops
from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.models.decoder import build_model
from rl_jax.models.value import value_model
from rl_jax.settings import ModelSettings

SETTINGS = ModelSettings(
    num_layers=2, embed_size=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=128
)
VOCAB = 256


def test_parts_by_hand():
    model = build_model(SETTINGS, VOCAB)
    layer = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128
    assert matrix_weights(model) == 2 * layer
    no_pairs = 3 * (2 * 2 * layer * 3 + 2 * 64 * VOCAB * 2)
    one_each = 3 * 4 * 2 * 4 * 16
    assert train_flops(model, [1, 1, 1], 2) == no_pairs + 3 * one_each  # a token sees itself
    assert train_flops(model, [3], 2) == no_pairs + 6 * one_each
    assert train_flops(value_model(build_model, SETTINGS, VOCAB), [3], 2) == (
        3 * 2 * 2 * layer * 3 + 6 * one_each
    )


def test_a_window_bounds_what_a_token_sees():
    assert seen_pairs(5, 0) == seen_pairs(5, 5) == seen_pairs(5, 9) == 1 + 2 + 3 + 4 + 5
    assert seen_pairs(5, 2) == 1 + 2 + 2 + 2 + 2
    windowed = build_model(replace(SETTINGS, window=2, full_every=2), VOCAB)
    plain = build_model(SETTINGS, VOCAB)
    one_pair = 3 * 4 * 4 * 16  # in one layer
    saved = train_flops(plain, [5, 1], 2) - train_flops(windowed, [5, 1], 2)
    assert saved == (15 - 9) * one_pair


@pytest.mark.slow
def test_forward_and_backward_are_what_xla_counts_but_for_the_masked_half():
    model, tokens = build_model(SETTINGS, VOCAB), 128
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), dict(model.abstract))
    row, mask = jnp.zeros((1, tokens), jnp.int32), jnp.ones((1, tokens), jnp.int32)
    positions = jnp.arange(tokens)[None]
    attend = lambda layer, q, k, v: attention(
        q, k, v, causal_segment_mask(positions, positions, mask, mask)
    )

    def loss(params):
        hidden = model.hidden(params, row, positions, attend)
        return (hidden @ model.head(params)).sum()

    counted = jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()["flops"]
    unmasked = 3 * 4 * 2 * 4 * 16 * (tokens * (tokens - 1) / 2)  # XLA computes the other half too
    assert counted == pytest.approx(train_flops(model, [tokens], tokens) + unmasked, rel=0.05)


@pytest.mark.parametrize(
    ("kinds", "peak"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, 2 * 989e12),
        (["NVIDIA H100 PCIe"], 756e12),
        (["TPU v5 lite"], 197e12),
        (["TPU v5p"], 459e12),
        (["cpu"], None),
        (["NVIDIA H200", "a stranger"], None),
    ],
)
def test_peak_is_of_all_devices_or_not_known(kinds, peak):
    devices = np.array([SimpleNamespace(device_kind=kind) for kind in kinds])
    assert peak_flops(SimpleNamespace(devices=devices)) == peak
