"""The two products of linear_logprob that need logits, as Hopper kernels: tiles of logits live in registers only.

Both are one persistent matmul (TMA into a ring in shared memory, two warpgroups of wgmma) with another end of a tile:
`column_stats` reduces it to three numbers a row, `logit_gradient` turns it into bfloat16 gradients.
Life of a tile: 1 the memory warpgroup streams blocks of hidden and head along D into the ring, from one tile straight
into the next. 2 two compute warpgroups take half of the tile's rows each. 3 while one works on the end of its tile, the
other's products keep the tensor cores busy, as far as the ring lets them drift apart. With `cluster` 2, neighbouring
blocks of rows share their loads of head.
Must not: query a device; know targets or vocabularies beyond the columns given. Everything is in units of log2.
"""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS, DEPTH_BLOCK = 128, 256, 64  # of a tile; along D a load
WARPGROUPS = 2
PART = (
    ROWS // WARPGROUPS
)  # rows of a warpgroup: 64 x 256 float32 accumulators are 128 registers a thread
STORE_COLUMNS = 64  # of a store of gradients: 128 bytes a row, one swizzle
STATS = ("max", "sum", "moment")


@dataclass(frozen=True)
class Hopper:
    """How to run on one card; all but num_sms are for tuning and tests."""

    num_sms: int
    columns: int = 16384  # vocabulary columns whose gradients are held at once
    cluster: int = 2  # blocks of a cluster; they share loads of head
    stages: int = 4  # of the ring
    strip: int = (
        16  # tiles of rows that sweep the columns together, so that head is read once a strip
    )
    interpret: Any = None  # plgpu.InterpretGPUParams() on CPU

    def fits(self, hidden: jax.Array, head: jax.Array) -> bool:
        D, V = head.shape
        return hidden.dtype == jnp.bfloat16 and D % DEPTH_BLOCK == 0 and V >= COLUMNS

    @property
    def row_multiple(self) -> int:
        return ROWS * self.cluster


def column_stats(
    hidden: jax.Array, head: jax.Array, scale: float, hopper: Hopper
) -> dict[str, jax.Array]:
    """Max of z = log2(e) * scale * hidden @ head, sum of 2^(z - max), sum of 2^(z - max)(z - max), over whole tiles.

    Args:    hidden: bf16[N, D], N a multiple of hopper.row_multiple.  head: bf16[D, V]; the last V % COLUMNS columns
             are left out.
    Returns: f32[N] each.
    """
    N, _ = hidden.shape
    groups = head.shape[1] // COLUMNS
    to_log2 = scale * 1.4426950408889634

    def end(z, row, column, outs, scratch):
        stage = scratch["stats"].at[lax.axis_index("warpgroup")]
        top = z.max(axis=1) * to_log2
        total = moment = None
        for start in range(0, COLUMNS, STORE_COLUMNS):  # few temporaries beside the accumulators
            part = lax.slice(z, (0, start), (PART, start + STORE_COLUMNS))
            below = part * to_log2 - _over_columns(top, STORE_COLUMNS)
            weight = jnp.exp2(below)
            total = weight if total is None else total + weight
            moment = weight * below if moment is None else moment + weight * below
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, value in enumerate((top, total.sum(axis=1), moment.sum(axis=1))):
            stage.at[i][...] = value
        plgpu.commit_smem()
        group = lax.div(column, jnp.int32(COLUMNS))
        for i, out in enumerate(outs):
            plgpu.copy_smem_to_gmem(stage.at[i], out.at[group, pl.ds(row, PART)])

    shape = jax.ShapeDtypeStruct((groups, N), jnp.float32)
    scratch = {"stats": plgpu.SMEM((WARPGROUPS, len(STATS), PART), jnp.float32)}
    kernel = _tiles(hidden.shape, groups * COLUMNS, [], [shape] * 3, scratch, end, hopper)
    top, total, moment = kernel(hidden, head)
    largest = top.max(axis=0)
    shift = top - largest
    weight = jnp.exp2(shift)
    total_moment = (weight * (moment + shift * total)).sum(axis=0)
    return dict(zip(STATS, (largest, (weight * total).sum(axis=0), total_moment)))


def logit_gradient(
    hidden: jax.Array, head: jax.Array, rows: list[jax.Array], scale: float, hopper: Hopper
) -> jax.Array:
    """-p (base + slope log2(p)) with log2(p) = log2(e) * scale * hidden @ head - lse, bf16[N, V].

    Args: hidden, head: as of column_stats, V a multiple of COLUMNS.  rows: lse, base, slope, f32[N] each.
    """
    N, V = hidden.shape[0], head.shape[1]
    assert V % COLUMNS == 0, f"{V} columns are not whole tiles of {COLUMNS}"
    to_log2 = scale * 1.4426950408889634

    def begin(row, inputs):
        return [_load_rows(x, pl.ds(row, PART)) for x in inputs]

    def end(z, row, column, outs, scratch, numbers):
        lse, base, slope = (_over_columns(x, STORE_COLUMNS) for x in numbers)
        for i, start in enumerate(range(0, COLUMNS, STORE_COLUMNS)):
            stage = scratch["out"].at[lax.axis_index("warpgroup"), i % 2]
            log_p = lax.slice(z, (0, start), (PART, start + STORE_COLUMNS)) * to_log2 - lse
            out = -jnp.exp2(log_p) * (base + slope * log_p)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            stage[...] = out.astype(jnp.bfloat16)
            plgpu.commit_smem()
            where = (pl.ds(row, PART), pl.ds(column + start, STORE_COLUMNS))
            plgpu.copy_smem_to_gmem(stage, outs[0].at[where])

    transforms = (plgpu.TilingTransform((8, STORE_COLUMNS)), plgpu.SwizzleTransform(128))
    staging = plgpu.SMEM((WARPGROUPS, 2, PART, STORE_COLUMNS), jnp.bfloat16, transforms=transforms)
    shape = jax.ShapeDtypeStruct((N, V), jnp.bfloat16)
    kernel = _tiles(hidden.shape, V, rows, [shape], {"out": staging}, end, hopper, begin)
    return kernel(hidden, head, *rows)[0]


def _load_rows(ref: Any, rows: Any) -> jax.Array:
    """One number a row from device memory, laid out as the accumulators' rows are."""
    how = {"layout": plgpu.Layout.WGMMA.reduce(1), "optimized": False}
    load: Any = plgpu.load
    if "idx" in inspect.signature(load).parameters:  # jax 0.10
        return load(ref, (rows,), **how)
    return load(ref.at[rows], **how)


def _over_columns(x: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (PART, columns), (0,))


def _tiles(shape, num_columns, rows, out_type, scratch, end, hopper, begin=None):
    """The kernel (hidden, head, *rows) -> outs that calls end(z, row, column, ...) with every tile's products.

    begin(row, rows) runs before a tile's products and its result goes to end.
    """
    N, D = shape
    cluster, stages = hopper.cluster, hopper.stages
    assert N % hopper.row_multiple == 0 and D % DEPTH_BLOCK == 0, f"[{N}, {D}] is not whole tiles"
    grid = (N // hopper.row_multiple, num_columns // COLUMNS)
    num_programs = max(hopper.num_sms // cluster, 1)
    blocks = D // DEPTH_BLOCK

    def body(hidden, head, *refs):
        inputs, refs = refs[: len(rows)], refs[len(rows) :]
        outs, (ring, full, free, *own) = refs[: len(out_type)], refs[len(out_type) :]
        own = dict(zip(scratch, own, strict=True))
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        tiles = lax.div(grid[0] * grid[1] - program + num_programs - 1, jnp.int32(num_programs))

        def corner(i):
            """First row and column of this block's i-th tile."""
            at = plgpu.planar_snake(program + i * num_programs, grid, 0, min(hopper.strip, grid[0]))
            row = at[0] * cluster + (lax.axis_index("cluster") if cluster > 1 else 0)
            return row * ROWS, at[1] * COLUMNS

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            _stream((hidden, head), ring, full, free, (tiles, blocks), corner, hopper)

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def tile(i, carry):
                row, column = corner(i)
                row = row + warpgroup * PART
                numbers = [] if begin is None else [begin(row, inputs)]
                products = partial(_multiply, ring, full, free, i * blocks, blocks, stages)
                z = pl.run_scoped(products, plgpu.ACC((PART, COLUMNS), jnp.float32))
                end(z, row, column, outs, own, *numbers)
                return carry

            lax.fori_loop(0, tiles, tile, 0)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_programs,),
        grid_names=("program",),
        **({"cluster": (cluster,), "cluster_names": ("cluster",)} if cluster > 1 else {}),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[*_ring(hopper), *scratch.values()],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if hopper.interpret is None else {"interpret": hopper.interpret}),
    )


def _ring(hopper: Hopper) -> list:
    """[blocks of hidden and head], barrier of filled slots, barrier of emptied ones."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    slots = [
        plgpu.SMEM((hopper.stages, *block), jnp.bfloat16, transforms=transforms)
        for block in ((ROWS, DEPTH_BLOCK), (DEPTH_BLOCK, COLUMNS))
    ]
    counts = {"num_arrivals": WARPGROUPS, "num_barriers": hopper.stages}
    free = (
        plgpu.ClusterBarrier(collective_axes=("cluster",), **counts)
        if hopper.cluster > 1
        else plgpu.Barrier(**counts)
    )
    return [slots, plgpu.Barrier(num_arrivals=2, num_barriers=hopper.stages), free]


def _stream(arrays, ring, full, free, sizes, corner, hopper: Hopper) -> None:
    """Fill the ring with the blocks of all tiles, then wait until all were used."""
    hidden, head = arrays
    tiles, blocks = sizes
    stages, steps = hopper.stages, tiles * blocks

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def load(step):
        slot = slot_of(step)
        row, column = corner(lax.div(step, jnp.int32(blocks)))
        depth = pl.ds(lax.rem(step, jnp.int32(blocks)) * DEPTH_BLOCK, DEPTH_BLOCK)
        plgpu.copy_gmem_to_smem(hidden.at[pl.ds(row, ROWS), depth], ring[0].at[slot], full.at[slot])
        shared = {"collective_axes": "cluster"} if hopper.cluster > 1 else {}
        plgpu.copy_gmem_to_smem(
            head.at[depth, pl.ds(column, COLUMNS)], ring[1].at[slot], full.at[slot], **shared
        )

    first = lax.min(jnp.int32(stages), steps)
    lax.fori_loop(0, first, lambda step, _: load(step), None)

    def reload(step, _):
        plgpu.barrier_wait(free.at[slot_of(step)])
        load(step)

    lax.fori_loop(first, steps, reload, None)
    # A block of a cluster must not end while another still writes into its shared memory.
    drain = lambda step, _: plgpu.barrier_wait(free.at[slot_of(step)])
    lax.fori_loop(steps - first, steps, drain, None)


def _multiply(ring, full, free, first, blocks, stages, products):
    """This warpgroup's rows of one tile; a slot is freed one product late, so that one is always under way."""
    rows = pl.ds(lax.axis_index("warpgroup") * PART, PART)

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def step(k, _):
        slot = slot_of(first + k)
        plgpu.barrier_wait(full.at[slot])
        plgpu.wgmma(products, ring[0].at[slot, rows], ring[1].at[slot])
        plgpu.wgmma_wait(1)

        @pl.when(k > 0)
        def _():
            plgpu.barrier_arrive(free.at[slot_of(first + k - 1)])

    lax.fori_loop(0, blocks, step, None)
    z = products[...]
    plgpu.barrier_arrive(free.at[slot_of(first + blocks - 1)])
    return z
