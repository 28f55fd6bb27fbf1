"""A types.Engine whose every token can be computed by hand, for tests of servers and schedulers.

The KV of a token t is (t + offset), offset being the single weight it was computed under, and a
decode step samples (sum of the KV of the whole context, the last token's own included + seed +
token_index) mod vocab_size with log-prob -(token + 1) / vocab_size. So a token that came from
another's pages, from stale KV, from the wrong prefix, seed or version is a different token;
`expected` computes what a clean run gives. Donated states refuse to be used again. Owns nothing
between calls but the counters. `before_block(engine)` runs at every generate: tests wait, fail or
slow it there.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kv import NO_PAGE, KVSpec
from rl_jax.engine.programs import Scores
from rl_jax.engine.state import FINISH_CODES
from rl_jax.mesh import make_mesh, named_sharding
from rl_jax.settings import EngineSettings
from rl_jax.types import BlockTokens, FinishReason, PrefillChunk, SlotSampling

BALLAST_RULES = {"rows": "tensor"}
NUM_LIKELY = 20  # tokens that `likely` tells
NAN_OFFSET = -1  # a weight under which every logit is NaN


def ballasted(ballast: Mapping[str, Sequence[int]], mesh: Any) -> dict[str, Any]:
    """param_shardings of a FakeEngine with this ballast on a mesh, abstract or not."""
    axes = {"offset": ()} | {n: ("rows", *[None] * (len(s) - 1)) for n, s in ballast.items()}
    return {name: named_sharding(of, BALLAST_RULES, mesh) for name, of in axes.items()}


@dataclass
class FakeState:
    """kv i64[pages, page_size]; slots: what generate needs of each armed slot, as SlotSampling's fields."""

    kv: np.ndarray
    slots: dict[int, dict]
    is_donated: bool = False


class FakeEngine:
    """params: {"offset": i32[]}, and ballast that nothing computes with. Greedy and sampled alike; top-k and top-p
    mean nothing."""

    packs_fresh = False
    num_likely = NUM_LIKELY

    def __init__(
        self,
        settings: EngineSettings,
        *,
        name: str = "fake",
        vocab_size: int = 97,
        device: int = 0,
        before_block: Callable[["FakeEngine"], None] = lambda engine: None,
        ballast: Mapping[str, Sequence[int]] | None = None,
        axes: Mapping[str, int] | None = None,
    ):
        """device: the first of its mesh. ballast: shapes of float32 weights, cut along their first dimension by
        axes["tensor"]."""
        self.settings, self.name, self.vocab_size = settings, name, vocab_size
        self._ballast, axes = dict(ballast or {}), axes or {}
        devices = jax.devices()[device : device + math.prod(axes.values())]
        self.mesh = make_mesh(axes, devices)
        self.param_shardings = ballasted(self._ballast, self.mesh)
        self.prefix_sharding = named_sharding((None,) * 4, {}, self.mesh)
        self.spec = KVSpec(1, 1, 1, settings.page_tokens, settings.cache_pages, "float32")
        self.move_buckets = (settings.cache_pages,)
        self.before_block = before_block
        self.before_compile: Callable[[FakeEngine], None] = lambda engine: None
        self.num_compile_steps = 2
        self.num_blocks = self.max_active = 0

    def params(self, offset: int) -> dict[str, jax.Array]:
        """The weights {"offset": offset}, and ballast of zeros, laid out as param_shardings."""
        values = {"offset": jnp.array(offset, jnp.int32)}
        values |= {name: jnp.zeros(shape) for name, shape in self._ballast.items()}
        return jax.device_put(values, self.param_shardings)

    def zero_params(self) -> dict[str, jax.Array]:
        return self.params(0)

    def pack(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return params

    def compile_steps(
        self, params: Mapping[str, jax.Array], *, decode: bool = True
    ) -> Iterator[str]:
        for step in range(self.num_compile_steps):
            self.before_compile(self)
            yield f"program {step}"

    def init_state(self) -> FakeState:
        return FakeState(np.zeros(self.spec.shape[:2], np.int64), {})

    def append(
        self,
        params: Mapping[str, jax.Array],
        state: FakeState,
        tables: np.ndarray,
        chunk: PrefillChunk,
    ) -> FakeState:
        state = self._donate(state)
        real = chunk.segment >= 0
        position, size = chunk.position[real], self.spec.page_size
        page = np.asarray(tables)[chunk.segment[real], position // size]
        assert (page != NO_PAGE).all(), "tokens without a page"
        state.kv[page, position % size] = chunk.tokens[real] + int(params["offset"])
        return state

    def score(
        self,
        params: Mapping[str, jax.Array],
        state: FakeState,
        tables: np.ndarray,
        chunk: PrefillChunk,
        targets: np.ndarray,
    ) -> tuple[FakeState, Scores]:
        """As append; a target t has the log-prob of a sampled one, the rank t + 1 and the likeliest of `held`."""
        state = self.append(params, state, tables, chunk)
        logprobs = np.array([self.logprob(int(t)) for t in targets], np.float32)
        nan = np.full(len(targets), int(params["offset"]) == NAN_OFFSET)
        return state, Scores(logprobs, targets + 1, nan, *self._likely(targets, logprobs))

    def arm(self, state: FakeState, slots: np.ndarray, sampling: SlotSampling) -> FakeState:
        state = self._donate(state)
        for r, slot in enumerate(slots.tolist()):
            state.slots[slot] = {
                name: getattr(sampling, name)[r] for name in SlotSampling.__dataclass_fields__
            }
        return state

    def generate(
        self,
        params: Mapping[str, jax.Array],
        state: FakeState,
        tables: np.ndarray,
        *,
        held: np.ndarray | None = None,
    ) -> tuple[FakeState, BlockTokens]:
        """held: tells the likeliest: the sampled token, then those before it, each less likely by 1. In place of a stop
        token that is held off comes the next id that is none."""
        self.before_block(self)
        state = self._donate(state)
        self.num_blocks += 1
        self.max_active = max(self.max_active, len(state.slots))
        S, k, offset = self.settings.slots, self.settings.steps_per_block, int(params["offset"])
        block = BlockTokens(
            tokens=np.zeros((S, k), np.int32),
            logprobs=np.zeros((S, k), np.float32),
            sampled_logprobs=np.zeros((S, k), np.float32),
            valid=np.zeros((S, k), bool),
            finish=np.zeros(S, np.int8),
            slot_epoch=np.full(S, -1, np.int32),
            nan=np.zeros(S, bool),
        )
        for slot in list(state.slots):
            sampling = state.slots[slot]
            sampling["held"] = 0 if held is None else int(held[slot])
            block.slot_epoch[slot] = sampling["epoch"]
            for step in range(k):
                context = state.kv, tables[slot]
                finish = self._step(context, sampling, offset, block, (slot, step))
                if finish is not None:
                    block.finish[slot] = FINISH_CODES[finish]
                    del state.slots[slot]
                    break
        if held is not None:
            block = replace(block, likely=self._likely(block.tokens, block.logprobs))
        return state, block

    def _likely(self, tokens: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = (tokens[..., None] - np.arange(NUM_LIKELY)) % self.vocab_size
        return ids.astype(np.int32), (logprobs[..., None] - np.arange(NUM_LIKELY)).astype(
            np.float32
        )

    def extract(self, state: FakeState, pages: np.ndarray) -> tuple:
        # jnp.array copies: device_put of numpy memory may alias it on CPU.
        rows = state.kv[np.asarray(pages)][..., None, None].astype(np.int32)
        return tuple(
            (jax.device_put(jnp.array(rows), self.prefix_sharding),) * 2
            for _ in range(self.spec.num_layers)
        )

    def insert(self, state: FakeState, kv: tuple, pages: np.ndarray) -> FakeState:
        state, rows = self._donate(state), np.asarray(kv[0][0])[: len(pages), :, 0, 0]
        real = np.asarray(pages) != NO_PAGE
        state.kv[np.asarray(pages)[real]] = rows[real]
        return state

    def copy(self, state: FakeState, source: np.ndarray, target: np.ndarray) -> FakeState:
        state = self._donate(state)
        state.kv[np.asarray(target)] = state.kv[np.asarray(source)]
        return state

    def free(self, state: FakeState, slots: np.ndarray) -> FakeState:
        state = self._donate(state)
        for slot in slots.tolist():
            state.slots.pop(slot, None)
        return state

    def expected(
        self,
        context: Sequence[int],
        num_tokens: int,
        *,
        offset: int | Sequence[int] = 0,
        seed: int = 0,
        token_index: int = 0,
    ) -> list[int]:
        """The tokens that follow a context whose KV is all of one version. offset: of each token,
        or of all.
        """
        offsets = [offset] * num_tokens if isinstance(offset, int) else list(offset)
        tokens = list(context)
        for j in range(num_tokens):
            kv = sum(t + offsets[j] for t in tokens)
            tokens.append((kv + seed + token_index + j) % self.vocab_size)
        return [int(t) for t in tokens[len(context) :]]

    def _step(self, context, sampling: dict, offset: int, block: BlockTokens, place):
        """One token of one slot into the block; why the slot ends, or None."""
        (kv, table), (slot, step) = context, place
        if offset == NAN_OFFSET:
            block.nan[slot] = True
            return FinishReason.ERROR
        length, index = int(sampling["context_length"]), int(sampling["token_index"])
        at = np.arange(length)
        page, place = table[at // self.spec.page_size], at % self.spec.page_size
        assert (page != NO_PAGE).all(), "a context without its pages"
        kv[page[-1], place[-1]] = int(sampling["last_token"]) + offset
        seed = int(sampling["seed"]) % self.vocab_size
        token = int(kv[page, place].sum() + seed + index) % self.vocab_size
        stops = sampling["stop_token_ids"].tolist()
        while index < sampling["held"] and token in stops:
            token = (token + 1) % self.vocab_size
        block.tokens[slot, step], block.valid[slot, step] = token, True
        block.logprobs[slot, step] = block.sampled_logprobs[slot, step] = self.logprob(token)
        sampling |= {
            "last_token": token,
            "context_length": length + 1,
            "token_index": index + 1,
        }
        if token == stops[0]:
            return FinishReason.EOS
        if token in stops:
            return FinishReason.STOP
        if index + 1 >= int(sampling["max_new_tokens"]):
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if length + 1 >= self.settings.context else None

    def logprob(self, token: int) -> float:
        return -(token + 1) / self.vocab_size

    @staticmethod
    def _donate(state: FakeState) -> FakeState:
        assert not state.is_donated, "this state was donated to an earlier call"
        state.is_donated = True
        return replace(state, is_donated=False)
