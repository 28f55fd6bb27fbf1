"""Attention over packed rows for the learner: the device's kernel where one fits, else the plain form.

What runs is chosen once, from the mesh's first device, when the learner is built, and is logged with the reason. plain
(models/attention.py, in blocks of queries) runs anywhere and holds scores; kernels/packed_attention.py holds none.
Must not: choose while tracing.
"""

import logging
from collections.abc import Callable
from functools import partial
from math import ceil, prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels.packed_attention import KERNELS, Split, unfit
from rl_jax.mesh import RulesLike, mesh_axes
from rl_jax.models.attention import Attend, attention, causal_segment_mask, packed_attend
from rl_jax.settings import ModelSettings

LOG = logging.getLogger(__name__)

# (positions i32[R, T], segments i32[R, T]) -> the attention of these rows
RowAttention = Callable[[jax.Array, jax.Array], Attend]


def choose_attention(
    name: str, settings: ModelSettings, rules: RulesLike, mesh: Mesh
) -> tuple[str, RowAttention]:
    """(what runs, itself). name: learner.attention.

    Raises: ValueError if a kernel is named that cannot run on this mesh.
    """
    if name == "plain":
        return name, plain_attention
    device = mesh.devices.flat[0]
    capability = getattr(device, "compute_capability", "")
    reasons = {}
    for kernel in KERNELS if name == "auto" else (name,):
        reasons[kernel] = unfit(
            kernel, device.platform, capability, settings.dtype, settings.head_dim
        ) or _unsplit(settings, rules, mesh)
        if not reasons[kernel]:
            LOG.info("learner.attention=%s: %s runs on %s", name, kernel, device.device_kind)
            return kernel, partial(kernel_attention, kernel, _split(rules, mesh))
    why = "; ".join(reasons.values())
    if name != "auto":
        raise ValueError(f"learner.attention={name} cannot run: {why}; use auto or plain")
    level = logging.INFO if device.platform == "cpu" else logging.WARNING
    LOG.log(level, "learner.attention=auto: plain runs on %s (%s)", device.device_kind, why)
    return "plain", plain_attention


def kernel_attention(
    kernel: str, split: Split | None, positions: jax.Array, segments: jax.Array
) -> Attend:
    """Segments are runs of columns in time order, so that positions add nothing."""
    return packed_attend(segments, kernel, split)


def plain_attention(positions: jax.Array, segments: jax.Array) -> Attend:
    """Causal attention inside each segment of rows [R, T], in blocks of queries.

    A row's columns are in time order, so a block of queries looks at no key beyond its own end: four
    blocks skip 3/8 of the scores, and each block's are small enough to stay in cache.
    """
    T = positions.shape[1]
    size = max(ceil(T / 4), 64)  # below 64 queries a block costs more to launch than it saves
    spans = [(start, min(start + size, T)) for start in range(0, T, size)]
    masks = [
        causal_segment_mask(positions[:, a:b], positions[:, :b], segments[:, a:b], segments[:, :b])
        for a, b in spans
    ]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        blocks = [
            attention(q[:, a:b], k[:, :b], v[:, :b], mask)
            for (a, b), mask in zip(spans, masks, strict=True)
        ]
        return jnp.concatenate(blocks, axis=1)

    return attend


def _unsplit(settings: ModelSettings, rules: RulesLike, mesh: Mesh) -> str:
    """Why rows or heads cannot be split as the rules say; "" if they can."""
    length, heads = mesh_axes(("length", "kv_heads"), rules)
    if any(mesh.shape[axis] > 1 for axis in length):
        return f"kernels take whole rows, mesh axes {'*'.join(length)} split them"
    shards = prod(mesh.shape[axis] for axis in heads)
    if settings.num_kv_heads % shards:
        return f"model.num_kv_heads={settings.num_kv_heads} is not divisible by {'*'.join(heads)}={shards}"
    return ""


def _split(rules: RulesLike, mesh: Mesh) -> Split | None:
    if mesh.size == 1:
        return None
    batch, heads = mesh_axes(("batch", "kv_heads"), rules)
    return Split(mesh, batch, heads)
