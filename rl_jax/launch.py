"""`python -m rl_jax.launch`: flags -> settings -> checks -> the parts, wired -> Driver.run().

Owns: the exit codes; nothing imports this file. Life: 1 config.parse reads and checks everything without jax; a bad
word, or a run directory that cannot be used, is told in under a second. 2 The environments are imported once in a
worker process and their tasks read, beside the import of jax. 3 The plan is built, the run directory opened. 4 The mode
runs. 5 Whatever ends it becomes one line and an exit code.
Must not: hold a rule of its own about values (validate.py) or about order (driver.py).
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from rl_jax import backend, config, live_view, resume
from rl_jax.algorithms.options import is_known, learns_from_rows
from rl_jax.console import say
from rl_jax.mesh import MeshPlan
from rl_jax.names import resolve
from rl_jax.progress import Progress
from rl_jax.rollout.worker import EnvPool
from rl_jax.run_dir import check_usable
from rl_jax.settings import Settings
from rl_jax.signals import Preempted, on_signal, stop_at_once
from rl_jax.validate_cluster import drives_from_cpu

EXIT_CONFIG, EXIT_PREEMPTED, EXIT_INTERRUPT = 2, 75, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job; returns the exit code (0 done, 2 config, 3 data, 4 environments, 5 servers or the learner's
    processes, 6 numbers, 7 storage,
    75 preempted and saved, 130 interrupted)."""
    with on_signal(signal.SIGTERM, stop_at_once):  # a job's own handlers take over later
        try:
            return _main(sys.argv[1:] if argv is None else argv)
        except Preempted as error:
            return _tell(error, EXIT_PREEMPTED)


def _main(argv: Sequence[str]) -> int:
    try:
        parsed = config.parse(argv)
        settings, options = parsed.settings, parsed.options
        if is_known(settings.algorithm):  # else by job.py, once it is loaded
            if options.run_dir:
                resume.decide(Path(options.run_dir), settings, options.resume)
            if options.mode == "eval":
                resume.check_eval(options.run_dir, settings, options.resume)
        if options.run_dir or not options.dry_run:
            check_usable(options.run_dir, is_held=not options.dry_run)
        if settings.metrics.progress == "rich" and (why := live_view.missing()):
            raise config.ConfigError([why])
        _set_backend(settings, options.dry_run)
    except (config.ConfigError, resume.RunDirError, backend.BackendError) as error:
        return _tell(error, EXIT_CONFIG)
    progress = Progress(settings.steps, settings.metrics.progress, settings.metrics.heartbeat_s)
    try:
        pool = None
        if config.plays_episodes(parsed):
            pool = EnvPool(
                settings.tasks.sources,
                settings.rollout,
                settings.rewards,
                scouts=1 if settings.cluster.moves_workers and not _plays_rows(parsed) else None,
            )
            pool.spawn()  # their imports run beside ours
        progress.start_heartbeat()
        return importlib.import_module("rl_jax.job").run(parsed, pool, progress, resolve)
    except KeyboardInterrupt as error:
        say(" ".join(map(str, error.args)) or "interrupted", sys.stderr)
        return EXIT_INTERRUPT
    except BaseException as error:  # Preempted is no Exception, and is told here too
        code = importlib.import_module("rl_jax.exit_codes").exit_code(error)
        if code is not None:
            return _tell(error, code)
        if not isinstance(error, Exception):
            raise
        traceback.print_exc()  # a bug of ours: the trace is the useful part
        return 1
    finally:
        progress.close()


def _plays_rows(parsed: config.Parsed) -> bool:
    """Whether the environments' scripts are all that a run needs of them, and there are no servers."""
    settings = parsed.settings
    if parsed.options.mode != "train" or not is_known(settings.algorithm):
        return False
    return learns_from_rows(settings.algorithm, settings.data)


def _set_backend(settings: Settings, dry_run: bool = False) -> None:
    """Tell JAX, before its import, which backend and how many simulated devices: in a dry run, and where the real ones
    are other processes', as many as the plan needs, whatever the machine has. Raises BackendError."""
    mesh = settings.mesh
    plan = MeshPlan.from_settings(mesh, settings.model)
    backend.avoid_broken_fusions()
    takes_devices = not drives_from_cpu(settings)
    if takes_devices:
        if mesh.platform == "cpu" or all(pool.hardware == "cpu" for pool in plan.pools):
            backend.simulate_cpu_devices(plan.num_devices)  # on an accelerator this changes nothing
        backend.use_platform(mesh.platform)
    if dry_run or not takes_devices:
        backend.only_simulate(plan.num_devices)
    backend.enable_compile_cache()


def _tell(error: BaseException, code: int) -> int:
    """One line for each thing that is wrong; returns the code."""
    lines = getattr(error, "errors", (str(error),))
    for line in lines:
        print(f"error: {' '.join(line.split()) or type(error).__name__}", file=sys.stderr)
    return code


def leave(code: int) -> None:
    """End the process. A server's thread that is stuck in a compile would crash an orderly exit of the interpreter; one
    that is stuck in a file would be waited for."""
    names = ("serve-", "rows", "traces", "save-")
    stuck = [t.name for t in threading.enumerate() if t.name.startswith(names)]
    say("", sys.stdout)
    say("", sys.stderr)
    if stuck or code == EXIT_INTERRUPT:  # a save that a second Ctrl-C left would print its end
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
