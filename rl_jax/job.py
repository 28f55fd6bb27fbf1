"""One job: checked, its run directory opened, its parts built, run in a mode, closed in reverse.

Life of `run` (a notebook's run calls the same `prepare`, and stops between steps): 1 The devices are counted, the
environments' tasks and a supervised run's rows read; nothing is written before all is known to fit (preflight.py,
supervised.py). 2 The run directory is opened. 3 Model and learner; weights from a checkpoint, or fresh and warm-started
on scripted episodes. 4 Servers, router, rollout, sync; none where rows alone are trained on (3 and 4: wiring.py). 5 The
Driver, in the mode asked for. 6 summary.json and the report; everything is closed, whatever happened.
Must not: decide the order of a step (driver.py), or check a value that config.parse could check.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from rl_jax import report, schema
from rl_jax.algorithms.contract import AlgorithmRaised
from rl_jax.algorithms.options import learns_from_rows
from rl_jax.algorithms.plugin import make_algorithm
from rl_jax.build_roles import Setting
from rl_jax.config import ConfigError, LaunchOptions, Parsed, resolved_python
from rl_jax.disk import disk_full
from rl_jax.driver import SAVED, Driver
from rl_jax.dry_run import dry_run, write_plan
from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.plan_record import check_disk, plan_record
from rl_jax.preflight import (
    Resolve,
    build_model,
    check_first_prompts,
    check_messages,
    load_names,
    load_plugin,
    prepare_tasks,
    present_devices,
)
from rl_jax.preflight_cluster import check_addresses, check_backend, check_gpus
from rl_jax.preflight_model import check_weights, history_notes
from rl_jax.progress import Progress
from rl_jax.resume import (
    PLAN,
    RUNS,
    auto_path,
    check_eval,
    check_replay,
    check_template,
    checkpoint_steps,
    decide,
    encode,
    template_of,
)
from rl_jax.rollout.blocking import run_blocking
from rl_jax.rollout.worker import EnvPool
from rl_jax.run_dir import RunDir
from rl_jax.settings import Settings
from rl_jax.signals import Preempted, interrupt, on_signal, stop_at_once
from rl_jax.start import (
    reads_source,
    saved_batches,
    saved_steps,
)
from rl_jax.supervised import (
    read_rows,
    with_steps,
)
from rl_jax.tokens import Renderer
from rl_jax.watching import check_watch
from rl_jax.wiring import (
    Job,
    build_driver,
    build_live,
    build_replay,
    make_checkpointer,
    make_recorder,
    open_traces,
)

LOG = logging.getLogger(__name__)

END_STATES = ((Preempted, "preempted"), (KeyboardInterrupt, "interrupted"))  # others: "failed"


def run(parsed: Parsed, pool: EnvPool | None, progress: Progress, resolve: Resolve) -> int:
    """Run one job to its end; returns 0. pool: spawned, or None where the mode needs no environment."""
    # Outside the driver's loops (before them, and in --mode=eval) there is nothing that a save would keep.
    with contextlib.ExitStack() as stack:
        kept = [
            stack.enter_context(on_signal(number, handle))
            for number, handle in ((signal.SIGTERM, stop_at_once), (signal.SIGINT, interrupt))
        ]
        check_signals = lambda: [k.check() for k in kept]
        job = prepare(parsed, pool, progress, resolve, stack, check_signals)
        if job is None:
            return 0
        with ending(job):
            _run_mode(job)
            check_signals()
        job.run_dir.status("done")
    return 0


def prepare(
    parsed: Parsed,
    pool: EnvPool | None,
    progress: Progress,
    resolve: Resolve,
    stack: contextlib.ExitStack,
    check_stop: Callable[[], Any],
) -> Job | None:
    """Everything that is checked before something is written, then the run directory; None after a dry run.

    pool: as run(). stack: closes what was opened, the pool among it. check_stop: raises if a signal came and was lost.
    """
    options, settings = parsed.options, parsed.settings
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    if pool is not None:
        stack.callback(lambda: run_blocking(pool.close()))
    check_backend(settings.cluster.backend)
    check_watch(settings.metrics)
    if not options.dry_run:
        check_addresses(settings.cluster)
        check_gpus(plan, settings)
    meshes = build_meshes(plan, present_devices(plan, "cpu" if options.dry_run else None))
    settings = load_plugin(settings, resolve, parsed.chosen)
    if options.mode == "eval":
        check_eval(options.run_dir, settings, options.resume)
    renderer = load_names(settings, plan, resolve, options.mode)
    if pool is not None:
        _check_environments(settings, pool, renderer, options, progress)
    elif options.mode == "train_only":
        saved_steps(settings)
        check_replay(Path(settings.rollout.replay_dir), renderer.template_sha256)
    corpus = None
    if options.mode == "train" and learns_from_rows(settings.algorithm, settings.data):
        corpus = read_rows(settings, renderer)
        settings = with_steps(settings, corpus)
        progress.total_steps = settings.steps
    where = Path(options.run_dir) if options.run_dir else auto_path(settings)[0]
    folder = Path(options.run_dir or RUNS)
    setting = Setting(settings, plan, meshes, folder, resolve, progress.note, options.mode)
    model = build_model(settings, resolve, renderer.tokenizer.vocab_size)
    decision = decide(where, settings, options.resume)
    check_weights(setting, model, reads_source(settings, options.mode, decision))
    record = plan_record(setting, model, pool, corpus)
    record["template_sha256"] = renderer.template_sha256
    if options.run_dir:
        check_template(Path(options.run_dir), renderer.template_sha256, options.resume)
    if options.dry_run:
        dry_run(setting, model, record, renderer, pool, progress)
        if options.run_dir:
            write_plan(setting, record)
        return None
    check_disk(record)
    run_dir = _open_run_dir(options, settings, record, stack)
    traces = open_traces(run_dir, settings, stack)
    if pool is not None:
        pool.log_dir = run_dir.logs
    for line in _opening_lines(run_dir, plan, renderer.template_sha256):
        progress.note(line)
    check_stop()
    settings = replace(settings, run_id=run_dir.run_id)
    job = Job(
        replace(setting, settings=settings, run=run_dir.path),
        model, run_dir, progress, renderer, pool, stack, check_stop, traces, corpus,
    )  # fmt: skip
    run_dir.status("running", mode=options.mode)
    return job


def _check_environments(
    settings: Settings,
    pool: EnvPool,
    renderer: Renderer,
    options: LaunchOptions,
    progress: Progress,
) -> None:
    """Their tasks and first prompts."""
    told = lambda: ", ".join(wait.text(time.monotonic()) for wait in pool.waits())
    with progress.phase("environments", "importing them in their worker processes", told):
        prepare_tasks(settings, pool, options.mode)
        check_messages(settings, pool, renderer.tokenizer)
        if not options.dry_run:  # it asks for more of them
            openings = check_first_prompts(settings, pool, renderer)
            for line in history_notes(settings, openings, renderer):
                progress.note(line)


def _open_run_dir(
    options: LaunchOptions,
    settings: Settings,
    record: Mapping[str, Any],
    stack: contextlib.ExitStack,
) -> RunDir:
    """Locked and written; what runs the attempt is its first event. record: of plan_record."""
    files = {
        "config.resolved.py": resolved_python(settings),
        PLAN: encode(record, indent=1) + "\n",
    }
    run_dir = RunDir.open(options.run_dir, settings, options.resume, files)
    stack.callback(run_dir.close)
    stack.push(lambda kind, error, trace: _raise_if_disk_full(error, run_dir))
    run_dir.start_logging()
    run_dir.write_env(devices=[str(device) for device in jax.devices()])
    changing = {"steps": settings.steps, "guards": schema.to_tree(settings.guards)}
    run_dir.event("attempt", mode=options.mode, **changing, **machine())
    return run_dir


def machine() -> dict[str, str]:
    """What decides, beside the config, which bits a step computes; a replay compares it."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "xla_flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
    }


@contextlib.contextmanager
def ending(job: Job) -> Iterator[None]:
    """Whatever ends the block stands in STATUS.json and in the log, and says how to go on."""
    run_dir = job.run_dir
    try:
        yield
    except BaseException as error:
        state = next((s for kind, s in END_STATES if isinstance(error, kind)), "failed")
        run_dir.status(state, error=f"{type(error).__name__}: {error}".removesuffix(": "))
        LOG.info("the run ended by", exc_info=True)  # where it came from, for driver.log only
        if isinstance(error, KeyboardInterrupt):
            error.args = (f"interrupted; {_goes_on(run_dir)}",)
        _raise_if_out_of_memory(error)
        if isinstance(error, AlgorithmRaised):
            log = run_dir.logs / "driver.log"
            raise AlgorithmRaised(f"{error}; its traceback is in {log}") from error
        raise


def _raise_if_out_of_memory(error: BaseException) -> None:
    """XLA tells a config that does not fit as it tells a bug of its own."""
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        raise ConfigError(
            [
                f"the devices' memory is too small: {str(error).splitlines()[0]}; --dry_run shows what each pool"
                " holds: use more devices, or less of engine.slots, engine.context and learner.microbatch_rows"
            ]
        ) from error


def _raise_if_disk_full(error: BaseException | None, run_dir: RunDir) -> None:
    """Whatever it ended first: the file, the remedy, and from where the run goes on."""
    if (full := disk_full(error)) is None:
        return
    text = f"{full.filename or run_dir.path}: {full.strerror}; free some space, then {_goes_on(run_dir)}"
    run_dir.status("failed", error=text)
    raise OSError(text) from error


def _opening_lines(run_dir: RunDir, plan: MeshPlan, template: str) -> Iterator[str]:
    """Where the run is, on what, and from what it goes on. template: the hash of this run's."""
    yield f"run directory {run_dir.path}"
    yield plan.describe()
    source = run_dir.decision.resume_from
    if run_dir.attempt and source is None:
        yield f"no checkpoint here: from step 0 again; older records are in {run_dir.path}/quarantine"
        if changes := run_dir.decision.changes:
            yield f"config changed since: {'; '.join(changes)}"
    theirs = template_of(source.parent.parent) if source is not None else None
    if theirs is not None and theirs != template:
        yield (
            f"warning: {source} was trained with another tokenizer or chat template ({theirs[:12]}, here"
            f" {template[:12]}): its weights know that one"
        )


def _goes_on(run_dir: RunDir) -> str:
    """How a run that ended early is taken up, and what of it is kept."""
    steps = checkpoint_steps(run_dir.path)
    return f"start the same command again with --run_dir={run_dir.path}: it goes on from " + (
        f"step {steps[-1]}, the last one saved" if steps else "the start, as no step is saved"
    )


def _run_mode(job: Job) -> None:
    setting, settings, mode = job.setting, job.settings, job.setting.mode
    if mode == "train":
        driver = build_driver(job)
        driver.run()
        return tell_end(job, driver)
    checkpointer, recorder = make_checkpointer(job), make_recorder(job)
    algorithm = make_algorithm(settings.algorithm, setting.resolve)
    build = build_replay if mode == "train_only" else build_live
    driver = build(job, algorithm, checkpointer, recorder)
    if mode == "train_only":
        driver.replay(saved_batches(settings, after=driver.state.version))
    elif mode == "rollout_only":
        driver.collect()
    else:
        driver.publish(driver.state.version)
        driver.evaluate("last")
    tell_end(job, driver)


def tell_end(job: Job, driver: Driver) -> None:
    """summary.json, and what a person reads after a run."""
    recorder, state, mode = driver.parts.recorder, driver.state, job.setting.mode
    if job.setting.reads:
        assert job.corpus is not None, "build_rows has it"
        recorder.summary({}, {}, held_out=state.evaluations, data=dict(job.corpus.counts))
        lines = report.fitted_lines(job.run_dir, job.settings, state)
    else:
        ledger = driver.parts.ledger
        episodes = ledger.counts() if ledger is not None else {}
        saved = {"saved": ledger.num_dropped(SAVED)} if mode == "rollout_only" else {}
        summary = recorder.summary(state.evaluations, episodes, **saved)
        lines = report.closing_lines(job.run_dir, mode, summary, state.version, job.settings)
    for line in lines:
        job.progress.note(line)
