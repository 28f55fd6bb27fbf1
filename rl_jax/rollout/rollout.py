"""The rollout: one thread with one asyncio loop on which all episodes, rewards and evaluations run.

Owns: that thread; the wiring of dispatcher, player, slots and environment pool; what the rest may call. All public
methods may be called from the driver's thread; each only posts to the loop, or waits for it with a deadline.
Invariants: nothing on the loop blocks (environments and scorers are processes, serving answers through futures, the
ledger's fsync and the driver's batch work happen on the driver's thread); every wait ends by a deadline; an error that
nobody above could see is `failed`, and ends the driver's take() at once.
Life: 1 start: the thread, then the pool (an environment that cannot be imported ends the start). 2 published(v) tells
the version that serves; want(step, n) raises the quota, and episodes start. 3 take(step) on the buffer, consumed(step)
after the learner's step, published(step) after the sync; again from 2. 4 evaluate between steps. 5 drain: all in flight
is cancelled with a record. 6 close.
Must not: be used from two driver threads at once.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from rl_jax.ledger import Ledger
from rl_jax.metrics import Metric
from rl_jax.rollout.blocking import within
from rl_jax.rollout.buffer import Interrupted, SampleBuffer
from rl_jax.rollout.curriculum import ANY
from rl_jax.rollout.dispatcher import Dispatcher
from rl_jax.rollout.episode import EpisodeRules, EpisodeTools
from rl_jax.rollout.evaluation import EvalResult, Evaluation, EvaluationFailed
from rl_jax.rollout.player import FleetExhausted, Player
from rl_jax.rollout.reward_service import RewardService
from rl_jax.rollout.scripted import ScriptPlan, scripted_trajectories
from rl_jax.rollout.selection import dropped_counts
from rl_jax.rollout.slots import Slots
from rl_jax.rollout.worker import EnvError
from rl_jax.settings import EvalSettings, RewardSettings, RolloutSettings, TaskSource
from rl_jax.timeline import Traces
from rl_jax.types import (
    Dropped,
    Group,
    Sampler,
    SchedulerPolicy,
    Task,
    Tick,
    Turn,
    TurnRequest,
)
from rl_jax.waits import Wait, stack_head

LOG = logging.getLogger(__name__)
TICK_S = 1.0  # how often the policy is asked without an event: free slots may change by themselves
POLL_S = 0.5  # how often a blocked caller looks whether the thread still lives
SLACK_S = (
    30.0  # added to a deadline that the loop itself keeps, before the thread is taken for hung
)


class RolloutStopped(RuntimeError):
    """The rollout's thread has ended, or did not answer in time."""


@dataclass
class Rollout:
    """See the module. `buffer` is shared with the driver; everything else here belongs to the rollout's thread."""

    sampler: Sampler
    stream: Any  # tasks.TaskStream
    pool: Any  # worker.EnvPool
    renderer: Any  # tokens.ChatRenderer
    buffer: SampleBuffer
    ledger: Ledger
    policy: SchedulerPolicy
    settings: RolloutSettings
    _: KW_ONLY
    run_id: str
    seed: int
    context: int  # engine.context: tokens of one context
    row_tokens: int = 0  # of the learner: tokens of a whole trajectory; 0 = one context
    vocab_size: int = 0  # of the model: ids that a server may sample; 0 = the tokenizer's
    turn_deadline_s: float = 60.0
    stop_deadline_s: float = 10.0
    still_s: float = (
        5.0  # without a tick, after which the loop counts as blocked by what runs on it
    )
    rewards: RewardSettings = RewardSettings()
    sources: Sequence[TaskSource] = ()  # what the episodes of a tag are scored by
    quarantine_dir: Path | None = None

    def __post_init__(self):
        self.failed: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rollout", daemon=True)
        self._closing: set[asyncio.Task] = set()  # environments that are being closed
        self._evaluation: Evaluation | None = None
        self._evaluation_name = ""
        self._is_closed = False
        self._ticker: asyncio.Task | None = None
        self._ticked_s = time.monotonic()
        self.rules = EpisodeRules.of(
            self.settings, self.context, self.turn_deadline_s, self.row_tokens
        )
        workers = self.settings.env_workers * self.settings.envs_per_worker
        sampler, tags = self.sampler, self.buffer.tags
        # Why no server will ever decode any more, or None; on the loop. Set before `start`.
        self.gone: Callable[[], str | None] = lambda: None
        self._slots = Slots(sampler.capacity, self._places, tags, workers, self.pool.limits)
        tools = EpisodeTools(
            self.sampler,
            self.pool.open,
            self._close_env,
            self.renderer,
            self._count,
            self.vocab_size,
        )
        self._scoring = RewardService(
            self.pool, self.rewards, self.settings.episode_timeout_s, self.sources
        )
        self._player = Player(
            tools,
            self._scoring,
            self.ledger,
            self.seed,
            self.settings.max_env_failures,
            self._fail,
            self.quarantine_dir,
        )
        self._dispatcher = Dispatcher(
            self._player,
            self.stream,
            self.buffer,
            self.policy,
            self._slots,
            self.settings,
            self.rules,
            self.run_id,
            self.buffer.tags,
            self._fail,
        )
        self.buffer.status = self.status
        self.buffer.on_drop = self._on_buffer_drop

    # --- life -------------------------------------------------------------------------------------------------------

    def trace(self, traces: Traces) -> None:
        """Have a timeline know what environments, scorers and the staleness bound take. Before `start`."""
        self.pool.trace(traces)
        self._scoring.track = traces.track("reward")
        self._dispatcher.track = traces.track("rollout")

    def start(self) -> None:
        """Start the thread and the pool. Raises what pool.start() raises, with everything closed again."""
        self._slots.check()
        self._thread.start()
        try:
            self._call(self._begin(), self.pool.start_limit_s + SLACK_S)
        except BaseException:
            self.close()
            raise

    def drain(self) -> None:
        """The run ends: nothing starts any more, what is in flight or buffered ends CANCELLED or DROPPED (run_end)."""
        self._call(self._drain("run_end"), self.stop_deadline_s + SLACK_S)

    def close(self) -> None:
        """End everything, environments too; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            try:
                self._call(self._end(), self.stop_deadline_s + SLACK_S)
            except Exception:
                LOG.exception("the rollout did not end cleanly")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self.stop_deadline_s)
        if self._thread.is_alive():
            LOG.error(
                "the rollout's thread did not end within %g s: %s",
                self.stop_deadline_s,
                self.status(),
            )
        elif not self._loop.is_closed():
            self._loop.close()

    # --- the driver's calls -----------------------------------------------------------------------------------------

    def want(self, step: int, num_groups: int, last_step: int | None = None) -> None:
        """The driver will take `num_groups` groups for `step`, the last time for `last_step`; does not wait."""
        self._post(self._dispatcher.want, step, num_groups, last_step)

    def published(self, version: int) -> None:
        """Every server serves `version` now: steps up to it are consumed, what is too old goes; does not wait."""
        self._post(self._dispatcher.published, version)

    def set_bound(self, bound: int) -> None:
        """Batches are at most `bound` versions old from the next take on; does not wait. Raises: ValueError."""
        self.buffer.set_bound(bound)
        self._post(self._dispatcher.set_bound, bound)

    def consumed(self, step: int, groups: Sequence[Group]) -> None:
        """learner.step(step) returned: TRAINED, on disk when this returns. Call it before published(step)."""
        self.buffer.consumed(step, groups)

    def check(self) -> None:
        """The ledger's conservation law, counted on the loop between two events. Raises LedgerError."""
        self._call(self._check(), SLACK_S)

    def evaluate(
        self,
        name: str,
        tasks: Sequence[Task],
        sampling: EvalSettings,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> EvalResult:
        """Play `tasks` with the version published last; blocks.

        Raises EvaluationFailed if nothing could be scored, Interrupted once should_stop() is true.
        """
        run = self._evaluate(name, tasks, sampling)
        try:
            return self._call(run, sampling.timeout_s + SLACK_S, should_stop)
        except (EvaluationFailed, RolloutStopped) as error:
            raise self.failed or error from None  # the cause, not that nothing could be scored

    def say(self, request: TurnRequest, should_stop: Callable[[], bool] = lambda: False) -> Turn:
        """One turn outside of any episode; blocks. It is no episode's, and in no record.

        Raises TurnError, and Interrupted once should_stop() is true.
        """
        return self._call(self.sampler.generate(request), request.deadline_s + SLACK_S, should_stop)

    def forget(self, session: str) -> None:
        """No turn of a session that say() began follows; does not wait."""
        self._post(self.sampler.release, session)

    def scripted(self, tasks: Sequence[Task], num: int, skill: float) -> list[Group]:
        """Scripted episodes for the warm start; blocks. Raises ScriptError."""
        plan = ScriptPlan(num, skill, self.seed)
        scripts = scripted_trajectories(self.pool, tasks, self.renderer, self.rules, plan)
        return self._call(scripts, plan.timeout_s + SLACK_S)

    def issue_again(self, issued: Sequence[Any]) -> None:
        """After a resume, before want(): tasks that were pending, as tasks.IssuedTask; they come first."""
        self._post(self._dispatcher.again, list(issued))

    def learned(self, advantages: Mapping[str, Sequence[float]]) -> None:
        """By tag the mean advantage of each episode of a step, for the curriculum; does not wait."""
        self._post(self.stream.curriculum.saw, advantages)

    def pending(self) -> list[tuple[int, int]]:
        """(epoch, index) of every task issued and not consumed, ascending: what a resume must issue again."""
        return self._call(_result(self._dispatcher.pending), SLACK_S)

    def position(self) -> dict[str, Any]:
        """Where the task stream stands, for a checkpoint: its state and pending(), of the same moment."""
        return self._call(_result(self._position), SLACK_S)

    def in_flight(self) -> int:
        """Episodes issued and without a terminal record. For the law use check(): this number is old at once."""
        return self._call(_result(self._num_open), SLACK_S)

    def counts(self) -> dict[str, float]:
        """Cumulative counters by metric name; the gauges episodes/in_flight and episodes/buffered; and open_tokens,
        sampled by episodes that may still be trained, in turns that are over."""
        counts: dict[str, float] = dict(self._player.counts)
        states = self.ledger.counts()
        counts["episodes/in_flight"] = sum(
            states[s] for s in ("ISSUED", "RUNNING", "COMPLETED", "TRUNCATED")
        )
        counts["episodes/buffered"] = self.buffer.num_open_episodes()
        for state in ("TRAINED", "EVALUATED", "ERRORED", "CANCELLED", "DROPPED"):
            counts[f"episodes/{state.lower()}"] = states[state]
        drops = self._dispatcher.drops + Counter(self.buffer.drops())
        counts |= dropped_counts(drops)
        pool = self.pool.counts
        counts["episodes/cut_observations"] = pool["truncated_observations"]
        counts["rewards/restarts"] = pool["reward_restarts"]
        counts["rewards/retries"] = pool["reward_retries"]
        counts["rewards/rescored_turns"] = self._player.rewards.num_rescored
        counts["envs/restarts"] = pool["restarts"] - pool["reward_restarts"]
        counts["envs/close_failed"] = (
            self._player.counts["envs/close_failed"] + pool["close_failed"]
        )
        if (curriculum := self.stream.curriculum) is not None:
            counts |= {f"curriculum/prob.{tag}": p for tag, p in curriculum.probs.items()}
        counts["open_tokens"] = self._dispatcher.num_open_tokens() + self.buffer.num_open_tokens()
        counts["time/wait_for_policy_s"] = self._dispatcher.wait_for_policy_s
        counts["time/slots_idle_s"] = self._dispatcher.slots_idle_s
        counts["time/wait_for_max_live_s"] = self._dispatcher.wait_for_max_live_s
        counts["envs/max_live_waits"] = pool["max_live_waits"]
        return counts

    def redundancy_metrics(self) -> dict[str, Metric]:
        """Of what was and was not kept since this was asked before; {} where nothing is redundant."""
        redundancy = self._dispatcher.redundancy
        return {} if redundancy is None else redundancy.metrics()

    def status(self) -> str:
        """What is waited for, in one line; any thread."""
        if self.failed is not None:
            return f"the rollout failed: {self.failed}"
        parts, now_s = [], time.monotonic()
        if self._evaluation is not None:
            parts.append(
                f"evaluation {self._evaluation_name}: {self._evaluation.num_left} episodes left"
            )
        episodes = self._dispatcher.episodes()
        phases: dict[str, int] = {}
        for episode in episodes:
            phase = "sampling" if episode.phase.startswith("sampling") else episode.phase
            phases[phase] = phases.get(phase, 0) + 1
        listed = ", ".join(f"{num} {phase}" for phase, num in sorted(phases.items()))
        parts.append(f"{len(episodes)} episodes live" + (f" ({listed})" if listed else ""))
        if episodes:
            oldest = min(episodes, key=lambda e: e.since_s)
            parts.append(
                f"longest wait: {oldest.session} {oldest.phase} for {now_s - oldest.since_s:.1f} s"
            )
        parts += [wait.text(now_s) for wait in self.waits()]
        parts.append(f"{self.buffer.num_waiting} groups buffered, {self.buffer.num_taken} taken")
        return "; ".join(parts)

    def waits(self) -> list[Wait]:
        """What the workers of environments and scorers do, tags of which the scheduler starts nothing, and the loop
        itself where it stands still; any thread."""
        waits = self.pool.waits() + self._dispatcher.shortfalls.waits()
        late_s = time.monotonic() - self._ticked_s
        if self._ticker is not None and not self._is_closed and late_s > self.still_s:
            limit = f"rollout.take_timeout_s={self.settings.take_timeout_s:g}"
            at = f"at {stack_head(self._thread.ident)}"
            waits.append(Wait("the rollout's loop stands still", self._ticked_s, limit, at))
        return waits

    # --- crossing to the loop ---------------------------------------------------------------------------------------

    def lag_s(self, limit_s: float) -> float:
        """How long the event loop takes to do something; limit_s where it does not. Not from the loop."""
        start_s, done = time.monotonic(), threading.Event()
        try:
            self._loop.call_soon_threadsafe(done.set)
        except RuntimeError:  # it is closed
            return limit_s
        return min(time.monotonic() - start_s, limit_s) if done.wait(limit_s) else limit_s

    def _post(self, call, *args) -> None:
        self._check_alive()
        self._loop.call_soon_threadsafe(self._guarded, call, *args)

    def _places(self, tag: str) -> tuple[str, ...]:
        """Of a tag; of all tags together for groups of any."""
        tags = self.stream.tags if tag == ANY else (tag,)
        return tuple(dict.fromkeys(place for t in tags for place in self.sampler.places(t)))

    def _call(
        self,
        coroutine: Coroutine,
        timeout_s: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Run on the loop and wait, as long as the thread lives and the deadline has not passed.

        Raises Interrupted, having cancelled it, once should_stop() is true.
        """
        if not self._thread.is_alive():
            coroutine.close()
            self._check_alive()
        future: Future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return future.result(POLL_S)
                except FutureTimeout:
                    if future.done():  # the coroutine itself raised TimeoutError
                        raise
                    if should_stop():
                        raise Interrupted from None
                    if not self._thread.is_alive() or time.monotonic() > deadline_s:
                        raise RolloutStopped(
                            f"the rollout's thread did not answer within {timeout_s:g} s: {self.status()}"
                        ) from None
        finally:
            future.cancel()

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise self.failed
        if not self._thread.is_alive():
            raise RolloutStopped(
                "the rollout is not running; call start() first, and nothing after close()"
            )

    def _guarded(self, call, *args) -> None:
        try:
            call(*args)
        except Exception as error:  # nobody above a loop callback would be told
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            LOG.info("the rollout failed: %s", error)  # the driver is told, and tells
            self.failed = error
            self._dispatcher.halt()
            self.buffer.fail(error)

    # --- on the loop ------------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _begin(self) -> None:
        limit_s = self.pool.start_limit_s + SLACK_S / 2
        late = EnvError("env_import", f"the environments did not start within {limit_s:g} s")
        await within(limit_s, self.pool.start(), late)
        self._dispatcher.version = self.sampler.version()
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self._ticked_s = time.monotonic()
            if (why := self.gone()) is not None:  # no turn may be under way that would fail of it
                self._fail(FleetExhausted(f"no decode server is left: {why}"))
            await asyncio.sleep(TICK_S)
            self._guarded(self._dispatcher.handle, Tick())

    def _position(self) -> dict[str, Any]:
        return {"stream": self.stream.state(), "pending": self._dispatcher.pending()}

    async def _check(self) -> None:
        self.ledger.check(self._num_open())

    def _num_open(self) -> int:
        evaluating = self._evaluation.num_open if self._evaluation is not None else 0
        return self._dispatcher.num_open_episodes() + self.buffer.num_open_episodes() + evaluating

    async def _evaluate(
        self, name: str, tasks: Sequence[Task], sampling: EvalSettings
    ) -> EvalResult:
        attempts = self.settings.max_attempts
        self._evaluation_name = name
        self._evaluation = Evaluation(
            self._player, self._slots, self.rules, self.run_id, attempts, self.buffer.beat
        )
        try:
            return await self._evaluation.run(name, tasks, sampling, self._dispatcher.version)
        finally:
            self._evaluation = None
            self._guarded(self._dispatcher.handle, Tick())  # its slots are free again

    async def _drain(self, reason: str) -> None:
        runners = self._dispatcher.stop(reason)
        if runners:
            await asyncio.wait(runners, timeout=self.stop_deadline_s)
        self.buffer.clear(reason)
        self.ledger.check(self._num_open())

    async def _end(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        try:
            await self._drain("run_end")
        finally:
            if self._closing:
                await asyncio.wait(set(self._closing), timeout=self.stop_deadline_s)
            await self.pool.close()

    def _close_env(self, handle: Any) -> None:
        closer = asyncio.create_task(handle.close())
        self._closing.add(closer)
        closer.add_done_callback(self._env_closed)

    def _env_closed(self, closer: asyncio.Task) -> None:
        self._closing.discard(closer)
        if not closer.cancelled() and closer.exception() is not None:
            LOG.warning(
                "an environment could not be closed: %s",
                closer.exception(),
                extra={"kind": "environments that could not be closed"},
            )
            self._count("envs/close_failed")

    def _count(self, name: str) -> None:
        self._player.counts[name] += 1
        if name.startswith("turns/"):
            self.buffer.beat()

    def _on_buffer_drop(self, group: Group, reason: str) -> None:
        """The driver's take() dropped a group: the scheduler may start another."""
        self._post(self._dispatcher.handle, Dropped(group.uid, reason))


async def _result(call: Callable[[], Any]) -> Any:
    """A plain call as a coroutine: it then runs on the loop."""
    return call()
