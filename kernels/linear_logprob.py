"""Log-probs of target tokens and entropies straight from hidden states and the output head; [T, V] never exists.

    z = cap(hidden @ head) / temperature,    logprob = z[target] - lse(z),    entropy = lse(z) - sum(softmax(z) z)

in float32, whatever the inputs' dtype; cap(x) = softcap tanh(x / softcap), or x where softcap is 0. A target outside
[0, V) has probability 0: log-prob -inf, entropy as ever.
Invariants: both outputs are differentiable in hidden and head, by hand-written rules: nothing differentiates through
the loops. The only logits alive are one chunk's. The gradient of a logit is rounded to the inputs' dtype before its
two matmuls, the gradient of the head is summed in float32 over chunks and rounded once.
Life of a call: 1 per chunk of positions four numbers a position: max, sum of exp(z - max), sum of exp(z - max) times
(z - max), and the target's logit. 2 if the vocabulary is split, they are combined over its shards. 3 three floats a
position are kept. 4 backward computes each chunk's logits again, turns them into gradients of logits, and multiplies
these into both gradients; 5 sums over shards come last, one a gradient.
Cost: 2 T D V FLOP forwards, 6 T D V backwards (again, and two products).
Must not: query a device; hold more than a chunk of logits; call a collective inside a loop.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels.linear_logprob_hopper import COLUMNS, Hopper, column_stats, logit_gradient

LOG_2 = math.log(2.0)


@dataclass(frozen=True)
class Split:
    """How the inputs lie on a mesh: rows of hidden over `batch` axes, columns of the head over `vocab` axes."""

    mesh: Mesh
    batch: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """What is static in a call."""

    temperature: float
    softcap: float
    chunk: int
    split: Split | None
    hopper: Hopper | None


def linear_logprob(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: float = 1.0,
    *,
    softcap: float = 0.0,
    chunk: int = 1024,
    num_chunks: jax.Array | int | None = None,
    split: Split | None = None,
    hopper: Hopper | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(log-probs, entropies), f32[..., T], natural log.

    Args:    hidden: [..., T, D].  head: [D, V], same dtype.  targets: i32[..., T].  temperature: static, above 0.
             softcap: of logits, static; 0 = none.
             chunk: positions of a row whose logits are live at once; all rows go together.
             num_chunks: chunks from here on are not computed and give 0 (data; None = all).
             split: of global arrays on a mesh, under jit: the first dimension of hidden and the second of head must
             divide by their axes. Then each device works on its own part, and sums over devices come once, at the end.
             hopper: compute what needs logits by Mosaic kernels where they fit: bfloat16, D a multiple of 64, and whole
             tiles of 256 columns; the rest goes the portable way, and all of it with a softcap. None = all portable.
    Raises:  ValueError for shapes or dtypes that do not fit, a temperature that is not above 0, or a softcap below 0.
    """
    _check(hidden, head, targets, temperature, softcap)
    *leading, T, D = hidden.shape
    if targets.size == 0:
        return jnp.zeros(targets.shape, jnp.float32), jnp.zeros(targets.shape, jnp.float32)
    hidden, targets = hidden.reshape(-1, T, D), targets.reshape(-1, T)
    chunk = max(min(chunk, T), 1)
    padding = -T % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))
    all_chunks = (T + padding) // chunk
    num_chunks = jnp.minimum(all_chunks if num_chunks is None else num_chunks, all_chunks)
    plan = _Plan(float(temperature), float(softcap), chunk, split, None if softcap else hopper)
    outputs = _linear_logprob(plan, hidden, head, targets, num_chunks)
    logprobs, entropy = (x[:, :T].reshape(*leading, T) for x in outputs)
    return logprobs, entropy


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """x held within (-cap, cap), smoothly; cap 0 = as it is. Source: Gemma 2, arXiv:2408.00118."""
    return cap * jnp.tanh(x / cap) if cap else x


def linear_logprob_ref(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: float = 1.0,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain jnp, holding [..., T, V]; float64 if an input is."""
    wide = jnp.promote_types(jnp.promote_types(hidden.dtype, head.dtype), jnp.float32)
    z = jnp.einsum("...td,dv->...tv", hidden.astype(wide), head.astype(wide))
    z = (softcap * jnp.tanh(z / softcap) if softcap else z) / temperature
    logprobs = jax.nn.log_softmax(z)
    V = head.shape[1]
    chosen = jnp.take_along_axis(logprobs, jnp.clip(targets, 0, V - 1)[..., None], axis=-1)[..., 0]
    inside = (targets >= 0) & (targets < V)
    return jnp.where(inside, chosen, -jnp.inf), -(jnp.exp(logprobs) * logprobs).sum(axis=-1)


def _check(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float, softcap: float
) -> None:
    if hidden.ndim < 2 or head.ndim != 2 or hidden.shape[-1] != head.shape[0]:
        raise ValueError(f"hidden [..., T, D]={hidden.shape} does not fit head [D, V]={head.shape}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets {targets.shape} must be {hidden.shape[:-1]}: one a hidden state")
    if hidden.dtype != head.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and head {head.dtype}; cast one to the other")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; log-probs have no limit at 0")
    if not softcap >= 0:
        raise ValueError(f"softcap={softcap} must be at least 0; 0 = none")


# --- the differentiation rule ---------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logprob(plan, hidden, head, targets, num_chunks):
    return _forward(plan, hidden, head, targets, num_chunks)[0]


def _forward(plan, hidden, head, targets, num_chunks):
    tokens, weights, values = _specs(plan.split)

    @partial(_on_shards, plan, (tokens, weights, values, P()), (values, values, values))
    def forward(hidden, head, targets, num_chunks):
        local = targets - _first_column(plan, head)
        stats = _combine(plan, _stats(plan, hidden, head, local, num_chunks))
        used = jnp.arange(targets.shape[1]) < num_chunks * plan.chunk
        log_sum = jnp.log(stats["sum"])
        lse = stats["max"] + log_sum
        entropy = log_sum - stats["moment"] / stats["sum"]
        logprobs = (stats["target"] - stats["max"]) - log_sum  # never above 0
        return tuple(jnp.where(used, x, 0.0) for x in (logprobs, entropy, lse))

    logprobs, entropy, lse = forward(hidden, head, targets, num_chunks)
    return (logprobs, entropy), (hidden, head, targets, num_chunks, lse, logprobs, entropy)


def _backward(plan, saved, cotangents):
    tokens, weights, values = _specs(plan.split)

    @partial(_on_shards, plan, (tokens, weights, values, P(), *[values] * 5), (tokens, weights))
    def backward(hidden, head, targets, num_chunks, *numbers):
        lse, logprobs, entropy, of_logprob, of_entropy = numbers
        rows = {
            "targets": targets - _first_column(plan, head),
            "lse": lse,
            "logprob": logprobs,
            # d(of_logprob * logprob + of_entropy * entropy) / dz = of_logprob * onehot - p * (base + slope * log p)
            "onehot": of_logprob / plan.temperature,
            "base": (of_logprob + of_entropy * entropy) / plan.temperature,
            "slope": of_entropy / plan.temperature,
        }
        of_hidden, of_head = _gradients(plan, hidden, head, rows, num_chunks)
        if plan.split and plan.split.vocab:
            of_hidden = lax.psum(of_hidden, plan.split.vocab)
        if plan.split and plan.split.batch:
            of_head = lax.psum(of_head, plan.split.batch)
        return of_hidden.astype(hidden.dtype), of_head.astype(head.dtype)

    of_hidden, of_head = backward(*saved, *cotangents)
    return of_hidden, of_head, None, None


_linear_logprob.defvjp(_forward, _backward)


def _specs(split: Split | None) -> tuple[P, P, P]:
    """Of hidden, of head, of what is one a position."""
    batch, vocab = (split.batch, split.vocab) if split else ((), ())
    return P(batch, None, None), P(None, vocab), P(batch, None)


def _on_shards(plan: _Plan, in_specs: tuple, out_specs: tuple, function: Any) -> Any:
    if plan.split is None:
        return function
    return jax.shard_map(
        function, mesh=plan.split.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _first_column(plan: _Plan, head: jax.Array) -> jax.Array | int:
    """The vocabulary index of this device's first column."""
    if plan.split is None or not plan.split.vocab:
        return 0
    return lax.axis_index(plan.split.vocab) * head.shape[1]


def _combine(plan: _Plan, stats: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Stats of the whole vocabulary from those of each shard's columns."""
    if plan.split is None or not plan.split.vocab:
        return stats
    axes = plan.split.vocab
    largest = lax.pmax(stats["max"], axes)
    shift = stats["max"] - largest
    scale = jnp.exp(shift)
    total, moment = lax.psum(
        (scale * stats["sum"], scale * (stats["moment"] + shift * stats["sum"])), axes
    )
    target = lax.pmax(stats["target"], axes)
    return {"max": largest, "sum": total, "moment": moment, "target": target}


# --- one device's columns, chunk by chunk ----------------------------------------------------------------------------

STATS = ("max", "sum", "moment", "target")
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _stats(plan: _Plan, hidden, head, targets, num_chunks) -> dict[str, jax.Array]:
    """f32[B, T] each, over these columns; targets count from the first of them."""
    whole = _whole_tiles(plan, hidden, head)

    def add(i, stats):
        part, chosen = _chunk(plan, hidden, i), _chunk(plan, targets, i)
        found = []
        if whole < head.shape[1]:
            found.append(_chunk_stats(plan, part, head[:, whole:], chosen - whole))
        if whole:
            found.append(_tile_stats(plan, part, head[:, :whole], chosen))
        found = _merge(found)
        return {name: _put(plan, stats[name], found[name], i) for name in STATS}

    empty = {name: jnp.zeros(targets.shape, jnp.float32) for name in STATS}
    return lax.fori_loop(0, num_chunks, add, empty)


def _gradients(plan: _Plan, hidden, head, rows, num_chunks) -> tuple[jax.Array, jax.Array]:
    """(of hidden over these columns, of head f32 over these rows). rows: one number a position each."""
    whole = _whole_tiles(plan, hidden, head)
    width = plan.hopper.columns // COLUMNS * COLUMNS if plan.hopper else whole
    tiles = [(start, min(start + width, whole)) for start in range(0, whole, width or 1)]
    if whole < head.shape[1]:
        tiles.append((whole, head.shape[1]))

    def add(i, carry):
        of_hidden, of_head = carry
        part = _chunk(plan, hidden, i)
        row = {name: _chunk(plan, value, i) for name, value in rows.items()}
        of_part, of_tiles = jnp.zeros(part.shape, jnp.float32), []
        for (start, end), of_tile in zip(tiles, of_head, strict=True):
            of_logits = _tile_logits if end <= whole else _chunk_logits
            shifted = row | {"targets": row["targets"] - start}
            gradient = of_logits(plan, part, head[:, start:end], shifted)
            of_part += product("bcv,dv->bcd", gradient, head[:, start:end])
            of_tile += product("bcd,bcv->dv", part, gradient)
            # One tile's gradient of logits at a time: without this XLA may hold all of them.
            part, of_part, of_tile = lax.optimization_barrier((part, of_part, of_tile))
            of_tiles.append(of_tile)
        return _put(plan, of_hidden, of_part.astype(of_hidden.dtype), i), tuple(of_tiles)

    # Parts of a sum over shards stay float32 until it is done.
    dtype = jnp.float32 if plan.split and plan.split.vocab else hidden.dtype
    D = head.shape[0]
    zeros = tuple(jnp.zeros((D, end - start), jnp.float32) for start, end in tiles)
    of_hidden, of_head = lax.fori_loop(0, num_chunks, add, (jnp.zeros(hidden.shape, dtype), zeros))
    return of_hidden, jnp.concatenate(of_head, axis=1)


def _chunk_stats(plan: _Plan, hidden, head, targets) -> dict[str, jax.Array]:
    z = soft_capped(product("bcd,dv->bcv", hidden, head), plan.softcap) / plan.temperature
    inside = (targets >= 0) & (targets < head.shape[1])
    at = jnp.where(inside, targets, 0)[..., None]
    largest = z.max(axis=-1)
    below = z - largest[..., None]
    weights = jnp.exp(below)
    return {
        "max": largest,
        "sum": weights.sum(axis=-1),
        "moment": (weights * below).sum(axis=-1),
        "target": jnp.where(inside, jnp.take_along_axis(z, at, axis=-1)[..., 0], -jnp.inf),
    }


def _chunk_logits(plan: _Plan, hidden, head, row) -> jax.Array:
    """Gradient of the logits [B, chunk, V] of one chunk, in hidden's dtype."""
    row = {name: value[..., None] for name, value in row.items()}
    capped = soft_capped(product("bcd,dv->bcv", hidden, head), plan.softcap)
    log_p = capped / plan.temperature - row["lse"]
    of_logits = jnp.where(jnp.arange(head.shape[1]) == row["targets"], row["onehot"], 0.0)
    of_logits -= jnp.exp(log_p) * (row["base"] + row["slope"] * log_p)
    if plan.softcap:
        of_logits *= 1.0 - jnp.square(capped / plan.softcap)
    return of_logits.astype(hidden.dtype)


def _merge(parts: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Stats of columns from those of their parts."""
    if len(parts) == 1:
        return parts[0]
    stacked = {name: jnp.stack([part[name] for part in parts]) for name in STATS}
    largest = stacked["max"].max(axis=0)
    shift = stacked["max"] - largest
    scale = jnp.exp(shift)
    return {
        "max": largest,
        "sum": (scale * stacked["sum"]).sum(axis=0),
        "moment": (scale * (stacked["moment"] + shift * stacked["sum"])).sum(axis=0),
        "target": stacked["target"].max(axis=0),
    }


def _chunk(plan: _Plan, x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, i * plan.chunk, plan.chunk, axis=1)


def _put(plan: _Plan, x: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, i * plan.chunk, axis=1)


# --- the same by the Hopper kernels -----------------------------------------------------------------------------------


def _whole_tiles(plan: _Plan, hidden, head) -> int:
    """How many of the first columns the kernels take."""
    if plan.hopper is None or not plan.hopper.fits(hidden, head):
        return 0
    return head.shape[1] // COLUMNS * COLUMNS


def _tile_stats(plan: _Plan, hidden, head, targets) -> dict[str, jax.Array]:
    """As _chunk_stats; the target's logit by a product of its own."""
    stats = column_stats(_flat(plan, hidden), head, 1 / plan.temperature, plan.hopper)
    rows = targets.size
    top, total, moment = (stats[name][:rows].reshape(targets.shape) for name in STATS[:3])
    inside = (targets >= 0) & (targets < head.shape[1])
    column = jnp.take(head, jnp.where(inside, targets, 0), axis=1)  # [D, B, chunk]
    target = product("bcd,dbc->bc", hidden, column) / plan.temperature
    return {
        "max": top * LOG_2,
        "sum": total,
        "moment": moment * LOG_2,
        "target": jnp.where(inside, target, -jnp.inf),
    }


def _tile_logits(plan: _Plan, hidden, head, row) -> jax.Array:
    """As _chunk_logits; the target's entry is set afterwards, from the log-prob."""
    vectors = (row["lse"] / LOG_2, row["base"], row["slope"] * LOG_2)
    vectors = [_flat(plan, x) for x in vectors]
    gradient = logit_gradient(_flat(plan, hidden), head, vectors, 1 / plan.temperature, plan.hopper)
    flat = {name: value.reshape(-1) for name, value in row.items()}
    log_p = flat["logprob"]
    inside = (flat["targets"] >= 0) & (flat["targets"] < head.shape[1])
    of_target = flat["onehot"] - jnp.exp(log_p) * (flat["base"] + flat["slope"] * log_p)
    at = jnp.where(inside, flat["targets"], head.shape[1])  # beyond: dropped
    gradient = gradient.at[jnp.arange(at.size), at].set(
        of_target.astype(gradient.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )
    return gradient[: at.size].reshape(*hidden.shape[:-1], head.shape[1])


def _flat(plan: _Plan, x: jax.Array) -> jax.Array:
    """[B, chunk, ...] -> [rows, ...], with rows of zeros up to whole tiles."""
    x = x.reshape(-1, *x.shape[2:])
    padding = -x.shape[0] % plan.hopper.row_multiple
    return jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1)))
