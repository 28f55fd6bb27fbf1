"""The parts of one job around its driver, built in order: what a run by launch and one in a notebook share.

Owns: which parts there are and how they are wired; `Job`, what every step of building needs. Life: 1 `make_recorder`
and a Checkpointer. 2 `build_live` (episodes: servers, router, rollout, sync, warm start), `build_rows` (a supervised
run) or `build_replay` (saved batches) gives a Driver that has not begun. Whatever was started is closed by Job.stack,
in reverse.
Must not: run a step (driver.py), or choose a mode (job.py).
"""

import contextlib
import gc
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_jax.algorithms.plugin import make_algorithm
from rl_jax.build_roles import Setting, make_roles, open_roles
from rl_jax.checkpoint import Checkpointer
from rl_jax.cluster import Cluster, learner_specs, make_cluster, make_starter, open_starter
from rl_jax.control import Reader
from rl_jax.data.corpus import Corpus
from rl_jax.data.stream import ExampleStream
from rl_jax.driver import Driver, Parts
from rl_jax.learner.flops import peak_flops
from rl_jax.learning import Learning, LearnsElsewhere, LearnsHere
from rl_jax.ledger import Ledger
from rl_jax.metrics import Metric, MetricsWriter
from rl_jax.models.model import Model
from rl_jax.pool_facts import pool_facts
from rl_jax.profiling import CompileSpans
from rl_jax.progress import Progress
from rl_jax.recorder import Recorder
from rl_jax.remote.spec import Spec
from rl_jax.remote.starter import Starter
from rl_jax.resume import METRICS
from rl_jax.rollout.blocking import run_blocking
from rl_jax.rollout.buffer import SampleBuffer
from rl_jax.rollout.curriculum import ANY, Bandit
from rl_jax.rollout.rollout import Rollout
from rl_jax.rollout.scheduler import SCHEDULERS
from rl_jax.rollout.tasks import TaskStream
from rl_jax.rollout.worker import EnvPool
from rl_jax.run_dir import RunDir
from rl_jax.settings import Settings
from rl_jax.start import starting_point
from rl_jax.steering import Steering
from rl_jax.supervised import make_trained, play_rows, remember_reference
from rl_jax.timeline import Traces
from rl_jax.tokens import Renderer
from rl_jax.types import Group, Task
from rl_jax.validate import check
from rl_jax.warm_start import warm_start
from rl_jax.watching import Watch
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.sync import WeightSync

LOG = logging.getLogger(__name__)

TRACES = "traces"  # the timeline's files, in the run directory


@dataclass
class Job:
    """What every step of building needs."""

    setting: Setting
    model: Model
    run_dir: RunDir
    progress: Progress
    renderer: Renderer
    pool: EnvPool | None
    stack: contextlib.ExitStack  # closes what was opened, in reverse
    check_stop: Callable[[], None]  # raises Preempted if SIGTERM came and its exception was lost
    traces: Traces  # its timeline
    corpus: Corpus | None = None  # of a supervised run, once its rows are read or played
    watch: Watch = None  # type: ignore[assignment]  # by make_recorder

    @property
    def settings(self) -> Settings:
        return self.setting.settings


def build_driver(job: Job) -> Driver:
    """Of a run that trains: on rows where its algorithm reads them, else on episodes; it has not begun."""
    checkpointer, recorder = make_checkpointer(job), make_recorder(job)
    algorithm = make_algorithm(job.settings.algorithm, job.setting.resolve)
    build = build_rows if job.setting.reads else build_live
    return build(job, algorithm, checkpointer, recorder)


def make_checkpointer(job: Job) -> Checkpointer:
    """Closed with the job."""
    checkpointer = Checkpointer(
        job.run_dir.path,
        job.settings.checkpoint,
        keep_oldest=job.setting.mode == "rollout_only",
    )
    job.stack.callback(checkpointer.finish)
    return checkpointer


def build_replay(
    job: Job, algorithm: Any, checkpointer: Checkpointer, recorder: Recorder
) -> Driver:
    """train_only: a learner, no servers."""
    settings = job.settings
    others = learner_specs(job.setting.plan, settings)
    learning = _learning(job, algorithm, checkpointer, _starter(job, others))
    with job.progress.doing("the weights of the start"):
        state, _ = learning.begin()
    waits = (learning.waits, recorder.waits)
    job.progress.start_heartbeat(lambda: "saved episodes", waits)
    job.watch.name_endpoints(others)
    learning.open()
    parts = Parts(
        learning.roles, None, None, None, None, algorithm, learning.checkpointer, recorder, {}
    )
    return Driver(parts, settings, state, _steering(job, recorder))


def build_live(job: Job, algorithm: Any, checkpointer: Checkpointer, recorder: Recorder) -> Driver:
    """Servers, router, rollout and sync round the learner, warm-started where the config says so."""
    setting, settings, model = job.setting, job.settings, job.model
    cluster = make_cluster(
        setting.plan, setting.meshes, model, settings, job.renderer.template_sha256,
        job.run_dir.logs,
    )  # fmt: skip
    cluster.trace(job.traces)
    job.stack.callback(cluster.close)
    learning = _learning(job, algorithm, checkpointer, cluster.starter)
    with job.progress.doing("the weights of the start"):
        begun = None if learner_specs(setting.plan, settings) else learning.begin()
    _import_before_threads()
    cluster.start()  # they compile from now on, beside all that follows
    for line in cluster.commands:
        job.progress.note(line)
    _move_workers(job, cluster)
    state, extra = begun or learning.begin()
    parts = _live_parts(job, cluster, learning, algorithm, recorder, extra)
    driver = Driver(parts, settings, state, _steering(job, recorder))
    if setting.mode == "train" and 0 < settings.steps <= state.version:
        job.progress.note(
            f"version {state.version} is past steps={settings.steps}: nothing is trained; raise --config.steps"
        )
    if job.run_dir.decision.resume_from is None and setting.warms_up:
        _warm_start(job, cluster, learning, parts)
    learning.open()
    _settle(job, cluster)
    job.check_stop()
    return driver


def build_rows(job: Job, algorithm: Any, checkpointer: Checkpointer, recorder: Recorder) -> Driver:
    """A supervised run: a learner and a stream of rows; no servers."""
    setting, settings, progress = job.setting, job.settings, job.progress
    corpus = job.corpus
    if corpus is None:
        assert job.pool is not None
        with progress.phase("scripted episodes"):
            job.corpus = corpus = play_rows(settings, job.pool, job.renderer)
    progress.note(corpus.describe())
    job.run_dir.event("data", digest=corpus.digest, **corpus.counts)
    roles = make_roles(setting, make_trained(setting, job.model, algorithm))
    roles.trace(job.traces.track("train/learner"))
    state, extra, source = starting_point(setting, job.run_dir.decision, checkpointer, roles)
    open_roles(setting, roles, source)
    if roles.frozen:
        with progress.phase("reference", "the log-probs of every row, once"):
            remember_reference(roles, corpus, settings)
    stream = ExampleStream(corpus.train, corpus.digest, settings.data, settings.seed)
    job.stack.callback(stream.close)
    if extra:
        stream.restore(extra["rows"])
    progress.start_heartbeat(lambda: "rows", (stream.waits, checkpointer.waits))
    parts = Parts(
        roles, None, None, None, None, algorithm, checkpointer, recorder, {}, stream,
        corpus.held_out,
    )  # fmt: skip
    return Driver(parts, settings, state, _steering(job, recorder))


def _starter(job: Job, specs: Sequence[Spec]) -> Starter | None:
    """What starts the learner's processes where there are no servers. Raises: ServersNotReady."""
    if not specs:
        return None
    starter = make_starter(job.settings.cluster, job.run_dir.logs, specs)
    starter.traces = job.traces
    job.stack.callback(starter.close)
    open_starter(starter, specs)
    for line in starter.commands:
        job.progress.note(line)
    return starter


def _learning(
    job: Job, algorithm: Any, checkpointer: Checkpointer, starter: Starter | None
) -> Learning:
    """Where the config says that the policy trains. starter: of the learner's processes, if it has any."""
    setting, model, decision = job.setting, job.model, job.run_dir.decision
    if not setting.settings.cluster.learner_processes:
        here = LearnsHere(setting, model, algorithm, decision, checkpointer)
        here.trace(job.traces)
        return here
    assert starter is not None, "whoever asks for processes made it"
    learning = LearnsElsewhere(setting, model, decision, starter, job.run_dir.event)
    job.stack.callback(learning.roles.close)
    return learning


def _move_workers(job: Job, cluster: Cluster) -> None:
    """To where the cluster puts them, if not here; they end before what started them is closed."""
    pool, place = job.pool, cluster.worker_place
    if pool is not None and place is not None:
        job.stack.callback(lambda: run_blocking(pool.close()))
        pool.move(place)


def _import_before_threads() -> None:
    """What replaces builtins.__import__ while it is imported (etils' lazy imports) must be done before servers compile:
    a thread that imports meanwhile, as JAX does while it traces, gets a lazy module in place of a class."""
    for name in ("grain", "orbax.checkpoint"):
        importlib.import_module(name)


def _live_parts(
    job: Job,
    cluster: Cluster,
    learning: Learning,
    algorithm: Any,
    recorder: Recorder,
    extra: Mapping[str, Any],
) -> Parts:
    """Rollout and sync around the cluster and the learner; all started."""
    settings, stack, pool, learner = job.settings, job.stack, job.pool, learning.roles.policy
    model = learner.model
    assert pool is not None, "every mode but train_only has environments"
    targets = cluster.watched_targets(settings.weights.deadline_s)
    plan = SyncPlan.build(
        model.abstract, model.logical_axes, learner.mesh, learner.param_shardings,
        targets, settings.model.dtype, settings.weights,
    )  # fmt: skip
    transport = learning.transport(plan) if learning.transport is not None else None
    sync = WeightSync(plan, targets, settings.weights, transport)
    sync.track = job.traces.track("sync")
    stack.callback(sync.close)
    ledger = Ledger(job.run_dir.ledger, settings.run_id)
    stack.callback(ledger.close)
    tags = [source.tag for source in settings.tasks.sources]
    chooses = settings.tasks.curriculum.name != "none"
    stream = TaskStream(
        {tag: pool.list_tasks(tag, "train") for tag in tags}, settings.seed, settings.tasks.shuffle,
        Bandit(tags, settings.seed, settings.tasks.curriculum) if chooses else None,
    )  # fmt: skip
    buffer = SampleBuffer(settings.rollout, ledger, (ANY,) if chooses else tags)
    rollout = Rollout(
        cluster.router, stream, pool, job.renderer, buffer, ledger,
        job.setting.resolve(settings.rollout.scheduler, SCHEDULERS)(), settings.rollout,
        run_id=settings.run_id, seed=settings.seed, context=settings.engine.context,
        row_tokens=settings.learner.row_tokens, vocab_size=job.model.vocab_size,
        turn_deadline_s=settings.serve.turn_deadline_s,
        stop_deadline_s=settings.serve.stop_deadline_s,
        rewards=settings.rewards, sources=settings.tasks.sources,
        quarantine_dir=job.run_dir.path / "quarantine",
    )  # fmt: skip
    rollout.gone = cluster.gone
    rollout.trace(job.traces)
    stack.callback(rollout.close)
    rollout.start()
    if "stream" in extra:
        if job.setting.owns(job.run_dir.decision.resume_from):
            ledger.check_seq(extra["ledger_seq"])
        ledger.void(extra["version"])
        job.traces.track("run/facts").mark("resumed", version=extra["version"])
        stream.restore(extra["stream"])
        rollout.issue_again([stream.task(epoch, index) for epoch, index in extra["pending"]])
    job.traces.track("run/facts").mark("ledger", seq=ledger.seq)
    waits = (rollout.waits, cluster.waits, learning.waits, ledger.waits)
    recorder.watch(cluster.counters, rollout.status, waits)
    specs = cluster.specs or learner_specs(job.setting.plan, settings)
    job.watch.attach(cluster, rollout, specs)
    cluster.router.tell = recorder.event
    evaluations = evaluation_tasks(settings, pool)
    return Parts(
        learning.roles, rollout, buffer, ledger, sync, algorithm, learning.checkpointer, recorder,
        evaluations,
    )  # fmt: skip


def _settle(job: Job, cluster: Cluster) -> None:
    """Wait for the servers' programs, then put what exists by now out of the garbage collector's sight.

    Tracing a big model leaves so many objects alive that each full collection takes 0.2 to 0.4 s, in which no server
    starts its next block: the collector stops every thread.
    """
    with job.progress.phase("servers", "compiling their programs", cluster.doing):
        cluster.wait_ready(job.settings.serve.compile_deadline_s)
    gc.collect()
    gc.freeze()
    job.stack.callback(
        gc.unfreeze
    )  # a notebook's or a test's process runs many jobs, and outlives them


def evaluation_tasks(settings: Settings, pool: EnvPool) -> dict[str, Sequence[Task]]:
    """name -> pinned tasks: each tag's eval split under its tag, each further held-out split under tag_split.

    A split with fewer than eval.episodes tasks is played in turns: each episode samples with a seed of its own.
    """
    found: dict[str, Sequence[Task]] = {}
    for source in settings.tasks.sources:
        for split in pool.splits(source.tag):
            if split == "train":
                continue
            name = source.tag if split == "eval" else f"{source.tag}_{split}"
            tasks = pool.list_tasks(source.tag, split)
            found[name] = [tasks[i % len(tasks)] for i in range(settings.eval.episodes)]
    return found


def open_traces(run_dir: RunDir, settings: Settings, stack: contextlib.ExitStack) -> Traces:
    """The timeline of this attempt, with what this process compiles; closed after all that is opened from now on."""
    where = run_dir.path / TRACES / f"attempt_{run_dir.attempt}"
    traces = Traces(where, run_dir.attempt, settings.metrics.timeline_bytes)
    stack.callback(traces.close)
    stack.callback(CompileSpans(traces.timeline).close)
    return traces


def _begin_timeline(job: Job, recorder: Recorder) -> None:
    """What a reader of the timeline must know first; the event has the time of day of its clock."""
    facts = pool_facts(job.setting, job.model)
    devices = {name: pool["devices"] for name, pool in facts["pools"].items()}
    trains = next((name for name, pool in facts["pools"].items() if pool["trains"]), "")
    recorder.trace(job.traces, devices, trains)
    if job.traces.is_on:
        job.traces.track("run/facts").mark("pools", mode=job.setting.mode, **facts)
        job.run_dir.event("timeline", path=f"{TRACES}/attempt_{job.run_dir.attempt}")


def make_recorder(job: Job) -> Recorder:
    if job.run_dir.decision.resume_step and job.setting.owns(job.run_dir.decision.resume_from):
        file = job.run_dir.path / METRICS
        if not file.exists() or not file.stat().st_size:
            LOG.warning("%s is gone: the rows of the steps before are lost; the run goes on", file)
    decode = job.renderer.tokenizer.decode
    watch = Watch.open(job.settings, job.run_dir, job.progress, decode, job.setting.resolve)
    job.stack.callback(watch.close)
    writer = MetricsWriter(job.run_dir.path, job.run_dir.attempt, on_row=watch.on_row)
    job.stack.callback(writer.close)
    recorder = Recorder(
        job.run_dir, writer, job.progress, job.settings.metrics, decode,
        peak_flops(job.setting.meshes.train), feeds=watch.feeds,
    )  # fmt: skip
    job.stack.callback(recorder.close)
    job.watch = watch
    _begin_timeline(job, recorder)
    return recorder


def _steering(job: Job, recorder: Recorder) -> Steering:
    settings, run, mode = job.settings, job.run_dir, job.setting.mode
    steering = Steering(
        Reader(run.path, run.attempt), recorder, lambda s: check(s, mode), mode,
        settings.rollout.max_staleness,
    )  # fmt: skip
    job.stack.callback(steering.refuse_rest, "the run has ended")
    job.watch.is_paused = lambda: steering.is_paused
    return steering


def _warm_start(job: Job, cluster: Cluster, learning: Learning, parts: Parts) -> None:
    """Supervised steps on scripted episodes; leaves version 0 in the policy, with a fresh optimizer."""
    settings, pool, cfg, recorder = job.settings, job.pool, job.settings.warm_start, parts.recorder
    assert pool is not None
    groups: list[Group] = []
    with job.progress.phase("scripted episodes"):
        for source in settings.tasks.sources:
            if source.script_episodes:
                tasks = pool.list_tasks(source.tag, "train")
                groups += parts.rollout.scripted(tasks, source.script_episodes, source.script_skill)
    teacher = learning.teacher()
    done = "compiling"

    def record(step: int, metrics: Mapping[str, Metric]) -> None:
        nonlocal done
        recorder.warm_start(step, metrics)
        job.check_stop()
        cluster.check()  # minutes before anybody would ask it for something
        done = f"step {step} of {cfg.steps}, loss {metrics['policy/loss'].mean:.3f}"

    with job.progress.phase("warm start", "the first step compiles", lambda: done):
        loss = warm_start(teacher, groups, cfg, settings.seed, record)
    learning.adopt(teacher)
    job.progress.note(f"warm start ended at a loss of {loss:.3f} nats a token")
