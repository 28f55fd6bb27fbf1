"""An engine that costs next to nothing and knows what its server's thread did between two blocks.

It makes no KV and any tokens, for all slots at once in numpy; a turn ends at its length. `begin` and `end`, called from
any thread, bound what is recorded. A block's host time is what passed from one call of generate to the next without
the time inside the verbs: what is left is the server's own.
"""

import cProfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rl_jax.engine.state import FINISH_CODES
from rl_jax.testing.fake_engine import FakeEngine
from rl_jax.types import BlockTokens, FinishReason

VERBS = ("append", "arm", "generate", "copy", "insert", "free")


class InstantEngine(FakeEngine):
    def __init__(self, settings, *, vocab_size: int = 50_000):
        super().__init__(settings, vocab_size=vocab_size)
        S, k = settings.slots, settings.steps_per_block
        self._epoch, self._left = np.full(S, -1, np.int32), np.zeros(S, np.int64)
        rng = np.random.default_rng(0)
        self._tokens = rng.integers(10, vocab_size, (S, k)).astype(np.int32)
        self._logprobs = -rng.random((S, k), np.float32)
        # (wall, CPU of the thread, wall inside verbs, CPU inside verbs, active slots) at each call of generate
        self._marks: list[tuple[float, float, float, float, int]] = []
        self._inside = [0.0, 0.0]
        self._is_recording = False
        self._profile: cProfile.Profile | None = None
        for name in VERBS:
            setattr(self, name, self._apart(getattr(self, name)))

    def begin(self, *, profile: bool = False) -> None:
        self._profile = cProfile.Profile() if profile else None
        self._is_recording = True

    def end(self) -> dict[str, np.ndarray]:
        """Seconds a block, f64[blocks]: `wall` and `cpu` of the host, `engine` inside the verbs; `active` slots i64."""
        self._is_recording = False
        wall, cpu, inside, inside_cpu = (
            np.array([mark[i] for mark in self._marks]) for i in range(4)
        )
        active = np.array([mark[4] for mark in self._marks[:-1]])
        engine = np.diff(inside)
        host = {"wall": np.diff(wall) - engine, "cpu": np.diff(cpu) - np.diff(inside_cpu)}
        return {**host, "engine": engine, "active": active}

    @property
    def profile(self) -> cProfile.Profile:
        """Of the server's thread between `begin` and `end`. Raises: ValueError if none was asked for."""
        if self._profile is None:
            raise ValueError("nothing was profiled; call begin(profile=True)")
        return self._profile

    # --- the verbs --------------------------------------------------------------------------

    def append(self, params, state, tables, chunk):
        return state

    def insert(self, state, kv, pages):
        return state

    def copy(self, state, source, target):
        return state

    def arm(self, state, slots, sampling):
        self._epoch[slots] = sampling.epoch
        self._left[slots] = sampling.max_new_tokens - sampling.token_index
        return state

    def free(self, state, slots):
        self._epoch[slots] = -1
        return state

    def generate(self, params, state, tables):
        self._mark()
        S, k = self._tokens.shape
        active = self._epoch >= 0
        made = np.where(active, np.minimum(self._left, k), 0)
        self._left -= made
        ended = active & (self._left == 0)
        block = BlockTokens(
            tokens=self._tokens.copy(),
            logprobs=self._logprobs.copy(),
            sampled_logprobs=self._logprobs.copy(),
            valid=np.arange(k) < made[:, None],
            finish=np.where(ended, FINISH_CODES[FinishReason.LENGTH], 0).astype(np.int8),
            slot_epoch=self._epoch.copy(),
            nan=np.zeros(S, bool),
        )
        self._epoch[ended] = -1
        return state, block

    # --- private ----------------------------------------------------------------------------

    def _mark(self) -> None:
        """At the start of a block, on the server's thread."""
        if not self._is_recording:
            if self._profile is not None:
                self._profile.disable()
            return
        if self._profile is not None and not self._marks:
            self._profile.enable()
        now, active = (time.perf_counter(), time.thread_time()), int((self._epoch >= 0).sum())
        # The verb that calls this has begun: what it has taken so far is before the mark, and so not of this block.
        self._marks.append((*now, *self._inside, active))

    def _apart(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        """The verb, with its time counted as the engine's."""

        def timed(*args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            result = verb(*args)
            self._inside[0] += time.perf_counter() - wall
            self._inside[1] += time.thread_time() - cpu
            return result

        return timed
