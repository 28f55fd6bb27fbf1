"""CostEngine: a types.Engine that makes no KV and any tokens, and spends virtual time by a model of costs.

A turn ends at its max_new_tokens or where its context is full, so who asks decides how long answers are. Tokens differ
from slot to slot and from turn to turn, so that no history is found under another one's name; which ones they are means
nothing.
Invariants: as the real engine, it knows slots and pages, not requests; a block costs what the longest of its slots
takes, so a slot that ends within it costs as much as one that goes on.
Must not: hold KV, or know what time it is.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.kv import KVSpec
from rl_jax.engine.state import FINISH_CODES
from rl_jax.settings import EngineSettings
from rl_jax.simulate.clock import VirtualLoop
from rl_jax.simulate.costs import Costs
from rl_jax.types import BlockTokens, FinishReason, PrefillChunk, SlotSampling

VOCAB_SIZE = 150_000


class CostEngine:
    packs_fresh = False
    num_likely = 0
    support = 0

    def __init__(self, settings: EngineSettings, costs: Costs, clock: VirtualLoop):
        self.settings, self.costs, self._clock = settings, costs, clock
        model = costs.model
        size = (settings.page_tokens, settings.cache_pages)
        self.spec = KVSpec(model.layers, model.kv_heads, model.head_dim, *size, "bfloat16")
        self.mesh, self.param_shardings = None, {}  # no weights: a sync has nothing to stage
        self.prefix_sharding = SimpleNamespace(
            mesh=None, spec=None
        )  # of one place, so moved as it is
        self.move_buckets = (settings.cache_pages,)
        S, k = settings.slots, settings.steps_per_block
        self._epoch, self._left = np.full(S, -1, np.int32), np.zeros(S, np.int64)
        self._context = np.zeros(S, np.int64)
        self._steps = np.arange(k)
        self._logprobs = np.full((S, k), -1.0, np.float32)
        self._nan = np.zeros(S, bool)
        # What it spent, in virtual seconds, and on how many tokens:
        self.busy_s = {"prefill": 0.0, "decode": 0.0, "move": 0.0}
        self.num_tokens = {"prefill": 0, "decode": 0, "move": 0}

    def zero_params(self) -> dict[str, Any]:
        return {}

    def pack(self, params: dict[str, Any]) -> dict[str, Any]:
        return params

    def compile_steps(self, params: Any, *, decode: bool = True) -> Iterator[str]:
        yield from ()

    def init_state(self) -> Any:
        return ()

    def append(self, params, state, tables: np.ndarray, chunk: PrefillChunk):
        real = chunk.segment >= 0
        position, num = chunk.position[real], int(real.sum())
        ends = np.zeros(len(tables), np.int64)
        ends[chunk.segment[real]] = position + 1  # of each segment the last one stays
        seconds = self.costs.chunk_s(num, int(position.sum()) + num, int(ends.sum()))
        self._spend("prefill", seconds, num)
        return state

    def arm(self, state, slots: np.ndarray, sampling: SlotSampling):
        self._epoch[slots] = sampling.epoch
        self._left[slots] = sampling.max_new_tokens - sampling.token_index
        self._context[slots] = sampling.context_length
        return state

    def generate(self, params, state, tables: np.ndarray) -> tuple[Any, BlockTokens]:
        active = self._epoch >= 0
        room = np.minimum(self._left, self.settings.context - self._context)
        made = np.where(active, np.minimum(room, len(self._steps)), 0)
        num_context = int(self._context[active].sum() + made.sum() // 2)
        seconds = self.costs.decode_s(int(made.max()), int(active.sum()), num_context)
        self._spend("decode", seconds, int(made.sum()))
        first = self._epoch.astype(np.int64) * 7919 + self._context * 104_729
        tokens = ((first[:, None] + self._steps * 31) % VOCAB_SIZE).astype(np.int32)
        self._left -= made
        self._context += made
        is_full = active & (self._context >= self.settings.context)
        is_done = active & (self._left <= 0)
        finish = np.where(is_full, FINISH_CODES[FinishReason.CONTEXT], 0)
        finish = np.where(is_done, FINISH_CODES[FinishReason.LENGTH], finish)
        block = BlockTokens(
            tokens=tokens,
            logprobs=self._logprobs,
            sampled_logprobs=self._logprobs,
            valid=self._steps < made[:, None],
            finish=finish.astype(np.int8),
            slot_epoch=self._epoch.copy(),
            nan=self._nan,
        )
        self._epoch[is_full | is_done] = -1
        return state, block

    def free(self, state, slots: np.ndarray):
        self._epoch[slots] = -1
        return state

    def extract(self, state, pages: np.ndarray) -> Any:
        num = len(pages) * self.spec.page_size
        self._spend("move", self.costs.move_s(num), num)
        return ((np.zeros((len(pages), 0), np.int8),) * 2,)

    def insert(self, state, kv: Any, pages: np.ndarray):
        return state

    def copy(self, state, source: np.ndarray, target: np.ndarray):
        return state

    def _spend(self, verb: str, seconds: float, num_tokens: int) -> None:
        self.busy_s[verb] += seconds
        self.num_tokens[verb] += num_tokens
        self._clock.spend(seconds)
