"""A run that a notebook drives, cell by cell: the parts of launch's job, stepped by hand.

Owns: `Run`, and the three functions of `rl_jax` (`quickstart`, `run`, `open_run`, there named `open`). The parts are
wired by wiring.py, and the steps are the Driver's: after the same steps a run holds what launch's holds.
Life: 1 config.parse, outset.py and job.prepare check as launch does, and raise what it would print. 2 The parts are
built, the start's weights served. 3 `step`, `evaluate`, `chat`, `save`, `export`, in any order, one at a time; between
two cells episodes go on up to rollout.max_staleness, and nothing is printed. 4 After the last step the run is finished
as launch finishes it; its servers stay for `evaluate` and `chat`. 5 `close`, the end of a `with` block, or of Python.
Interrupts: the first one is heard where no step is half done, raised as KeyboardInterrupt, and the next call goes on; a
second one is raised at once, and where it hits an update the run can only be opened again from its last save. SIGINT's
handler is replaced while a call is under way, on the main thread alone, and put back; no other handler is touched.
Must not: know an order within a step, or decide anything that a config decides.
"""

import contextlib
import importlib
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_jax import outset
from rl_jax.config import Parsed, parse
from rl_jax.names import resolve
from rl_jax.notebook.chat import Chat, without_servers
from rl_jax.notebook.files import RunFiles
from rl_jax.progress import Progress
from rl_jax.resume import checkpoint_of
from rl_jax.signals import interrupt, on_signal

LOOK_S = 0.1  # between two looks whether Python ends
CLOSED = "the run is closed; rl_jax.run(run_dir=...) goes on with it, rl_jax.open(...) reads it"


class RunClosed(RuntimeError):
    """It can do nothing any more, but its files can be read."""


def quickstart(
    changes: Mapping[str, Any] | None = None, *, run_dir: str | Path = "", **overrides: Any
) -> "Run":
    """The quickstart's run, ready for its first step; minutes, as it is warm-started. All arguments: as of `run`."""
    return run("quickstart", changes, run_dir=run_dir, **overrides)


def run(
    config: str | Path = "",
    changes: Mapping[str, Any] | None = None,
    *,
    run_dir: str | Path = "",
    mesh: str = "",
    resume: str = "auto",
    **overrides: Any,
) -> "Run":
    """A run of any config, ready for its first step.

    Args:    config: a file or a name of rl_jax/configs; "" = that of the run in run_dir, which goes on, else the
             quickstart.  changes: dotted key -> value, as {"rollout.max_staleness": 0}.  overrides: those of keys
             without a dot, as steps=6.  run_dir, mesh, resume: as the flags of launch.
    Raises:  ConfigError, RunDirError, BackendError, and what else launch would tell and exit for.
    """
    values = {**(changes or {}), **overrides}
    words = [
        f"--config.{key}={value if isinstance(value, str) else repr(value)}"
        for key, value in values.items()
    ]
    flags = {"config": config, "run_dir": run_dir, "mesh": mesh, "resume": resume}
    words += [f"--{name}={value}" for name, value in flags.items() if str(value)]
    return Run(parse(words))


def open_run(run_dir: str | Path) -> RunFiles:
    """A run that somebody else made, or makes: its figures, episodes and config. Raises RunDirError."""
    return RunFiles(run_dir)


class Run(RunFiles):
    """Sole user of its Driver. Close it, or use it in a `with` statement."""

    def __init__(self, parsed: Parsed):
        """Builds everything; what was opened is closed again if that fails or is interrupted."""
        outset.check_directory(parsed)
        settings = parsed.settings
        outset.set_backend(settings)
        self._progress = Progress(
            settings.steps, settings.metrics.progress, settings.metrics.heartbeat_s
        )
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._progress.close)
        self._is_closed, self._is_finished, self._broken = False, False, ""
        self._closing = threading.Event()
        self._asked = threading.Lock()  # one call at a time
        self._chatted = 0  # tokens of conversations that the figures know to be nobody's
        try:
            self._build(parsed)
        except BaseException:
            self._is_closed = True
            self._stack.close()
            raise
        super().__init__(self._job.run_dir.path)
        threading.Thread(target=self._watch_main, name="notebook-end").start()
        self._progress.is_idle = True

    def _build(self, parsed: Parsed) -> None:
        with on_signal(signal.SIGINT, interrupt) as kept:
            pool = outset.spawn_pool(parsed)
            self._progress.start_heartbeat()
            self._jobs = importlib.import_module("rl_jax.job")
            driver, buffer = "rl_jax.driver", "rl_jax.rollout.buffer"
            self._held = (
                importlib.import_module(driver).Held,
                importlib.import_module(buffer).Interrupted,
            )
            job = self._jobs.prepare(parsed, pool, self._progress, resolve, self._stack, kept.check)
            self._job = job
            with self._jobs.ending(job):
                self._driver = importlib.import_module("rl_jax.wiring").build_driver(job)
                self._driver.open()
            kept.check()
        job.check_stop = lambda: None
        rollout = self._driver.parts.rollout
        self.chat: Any = without_servers
        if rollout is not None:
            say = lambda request: self._while_asked(lambda: rollout.say(request, self._is_held))
            self.chat = Chat(job.renderer, job.settings, say, rollout.forget)

    # --- what it does ---

    @property
    def version(self) -> int:
        """Steps that its weights have seen."""
        return self._driver.state.version

    @property
    def parts(self) -> Any:
        """The driver's parts (rl_jax.driver.Parts), to look at: learner, sync, rollout, ledger, ..."""
        return self._driver.parts

    @property
    def settings(self) -> Any:
        """Its whole config, resolved; and as it was steered."""
        return self._driver.settings

    def step(self, num: int = 1) -> "Run":
        """`num` more steps, with the evaluations and saves that are due between them; after the last one the run ends
        as launch's does. Returns: itself, for the cell to show.

        Raises: ValueError where no step is left; KeyboardInterrupt, and then goes on with the next call; what else
        ends a run of launch.
        """
        steps = self.settings.steps
        if num < 1:
            raise ValueError(f"step({num}): a run goes on by 1 step or more")
        if self._is_finished:
            raise ValueError(
                f"it is over at step {self.version} of steps={steps}; close() it, and go on with rl_jax.run("
                f"run_dir={str(self.path)!r}, steps={steps + 50})"
            )
        self._while_asked(lambda: self._advance(min(self.version + num, steps)), ends=True)
        return self

    def evaluate(self) -> dict[str, float]:
        """Success on the pinned tasks at the current version, by name of the evaluation; it is recorded, too. (Of a run
        on rows: its held-out figures.)"""
        return self._while_asked(self._evaluate)

    def save(self) -> None:
        """A checkpoint of the current version."""
        self._while_asked(self._driver.save)

    def export(self, out: str | Path, *, dtype: str = "", verify: bool = True) -> Path:
        """The current policy as a Hugging Face directory, read back and compared where `verify`; saves it first."""
        is_open = not self._is_closed
        if is_open and (self._driver.num_unsaved or checkpoint_of(self.path) is None):
            self.save()
        return super().export(out, dtype=dtype, verify=verify)

    def interrupt(self) -> None:
        """What Ctrl-C or the kernel's interrupt does, from any thread: what is under way ends where that is safe."""
        self._driver.hold()

    def close(self) -> None:
        """Save what was learned since the last save, then end everything that runs; idempotent. The files stay."""
        if self._is_closed:
            return
        self._closing.set()
        self._progress.is_idle = False
        driver = self._driver
        try:
            if driver.is_between and driver.num_unsaved and not self._broken:
                driver.save()
        finally:
            self._end(self._broken or "closed")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- inside ---

    def _advance(self, last: int) -> None:
        driver = self._driver
        chatted = self.chat.num_tokens if isinstance(self.chat, Chat) else 0
        driver.rested(chatted - self._chatted)
        self._chatted = chatted
        with driver.kept():
            driver.advance(last)
            if driver.state.version >= self.settings.steps or driver.state.version < last:
                # The last step, or steering ended the run.
                driver.finish()
                self._is_finished = True
                self._jobs.tell_end(self._job, driver)
                self._job.run_dir.status("done")

    def _evaluate(self) -> dict[str, float]:
        driver = self._driver
        (driver.measure if driver.parts.stream is not None else driver.evaluate)("last")
        return {name: value["last"] for name, value in driver.state.evaluations.items()}

    def _while_asked(self, work: Callable[[], Any], *, ends: bool = False) -> Any:
        """One call, interruptible; silence after it. ends: what it raises ends the run, and stands in STATUS.json.

        Raises: KeyboardInterrupt for the first interrupt once that is safe; for a second one at once.
        """
        if self._is_closed:
            raise RunClosed(CLOSED)
        if self._broken:
            where = f"rl_jax.run(run_dir={str(self.path)!r})"
            raise RunClosed(
                f"{self._broken}; close() it, and go on from its last save with {where}"
            )
        if not self._asked.acquire(blocking=False):
            raise RuntimeError(
                "the run does something else already; wait for it, or interrupt() it"
            )
        driver, told, result = self._driver, "", None
        self._progress.is_idle = False
        try:
            with on_signal(signal.SIGINT, self._hear):
                with self._jobs.ending(self._job) if ends else contextlib.nullcontext():
                    try:
                        result = work()
                    except self._held as error:
                        told = str(error) or "stopped"
        finally:
            if not driver.is_between:
                self._broken = f"step {self.version + 1} ended half done"
            is_held = driver.is_held
            driver.release()
            self._progress.is_idle = True
            self._asked.release()
        if told or is_held:
            where = told or "stopped"
            raise KeyboardInterrupt(
                f"{where}; version {self.version} is kept, the next call goes on"
            )
        return result

    def _hear(self, signum: int) -> None:
        if self._driver.is_held:
            interrupt(signum)
        self._driver.hold()

    def _is_held(self) -> bool:
        return self._driver.is_held

    def _settle(self) -> None:
        """The traces of the last step are written beside what follows it."""
        if not self._is_closed:
            self._driver.parts.recorder.flush()

    def _state(self, status: dict[str, Any]) -> str:
        if self._is_closed:
            return super()._state(status)
        if self._is_finished:
            return "finished; its servers still answer"
        return f"open, {self.settings.steps - self.version} steps left"

    def _watch_main(self) -> None:
        """Ends the run with Python, if nobody closed it: threads that compute while the interpreter goes crash it.

        Nothing is saved then, as the pools of threads that a save needs are gone; the status says so."""
        main = threading.main_thread()
        while main.is_alive():
            if self._closing.wait(LOOK_S):
                return
        self._end("Python ended before close(): the last save stands")

    def _end(self, why: str) -> None:
        self._is_closed = True
        with self._stack:
            if not self._is_finished:
                self._job.run_dir.status("interrupted", step=self.version, error=why)
