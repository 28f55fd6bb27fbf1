"""The products of a decode step for many rows, as Hopper kernels: weights stream by once, whatever the number of rows.

A cluster's blocks take 128 rows each and share their loads of the weights; each cluster has columns of its own, and
where that would leave multiprocessors idle, a part of the contraction. `gated_matmul` ends in silu(gate) * up;
`split_matmul` leaves its parts, f32[P, N, M], to the kernel that reads them (`decode_rows.add_norm`,
`decode_attention`).
Life of a block: 1 the memory warpgroup streams blocks of x and w along the contraction into a ring in shared memory. 2
two compute warpgroups take half of the rows each. 3 they end their columns and store them.
Must not: query a device, or round otherwise than the portable path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, DEPTH = 128, 64  # of a block; along the contraction, of a load
WARPGROUPS = 2
PART = ROWS // WARPGROUPS  # rows of a warpgroup
MOST_COLUMNS = 160  # of gate and of up in a block: as many accumulators a thread each
STORE = 72  # columns of gated_matmul that are stored at once
SHARED_BYTES = 226 << 10  # of a multiprocessor, less barriers


@dataclass(frozen=True)
class Hopper:
    """How to run on one card; all but num_sms are for tuning and tests."""

    num_sms: int
    stages: int = 0  # of the ring; 0: as many as there is room for, 6 at most
    columns: int = 0  # of a block; 0: chosen
    parts: int = 0  # of a contraction; 0: chosen
    interpret: Any = None  # plgpu.InterpretGPUParams() on CPU

    def takes(self, rows: int, depth: int) -> bool:
        """Whether these kernels are for products of so many rows, whole blocks along the contraction."""
        return rows == 2 * ROWS and depth % DEPTH == 0


@partial(jax.jit, static_argnums=2)  # so that the layers of a program share one
def gated_matmul(x: jax.Array, w: jax.Array, hopper: Hopper) -> jax.Array:
    """silu(x @ w[0].T) * (x @ w[1].T) [N, F]; both products are rounded before.

    Args: x: bf16[N, D].  w: bf16[2, F, D], of gate and up.
    """
    (N, D), F = x.shape, w.shape[1]
    cluster, step = N // ROWS, 8 * max(1, N // ROWS // 2)
    groups = hopper.num_sms // cluster
    waves = -(-F // (groups * MOST_COLUMNS))
    C = hopper.columns or -(-F // (groups * waves * step)) * step
    size = min(C, STORE)

    def weights(w, program, depth):
        return w.at[:, pl.ds(first(program), C), depth]

    def first(
        program,
    ):  # the last one overlaps with that before it, and stores the same numbers there
        return lax.min(program * C, jnp.int32(F - C))

    def multiply(sums, x, w):
        for i in range(2):
            plgpu.wgmma(sums[i], x, w.at[i].transpose((1, 0)))

    def end(sums, program, row, out, stage):
        gate, up = (z.astype(jnp.bfloat16).astype(jnp.float32) for z in sums)
        silu = (gate / (1.0 + jnp.exp(-gate))).astype(jnp.bfloat16).astype(jnp.float32)
        value = (silu * up).astype(jnp.bfloat16)
        for start in range(0, C, size):
            start = min(start, C - size)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            stage[...] = lax.slice(value, (0, start), (PART, start + size))
            plgpu.commit_smem()
            where = (pl.ds(row, PART), pl.ds(first(program) + start, size))
            plgpu.copy_smem_to_gmem(stage, out.at[where])

    work = _Work(
        grid=-(-F // C),
        num_sums=2,
        columns=C,
        slot=(2, C, DEPTH),
        blocks=lambda program: (jnp.int32(0), jnp.int32(D // DEPTH)),
        weights=weights,
        multiply=multiply,
        end=end,
        out=jax.ShapeDtypeStruct((N, F), jnp.bfloat16),
        stage=plgpu.SMEM((WARPGROUPS, PART, size), jnp.bfloat16),
        num_stored=PART * size * 2,
    )
    return _run(x, w, work, hopper)


@partial(jax.jit, static_argnums=2)
def split_matmul(x: jax.Array, w: jax.Array, hopper: Hopper) -> jax.Array:
    """Parts f32[P, N, M] of x @ w, for x bf16[N, D] and w bf16[D, M]."""
    (N, D), M = x.shape, w.shape[1]
    blocks = D // DEPTH
    C, parts = hopper.columns, hopper.parts
    if not C:
        C, parts = _cut(M, blocks, hopper.num_sms // (N // ROWS))
    tiles = M // C
    assert M % C == 0 and C % DEPTH == 0, f"{M} columns are not whole blocks of {C}"

    def span(program):
        part = lax.div(program, jnp.int32(tiles))
        begin, stop = (lax.div((part + i) * blocks, jnp.int32(parts)) for i in (0, 1))
        return begin, stop - begin

    def first(program):
        return lax.rem(program, jnp.int32(tiles)) * C

    def weights(w, program, depth):
        return w.at[depth, pl.ds(first(program), C)]

    def end(sums, program, row, out, stage):
        part = lax.div(program, jnp.int32(tiles))
        for start in range(0, C, 32):
            piece = stage.at[(start // 32) % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            piece[...] = lax.slice(sums[0], (0, start), (PART, start + 32))
            plgpu.commit_smem()
            where = (part, pl.ds(row, PART), pl.ds(first(program) + start, 32))
            plgpu.copy_smem_to_gmem(piece, out.at[where])

    tiled = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    work = _Work(
        grid=tiles * parts,
        num_sums=1,
        columns=C,
        slot=(DEPTH, C),
        blocks=span,
        weights=weights,
        multiply=lambda sums, x, w: plgpu.wgmma(sums[0], x, w),
        end=end,
        out=jax.ShapeDtypeStruct((parts, N, M), jnp.float32),
        stage=plgpu.SMEM((WARPGROUPS, 2, PART, 32), jnp.float32, transforms=tiled),
        num_stored=2 * PART * 32 * 4,
    )
    return _run(x, w, work, hopper)


def _cut(columns: int, blocks: int, groups: int) -> tuple[int, int]:
    """Columns of a block and parts of the contraction that are done first, by a count of loads."""

    def cost(C: int, parts: int) -> float:
        waves = -(-(columns // C) * parts // groups)
        return waves * (-(-blocks // parts) * (C + 16) + 640) + 100 * parts

    ways = [
        (C, parts)
        for C in range(DEPTH, 257, DEPTH)
        if columns % C == 0
        for parts in range(1, min(blocks, 8) + 1)
    ]
    return min(ways, key=lambda way: cost(*way))


@dataclass(frozen=True)
class _Work:
    """One kernel; a program is one cluster's columns and part."""

    grid: int
    num_sums: int
    columns: int  # of each sum
    slot: tuple[int, ...]  # shape of a load of w
    blocks: Callable  # program -> (first, number) of its blocks of the contraction
    weights: Callable  # (w, program, depth) -> what of w a load brings
    multiply: Callable
    end: Callable
    out: jax.ShapeDtypeStruct
    stage: Any
    num_stored: int  # bytes of a warpgroup's stage


def _run(x: jax.Array, w: jax.Array, work: _Work, hopper: Hopper) -> jax.Array:
    cluster = x.shape[0] // ROWS
    num_loaded = 2 * (ROWS * DEPTH + DEPTH * work.columns * work.num_sums)
    room = (SHARED_BYTES - WARPGROUPS * work.num_stored) // num_loaded
    stages = hopper.stages or min(room, 6)

    def body(x, w, out, ring_x, ring_w, full, free, stage):
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        row = (lax.axis_index("cluster") if cluster > 1 else jnp.int32(0)) * ROWS
        begin, num = work.blocks(program)

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def load(step):
                slot = lax.rem(step, jnp.int32(stages))
                depth = pl.ds((begin + step) * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(row, ROWS), depth], ring_x.at[slot], full.at[slot]
                )
                source = work.weights(w, program, depth)
                shared = {"collective_axes": "cluster"} if cluster > 1 else {}
                plgpu.copy_gmem_to_smem(source, ring_w.at[slot], full.at[slot], **shared)

            def wait_free(step):
                plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(stages))])

            def reload(step, _):
                wait_free(step)
                load(step)

            ahead = lax.min(jnp.int32(stages), num)
            lax.fori_loop(0, ahead, lambda step, _: load(step), None)
            lax.fori_loop(ahead, num, reload, None)
            # A block of a cluster must not end while another still writes into its shared memory.
            lax.fori_loop(num - ahead, num, lambda step, _: wait_free(step), None)

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            rows = pl.ds(warpgroup * PART, PART)

            def products(*sums):
                def step(k, _):
                    slot = lax.rem(k, jnp.int32(stages))
                    plgpu.barrier_wait(full.at[slot])
                    work.multiply(sums, ring_x.at[slot, rows], ring_w.at[slot])
                    plgpu.wgmma_wait(
                        0
                    )  # meanwhile the other warpgroup's keep the tensor cores busy
                    plgpu.barrier_arrive(free.at[slot])

                lax.fori_loop(0, num, step, None)
                return [z[...] for z in sums]

            sums = pl.run_scoped(
                products, *[plgpu.ACC((PART, work.columns), jnp.float32)] * work.num_sums
            )
            work.end(sums, program, row + warpgroup * PART, out, stage.at[warpgroup])
            plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
    ring = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=tiled)
    counts = {"num_arrivals": WARPGROUPS, "num_barriers": stages}
    free = (
        plgpu.ClusterBarrier(collective_axes=("cluster",), **counts)
        if cluster > 1
        else plgpu.Barrier(**counts)
    )
    return plgpu.kernel(
        body,
        out_type=work.out,
        grid=(work.grid,),
        grid_names=("program",),
        **({"cluster": (cluster,), "cluster_names": ("cluster",)} if cluster > 1 else {}),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            ring((stages, ROWS, DEPTH)),
            ring((stages, *work.slot)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            free,
            work.stage,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if hopper.interpret is None else {"interpret": hopper.interpret}),
    )(x, w)
