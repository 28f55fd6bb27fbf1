"""EnvPool: blocking environments, made asynchronous, bounded and killable; and where the run's scorers are.

Owns: the worker processes (process.py), which environment lives in which, and their replacement. The driver's process
never imports an environment: task lists too are made in a worker and come as data.

Invariants
    Every call has a deadline, and its worker is killed when it passes. Only the episode that hung is told env_timeout;
    the others that lived in that worker are told env_lost. All of it is charged to infra, none of it is a reward.
    A worker that ended is replaced, the first two times at once, then with a growing pause, until max_env_failures
    workers of one place ended without a finished episode in between: then `failed` is set and open() raises it.
    At most envs_per_worker environments live in a worker, and at most max_live of a task source that has one, whoever
    plays them; one counts until its close() has come back. open() waits for a free place, with a deadline.
    Scorers have workers of their own (scorer_pool.py), or are a service's (http_scorers.py): `scorers`, which lives as
    long as the pool does.

Life
    1. spawn():    processes start and import in the background (call it before importing what is slow)
    2. prepare():  blocks until imports are done and all task lists are there: list_tasks(), splits(), has_script(),
                   and first_observations()
       move():     from then on they run elsewhere (place.py): those of this host, which listed the tasks, end
    3. start():    on the loop's thread; then open() -> EnvHandle, reset(), step(), script(), close()
    4. close():    environments are closed, processes ended

Must not: know the scheduler, the ledger or a reward's meaning.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from envs import ENVS
from rl_jax.rewards import REWARDS
from rl_jax.rollout import wire
from rl_jax.rollout.blocking import run_blocking
from rl_jax.rollout.http_scorers import HttpScorers, ServiceError
from rl_jax.rollout.place import LocalPlace, Place
from rl_jax.rollout.process import Limit, WorkerFault, WorkerProcess, told
from rl_jax.rollout.scorer_pool import Answer, ScorerPool, pause_s
from rl_jax.settings import RewardSettings, RolloutSettings, TaskSource
from rl_jax.timeline import NO_TRACES, Traces
from rl_jax.types import Action, EpisodeView, Failure, Message, StepResult, Task
from rl_jax.waits import Wait

LOOK_S = 60.0  # for the first resets of an environment of which nothing is known


class EnvError(Exception):
    """An environment's call that gave no result.

    kind: env_timeout | env_error (it raised) | bad_task (of tasks()) | env_died (its process ended) | env_lost (its
    worker ended in another episode's call) | bad_observation | env_import | env_full (no place within the deadline) |
    env_budget (too many workers ended). charged_to is always infra: the policy cannot know what breaks an environment.
    """

    def __init__(self, kind: str, detail: str, charged_to: str = "infra"):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.charged_to, self.detail = kind, charged_to, detail

    @property
    def failure(self) -> Failure:
        return Failure("env", self.kind, self.charged_to, self.detail)


class EnvHandle:
    """One episode's environment. Calls of one handle must not overlap."""

    def __init__(
        self, pool: "EnvPool", worker: WorkerProcess, number: int, task: Task, uid: str, seed: int
    ):
        self.task, self.uid = task, uid
        self._pool, self._worker, self._number, self._seed = pool, worker, number, seed
        self._is_open, self._is_counted = True, True

    async def reset(self) -> StepResult:
        """The first observation. Raises EnvError, after which the handle is closed."""
        settings = self._pool.settings
        limit = Limit(settings.reset_timeout_s, "rollout.reset_timeout_s")
        task = wire.task_to_wire(self.task)
        return self._result(await self._call("reset", limit, task=task, seed=self._seed))

    async def step(self, action: Action) -> StepResult:
        """What the action led to; reward a NoReward (NaN) if it is no finite number. Raises EnvError, as reset()."""
        return self._result(
            await self._call("step", self._pool.step_limit, a=wire.action_to_wire(action))
        )

    async def script(self, seed: int, skill: float) -> Message:
        """What the next scripted action says. seed: of the episode's script; only the first call's counts.

        skill: probability, 0..1, that the episode is played by the solution. Raises EnvError, as reset().
        """
        said = await self._call("script", self._pool.step_limit, seed=seed, skill=skill)
        return wire.message_from_wire(said)

    async def close(self) -> None:
        """Give the place back. Raises nothing: the episode is over, so trouble is only counted (close_failed)."""
        if not self._is_open:
            return
        self._release()
        try:
            await self._worker.call("close", self.uid, self._pool.step_limit, e=self._number)
        except WorkerFault:
            self._pool.counts["close_failed"] += 1
        finally:
            self._leave()

    async def _call(self, verb: str, limit: Limit, **payload: Any) -> Any:
        if not self._is_open:
            raise EnvError("env_error", f"{verb} of {self.uid}: its environment is closed")
        try:
            return await self._worker.call(verb, self.uid, limit, e=self._number, **payload)
        except WorkerFault as fault:
            self._release()
            self._leave()  # the worker closed it, or is gone
            raise self._pool.charge(fault, self._worker) from None

    def _result(self, answer: Mapping[str, Any]) -> StepResult:
        result = wire.step_from_wire(answer)
        if "truncated_bytes" in result.info:
            self._pool.counts["truncated_observations"] += 1
        if result.done:
            self._pool.finished(self._worker)
        return result

    def _release(self) -> None:
        self._is_open = False
        self._pool.release(self._worker)

    def _leave(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._pool.left(self.task.tag)


class EnvPool:
    """Worker processes for environments and scorers. All methods after prepare() on one loop's thread."""

    def __init__(
        self,
        sources: Sequence[TaskSource],
        settings: RolloutSettings,
        rewards: RewardSettings | None = None,
        log_dir: Path | None = None,
        *,
        scouts: int | None = None,
    ):
        """log_dir: where each worker's output is kept from start() on (may be set until then); None = only its tail.
        scouts: most workers of a kind before move(), where that will be called; None = all.

        Raises: ValueError for an unknown environment or reward, or a tag that occurs twice.
        """
        rewards = rewards or RewardSettings()
        self.settings = settings
        # env_timeout, ..., restarts, truncated_observations, close_failed; and what scorers count
        self.counts: Counter[str] = Counter()
        self.failed: EnvError | None = None
        self.step_limit = Limit(settings.step_timeout_s, "rollout.step_timeout_s")
        self._start_limit = Limit(settings.start_timeout_s, "rollout.start_timeout_s")
        self.open_limit = (
            self._start_limit
        )  # a place is free again when a worker that ended is replaced
        self.log_dir = log_dir
        env_sources = [_source_to_wire(source) for source in sources]
        self._tags = [source.tag for source in sources]
        self.limits = {source.tag: source.max_live for source in sources if source.max_live}
        self._live_of: Counter[str] = Counter()  # environments that are not closed yet, by tag
        if len(set(self._tags)) != len(self._tags):
            raise ValueError(
                f"tasks.sources has a tag twice: {', '.join(sorted(self._tags))}; tags must differ"
            )
        names = {name for source in sources for name in source.scorers}
        scorers = {name: _target("reward", name, REWARDS) for name in sorted(names)}
        common = {"max_obs_bytes": settings.max_obs_bytes}
        self._inits = {
            name: common | {"sources": env_sources, "scorers": {}}
            for name in env_names(settings.env_workers)
        }
        self._place: Place = LocalPlace()
        self._scouts = settings.env_workers if scouts is None else scouts
        self._has_moved = False
        of_turns = {source.turn_reward for source in sources} - {""}
        self.scorers: ScorerPool | HttpScorers
        if rewards.url:
            self.scorers = HttpScorers(scorers, rewards, counts=self.counts, of_turns=of_turns)
        else:
            self.scorers = ScorerPool(
                scorers,
                rewards,
                self._start_limit,
                max_endings=settings.max_env_failures,
                keep_alive_s=rewards.keep_alive_s or None,
                counts=self.counts,
                of_turns=of_turns,
                scouts=scouts,
            )
            self.scorers.on_failed = self._scorers_failed
        self._workers: dict[str, WorkerProcess] = {}
        self._traces = NO_TRACES
        self._tasks: dict[tuple[str, str], tuple[Task, ...]] = {}
        self._offers: dict[str, Any] = {}
        self._endings: Counter[str] = Counter()  # of each place, since its last finished episode
        self._restarts: dict[str, asyncio.Task] = {}
        self._place_free = asyncio.Event()
        self._num_opened = 0
        self._is_closed = False

    # --- before the loop ----------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start the processes; returns at once."""
        for name in list(self._inits)[: self._scouts]:
            if name not in self._workers:
                self._workers[name] = self._new_worker(name)
        self.scorers.spawn()

    def prepare(self) -> None:
        """Block until the environments are imported and their tasks listed; a loop that runs on this thread waits too.

        Raises: EnvError naming the environment and its own error; no process is left then.
        """
        run_blocking(self._prepare())

    def move(self, place: Place) -> None:
        """After prepare(): workers run there from now on, all of them. They are started at once, and start() waits for
        them. Raises: OSError where no process can be started."""
        run_blocking(self._move(place))

    async def _move(self, place: Place) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
        self._workers, self._place, self._has_moved = {}, place, True
        self._scouts = len(self._inits)
        if isinstance(self.scorers, ScorerPool):
            await self.scorers.move(place)
        self.spawn()

    def trace(self, traces: Traces) -> None:
        """Have the timeline know what the environments' workers do from now on."""
        self._traces = traces
        for name, worker in self._workers.items():
            worker.track = traces.track(f"env/{name}")

    @property
    def start_limit_s(self) -> float:
        """That start() may take."""
        return self._place.start_s + self._start_limit.seconds

    def splits(self, tag: str) -> tuple[str, ...]:
        """The splits that a tag's environment has."""
        return tuple(self._offers[tag]["splits"])

    def has_script(self, tag: str) -> bool:
        return self._offers[tag]["script"]

    def list_tasks(self, tag: str, split: str) -> tuple[Task, ...]:
        """The tasks of a source; its env, tag and reward are filled in, and ids start with the tag.

        Raises: ValueError for a split its environment does not have.
        """
        if (tag, split) not in self._tasks:
            raise ValueError(
                f"tag {tag!r} has no split {split!r}; use one of {', '.join(self.splits(tag))}"
            )
        return self._tasks[tag, split]

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[None]:
        """The workers on a loop that is not theirs, before start(); on any error they are ended. Raises: EnvError."""
        for worker in self._workers.values():
            worker.attach(on_death=lambda worker: None)
        try:
            yield
        except BaseException as error:  # an interrupt too must leave no process behind
            await self.close()
            if isinstance(error, WorkerFault):
                raise self.charge(error) from None
            raise
        for worker in self._workers.values():
            worker.detach()

    async def _prepare(self) -> None:
        self.spawn()
        async with self._borrowed():
            for worker in self._workers.values():
                await worker.ready()
            try:
                await self.scorers.check()
            except ServiceError as error:
                raise EnvError("reward_service", str(error)) from None
            first = next(iter(self._workers.values()))
            self._offers = first.offers["envs"] if first.offers else {}
            for tag in self._tags:
                for split in self.splits(tag):
                    self._tasks[tag, split] = await self._fetch_tasks(first, tag, split)

    async def _fetch_tasks(self, worker: WorkerProcess, tag: str, split: str) -> tuple[Task, ...]:
        tasks: list[Task] = []
        while True:
            owner = f"tag {tag!r} split {split!r}"
            try:
                part = await worker.call(
                    "tasks", owner, self._start_limit, tag=tag, split=split, start=len(tasks)
                )
            except WorkerFault as fault:
                raise WorkerFault(fault.kind, f"tag {tag!r}: {fault.detail}") from None
            tasks += [wire.task_from_wire(task) for task in part["tasks"]]
            if len(tasks) >= part["size"]:
                return tuple(tasks)

    def first_observations(
        self, tasks: Sequence[Task], seed: int, patience_s: float, most_s: float = LOOK_S
    ) -> list[StepResult | EnvError | None]:
        """Of each task, between prepare() and start(), or why its reset failed; None where nothing came in time.

        After patience_s only tags of which nothing is known are waited for: until a task of it answered, or two failed
        by themselves, or most_s have passed. A reset that takes longer is left to its own deadline and ends by itself;
        a worker that ended is replaced. Nothing is charged to anybody. Raises: EnvError, as prepare().
        """
        return run_blocking(self._look(tasks, seed, patience_s, most_s))

    async def _look(
        self, tasks: Sequence[Task], seed: int, patience_s: float, most_s: float
    ) -> list[StepResult | EnvError | None]:
        found: list[StepResult | EnvError | None] = [None] * len(tasks)
        waiting = iter(enumerate(tasks))
        limit = Limit(self.settings.reset_timeout_s, "rollout.reset_timeout_s")

        gates = {tag: asyncio.Semaphore(num) for tag, num in self.limits.items()}

        async def look(name: str) -> None:
            for i, task in waiting:
                async with gates.get(task.tag, nullcontext()):
                    worker = self._workers[name]
                    self._num_opened += 1
                    uid, number = f"first_look/{task.id}", self._num_opened
                    reset = worker.call(
                        "reset", uid, limit, e=number, task=wire.task_to_wire(task), seed=seed
                    )
                    # Sent at once: a reset that nobody waits for any longer is closed all the same.
                    closed = worker.call("close", uid, self.step_limit, e=number)
                    answer, _ = await asyncio.gather(reset, closed, return_exceptions=True)
                if isinstance(answer, WorkerFault):
                    found[i] = EnvError(answer.kind, answer.detail)
                elif not isinstance(answer, BaseException):
                    found[i] = wire.step_from_wire(answer)
                await self._mend(name)

        async with self._borrowed():
            looks = [asyncio.create_task(look(name)) for name in self._workers]
            end_s, wait_s = time.monotonic() + most_s, patience_s
            while any(not task.done() for task in looks):
                await asyncio.wait(looks, timeout=wait_s)
                wait_s = 0.1
                if time.monotonic() > end_s or _is_known(tasks, found):
                    break
            for task in looks:
                task.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
            for name in list(self._workers):
                await self._mend(name)
        return found

    async def _mend(self, name: str) -> None:
        """Before start(): a worker that ended is replaced. Raises: WorkerFault if the new one cannot import."""
        worker = self._workers[name]
        with suppress(WorkerFault):
            await worker.ready()
        if worker.fault is not None:
            worker = self._workers[name] = self._new_worker(name)
            worker.attach(on_death=lambda worker: None)
            await worker.ready()

    # --- on the loop --------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Environments that may live at once."""
        return self.settings.env_workers * self.settings.envs_per_worker

    @property
    def num_live(self) -> int:
        return sum(worker.num_live for worker in self._workers.values())

    def waits(self) -> list[Wait]:
        """What each busy worker works at. Any thread."""
        envs = [wait for worker in list(self._workers.values()) if (wait := worker.wait)]
        return envs + self.scorers.waits()

    async def start(self) -> None:
        """Take the prepared workers onto the running loop. Raises EnvError, as prepare(), if not prepared before, or
        where they do not come to the place they were moved to."""
        if not self._offers:
            await self._prepare()
        for worker in self._workers.values():
            worker.attach(self._died)
            if self.log_dir is not None:
                worker.open_log(self.log_dir)
        self.scorers.log_dir = self.log_dir
        await self.scorers.start()
        if self._has_moved:
            try:
                await asyncio.gather(*[worker.ready() for worker in list(self._workers.values())])
            except WorkerFault as fault:
                raise self.charge(fault) from None

    async def open(self, task: Task, uid: str, seed: int) -> EnvHandle:
        """A place for an episode of `task`, in the worker with the fewest; waits for one if all are taken.

        seed: of reset(). Raises: EnvError env_full after start_timeout_s; env_budget once `failed` is set.
        """
        if self._is_limited(task.tag):
            self.counts["max_live_waits"] += 1
        try:
            worker = await self._until(
                lambda: None if self._is_limited(task.tag) else self._emptiest()
            )
        except TimeoutError:
            raise EnvError("env_full", self._full(task.tag, uid)) from None
        self._live_of[task.tag] += 1
        self._num_opened += 1
        worker.num_live += 1
        return EnvHandle(self, worker, self._num_opened, task, uid, seed)

    async def score(self, name: str, task: Task, view: EpisodeView, **asked: Any) -> Answer:
        """As scorer_pool.Scorers."""
        return await self.scorers.score(name, task, view, **asked)

    async def close(self) -> None:
        """End all processes. Idempotent."""
        self._is_closed = True
        self._place_free.set()
        for restart in self._restarts.values():
            restart.cancel()
        ends = (worker.close() for worker in self._workers.values())
        await asyncio.gather(self.scorers.close(), *ends)

    # --- for handles --------------------------------------------------------------------------------------------------

    def charge(self, fault: WorkerFault, worker: WorkerProcess | None = None) -> EnvError:
        """The typed, counted error of an environment's call."""
        self.counts[fault.kind] += 1
        return EnvError(fault.kind, self._told(fault, worker))

    def finished(self, worker: WorkerProcess) -> None:
        """An episode of this worker came to its end: the place works."""
        self._endings[worker.name] = 0

    def release(self, worker: WorkerProcess) -> None:
        worker.num_live -= 1
        self._place_free.set()

    def left(self, tag: str) -> None:
        """An environment of the tag is closed, or gone."""
        self._live_of[tag] -= 1
        self._place_free.set()

    def _told(self, fault: WorkerFault, worker: WorkerProcess | None) -> str:
        return fault.detail if worker is None else told(fault, worker.name, self.log_dir)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _is_limited(self, tag: str) -> bool:
        return tag in self.limits and self._live_of[tag] >= self.limits[tag]

    def _full(self, tag: str, uid: str) -> str:
        waited = f"no place for {uid} within {self.open_limit.setting}={self.open_limit.seconds:g}"
        if self._is_limited(tag):
            return f"{waited}: max_live={self.limits[tag]} environments of tag {tag!r} live; raise it, or close faster"
        return (
            f"{waited}: {self.num_live} of {self.capacity} environments live; raise rollout.env_workers or"
            " envs_per_worker"
        )

    def _emptiest(self) -> WorkerProcess | None:
        usable = [
            worker
            for worker in self._workers.values()
            if worker.is_usable and worker.num_live < self.settings.envs_per_worker
        ]
        return min(usable, key=lambda worker: worker.num_live, default=None)

    async def _until(self, find: Callable[[], WorkerProcess | None]) -> WorkerProcess:
        """What find() finds, asked again whenever a worker may be free. Raises: TimeoutError; EnvError once no worker
        is started any more."""
        async with asyncio.timeout(self.open_limit.seconds):
            while True:
                if self.failed is not None:
                    raise EnvError(self.failed.kind, self.failed.detail)
                if self._is_closed:
                    raise EnvError("env_lost", "the environments' workers are closed")
                worker = find()
                if worker is not None:
                    return worker
                self._place_free.clear()
                await self._place_free.wait()

    def _new_worker(self, name: str) -> WorkerProcess:
        worker = WorkerProcess(name, self._inits[name], self._start_limit, self._place)
        worker.track = self._traces.track(f"env/{name}")
        return worker

    def _died(self, worker: WorkerProcess) -> None:
        """Replace a worker that ended, unless its place has used up its budget."""
        if self._is_closed:
            return
        name = worker.name
        self._endings[name] += 1
        limit = self.settings.max_env_failures
        if self._endings[name] > limit:
            self.failed = EnvError(
                "env_budget",
                f"worker {name} ended {self._endings[name]} times in a row (rollout.max_env_failures={limit}) without "
                f"a finished episode; the last: {worker.fault}",
            )
            self._place_free.set()
            return
        self.counts["restarts"] += 1
        self._restarts[name] = asyncio.get_running_loop().create_task(self._replace(name))

    def _scorers_failed(self, detail: str) -> None:
        self.failed = EnvError("env_budget", detail)
        self._place_free.set()

    async def _replace(self, name: str) -> None:
        await asyncio.sleep(pause_s(self._endings[name]))
        worker = self._workers[name] = self._new_worker(name)
        worker.attach(self._died)
        if self.log_dir is not None:
            worker.open_log(self.log_dir)
        try:
            await worker.ready()
        except WorkerFault:
            return  # _died has been told, and decides anew
        self._place_free.set()


def env_names(num: int) -> list[str]:
    """Of the places of so many workers."""
    return [f"env_{i}" for i in range(num)]


def _is_known(tasks: Sequence[Task], found: Sequence[StepResult | EnvError | None]) -> bool:
    """Whether of each tag some task answered, or two failed by themselves, or all of them."""
    for tag in {task.tag for task in tasks}:
        seen = [result for task, result in zip(tasks, found) if task.tag == tag]
        own = [r for r in seen if isinstance(r, EnvError) and r.kind != "env_lost"]
        if not any(isinstance(r, StepResult) for r in seen) and len(own) < min(2, len(seen)):
            return False
    return True


def _source_to_wire(source: TaskSource) -> dict[str, Any]:
    out = {
        "tag": source.tag,
        "env": source.env,
        "reward": source.reward,
        "config": _plain(source.config),
        "target": _target("environment", source.env, ENVS),
    }
    try:
        wire.dumps(out)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the config of task source {source.tag!r} cannot go to a worker as JSON: {error}; use plain values"
        ) from None
    return out


def _target(kind: str, name: str, table: Mapping[str, str]) -> str:
    target = table.get(name, name)
    if ":" not in target:
        raise ValueError(
            f'no {kind} {name!r}; use one of {", ".join(table)} or "package.module:attribute"'
        )
    return target


def _plain(value: Any) -> Any:
    """Mappings of any kind as dicts, sequences as lists: what JSON holds."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
