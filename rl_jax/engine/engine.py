"""JaxEngine: append, arm, generate, free, extract, insert and copy, compiled for one server's mesh.

Owns: the compiled programs, the buckets that keep their number small, and the layout of params and
KV on one server's mesh.
Invariants: the state given in is donated and never touched again; shapes inside jit come from
settings and buckets only; the result for a request does not depend on slots, pages, neighbours or
block size (programs.py says down to which bits).
A request's life: 1 `append` computes the KV of context[:-1], chunk by chunk, into the pages that the
request's table lists; on a prefill server `extract` then copies the pages, and `insert` writes them
to pages of a decode server. 2 `arm` tells a slot how to sample: context, seed, budget, stop ids.
3 `generate` samples blocks until the device itself ends the slot; the tables must list the pages that
a block writes to. 4 the next turn's suffix, which starts with the last sampled token, is appended and
a slot armed again. 5 `free` stops a slot before its end. A page that several contexts share is only
read; who writes behind a shared part of a page takes a `copy` of it first.
Host arrays that are passed in may be read after the call returns (the CPU backend aliases numpy
memory): callers never write to them again.
Weights come by name, in the model's dtype and param_shardings, as they are synchronised and digested; `pack` turns them
into `params`, what all verbs take: Params of model.packed where the mesh splits query and kv heads alike.
Must not: know versions, sessions, threads or text; say which page is whose; convert weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from kernels.kv import NO_PAGE, KVSpec
from rl_jax.engine import programs
from rl_jax.engine.attention import (
    PLAIN,
    choose_attention,
    choose_chunk_attention,
    with_rows,
)
from rl_jax.engine.chunks import fresh_chunk, is_fresh, padding_chunk
from rl_jax.engine.state import Cache, DecodeState, SlotState, empty_sampling, empty_slots
from rl_jax.lowering import Lowering, Program
from rl_jax.mesh import RulesLike, mesh_axes, named_sharding, shardings
from rl_jax.models.model import Model
from rl_jax.settings import EngineSettings, ModelSettings
from rl_jax.types import BlockTokens, PrefillChunk, SlotSampling

MIN_VISIBLE = 256  # positions of the smallest attention bucket; each next one is 4 times larger
MIN_MOVED = 64  # pages of the smallest bucket of extract and insert
MIN_TILE, MAX_TILE = (
    16,
    128,
)  # queries of one attention tile: few suit short suffixes, many suit long chunks

# What lower calls a program, where its verb says more than its attribute.
VERBS = {
    "_zero_params": "weights",
    "_extend": "append",
    "_disarm": "free",
    "_read_pages": "extract",
    "_write_pages": "insert",
    "_copy_pages": "copy",
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
        likely: int = 0,
    ):
        """rules_serve: (logical axis, mesh axes) pairs of the server. support: ids that a block
        returns of what each token was sampled from. likely: tokens that `generate` and `score` can
        tell of each place; 0: for clients that ask nothing beyond what rollout does, without the
        programs for that. Allocates nothing; compiles at the first calls.
        """
        self.model, self.mesh, self.settings, self.name = model, mesh, settings, name
        self.num_likely = min(likely, model.vocab_size)
        s = model.settings
        self.dtype = jnp.dtype(s.dtype)
        self.spec = kv_spec(s, settings)
        self.param_shardings = shardings(model.logical_axes, rules_serve, mesh)
        heads, kv_heads = mesh_axes(("heads", "kv_heads"), rules_serve)
        self.served = model.packed if model.packed is not None and heads == kv_heads else model
        self._replicated = named_sharding((), rules_serve, mesh)
        self._cache_sharding = named_sharding(self.spec.axes, rules_serve, mesh)
        # Copies of pages have as many as a bucket, which no mesh axis need divide.
        self.prefix_sharding = named_sharding((None, *self.spec.axes[1:]), rules_serve, mesh)
        self.visible_buckets = page_buckets(self.spec, settings.context)
        # What one chunk completes moves together, and so does the longest history.
        together = self.spec.pages_of(settings.chunk_sizes[-1]) + settings.chunk_requests
        self.move_buckets = buckets(MIN_MOVED, max(settings.table_pages, together))
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        page_size = self.spec.page_size
        attention = choose_attention(s, rules_serve, mesh, settings.context, page_size)
        attention = with_rows(attention, s, mesh, settings.slots)
        self.served_formats = self._formats(rules_serve, attention.rows is not None)
        self.chunk_attention = choose_chunk_attention(s, rules_serve, mesh, settings.context)
        self.step = programs.Step(
            attention, not on_cpu, settings.steps_per_block, settings.context, support
        )
        # A kernel reads what is live; the plain form reads whole tables, so it is given short ones.
        whole = self.visible_buckets[-1:]
        self.step_buckets = self.visible_buckets if attention is PLAIN else whole
        self._compile()

    def _formats(self, rules: RulesLike, for_rows: bool) -> dict[str, Sharding | Format]:
        """Where each weight of `served` lies, and how: some as the kernels for many rows read them."""
        places = shardings(self.served.logical_axes, rules, self.mesh)
        orders = {n: join.rows_order for n, join in self.model.joins.items() if for_rows}
        return {
            name: place if (order := orders.get(name)) is None else Format(Layout(order), place)
            for name, place in places.items()
        }

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
        of, place = self.model.joins[name].of, self.served_formats[name]
        if (of, place) not in self._joins:
            self._joins[of, place] = jax.jit(of, out_shardings=place)
        return self._joins[of, place](parts)

    # --- the verbs --------------------------------------------------------------------------

    def append(
        self,
        params: Mapping[str, jax.Array],
        state: DecodeState,
        tables: np.ndarray,
        chunk: PrefillChunk,
    ) -> DecodeState:
        """The state with the KV of the chunk's tokens written. tables: i32[R, N] pages of each request of the chunk,
        those of its tokens and of all before them.
        """
        visible, how = self._visible(chunk), self._how(chunk)
        if how["fresh"] is not None:
            visible = self.visible_buckets[-1]  # it is not read: one program
        kv = self._extend(
            params,
            state.kv,
            *self._chunk_args(chunk),
            self._tables(tables),
            visible=visible,
            **how,
        )
        return replace(state, kv=kv)

    def score(
        self,
        params: Mapping[str, jax.Array],
        state: DecodeState,
        tables: np.ndarray,
        chunk: PrefillChunk,
        targets: np.ndarray,
    ) -> tuple[DecodeState, programs.Scores]:
        """As append, with how likely targets i32[C] were behind the chunk's tokens. Chunks of the largest size only:
        it is one program.
        """
        packed = *self._chunk_args(chunk), self._tables(tables)
        kv, scores = self._score(params, state.kv, packed, targets)
        return replace(state, kv=kv), scores

    def arm(self, state: DecodeState, slots: np.ndarray, sampling: SlotSampling) -> DecodeState:
        """Set the slots i32[R] to generate from contexts whose KV, but for the last token's, is there."""
        rows, values = self._slot_values(slots, sampling)
        return replace(state, slots=self._arm(state.slots, rows, values))

    def generate(
        self,
        params: Mapping[str, jax.Array],
        state: DecodeState,
        tables: np.ndarray,
        *,
        held: np.ndarray | None = None,
    ) -> tuple[DecodeState, BlockTokens]:
        """One block of steps_per_block steps; the copy of its tokens to the host is already under
        way. tables: i32[slots, N] pages of each active slot, those that the block writes to included.
        held: i32[slots] token index below which a slot's stop tokens are not sampled. With it the likeliest tokens
        are told, and another program runs.
        """
        used = int(np.max(np.nonzero((tables != NO_PAGE).any(axis=0))[0], initial=-1)) + 1
        width = next(bucket for bucket in self.step_buckets if bucket >= used)
        tables = np.ascontiguousarray(tables[:, :width])
        if held is None:
            state, made = self._generate(params, state, tables)
        else:
            state, made = self._generate_asked(params, state, tables, held)
        for array in jax.tree.leaves(made):
            array.copy_to_host_async()
        *block, support, told = made
        return state, BlockTokens(*block, support=support, likely=told)

    def free(self, state: DecodeState, slots: np.ndarray) -> DecodeState:
        """Stop the slots i32[R]; no page is written for them any more."""
        rows = np.full(self.settings.slots, self.settings.slots, np.int32)
        rows[: len(slots)] = slots
        return replace(state, slots=self._disarm(state.slots, rows))

    def extract(self, state: DecodeState, pages: np.ndarray) -> Cache:
        """Copies of at most move_buckets[-1] pages i32[n], in order: per layer k, v [bucket, page, K, Dh]."""
        size = next(bucket for bucket in self.move_buckets if bucket >= len(pages))
        return self._read_pages(state.kv, _filled(pages, size))

    def insert(self, state: DecodeState, kv: Cache, pages: np.ndarray) -> DecodeState:
        """Write page i of kv (of `extract`, in prefix_sharding) to page pages[i], i32[n]; NO_PAGE = nowhere."""
        size = kv[0][0].shape[0]
        return replace(state, kv=self._write_pages(state.kv, kv, _filled(pages, size)))

    def copy(self, state: DecodeState, source: np.ndarray, target: np.ndarray) -> DecodeState:
        """Copy page source[i] to page target[i], i32[n]; no target is a source."""
        kv, most = state.kv, self.num_requests
        for at in range(0, len(source), most):
            pairs = (_filled(pages[at : at + most], most) for pages in (source, target))
            kv = self._copy_pages(kv, *pairs)
        return replace(state, kv=kv)

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
        state = self.init_state()
        none = np.full((self.num_requests, self.settings.table_pages), NO_PAGE, np.int32)
        chunks = [
            (f"{size} tokens within {visible} pages", size, self._last_position(visible))
            for size in self.settings.chunk_sizes
            for visible in self.visible_buckets
        ]
        for name, size, position in chunks:
            chunk = padding_chunk(size, self.num_requests, position + 1)
            state = self.append(params, state, none, chunk)
            yield f"append of {name}"
        for size in self._fresh_sizes:
            state = self.append(params, state, none, fresh_chunk(size, self.num_requests, 1))
            yield f"append of {size} fresh tokens"
        for bucket in self.move_buckets:
            pages = np.full(bucket, NO_PAGE, np.int32)
            kv = self.extract(state, pages)
            yield f"extract of {bucket} pages"
            state = self.insert(state, kv, pages)
            yield f"insert of {bucket} pages"
        state = self.copy(state, none[:1, 0], none[:1, 0])
        yield "copy"
        if decode:
            no_slots = np.zeros(0, np.int32)
            state = self.arm(state, no_slots, empty_sampling(self.settings.num_stop_tokens))
            yield "arm"
            state = self.free(state, no_slots)
            yield "free"
            for bucket in self.step_buckets:
                tables = np.full((self.settings.slots, bucket), NO_PAGE, np.int32)
                state, made = self._generate(params, state, tables)
                jax.block_until_ready(made)
                yield f"generate within {bucket} pages"
                if self.num_likely:
                    none = np.zeros(self.settings.slots, np.int32)
                    state, made = self._generate_asked(params, state, tables, none)
                    jax.block_until_ready(made)
                    yield f"generate within {bucket} pages, with what clients ask for"
            if self.num_likely:
                size = self.settings.chunk_sizes[-1]
                chunk = padding_chunk(size, self.num_requests, 1)
                no_pages = np.full(
                    (self.num_requests, self.settings.table_pages), NO_PAGE, np.int32
                )
                state, _ = self.score(params, state, no_pages, chunk, chunk.tokens)
                yield "score"
        jax.block_until_ready(state.kv)

    def lower(self, *, decode: bool = True) -> Iterator[Program]:
        """What compile_steps compiles, from shapes alone; of chunk sizes and attention buckets the largest only, as
        the others differ in sizes. Raises: LoweringError.
        """
        twin, made, seen = copy(self), [], set()
        twin.settings = replace(self.settings, chunk_sizes=self.settings.chunk_sizes[-1:])
        twin.visible_buckets = twin.step_buckets = self.visible_buckets[-1:]
        twin.move_buckets = self.move_buckets[-1:]
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

        def init_state() -> DecodeState:
            empty = lambda: jnp.zeros(spec.shape, dtype)
            kv = tuple((empty(), empty()) for _ in range(spec.num_layers))
            return DecodeState(kv, empty_slots(self.settings))

        state_out = DecodeState(cache, small)
        self._init_state = jit(init_state, out_shardings=state_out)
        self._zero_params = jit(
            lambda: {n: jnp.zeros(a.shape, dtype) for n, a in model.abstract.items()},
            out_shardings=self.served_formats,
        )
        self._joins: dict[Any, Any] = {}
        self._extend = jit(
            partial(programs.extend, model),
            static_argnames=("visible", "tile", "fresh"),
            donate_argnums=1,
            out_shardings=cache,
        )
        self._generate = jit(
            partial(programs.generate, model, step=self.step),
            donate_argnums=1,
            out_shardings=(state_out, small),
        )
        self._score = jit(
            partial(
                programs.score, model, visible=self.visible_buckets[-1],
                tile=tile_of(self.settings.chunk_sizes[-1]), likely=self.num_likely,
            ),
            donate_argnums=1,
            out_shardings=(cache, small),
        )  # fmt: skip
        self._generate_asked = jit(
            partial(programs.generate, model, step=replace(self.step, likely=self.num_likely)),
            donate_argnums=1,
            out_shardings=(state_out, small),
        )
        self._arm = jit(programs.arm, donate_argnums=0, out_shardings=small)
        self._disarm = jit(programs.disarm, donate_argnums=0, out_shardings=small)
        self._read_pages = jit(programs.read_pages_of, out_shardings=prefix)
        self._write_pages = jit(programs.insert_pages, donate_argnums=0, out_shardings=cache)
        self._copy_pages = jit(programs.copy_pages, donate_argnums=0, out_shardings=cache)

    # --- host arrays ------------------------------------------------------------------------

    @property
    def _fresh_sizes(self) -> Sequence[int]:
        return () if self.chunk_attention is None else self.settings.chunk_sizes

    def _how(self, chunk: PrefillChunk) -> dict[str, Any]:
        """What chooses the program that extends by this chunk, besides `visible`."""
        fresh = self.chunk_attention if is_fresh(chunk) else None
        return {"tile": tile_of(len(chunk.tokens)), "fresh": fresh}

    def _visible(self, chunk: PrefillChunk) -> int:
        """Pages that the chunk's queries may see: a bucket."""
        highest = int(np.max(chunk.position, where=chunk.segment >= 0, initial=0))
        if highest >= self.settings.context:
            raise ValueError(
                f"{self.name}: a chunk reaches position {highest} but engine.context={self.settings.context}; "
                "refuse such prompts before they are packed"
            )
        return self._bucket(self.spec.pages_of(highest + 1))

    def _bucket(self, num_pages: int) -> int:
        return next(bucket for bucket in self.visible_buckets if bucket >= num_pages)

    def _last_position(self, bucket: int) -> int:
        return min(bucket * self.spec.page_size, self.settings.context) - 1

    def _tables(self, tables: np.ndarray) -> np.ndarray:
        """Padded to a row for each request of a chunk, and to the pages of a full context."""
        out = np.full((self.num_requests, self.settings.table_pages), NO_PAGE, np.int32)
        out[: len(tables), : tables.shape[1]] = tables
        return out

    def _chunk_args(self, chunk: PrefillChunk) -> tuple[np.ndarray, ...]:
        if len(chunk.tokens) not in self.settings.chunk_sizes:
            raise ValueError(
                f"{self.name}: a chunk of {len(chunk.tokens)} tokens is none of "
                f"engine.chunk_sizes={self.settings.chunk_sizes}; pack with engine.chunks.pack"
            )
        lengths = np.zeros(self.num_requests, np.int32)
        lengths[: len(chunk.lengths)] = chunk.lengths
        return chunk.tokens, chunk.segment, chunk.position, lengths

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


def kv_spec(model: ModelSettings, settings: EngineSettings) -> KVSpec:
    """The cache of an engine that serves this model."""
    return KVSpec(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=settings.page_tokens,
        num_pages=settings.cache_pages,
        dtype=model.dtype,
    )


def buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 4 x smallest, ... below largest, then largest."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= 4
    return (*sizes, largest)


def page_buckets(spec: KVSpec, context: int) -> tuple[int, ...]:
    """Numbers of pages that programs are compiled for, ascending."""
    smallest = spec.pages_of(min(MIN_VISIBLE, context))
    return buckets(smallest, spec.pages_of(context))


def tile_of(chunk_size: int) -> int:
    """Queries of one attention tile for a chunk of this size: about 32 tiles, within bounds."""
    return min(max(chunk_size // 32, MIN_TILE), MAX_TILE)


def _filled(pages: np.ndarray, size: int) -> np.ndarray:
    return np.pad(np.asarray(pages, np.int32), (0, size - len(pages)), constant_values=NO_PAGE)


def _pad(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros((size, *np.shape(values)[1:]), np.asarray(values).dtype)
    out[: len(values)] = values
    return out
