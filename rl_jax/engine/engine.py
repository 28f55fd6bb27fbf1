"""JaxEngine: prefill, insert, append, generate, extract and free, compiled for one server's mesh.

Owns: the compiled programs, the buckets that keep their number small, and the layout of params and
KV on one server's mesh.
Invariants: the state given in is donated and never touched again; shapes inside jit come from
settings and buckets only; the result for a request does not depend on slots, neighbours or block
size (programs.py says down to which bits).
A request's life: 1 `prefill` computes the KV of context[:-1] on a scratch cache, started from a
Prefix where one is given (or `append` does it in place, chunk by chunk). 2 `insert` copies Prefixes
to slots and arms them: context, seed, budget, stop ids. 3 `generate` samples blocks until the
device itself ends the slot. 4 the next turn's suffix, which starts with the last sampled token, is
appended and the slot armed again. 5 `free` stops a slot; `extract` copies its KV out. Host arrays
that are passed in may be read after the call returns (the CPU backend aliases numpy memory):
callers never write to them again.
Weights come by name, in the model's dtype and param_shardings, as they are synchronised and digested; `pack` turns them
into `params`, what all verbs take: Params of model.packed where the mesh splits query and kv heads alike.
Must not: know versions, sessions, threads or text; convert weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kv import KVSpec
from rl_jax.engine import programs
from rl_jax.engine.attention import choose_attention, choose_chunk_attention
from rl_jax.engine.chunks import end_positions, fresh_chunk, is_fresh, padding_chunk
from rl_jax.engine.state import Cache, DecodeState, SlotState, empty_sampling, empty_slots
from rl_jax.lowering import Lowering, Program
from rl_jax.mesh import mesh_axes, named_sharding, shardings
from rl_jax.models.model import Model
from rl_jax.settings import EngineSettings
from rl_jax.types import BlockTokens, PrefillChunk, Prefix, SlotSampling

MIN_VISIBLE = (
    256  # cache positions of the smallest attention bucket; each next one is 4 times larger
)
MIN_TILE, MAX_TILE = (
    16,
    128,
)  # queries of one attention tile: few suit short suffixes, many suit long chunks

# What lower calls a program, where its verb says more than its attribute.
VERBS = {
    "_zero_params": "weights",
    "_extend_scratch": "prefill",
    "_insert_scratch": "continuation",
    "_extend_state": "append",
    "_insert_state": "insert",
    "_disarm": "free",
}


class JaxEngine:
    """types.Engine over one Model on one mesh."""

    def __init__(
        self,
        model: Model,
        mesh: jax.sharding.Mesh,
        rules_serve,
        settings: EngineSettings,
        name: str,
        *,
        support: int = 0,
    ):
        """rules_serve: (logical axis, mesh axes) pairs of the server. support: ids that a block
        returns of what each token was sampled from. Allocates nothing; compiles at the first calls.
        """
        self.model, self.mesh, self.settings, self.name = model, mesh, settings, name
        s = model.settings
        self.dtype = jnp.dtype(s.dtype)
        self.spec = KVSpec(
            num_layers=s.num_layers,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            page_size=settings.context,
            num_pages=settings.slots,
            dtype=s.dtype,
        )
        self.param_shardings = shardings(model.logical_axes, rules_serve, mesh)
        heads, kv_heads = mesh_axes(("heads", "kv_heads"), rules_serve)
        self.served = model.packed if model.packed is not None and heads == kv_heads else model
        self.served_shardings = shardings(self.served.logical_axes, rules_serve, mesh)
        self._replicated = named_sharding((), rules_serve, mesh)
        self._cache_sharding = named_sharding(self.spec.axes, rules_serve, mesh)
        # A scratch cache has as many rows as a chunk has requests, which no mesh axis need divide.
        self.prefix_sharding = named_sharding((None, *self.spec.axes[1:]), rules_serve, mesh)
        self.visible_buckets = buckets(MIN_VISIBLE, settings.context)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        attention = choose_attention(s, settings.slots, rules_serve, mesh, settings.context)
        self.chunk_attention = choose_chunk_attention(s, rules_serve, mesh, settings.context)
        self.step = programs.Step(attention, not on_cpu, settings.steps_per_block, support)
        self._compile()

    @property
    def packs_fresh(self) -> bool:
        """Whether a chunk of requests that all start at position 0 is computed faster than others."""
        return self.chunk_attention is not None

    # --- state ------------------------------------------------------------------------------

    def init_state(self) -> DecodeState:
        """Empty slots. k and v of a layer are two arrays: one array twice cannot be donated."""
        return self._init_state()

    def zero_params(self) -> dict[str, jax.Array]:
        """What `pack` returns, of zeros, to compile with before real weights have come."""
        return self._zero_params()

    def pack(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The form of named weights (in param_shardings) that the verbs take; as Model.pack, it empties the dict."""
        if self.served is self.model:
            served = dict(params)
            params.clear()
            return served
        return self.model.pack(params, self._join)

    def _join(self, name: str, parts: list[jax.Array]) -> jax.Array:
        of, place = self.model.joins[name].of, self.served_shardings[name]
        if (of, place) not in self._joins:
            self._joins[of, place] = jax.jit(of, out_shardings=place)
        return self._joins[of, place](parts)

    # --- the six verbs ----------------------------------------------------------------------

    def prefill(
        self,
        params: Mapping[str, jax.Array],
        chunk: PrefillChunk,
        prefixes: Sequence[Prefix | None],
    ) -> tuple[Prefix, ...]:
        """KV of the chunk's requests, each on top of its Prefix (None = from position 0).

        Returns: per request a Prefix of prefix + chunk tokens whose arrays [R, T, K, Dh] the
        requests share (`row` is its own); version -1 and no hash: the caller knows them. Prefixes
        stay valid.
        """
        # A prefix may be padded further than its own tokens reach: its chunk's longest request says how far.
        lengths = [p.kv[0][0].shape[1] for p in prefixes if p is not None]
        visible = max(self._visible(chunk), *lengths, 0)
        kv = self._scratch(visible)
        for source, rows in self._by_source(prefixes, np.arange(len(prefixes)), self.num_requests):
            kv = self._insert_scratch(kv, source, rows)
        kv = self._extend_scratch(
            params, kv, *self._chunk_args(chunk), np.arange(self.num_requests, dtype=np.int32),
            visible=visible, **self._how(chunk),
        )  # fmt: skip
        return tuple(
            Prefix(kv, num_tokens, -1, None, "", self.spec, row=row)
            for row, num_tokens in enumerate(end_positions(chunk))
        )

    def append(
        self,
        params: Mapping[str, jax.Array],
        state: DecodeState,
        slots: np.ndarray,
        chunk: PrefillChunk,
    ) -> DecodeState:
        """The state with the chunk's KV written to the live slots i32[R]; request r of the chunk
        goes to slots[r].
        """
        rows = np.full(self.num_requests, self.settings.slots, np.int32)
        rows[: len(slots)] = slots
        visible, how = self._visible(chunk), self._how(chunk)
        if how["fresh"] is not None:
            visible = self.settings.context  # it is not read: one program
        kv = self._extend_state(
            params, state.kv, *self._chunk_args(chunk), rows, visible=visible, **how
        )
        return replace(state, kv=kv)

    def insert(
        self,
        state: DecodeState,
        prefixes: Sequence[Prefix | None],
        slots: np.ndarray,
        sampling: SlotSampling,
    ) -> DecodeState:
        """Copy each Prefix (None = the slot's own KV stays) to its slot and arm the slots i32[R]
        for generate.
        """
        kv = state.kv
        for source, rows in self._by_source(prefixes, slots, self.settings.slots):
            kv = self._insert_state(kv, source, rows)
        rows, values = self._slot_values(slots, sampling)
        return DecodeState(kv, self._arm(state.slots, rows, values))

    def generate(
        self, params: Mapping[str, jax.Array], state: DecodeState
    ) -> tuple[DecodeState, BlockTokens]:
        """One block of steps_per_block steps; the copy of its tokens to the host is already under
        way.
        """
        state, made = self._generate(params, state)
        for array in jax.tree.leaves(made):
            array.copy_to_host_async()
        *block, support = made
        return state, BlockTokens(*block, support=support)

    def extract(self, state: DecodeState, slot: int) -> Prefix:
        """A copy of the KV of one slot: context[:-1] as last armed or generated. Waits for the
        device.
        """
        num_tokens = max(int(state.slots.context_length[slot]) - 1, 0)
        kv = self._read_row(state.kv, np.int32(slot))
        return Prefix(kv, num_tokens, -1, None, "", self.spec)

    def free(self, state: DecodeState, slots: np.ndarray) -> DecodeState:
        """Stop the slots i32[R]; their KV stays readable until it is overwritten."""
        rows = np.full(self.settings.slots, self.settings.slots, np.int32)
        rows[: len(slots)] = slots
        return replace(state, slots=self._disarm(state.slots, rows))

    # --- compiling --------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """R: requests of one chunk."""
        return self.settings.chunk_requests

    def warmup(self, params: Mapping[str, jax.Array], *, decode: bool = True) -> int:
        """Compile what a decode (or else a prefill) server will call, so that no request waits.

        Returns: the number of programs.
        """
        return sum(1 for _ in self.compile_steps(params, decode=decode))

    def compile_steps(
        self, params: Mapping[str, jax.Array], *, decode: bool = True
    ) -> Iterator[str]:
        """As warmup, but yields after each program, with its name; each is run once on padding."""
        chunks = [
            (size, visible, padding_chunk(size, self.num_requests, visible))
            for size in self.settings.chunk_sizes
            for visible in self.visible_buckets
        ]
        none = np.zeros(0, np.int32)
        if decode:
            state = self.init_state()
            for size, visible, chunk in chunks:
                state = self.append(params, state, none, chunk)
                yield f"append of {size} tokens within {visible}"
            for size in self._fresh_sizes:
                state = self.append(params, state, none, fresh_chunk(size, self.num_requests, 1))
                yield f"append of {size} fresh tokens"
            dropped = np.full(self.num_requests, self.settings.slots, np.int32)
            for visible in self.visible_buckets:
                kv = self._insert_state(state.kv, self._scratch(visible), dropped)
                state = replace(state, kv=kv)
                yield f"insert of {visible} tokens"
            state = self.insert(state, [], none, empty_sampling(self.settings.num_stop_tokens))
            yield "arm"
            state = self.free(state, none)
            yield "free"
            jax.block_until_ready(self._generate(params, state)[1])
            yield "generate"
            return
        for size in self._fresh_sizes:  # a request reaches no further than the chunk
            reach = self.visible_buckets.index(self._bucket(min(size, self.settings.context) - 1))
            chunks += [
                (f"{size} fresh", visible, fresh_chunk(size, self.num_requests, visible))
                for visible in self.visible_buckets[: reach + 1]
            ]
        for size, visible, chunk in chunks:
            prefixes = self.prefill(params, chunk, [None] * self.num_requests)
            jax.block_until_ready(prefixes[0].kv)
            yield f"prefill of {size} tokens within {visible}"
        dropped = np.full(self.num_requests, self.num_requests, np.int32)
        for longer in self.visible_buckets:  # contexts that are cut into several chunks
            for shorter in self.visible_buckets[: self.visible_buckets.index(longer) + 1]:
                self._insert_scratch(self._scratch(longer), self._scratch(shorter), dropped)
                yield f"continuation of {shorter} within {longer} tokens"

    def lower(self, *, decode: bool = True) -> Iterator[Program]:
        """What compile_steps compiles, from shapes alone; of chunk sizes and attention buckets the largest only, as
        the others differ in sizes. Raises: LoweringError.
        """
        twin, made, seen = copy(self), [], set()
        twin.settings = replace(self.settings, chunk_sizes=self.settings.chunk_sizes[-1:])
        twin.visible_buckets = self.visible_buckets[-1:]
        twin._compile(partial(Lowering, made))
        for name, program in vars(twin).items():
            if isinstance(program, Lowering):
                program.name = f"{self.name} {VERBS.get(name, name.lstrip('_'))}"
        for _ in twin.compile_steps(twin.zero_params(), decode=decode):
            yield from ((name, program) for name, program in made if name not in seen)
            seen.update(name for name, _ in made)
            made.clear()

    def _compile(self, jit: Callable[..., Any] = jax.jit) -> None:
        model, spec, dtype = self.served, self.spec, self.dtype
        cache, prefix, small = self._cache_sharding, self.prefix_sharding, self._replicated

        def zeros(rows: int, length: int) -> Cache:
            shape = (rows, length, *spec.shape[2:])
            return tuple(
                (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(spec.num_layers)
            )

        def init_state() -> DecodeState:
            return DecodeState(zeros(*spec.shape[:2]), empty_slots(self.settings))

        extend = partial(programs.extend, model)
        static = {"static_argnames": ("visible", "tile", "fresh"), "donate_argnums": (1,)}
        state_out = DecodeState(cache, small)
        self._init_state = jit(init_state, out_shardings=state_out)
        self._scratch = jit(
            partial(zeros, self.num_requests), static_argnums=0, out_shardings=prefix
        )
        self._zero_params = jit(
            lambda: {n: jnp.zeros(a.shape, dtype) for n, a in model.abstract.items()},
            out_shardings=self.served_shardings,
        )
        self._joins: dict[Any, Any] = {}
        self._extend_state = jit(extend, out_shardings=cache, **static)
        self._extend_scratch = jit(extend, out_shardings=prefix, **static)
        self._generate = jit(
            partial(programs.generate, model, step=self.step),
            donate_argnums=1,
            out_shardings=(state_out, small),
        )
        insert = {"donate_argnums": 0}
        self._insert_state = jit(programs.insert_rows, out_shardings=cache, **insert)
        self._insert_scratch = jit(programs.insert_rows, out_shardings=prefix, **insert)
        self._arm = jit(programs.arm, donate_argnums=0, out_shardings=small)
        self._disarm = jit(programs.disarm, donate_argnums=0, out_shardings=small)
        self._read_row = jit(programs.read_row, out_shardings=prefix)

    # --- host arrays ------------------------------------------------------------------------

    @property
    def _fresh_sizes(self) -> Sequence[int]:
        return () if self.chunk_attention is None else self.settings.chunk_sizes

    def _how(self, chunk: PrefillChunk) -> dict[str, Any]:
        """What chooses the program that extends by this chunk, besides `visible`."""
        fresh = self.chunk_attention if is_fresh(chunk) else None
        return {"tile": tile_of(len(chunk.tokens)), "fresh": fresh}

    def _visible(self, chunk: PrefillChunk) -> int:
        return self._bucket(int(np.max(chunk.position, where=chunk.segment >= 0, initial=0)))

    def _bucket(self, highest: int) -> int:
        for bucket in self.visible_buckets:
            if highest < bucket:
                return bucket
        raise ValueError(
            f"{self.name}: a chunk reaches position {highest} but engine.context={self.settings.context}; "
            "refuse such prompts before they are packed"
        )

    def _chunk_args(self, chunk: PrefillChunk) -> tuple[np.ndarray, ...]:
        if len(chunk.tokens) not in self.settings.chunk_sizes:
            raise ValueError(
                f"{self.name}: a chunk of {len(chunk.tokens)} tokens is none of "
                f"engine.chunk_sizes={self.settings.chunk_sizes}; pack with engine.chunks.pack"
            )
        lengths = np.zeros(self.num_requests, np.int32)
        lengths[: len(chunk.lengths)] = chunk.lengths
        return chunk.tokens, chunk.segment, chunk.position, lengths

    def _by_source(self, prefixes: Sequence[Prefix | None], slots: np.ndarray, num_rows: int):
        """(kv, i32[rows of kv] destination or out of range) of each batch of prefixes that share
        their arrays.
        """
        sources: dict[int, tuple[Cache, np.ndarray]] = {}
        for prefix, slot in zip(prefixes, slots):
            if prefix is None:
                continue
            if not self.spec.same_tokens(prefix.spec):
                raise ValueError(
                    f"{self.name}: a prefix of {prefix.spec} does not fit the cache of {self.spec}; "
                    "prefill and decode servers must serve the same model"
                )
            kv, rows = sources.setdefault(
                id(prefix.kv),
                (prefix.kv, np.full(prefix.kv[0][0].shape[0], num_rows, np.int32)),
            )
            rows[prefix.row] = slot
        yield from sources.values()

    def _slot_values(
        self, slots: np.ndarray, sampling: SlotSampling
    ) -> tuple[np.ndarray, SlotState]:
        """Padded to S rows, so that arming is one program."""
        S, R = self.settings.slots, len(slots)
        rows = np.full(S, S, np.int32)
        rows[:R] = slots
        seed = np.asarray(sampling.seed, np.uint64)
        high_low = [(seed >> np.uint64(32)).astype(np.uint32), seed.astype(np.uint32)]
        arrays = {
            field.name: getattr(sampling, field.name)
            for field in fields(SlotState)
            if field.name not in ("key", "active")
        }
        arrays |= {"key": np.stack(high_low, axis=-1), "active": np.ones(R, bool)}
        return rows, SlotState(**{name: _pad(value, S) for name, value in arrays.items()})


def buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 4 x smallest, ... below largest, then largest."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 4
    return (*sizes, largest)


def tile_of(chunk_size: int) -> int:
    """Queries of one attention tile for a chunk of this size: about 32 tiles, within bounds."""
    return min(max(chunk_size // 32, MIN_TILE), MAX_TILE)


def _pad(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros((size, *np.shape(values)[1:]), np.asarray(values).dtype)
    out[: len(values)] = values
    return out
