"""A value model is a policy's trunk with a scalar on top."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.models.decoder import build_model
from rl_jax.models.value import BIAS, WEIGHT, value_model
from rl_jax.testing.tiny_model import TINY_VOCAB, tiny_model, tiny_settings

SMALL = {"num_layers": 1, "embed_size": 16, "num_heads": 2, "num_kv_heads": 2, "mlp_size": 32}
TOKENS = np.arange(10, 22).reshape(2, 6).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(6, dtype=np.int32), TOKENS.shape)


def attend(layer, q, k, v):
    ones = np.ones_like(POSITIONS)
    return attention(q, k, v, causal_segment_mask(POSITIONS, POSITIONS, ones, ones))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_value_model_of_a_policy_shares_its_hidden_states_and_says_0(tied):
    policy, params = tiny_model(**SMALL, tie_embeddings=tied)
    model = value_model(build_model, policy.settings, TINY_VOCAB)
    own = model.from_policy(params)
    assert set(own) == set(params) - {"unembed"} | {WEIGHT, BIAS}
    assert {n: (a.shape, a.dtype) for n, a in own.items()} == {
        n: (s.shape, s.dtype) for n, s in model.abstract.items()
    }
    assert {n: len(axes) for n, axes in model.logical_axes.items()} == {
        n: s.ndim for n, s in model.abstract.items()
    }
    hidden = model.hidden(own, TOKENS, POSITIONS, attend)
    np.testing.assert_array_equal(hidden, policy.hidden(params, TOKENS, POSITIONS, attend))
    assert not np.asarray(model.values(own, hidden)).any()
    own[WEIGHT], own[BIAS] = own[WEIGHT].at[3].set(2.0), own[BIAS] + 0.5
    np.testing.assert_allclose(
        model.values(own, hidden[:, -1]), 2 * np.asarray(hidden)[:, -1, 3] + 0.5, rtol=1e-6
    )


def test_head_is_float32_under_any_trunk_and_a_strangers_weights_are_refused():
    model = value_model(build_model, tiny_settings(**SMALL, param_dtype="bfloat16"), TINY_VOCAB)
    params = jax.jit(model.init)(jax.random.key(0))
    cast = model.cast(params, jnp.bfloat16)
    assert {str(a.dtype) for a in cast.values()} == {"float32", "bfloat16"}
    assert cast[WEIGHT].dtype == model.values(cast, jnp.ones(16, jnp.bfloat16)).dtype == jnp.float32
    with pytest.raises(ValueError, match="lacks .* weights of the value model's trunk, first"):
        model.from_policy({"embed": params["embed"]})
