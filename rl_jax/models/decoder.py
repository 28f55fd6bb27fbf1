"""The decoder family: GQA with rope, RMSNorm, SwiGLU; optional qk-norm, qkv biases and tied head.

Pre-norm residual layers, as in Llama, Qwen2 (qkv_bias) and Qwen3 (qk_norm). Layers are written out
one by one, each with its own weights: measured faster than a scan over stacked weights on CPU and
GPU, and one tree for train, sync and serve. Norms, rope and softmax are float32, matmuls accumulate
in float32, activations are settings.dtype.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels.packed_attention import SAVED as ATTENTION
from rl_jax.models.attention import Attend, apply_rope, rope_angles
from rl_jax.models.layers import MATMUL, RMSNorm, linear, lookup, weight
from rl_jax.models.model import Constrain, Model, model_from_module
from rl_jax.settings import ModelSettings


class Attention(nnx.Module):
    """Projections of one layer's attention, head axes kept; the caller's `attend` does the rest."""

    def __init__(self, settings: ModelSettings, dtype: jnp.dtype):
        s, D, H, K, Dh = (
            settings,
            settings.embed_size,
            settings.num_heads,
            settings.num_kv_heads,
            settings.head_dim,
        )
        heads, kv_heads = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.query = weight((D, H, Dh), heads, dtype, std=D**-0.5)
        self.key = weight((D, K, Dh), kv_heads, dtype, std=D**-0.5)
        self.value = weight((D, K, Dh), kv_heads, dtype, std=D**-0.5)
        self.out = weight(
            (H, Dh, D),
            ("heads", "head_dim", "embed"),
            dtype,
            std=(H * Dh * 2 * s.num_layers) ** -0.5,  # the residual sum of all layers stays O(1)
        )
        self.query_bias = weight((H, Dh), heads[1:], dtype) if s.qkv_bias else None
        self.key_bias = weight((K, Dh), kv_heads[1:], dtype) if s.qkv_bias else None
        self.value_bias = weight((K, Dh), kv_heads[1:], dtype) if s.qkv_bias else None
        self.query_norm = RMSNorm(Dh, s.norm_eps, dtype) if s.qk_norm else None
        self.key_norm = RMSNorm(Dh, s.norm_eps, dtype) if s.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: tuple[jax.Array, jax.Array],
        layer: int,
        attend: Attend,
    ) -> Float[Array, "B T D"]:
        q = linear("btd,dhk->bthk", x, self.query, self.query_bias)  # [B, T, H, Dh]
        k = linear("btd,dhk->bthk", x, self.key, self.key_bias)  # [B, T, K, Dh]
        v = linear("btd,dhk->bthk", x, self.value, self.value_bias)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        out = attend(layer, apply_rope(q, *angles), apply_rope(k, *angles), v)
        return linear("bthk,hkd->btd", out, self.out)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)). Source: arXiv:2002.05202."""

    def __init__(self, settings: ModelSettings, dtype: jnp.dtype):
        D, F = settings.embed_size, settings.mlp_size
        self.gate = weight((D, F), ("embed", "mlp"), dtype, std=D**-0.5)
        self.up = weight((D, F), ("embed", "mlp"), dtype, std=D**-0.5)
        self.down = weight(
            (F, D), ("mlp", "embed"), dtype, std=(F * 2 * settings.num_layers) ** -0.5
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gated = jax.nn.silu(linear("btd,df->btf", x, self.gate)) * linear("btd,df->btf", x, self.up)
        return linear("btf,fd->btd", gated, self.down)


class DecoderLayer(nnx.Module):
    def __init__(self, settings: ModelSettings, dtype: jnp.dtype):
        self.attention_norm = RMSNorm(settings.embed_size, settings.norm_eps, dtype)
        self.attention = Attention(settings, dtype)
        self.mlp_norm = RMSNorm(settings.embed_size, settings.norm_eps, dtype)
        self.mlp = SwiGLU(settings, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: tuple[jax.Array, jax.Array],
        layer: int,
        attend: Attend,
    ) -> Float[Array, "B T D"]:
        x = x + self.attention(self.attention_norm(x), angles, layer, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    def __init__(self, settings: ModelSettings, vocab_size: int):
        V, D, dtype = vocab_size, settings.embed_size, jnp.dtype(settings.param_dtype)
        self.settings = settings
        # A normed state then meets the head with logits of O(1), tied or not. GPT-2's 0.02 is this for
        # D 2500; at D 96 it learns several times slower (docs/log.md).
        std = D**-0.5
        self.embed = weight((V, D), ("vocab", "embed"), dtype, std=std)
        self.layers = nnx.List([DecoderLayer(settings, dtype) for _ in range(settings.num_layers)])
        self.final_norm = RMSNorm(D, settings.norm_eps, dtype)
        self.unembed = (
            None if settings.tie_embeddings else weight((D, V), ("embed", "vocab"), dtype, std=std)
        )

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        remat: str,
        constrain: Constrain,
    ) -> Float[Array, "B T D"]:
        """See Model.hidden. An id outside the vocabulary reads the nearest row: padding is any."""
        axes = ("batch", "length", None)
        # A table split over D would give rows split over D, on axes that the batch needs.
        table = constrain(self.embed[...], ("vocab", None))
        x = lookup(table, tokens)  # before the cast: of the rows read only
        x = constrain(x.astype(self.settings.dtype), axes)
        angles = rope_angles(positions, self.settings.head_dim, self.settings.rope_theta)
        for index, layer in enumerate(self.layers):

            def apply(x, angles, layer=layer, index=index):
                return constrain(layer(x, angles, index, attend), axes)

            x = recomputed(apply, remat)(x, angles)
        return self.final_norm(x)

    def head(self) -> Float[Array, "D V"]:
        matrix = self.embed[...].T if self.unembed is None else self.unembed[...]
        return matrix.astype(self.settings.dtype)


def recomputed(apply: Callable, remat: str) -> Callable:
    """apply, with what of it the backward pass computes again rather than reads: see Model.hidden."""
    if remat == "none":
        return apply
    kept = {"elementwise": (MATMUL, ATTENTION), "layer": (ATTENTION,)}[remat]
    return jax.checkpoint(apply, policy=jax.checkpoint_policies.save_only_these_names(*kept))


def build_model(settings: ModelSettings, vocab_size: int) -> Model:
    """The decoder for these settings, with no arrays yet.

    Raises: ValueError listing everything that cannot be: a size below 1, heads that do not group,
    an odd head_dim, an unknown dtype, a vocab_size unlike settings.vocab_size where that is set.
    """
    errors = model_errors(settings, vocab_size)
    if errors:
        raise ValueError("; ".join(errors))
    return model_from_module(lambda: Decoder(settings, vocab_size), settings, vocab_size)


def model_errors(settings: ModelSettings, vocab_size: int) -> list[str]:
    """What makes these settings no decoder, one line each."""
    s = settings
    sizes = ("num_layers", "embed_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size")
    errors = [
        f"model.{name}={getattr(s, name)} must be at least 1"
        for name in sizes
        if getattr(s, name) < 1
    ]
    if vocab_size < 1:
        errors.append(f"vocab_size={vocab_size} must be at least 1")
    if s.vocab_size not in (0, vocab_size):
        errors.append(
            f"model.vocab_size={s.vocab_size} but the model is built for {vocab_size}; "
            "set model.vocab_size=0 to take the tokenizer's"
        )
    if s.num_kv_heads > 0 and s.num_heads % s.num_kv_heads:
        errors.append(
            f"model.num_heads={s.num_heads} is not divisible by model.num_kv_heads={s.num_kv_heads}"
        )
    if s.head_dim % 2:
        errors.append(
            f"model.head_dim={s.head_dim} is odd; rope rotates pairs, use {s.head_dim + 1}"
        )
    for name in ("dtype", "param_dtype"):
        if getattr(s, name) not in ("float32", "bfloat16"):
            errors.append(f"model.{name}={getattr(s, name)!r} must be float32 or bfloat16")
    return errors
