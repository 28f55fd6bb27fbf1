"""Attention and rope against slow numpy references and invariants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.models.attention import apply_rope, attention, causal_segment_mask, rope_angles


def slow_attention(q, k, v, mask):
    """One query and one head at a time, float64."""
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        if len(seen) == 0:
            continue
        kv_head = h // (q.shape[2] // k.shape[2])
        scores = k[b, seen, kv_head] @ q[b, t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, seen, kv_head]
    return out


def random_qkv(kv_heads: int, scale: float = 1.0):
    rng = np.random.default_rng(0)
    q = scale * rng.normal(size=(2, 5, 4, 6))
    k, v = rng.normal(size=(2, 2, 7, kv_heads, 6))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), rng


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_slow_reference(kv_heads):
    q, k, v, rng = random_qkv(kv_heads)
    mask = rng.random((2, 5, 7)) < 0.5
    mask[0, 2] = False
    np.testing.assert_allclose(
        attention(q, k, v, mask), slow_attention(q, k, v, mask), rtol=1e-5, atol=1e-5
    )


def test_row_without_visible_keys_gives_zero_and_finite_gradients():
    q, k, v, _ = random_qkv(2, scale=1e4)  # scores far beyond exp's range in float32
    mask = np.ones((2, 5, 7), bool)
    mask[0, 0], mask[1, :, 3:] = False, False
    k[1, 5] = 1e4  # a masked key with a huge score
    out, back = jax.vjp(lambda q, k, v: attention(q, k, v, mask), q, k, v)
    assert np.all(np.asarray(out[0, 0]) == 0)
    assert all(np.isfinite(g).all() for g in back(jnp.ones_like(out)))


def test_bfloat16_attention_stays_near_float32():
    q, k, v, _ = random_qkv(2)
    mask = np.ones((2, 5, 7), bool)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out = attention(*low, mask)
    assert out.dtype == jnp.bfloat16
    exact = slow_attention(*(np.asarray(x, np.float64) for x in low), mask)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=0.02)  # 2 bf16 roundings


def test_rope_rotates_the_pair_half_a_head_apart():
    x = np.arange(8, dtype=np.float32).reshape(1, 1, 1, 8) + 1
    out = np.asarray(apply_rope(x, *rope_angles(np.array([[3]]), 8, 100.0)))[0, 0, 0]
    for i in range(4):
        angle = 3 * 100.0 ** (-i / 4)
        a, b = x[0, 0, 0, i], x[0, 0, 0, i + 4]
        assert out[i] == pytest.approx(a * np.cos(angle) - b * np.sin(angle), abs=1e-5)
        assert out[i + 4] == pytest.approx(b * np.cos(angle) + a * np.sin(angle), abs=1e-5)


def test_rope_scores_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(q_position, k_position):
        rotated_q = apply_rope(q, *rope_angles(np.array([[q_position]]), 8, 1e4))
        rotated_k = apply_rope(k, *rope_angles(np.array([[k_position]]), 8, 1e4))
        return float(jnp.sum(rotated_q * rotated_k))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_causal_segment_mask_sees_own_segment_up_to_itself():
    positions = np.array([[0, 1, 0, 1, 0]])
    segments = np.array([[1, 1, 2, 2, 0]])
    mask = np.asarray(causal_segment_mask(positions, positions, segments, segments))[0]
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(mask, np.array(expected, bool))
