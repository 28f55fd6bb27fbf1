"""A types.Engine whose every token can be computed by hand, for tests of servers and schedulers.

The KV of a token t is (t + offset), offset being the single weight it was computed under, and a
decode step samples (sum of the KV of the whole context, the last token's own included + seed +
token_index) mod vocab_size with log-prob -(token + 1) / vocab_size. So a token that came from
another slot's KV, from stale KV, from the wrong prefix, seed or version is a different token;
`expected` computes what a clean run gives. Donated states refuse to be used again. Owns nothing
between calls but the counters. `before_block(engine)` runs at every generate: tests wait, fail or
slow it there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from kernels.kv import KVSpec
from rl_jax.engine.chunks import end_positions
from rl_jax.engine.state import FINISH_CODES
from rl_jax.mesh import make_mesh, named_sharding
from rl_jax.settings import EngineSettings
from rl_jax.types import BlockTokens, FinishReason, PrefillChunk, Prefix, SlotSampling

NAN_OFFSET = -1  # a weight under which every logit is NaN


@dataclass
class FakeState:
    """kv i32[S, context]; slots: what generate needs of each armed slot, as SlotSampling's fields."""

    kv: np.ndarray
    slots: dict[int, dict]
    is_donated: bool = False


class FakeEngine:
    """params: {"offset": i32[]}. Greedy and sampled alike; top-k and top-p mean nothing."""

    packs_fresh = False

    def __init__(
        self,
        settings: EngineSettings,
        *,
        name: str = "fake",
        vocab_size: int = 97,
        device: int = 0,
        before_block: Callable[["FakeEngine"], None] = lambda engine: None,
    ):
        self.settings, self.name, self.vocab_size = settings, name, vocab_size
        self.mesh = make_mesh({}, jax.devices()[device : device + 1])
        self.param_shardings = {"offset": named_sharding((), {}, self.mesh)}
        self.prefix_sharding = named_sharding((None,) * 4, {}, self.mesh)
        self.spec = KVSpec(1, 1, 1, settings.context, settings.slots, "float32")
        self.before_block = before_block
        self.before_compile: Callable[[FakeEngine], None] = lambda engine: None
        self.num_compile_steps = 2
        self.num_blocks = self.max_active = 0

    def params(self, offset: int) -> dict[str, jax.Array]:
        """The weights {"offset": offset}, laid out as param_shardings."""
        value = jax.device_put(jnp.array(offset, jnp.int32), self.param_shardings["offset"])
        return {"offset": value}

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
        return FakeState(np.zeros((self.settings.slots, self.settings.context), np.int64), {})

    def prefill(
        self,
        params: Mapping[str, jax.Array],
        chunk: PrefillChunk,
        prefixes: Sequence[Prefix | None],
    ) -> tuple[Prefix, ...]:
        rows = np.zeros((self.settings.chunk_requests, self.settings.context, 1, 1), np.int32)
        for row, prefix in enumerate(prefixes):
            if prefix is not None:
                rows[row] = np.asarray(prefix.kv[0][0])[prefix.row]
        self._write(rows[:, :, 0, 0], np.arange(len(rows)), chunk, params)
        # jnp.array copies: device_put of numpy memory may alias it on CPU.
        kv = jax.device_put(jnp.array(rows), self.prefix_sharding)
        kv = ((kv, jax.device_put(jnp.array(rows), self.prefix_sharding)),)
        return tuple(
            Prefix(kv, end, -1, None, "", self.spec, row=row)
            for row, end in enumerate(end_positions(chunk))
        )

    def append(
        self,
        params: Mapping[str, jax.Array],
        state: FakeState,
        slots: np.ndarray,
        chunk: PrefillChunk,
    ) -> FakeState:
        state = self._donate(state)
        self._write(state.kv, slots, chunk, params)
        return state

    def insert(
        self,
        state: FakeState,
        prefixes: Sequence[Prefix | None],
        slots: np.ndarray,
        sampling: SlotSampling,
    ) -> FakeState:
        state = self._donate(state)
        for r, (prefix, slot) in enumerate(zip(prefixes, slots.tolist())):
            if prefix is not None:
                state.kv[slot] = np.asarray(prefix.kv[0][0])[prefix.row, :, 0, 0]
            state.slots[slot] = {
                name: getattr(sampling, name)[r] for name in SlotSampling.__dataclass_fields__
            }
        return state

    def generate(
        self, params: Mapping[str, jax.Array], state: FakeState
    ) -> tuple[FakeState, BlockTokens]:
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
            block.slot_epoch[slot] = sampling["epoch"]
            for step in range(k):
                finish = self._step(state.kv[slot], sampling, offset, block, slot, step)
                if finish is not None:
                    block.finish[slot] = FINISH_CODES[finish]
                    del state.slots[slot]
                    break
        return state, block

    def extract(self, state: FakeState, slot: int) -> Prefix:
        rows = jnp.array(state.kv[slot][None, :, None, None].astype(np.int32))
        kv = jax.device_put(rows, self.prefix_sharding)
        num_tokens = int(state.slots[slot]["context_length"]) - 1 if slot in state.slots else 0
        return Prefix(((kv, kv),), num_tokens, -1, None, "", self.spec)

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

    def _write(self, kv: np.ndarray, rows: np.ndarray, chunk: PrefillChunk, params) -> None:
        real = chunk.segment >= 0
        row = np.asarray(rows)[chunk.segment[real]]
        kv[row, chunk.position[real]] = chunk.tokens[real] + int(params["offset"])

    def _step(self, kv, sampling: dict, offset: int, block: BlockTokens, slot: int, step: int):
        """One token of one slot into the block; why the slot ends, or None."""
        if offset == NAN_OFFSET:
            block.nan[slot] = True
            return FinishReason.ERROR
        length, index = int(sampling["context_length"]), int(sampling["token_index"])
        kv[length - 1] = int(sampling["last_token"]) + offset
        seed = int(sampling["seed"]) % self.vocab_size
        token = int(kv[:length].sum() + seed + index) % self.vocab_size
        block.tokens[slot, step], block.valid[slot, step] = token, True
        block.logprobs[slot, step] = block.sampled_logprobs[slot, step] = self.logprob(token)
        sampling |= {
            "last_token": token,
            "context_length": length + 1,
            "token_index": index + 1,
        }
        stops = sampling["stop_token_ids"].tolist()
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
