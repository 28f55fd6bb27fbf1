"""`python -m rl_jax.launch`: flags -> settings -> checks -> the parts, wired -> Driver.run().

Owns: the exit codes; nothing imports this file. Life: 1 config.parse reads and checks everything without jax; a bad
word, or a run directory that cannot be used, is told in under a second (outset.py). 2 The environments are imported
once in a worker process and their tasks read, beside the import of jax. 3 The plan is built, the run directory opened.
4 The mode runs. 5 Whatever ends it becomes one line and an exit code.
Must not: hold a rule of its own about values (validate.py) or about order (driver.py).
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

from rl_jax import config, outset
from rl_jax.console import say
from rl_jax.names import resolve
from rl_jax.progress import Progress
from rl_jax.signals import Preempted, on_signal, stop_at_once

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
        outset.check_directory(parsed)
        settings = parsed.settings
        outset.set_backend(settings, parsed.options.dry_run)
    except outset.ERRORS as error:
        return _tell(error, EXIT_CONFIG)
    progress = Progress(settings.steps, settings.metrics.progress, settings.metrics.heartbeat_s)
    try:
        pool = outset.spawn_pool(parsed)
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
