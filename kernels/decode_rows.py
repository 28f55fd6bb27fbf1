"""What stands between the attentions of a decode step, for few rows, as Triton kernels: XLA makes two or three of each.

`split_matmul` leaves its contraction in parts, f32[P, N, M]: parts keep all multiprocessors busy where the result is
narrow, and the kernel that reads the result sums them (`add_norm` here, `decode_attention`), so that no kernel runs for
the sum alone. `gated_matmul` ends in silu(gate) * up. Sums are float32 and rounded where the portable path rounds.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # a JAX without it
    plgpu: Any = None

ROWS, COLUMNS = 64, 64  # of a program's tile
MOST_ROWS = 128  # beyond it the products are bound by arithmetic, and XLA's are better
MOST_PROGRAMS = 140
MAX_COLUMNS = 8192  # of a row in registers


def fits(shape: tuple[int, ...], columns: int) -> bool:
    """Whether a product of x [rows, depth] with w [depth, columns] is whole tiles, few enough."""
    rows, depth = shape
    return rows <= MOST_ROWS and rows % ROWS == 0 and depth % 128 == 0 and columns % COLUMNS == 0


def split_matmul(x: jax.Array, w: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Parts f32[P, N, M] of x @ w, for x [N, D] and w [D, M] that `fits`."""
    (N, D), M = x.shape, w.shape[1]
    depth, tiles = 128, (N // ROWS) * (M // COLUMNS)
    blocks = D // depth
    most = max(MOST_PROGRAMS // tiles, 1)
    parts = max(p for p in range(1, most + 1) if blocks % p == 0)

    def body(x, w, out):
        column, part, row = (pl.program_id(i) for i in range(3))
        columns = pl.ds(column * COLUMNS, COLUMNS)
        rows = pl.ds(row * ROWS, ROWS)

        def step(i, total):
            where = pl.ds((part * (blocks // parts) + i) * depth, depth)
            return total + plgpu.dot(x[rows, where], w[where, columns])

        zeros = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        out[part, rows, columns] = lax.fori_loop(0, blocks // parts, step, zeros)

    return _call(
        body,
        jax.ShapeDtypeStruct((parts, N, M), jnp.float32),
        (M // COLUMNS, parts, N // ROWS),
        ("split_matmul", 4, 4),
        interpret,
    )(x, w)


def gated_matmul(x: jax.Array, w: jax.Array, *, interpret: bool = False) -> jax.Array:
    """silu(x @ w[:, 0]) * (x @ w[:, 1]) [N, F] for x [N, D] and w [D, 2, F]; products are rounded before."""
    (N, D), F = x.shape, w.shape[2]
    depth = 64

    def body(x, w, out):
        column, row = pl.program_id(0), pl.program_id(1)
        columns = pl.ds(column * COLUMNS, COLUMNS)
        rows = pl.ds(row * ROWS, ROWS)

        def step(i, totals):
            where = pl.ds(i * depth, depth)
            block = x[rows, where]
            return tuple(t + plgpu.dot(block, w[where, j, columns]) for j, t in enumerate(totals))

        zeros = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        totals = lax.fori_loop(0, D // depth, step, (zeros, zeros))
        gate, up = (t.astype(out.dtype).astype(jnp.float32) for t in totals)
        silu = (gate / (1.0 + jnp.exp(-gate))).astype(out.dtype).astype(jnp.float32)
        out[rows, columns] = (silu * up).astype(out.dtype)

    out = jax.ShapeDtypeStruct((N, F), x.dtype)
    return _call(body, out, (F // COLUMNS, N // ROWS), ("gated_matmul", 4, 4), interpret)(x, w)


def add_norm(
    x: jax.Array, parts: jax.Array, scale: jax.Array, eps: float, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(x + y, rounded; its RMSNorm times scale, in float32, rounded) for y the sum of the parts, rounded.

    Args: x: [N, D], D at most MAX_COLUMNS.  parts: [P, N, D].  scale: [D].
    """
    N, D = x.shape
    size = pl.next_power_of_2(D)
    assert size <= MAX_COLUMNS, f"{D} columns do not fit into registers"

    def body(x, parts, scale, total, normed):
        row, columns = pl.program_id(0), jnp.arange(size)
        mask = columns < D
        load = lambda ref: plgpu.load(ref, mask=mask, other=0.0).astype(jnp.float32)
        y = sum(load(parts.at[p, row, columns]) for p in range(parts.shape[0]))
        y = y.astype(total.dtype).astype(jnp.float32)
        both = (load(x.at[row, columns]) + y).astype(total.dtype)
        plgpu.store(total.at[row, columns], both, mask=mask)
        wide = both.astype(jnp.float32)
        wide *= lax.rsqrt(jnp.sum(wide * wide) / D + eps) * load(scale.at[columns])
        plgpu.store(normed.at[row, columns], wide.astype(normed.dtype), mask=mask)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = _call(body, [like, like], (N,), ("add_norm", 4, 1), interpret)(x, parts, scale)
    return total, normed


def _call(body, out_shape, grid, how: tuple[str, int, int], interpret: bool):
    """how: name, warps of a program, loads under way."""
    name, num_warps, num_stages = how
    params = plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    call = partial(pl.pallas_call, body, out_shape=out_shape, grid=grid, name=name)
    return call(interpret=interpret, compiler_params=params)
