"""The decoder family: GQA with rope, RMSNorm, a gated MLP, and as features of ModelSettings what families differ in.

Pre-norm residual layers, as in Llama and SmolLM2; Mistral adds a window, Qwen2 qkv_bias, Qwen3 qk_norm, Gemma windows
on some layers, soft caps, post_norms, norm_offset, scale_embed and gelu_tanh. Layers are written out
one by one, each with its own weights: measured faster than a scan over stacked weights on CPU and
GPU, and one tree for train, sync and serve. Norms, rope and softmax are float32, matmuls accumulate
in float32, activations are settings.dtype.
Packed, for serving: query, key and value are one weight [D, K, G + 2, Dh], a group's G query heads before its key and
value, so that a split over kv heads splits it as it splits the three; gate and up are one [D, 2, F].
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels.packed_attention import SAVED as ATTENTION
from rl_jax.models.attention import Attend, FusedAttend, apply_rope, rope_angles
from rl_jax.models.features import feature_errors, form_of
from rl_jax.models.layers import MATMUL, RMSNorm, linear, lookup, weight
from rl_jax.models.model import Constrain, Join, Model, model_from_module
from rl_jax.settings import ModelSettings

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class Attention(nnx.Module):
    """Projections of one layer's attention, head axes kept; the caller's `attend` does the rest."""

    def __init__(self, settings: ModelSettings, dtype: jnp.dtype, packed: bool):
        s, D, H, K, Dh = (
            settings,
            settings.embed_size,
            settings.num_heads,
            settings.num_kv_heads,
            settings.head_dim,
        )
        self.packed = packed
        # name of a projection -> (its heads, their logical axes)
        heads = {"query": ((H,), ("heads",)), "key": ((K,), ("kv_heads",)), "value": ((K,), ("kv_heads",))}  # fmt: skip
        if packed:
            heads = {"query_key_value": ((K, H // K + 2), ("kv_heads", None))}
        for name, (shape, axes) in heads.items():
            matrix = weight((D, *shape, Dh), ("embed", *axes, "head_dim"), dtype, std=D**-0.5)
            setattr(self, name, matrix)
            bias = weight((*shape, Dh), (*axes, "head_dim"), dtype) if s.qkv_bias else None
            setattr(self, f"{name}_bias", bias)
        self.out = weight(
            (H, Dh, D),
            ("heads", "head_dim", "embed"),
            dtype,
            std=(H * Dh * 2 * s.num_layers) ** -0.5,  # the residual sum of all layers stays O(1)
        )
        self.query_norm = norm(s, Dh, dtype) if s.qk_norm else None
        self.key_norm = norm(s, Dh, dtype) if s.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: tuple[jax.Array, jax.Array],
        layer: int,
        attend: Attend,
    ) -> Float[Array, "B T D"]:
        q, k, v = self._project(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        out = attend(layer, apply_rope(q, *angles), apply_rope(k, *angles), v)
        return linear("bthk,hkd->btd", out, self.out)

    def fused(
        self, h: Float[Array, "S D"], angles: tuple, layer: int, attend: FusedAttend
    ) -> Float[Array, "P S D"]:
        """The packed form of a decode step, in parts to be summed."""
        w, out = self.query_key_value[...], self.out[...]
        if self.query_norm is None or self.key_norm is None:
            product = attend.product(h, w.reshape(len(w), -1))
            product = product.reshape(*product.shape[:2], *w.shape[1:])
            bias = self.query_key_value_bias
            heads = attend.of_product(layer, product, None if bias is None else bias[...], angles)
        else:
            q, k, v = self._project(h[:, None])
            q, k = self.query_norm(q), self.key_norm(k)
            heads = attend(layer, apply_rope(q, *angles), apply_rope(k, *angles), v)[:, 0]
        return attend.product(heads.reshape(len(h), -1), out.reshape(-1, out.shape[-1]))

    def _project(self, x: Float[Array, "B T D"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, T, H, Dh], k and v [B, T, K, Dh]"""
        if self.packed:
            both = linear("btd,dkgh->btkgh", x, self.query_key_value, self.query_key_value_bias)
            q = both[..., :-2, :].reshape(*x.shape[:2], -1, both.shape[-1])
            return q, both[..., -2, :], both[..., -1, :]
        q = linear("btd,dhk->bthk", x, self.query, self.query_bias)
        k = linear("btd,dhk->bthk", x, self.key, self.key_bias)
        return q, k, linear("btd,dhk->bthk", x, self.value, self.value_bias)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)). Source: arXiv:2002.05202."""

    def __init__(self, settings: ModelSettings, dtype: jnp.dtype, packed: bool):
        D, F = settings.embed_size, settings.mlp_size
        self.packed, self.activation = packed, settings.activation
        if packed:
            self.gate_up = weight((D, 2, F), ("embed", None, "mlp"), dtype, std=D**-0.5)
        else:
            self.gate = weight((D, F), ("embed", "mlp"), dtype, std=D**-0.5)
            self.up = weight((D, F), ("embed", "mlp"), dtype, std=D**-0.5)
        self.down = weight(
            (F, D), ("mlp", "embed"), dtype, std=(F * 2 * settings.num_layers) ** -0.5
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.packed:
            both = linear("btd,dcf->btcf", x, self.gate_up)
            gate, up = both[..., 0, :], both[..., 1, :]
        else:
            gate, up = linear("btd,df->btf", x, self.gate), linear("btd,df->btf", x, self.up)
        return linear("btf,fd->btd", ACTIVATIONS[self.activation](gate) * up, self.down)


class DecoderLayer(nnx.Module):
    def __init__(self, settings: ModelSettings, dtype: jnp.dtype, packed: bool):
        D, post = settings.embed_size, settings.post_norms
        self.attention_norm = norm(settings, D, dtype)
        self.attention = Attention(settings, dtype, packed)
        self.attention_post_norm = norm(settings, D, dtype) if post else None
        self.mlp_norm = norm(settings, D, dtype)
        self.mlp = GatedMLP(settings, dtype, packed)
        self.mlp_post_norm = norm(settings, D, dtype) if post else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: tuple[jax.Array, jax.Array],
        layer: int,
        attend: Attend,
    ) -> Float[Array, "B T D"]:
        y = self.attention(self.attention_norm(x), angles, layer, attend)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))


def norm(settings: ModelSettings, size: int, dtype: jnp.dtype) -> RMSNorm:
    return RMSNorm(size, settings.norm_eps, dtype, settings.norm_offset)


class Decoder(nnx.Module):
    def __init__(self, settings: ModelSettings, vocab_size: int, packed: bool = False):
        V, D, dtype = vocab_size, settings.embed_size, jnp.dtype(settings.param_dtype)
        self.settings = settings
        # A normed state then meets the head with logits of O(1), tied or not. GPT-2's 0.02 is this for
        # D 2500; at D 96 it learns several times slower (docs/log.md).
        std = D**-0.5
        self.embed = weight((V, D), ("vocab", "embed"), dtype, std=std)
        layers = [DecoderLayer(settings, dtype, packed) for _ in range(settings.num_layers)]
        self.layers = nnx.List(layers)
        self.final_norm = norm(settings, D, dtype)
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
        x = x.astype(self.settings.dtype)
        if self.settings.scale_embed:
            x = x * jnp.asarray(self.settings.embed_size**0.5, x.dtype)
        x = constrain(x, axes)
        of_window = self._angles(positions)
        if isinstance(attend, FusedAttend):
            return self._fused(x, of_window, attend)
        for index, layer in enumerate(self.layers):
            angles = of_window[form_of(self.settings, index).window > 0]

            def apply(x, angles, layer=layer, index=index):
                return constrain(layer(x, angles, index, attend), axes)

            x = recomputed(apply, remat)(x, angles)
        return self.final_norm(x)

    def _angles(self, positions: Int[Array, "B T"]) -> dict[bool, tuple[jax.Array, jax.Array]]:
        """(cos, sin) of layers without and with a window."""
        s = self.settings
        full = rope_angles(positions, s.head_dim, s.rope_theta, s.rope)
        if not s.rope_theta_local:
            return {False: full, True: full}
        return {False: full, True: rope_angles(positions, s.head_dim, s.rope_theta_local)}

    def _fused(self, x: jax.Array, of_window: dict[bool, tuple], attend: FusedAttend) -> jax.Array:
        """The packed layers of a decode step by the device's kernels: each sum together with the norm that reads it."""
        h = self.layers[0].attention_norm(x)[:, 0]
        x = x[:, 0]
        norms = [layer.attention_norm for layer in self.layers][1:] + [self.final_norm]
        for index, (layer, following) in enumerate(zip(self.layers, norms, strict=True)):
            angles = of_window[form_of(self.settings, index).window > 0]
            y = layer.attention.fused(h, angles, index, attend)
            x, h = attend.add_norm(x, y, layer.mlp_norm.scale[...], layer.mlp_norm.eps)
            y = attend.product(attend.gated(h, layer.mlp.gate_up[...]), layer.mlp.down[...])
            x, h = attend.add_norm(x, y, following.scale[...], following.eps)
        return h[:, None]

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
    model, packed = (
        model_from_module(lambda p=p: Decoder(settings, vocab_size, p), settings, vocab_size)
        for p in (False, True)
    )
    return replace(model, packed=packed, joins=joins_of(packed, settings))


def joins_of(packed: Model, settings: ModelSettings) -> dict[str, Join]:
    """How the packed decoder's joined weights are made of the named ones."""

    def by_group(
        parts: list[jax.Array],
    ) -> jax.Array:  # [..., heads, Dh] each -> [..., K, G + 2, Dh]
        K, Dh = settings.num_kv_heads, settings.head_dim
        return jnp.concatenate([x.reshape(*x.shape[:-2], K, -1, Dh) for x in parts], axis=-2)

    def side_by_side(parts: list[jax.Array]) -> jax.Array:  # [D, F] each -> [D, 2, F]
        return jnp.stack(parts, axis=-2)

    joins = {}
    for name in packed.abstract:
        path, _, last = name.rpartition(".")
        bias = "_bias" if last.endswith("_bias") else ""
        if last.startswith("query_key_value"):
            parts = tuple(f"{path}.{part}{bias}" for part in ("query", "key", "value"))
            joins[name] = Join(parts, by_group)
        elif last == "gate_up":
            joins[name] = Join((f"{path}.gate", f"{path}.up"), side_by_side, rows_order=(1, 2, 0))
    return joins


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
    return [*errors, *feature_errors(s)]
