"""Our engine as google-jetstream's `Engine`, for who serves with JetStream's orchestrator. Needs the extra `jetstream`.

Owns: which pages belong to which slot of a decode state (slot s has all of its own, nothing is shared), and a second
cache, in which `prefill` computes.
Life of a request: 1 `prefill` computes the KV of all tokens but the last and copies its pages out. 2 JetStream moves
the Prefix to `get_prefix_destination_sharding` of the engine that generates. 3 `insert` writes the pages and arms the
slot with the last token. 4 `generate` makes one token a slot. A slot ends itself at a stop id or at the full context,
from where on its tokens are not valid; else it goes on until the next insert, as JetStream has no verb to free it.
What JetStream lacks stays unused: log-probs, sampling of a request's own, abort, versions, shared prefixes. Sampling is
the adapter's, the same for all requests. Prompts above max_prefill_length are cut by JetStream, to their last tokens.
Known of google-jetstream 0.2.2: importing it imports TensorFlow (10 s and more); importing its orchestrator sets the
root logger to DEBUG; an exception in one of its threads ends the process; and its orchestrator calls jax.tree_map,
which jax has no more: who runs it sets jax.tree_map = jax.tree.map first.
Must not: be imported by other parts; know JetStream's threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kv import NO_PAGE
from rl_jax.engine.chunks import Piece, pack
from rl_jax.tokens.tokenizer import Tokenizer
from rl_jax.types import SlotSampling

try:
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
except ImportError as error:
    raise ImportError(
        f"google-jetstream cannot be imported ({error}); install the extra: pip install 'rl_jax[jetstream]' (what PyPI"
        " names jetstream is another package)"
    ) from error

# JetStream pads prompts to one of these and looks max_prefill_length up among them.
PREFILL_LENGTHS = tuple(2**n for n in range(4, 16))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JetStreamPrefix:
    """KV of a context without its last token, and that token."""

    kv: Any  # per layer (k, v), as Engine.extract gives them
    end: jax.Array  # i32[2] (last token, tokens of the context)


@dataclass(frozen=True)
class JetStreamState:
    """state: the engine's own, donated to each verb. length, sampled: i64[slots] tokens of the context that a slot may
    have, and those it sampled since its insert; -1 where nothing was inserted.
    """

    state: Any
    length: np.ndarray
    sampled: np.ndarray


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A rl_jax Tokenizer as JetStream wants it. It puts bos_id before every first prompt."""

    def __init__(self, tokenizer: Tokenizer, bos_id: int, pad_id: int = 0):
        self.tokenizer, self._bos_id, self._pad_id = tokenizer, bos_id, pad_id

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """As JetStream's own: (padded tokens, how many are real); kwargs of token_utils.pad_tokens."""
        tokens = np.array(self.tokenizer.encode(s), np.int32)
        return token_utils.pad_tokens(tokens, self.bos_id, self.pad_id, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self.tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self._pad_id

    @property
    def eos_id(self) -> int:
        return self.tokenizer.stop_token_ids[0]

    @property
    def bos_id(self) -> int:
        return self._bos_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self.tokenizer.stop_token_ids)


class JetStreamEngine(engine_api.Engine):
    """One of our engines behind JetStream's interface; a thread may prefill while another one generates."""

    def __init__(
        self,
        engine: Any,
        load: Callable[[], Mapping[str, jax.Array]],
        tokenizer: JetStreamTokenizer,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ):
        """engine: types.Engine with settings, spec, mesh, prefix_sharding and pack. load: weights by name, laid out as
        engine.param_shardings. temperature, top_p, top_k: of all requests; the n-th insert samples with seed n.

        Raises: ValueError where the engine's settings do not suit JetStream.
        """
        size = engine.settings
        if size.steps_per_block != 1:
            raise ValueError(
                f"engine.steps_per_block={size.steps_per_block}; JetStream counts a request's tokens once a result, so"
                " its max_tokens holds with 1 only"
            )
        if size.cache_pages < size.slots * size.table_pages:
            raise ValueError(
                f"engine.num_pages={size.num_pages} are fewer than the {size.slots * size.table_pages} of all slots at"
                " full context; JetStream has no preemption, so set 0"
            )
        if size.context <= PREFILL_LENGTHS[0]:
            raise ValueError(
                f"engine.context={size.context}; JetStream pads prompts to {PREFILL_LENGTHS[0]} tokens or more, so it"
                f" must be {PREFILL_LENGTHS[0] + 1} at least"
            )
        stops = tokenizer.tokenizer.stop_token_ids
        if len(stops) > size.num_stop_tokens:
            raise ValueError(
                f"the tokenizer has {len(stops)} stop ids but engine.num_stop_tokens={size.num_stop_tokens}; raise it"
            )
        self.engine, self._load, self._tokenizer = engine, load, tokenizer
        self._sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._stops = np.full((1, size.num_stop_tokens), -1, np.int32)
        self._stops[0, : len(stops)] = stops
        pages = np.arange(size.slots * size.table_pages, dtype=np.int32)
        self._tables = pages.reshape(size.slots, size.table_pages)
        self._prefill_state: Any = None
        self._num_inserts = 0

    # --- the verbs --------------------------------------------------------------------------

    def load_params(self) -> Any:
        return self.engine.pack(dict(self._load()))

    def init_decode_state(self) -> JetStreamState:
        nothing = np.full(self.engine.settings.slots, -1, np.int64)
        return JetStreamState(self.engine.init_state(), nothing, nothing)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: JetStreamPrefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> JetStreamPrefix:
        """KV of the prefix's context, if any, and these tokens i32[n], of which true_length are real.

        Raises: ValueError for no tokens, or a context that does not fit.
        """
        tokens, start = np.asarray(padded_tokens, np.int32)[:true_length], 0
        if existing_prefix is not None:
            last, length = np.asarray(existing_prefix.end).tolist()
            tokens, start = np.concatenate([np.array([last], np.int32), tokens]), length - 1
        context = start + len(tokens)
        if len(tokens) == 0 or context >= self.engine.settings.context:
            raise ValueError(
                f"a prompt of {context} tokens; engine.context={self.engine.settings.context} takes 1 to"
                f" {self.engine.settings.context - 1}"
            )
        if self._prefill_state is None:
            self._prefill_state = self.engine.init_state()
        state, table = self._prefill_state, self._tables[:1]
        if existing_prefix is not None:
            pages = self._pages(table[0], start, existing_prefix.kv[0][0].shape[0])
            state = self.engine.insert(state, existing_prefix.kv, pages)
        most = self.engine.settings.chunk_sizes[-1]
        for at in range(0, len(tokens) - 1, most):
            piece = Piece(tokens[at : min(at + most, len(tokens) - 1)], start + at)
            chunk = pack([piece], self.engine.settings.chunk_sizes)
            state = self.engine.append(params, state, table, chunk)
        num = max(1, self.engine.spec.pages_of(context - 1))
        kv = self.engine.extract(state, table[0, :num])
        self._prefill_state = state
        end = jax.device_put(np.array([tokens[-1], context], np.int32), self._replicated)
        return JetStreamPrefix(kv, end)

    def insert(
        self, prefix: JetStreamPrefix, decode_state: JetStreamState, slot: int
    ) -> JetStreamState:
        last, length = np.asarray(prefix.end).tolist()
        pages = self._pages(self._tables[slot], length - 1, prefix.kv[0][0].shape[0])
        state = self.engine.insert(decode_state.state, prefix.kv, pages)
        seed, self._num_inserts = self._num_inserts, self._num_inserts + 1
        state = self.engine.arm(state, np.array([slot], np.int32), self._arming(last, length, seed))
        lengths, sampled = decode_state.length.copy(), decode_state.sampled.copy()
        lengths[slot], sampled[slot] = length, 0
        return JetStreamState(state, lengths, sampled)

    def generate(
        self, params: Any, decode_state: JetStreamState
    ) -> tuple[JetStreamState, engine_api.ResultTokens]:
        """One token of each slot; not valid where the slot had ended, or was never filled."""
        is_filled, context = decode_state.length >= 0, self.engine.settings.context
        room = np.minimum(decode_state.length + 1, context)
        used = (
            np.arange(self.engine.settings.table_pages) * self.engine.spec.page_size < room[:, None]
        )
        tables = np.where(used & is_filled[:, None], self._tables, np.int32(NO_PAGE))
        state, block = self.engine.generate(params, decode_state.state, tables)
        sampled = np.where(is_filled, decode_state.sampled + 1, 0)
        data = _joined(block.tokens, block.valid, sampled.astype(np.int32))
        result = engine_api.ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )
        length = np.where(is_filled, decode_state.length + 1, -1)
        return JetStreamState(state, length, sampled), result

    # --- what JetStream asks ----------------------------------------------------------------

    def get_prefix_destination_sharding(self) -> JetStreamPrefix:
        return JetStreamPrefix(kv=self.engine.prefix_sharding, end=self._replicated)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Empty: build_tokenizer needs none."""
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> JetStreamTokenizer:
        return self._tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        return self.engine.settings.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest of JetStream's padded lengths that leaves room for a token."""
        return max(n for n in PREFILL_LENGTHS if n < self.engine.settings.context)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # --- private ----------------------------------------------------------------------------

    @property
    def _replicated(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.engine.mesh, jax.sharding.PartitionSpec())

    def _pages(self, table: np.ndarray, num_tokens: int, size: int) -> np.ndarray:
        """Where size extracted pages go to, of which those of num_tokens tokens are real."""
        pages, num = np.full(size, NO_PAGE, np.int32), self.engine.spec.pages_of(num_tokens)
        pages[:num] = table[:num]
        return pages

    def _arming(self, last: int, length: int, seed: int) -> SlotSampling:
        ints = lambda value: np.array([value], np.int32)
        floats = lambda name: np.array([self._sampling[name]], np.float32)
        return SlotSampling(
            last_token=ints(last), context_length=ints(length), seed=np.array([seed], np.uint64),
            token_index=ints(0), max_new_tokens=ints(self.engine.settings.context),
            temperature=floats("temperature"), top_p=floats("top_p"), top_k=ints(self._sampling["top_k"]),
            stop_token_ids=self._stops, epoch=ints(seed),
        )  # fmt: skip


@jax.jit
def _joined(tokens: jax.Array, valid: jax.Array, lengths: jax.Array) -> jax.Array:
    """i32[S, 3], so that one copy brings all to the host."""
    return jnp.concatenate([tokens, valid.astype(jnp.int32), lengths[:, None]], axis=1)
