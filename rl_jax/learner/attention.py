"""Attention over packed rows for the learner: the device's kernel where one fits, else the plain form.

What runs is chosen once, from the mesh's first device, when the learner is built, and is logged with the reason. plain
(models/attention.py, in blocks of queries) runs anywhere, for every model, and holds scores; the kernels of
kernels/packed_attention.py hold none, and know neither windows nor soft caps.
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
from rl_jax.models.features import attention_unfit, form_of
from rl_jax.settings import ModelSettings

LOG = logging.getLogger(__name__)
MAX_BLOCKS = 16  # of a row in a layer with a window: each is a part of the program

# (positions i32[R, T], segments i32[R, T]) -> the attention of these rows
RowAttention = Callable[[jax.Array, jax.Array], Attend]


def choose_attention(
    name: str, settings: ModelSettings, rules: RulesLike, mesh: Mesh, row_tokens: int = 0
) -> tuple[str, RowAttention]:
    """(what runs, itself). name: learner.attention. row_tokens: of a row, which bounds a context; 0 = not known.

    Raises: ValueError if a kernel is named that cannot run on this mesh.
    """
    plain = partial(plain_attention, settings)
    if name == "plain":
        return name, plain
    device = mesh.devices.flat[0]
    capability = getattr(device, "compute_capability", "")
    reasons = {}
    for kernel in KERNELS if name == "auto" else (name,):
        reasons[kernel] = unfit(
            kernel, device.platform, capability, settings.dtype, settings.head_dim
        )
        reasons[kernel] = (
            reasons[kernel]
            or attention_unfit(settings, row_tokens)
            or _unsplit(settings, rules, mesh)
        )
        if not reasons[kernel]:
            LOG.info("learner.attention=%s: %s runs on %s", name, kernel, device.device_kind)
            return kernel, partial(kernel_attention, kernel, _split(rules, mesh))
    why = "; ".join(dict.fromkeys(reasons.values()))
    if name != "auto":
        raise ValueError(f"learner.attention={name} cannot run: {why}; use auto or plain")
    level = logging.INFO if device.platform == "cpu" else logging.WARNING
    LOG.log(level, "learner.attention=auto: plain runs on %s (%s)", device.device_kind, why)
    return "plain", plain


def kernel_attention(
    kernel: str, split: Split | None, positions: jax.Array, segments: jax.Array
) -> Attend:
    """Segments are runs of columns in time order, so that positions add nothing."""
    return packed_attend(segments, kernel, split)


def plain_attention(settings: ModelSettings, positions: jax.Array, segments: jax.Array) -> Attend:
    """Causal attention inside each segment of rows [R, T], in blocks of queries.

    A row's columns are in time order, so a block of queries looks at no key beyond its own end: four
    blocks skip 3/8 of the scores, and each block's are small enough to stay in cache. A segment's columns lie side by
    side, so it looks at none further back than the layer's window either, and blocks are no longer than that.
    """
    T = positions.shape[1]
    forms = [form_of(settings, layer) for layer in range(settings.num_layers)]
    windows = [form.window if form.window < T else 0 for form in forms]
    blocks = {window: _blocks(positions, segments, window) for window in sorted({*windows})}

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        parts = [
            attention(q[:, a:b], k[:, first:b], v[:, first:b], mask, forms[layer])
            for (first, a, b), mask in blocks[windows[layer]]
        ]
        return jnp.concatenate(parts, axis=1)

    return attend


def _blocks(
    positions: jax.Array, segments: jax.Array, window: int
) -> list[tuple[tuple[int, int, int], jax.Array]]:
    """((first key, first query, end of both), mask) of each block of queries."""
    T = positions.shape[1]
    size = ceil(T / 4)
    if window:
        size = min(size, max(window, ceil(T / MAX_BLOCKS)))
    size = max(size, 64)  # below 64 queries a block costs more to launch than it saves
    found = []
    for a in range(0, T, size):
        b = min(a + size, T)
        first = max(a + 1 - window, 0) if window else 0
        queries, keys = slice(a, b), slice(first, b)
        mask = causal_segment_mask(
            positions[:, queries],
            positions[:, keys],
            segments[:, queries],
            segments[:, keys],
            window,
        )
        found.append(((first, a, b), mask))
    return found


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
