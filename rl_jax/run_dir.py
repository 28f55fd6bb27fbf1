"""The run directory: one process holds it, and its files say what the run is and how it goes.

Owns: LOCK, config.json, config.resolved.py, plan.json, ENV.json, STATUS.json, events.jsonl, logs/attempt_k and its link
logs/latest; the names of what others write (metrics.jsonl, ledger.jsonl, rollouts/, checkpoints/, summary.json).
Invariants: one process at a time holds a directory (a lock of the operating system, so a dead one never blocks);
nothing is written before every check has passed; config.json comes first and by one rename, so a directory is either
empty or says whose it is; small files are replaced, never overwritten in place.
Life: 1 resume.decide refuses or says what will happen, check_usable looks whether it could. 2 `RunDir.open` locks,
decides again, sets aside what a start without a checkpoint would confuse, and writes. 3 `status`, `event` while it
runs. 4 `close`.
Must not: read a checkpoint, or stop a run because a line of events or status was lost (counted in num_lost).
"""

import fcntl
import importlib.metadata
import logging
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rl_jax import schema
from rl_jax.console import FirstOfAKind, WithCount
from rl_jax.disk import disk_full, existing, naming, open_lines
from rl_jax.resume import (
    CHECKPOINTS,
    CONFIG,
    LEDGER,
    LOCK,
    LOGS,
    METRICS,
    ROLLOUTS,
    RUNS,
    SUMMARY,
    Decision,
    RunDirError,
    auto_path,
    decide,
    encode,
    step_of,
)
from rl_jax.settings import Settings

LOG = logging.getLogger(__name__)

STATUS, ENV, EVENTS = "STATUS.json", "ENV.json", "events.jsonl"
QUARANTINE = "quarantine"
DRIVER_LOG = "driver.log"

GLANCE_S = 0.05  # longer than check_usable of another process holds a lock

# Written by an attempt that left no checkpoint: a fresh start moves them to quarantine/, lest a reader mixes the two.
ATTEMPT_FILES = (EVENTS, LEDGER, METRICS, SUMMARY, ROLLOUTS)

_PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml-collections",
    "gymnasium", "reasoning-gym", "tokenizers", "jinja2",
)  # fmt: skip


class RunDir:
    """Sole writer of the files this module owns. `open` is the constructor to call."""

    def __init__(self, decision: Decision, lock: TextIO):
        self.decision, self._lock = decision, lock
        self.path, self.run_id, self.attempt = decision.path, decision.run_id, decision.attempt
        self.num_lost = 0
        self._events = open_lines(self.path / EVENTS)
        self._handlers: list[logging.Handler] = []
        self._repeated = FirstOfAKind()
        self._status: tuple[str, float] = ("", -math.inf)  # state, when written

    @classmethod
    def open(
        cls,
        path: Path | str,
        settings: Settings,
        resume: str = "auto",
        files: Mapping[str, str] | None = None,
    ) -> "RunDir":
        """Lock and prepare the directory ("" = auto_path). `files`: name -> text to put beside config.json.

        Raises RunDirError: refused (see `decide`), in use by another process, or not writable.
        """
        if not str(path):
            path, run_id = auto_path(settings)
            settings = replace(settings, run_id=run_id)
        path = Path(path)
        decide(path, settings, resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
            try:
                decision = decide(path, settings, resume)  # again: now nobody else can change it
                _prepare(decision, settings, files or {})
                return cls(decision, lock)
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise RunDirError(
                f"cannot write the run directory {path}: {error.strerror or error}"
            ) from error

    # --- where things are ---

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    @property
    def logs(self) -> Path:
        return self.path / LOGS / f"attempt_{self.attempt}"

    def rollouts(self, step: int, split: str) -> Path:
        """Where the traces of a step go; split: train | eval."""
        return self.path / ROLLOUTS / f"step_{step}" / split

    # --- what the run says about itself ---

    def start_logging(self) -> None:
        """From now on the rl_jax loggers write to logs/attempt_k/driver.log, warnings also to stderr
        (of a kind that repeats the first and a count: console.py)."""
        file = _LogFile(self.logs / DRIVER_LOG, self._lost)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
        console = logging.StreamHandler()
        console.setLevel(logging.WARNING)
        console.addFilter(self._repeated)
        console.setFormatter(WithCount("warning: %(message)s"))
        self._handlers = [file, console]
        logger = logging.getLogger("rl_jax")
        logger.setLevel(logging.INFO)
        # Some libraries give the root logger a handler of its own: each line would come twice.
        logger.propagate = False
        for handler in self._handlers:
            logger.addHandler(handler)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl."""
        head = {"time": round(time.time(), 3), "t_mono_s": round(time.monotonic(), 3)}
        try:
            self._events.write(
                encode({**head, "attempt": self.attempt, "kind": kind, **fields}) + "\n"
            )
            self._events.flush()
        except (OSError, ValueError) as error:  # full disk, closed file
            self._lost(EVENTS, error)

    def status(self, state: str, **fields: Any) -> None:
        """Replace STATUS.json, while running at most once a second; on a full disk overwrite it."""
        now = time.monotonic()
        if state == self._status[0] == "running" and now - self._status[1] < 1.0:
            return
        self._status = (state, now)
        body = {"state": state, "run_id": self.run_id, "attempt": self.attempt, "pid": os.getpid()}
        body |= {"time": round(time.time(), 3), **fields}
        try:
            try:
                self.write_json(STATUS, body)
            except OSError as error:
                if disk_full(error) is None:
                    raise
                _overwrite(self.path / STATUS, encode(body, indent=1) + "\n")
        except OSError as error:
            self._lost(STATUS, error)

    def write_env(self, **extra: Any) -> None:
        """ENV.json: versions, git, command line; `extra` for what only a later part knows, such as the devices."""
        self.write_json(ENV, {**_environment(), **extra})

    def write_json(self, name: str, value: Any) -> Path:
        """Replace one file of the directory by JSON. Raises OSError."""
        path = self.path / name
        _replace(path, encode(value, indent=1) + "\n")
        return path

    def close(self) -> None:
        """Release the directory; its files stay."""
        logger = logging.getLogger("rl_jax")
        for line in self._repeated.rest():
            LOG.log(logging.INFO if self._status[0] == "failed" else logging.WARNING, line)
        for handler in self._handlers:
            logger.removeHandler(handler)
        for name, file in (*((DRIVER_LOG, h) for h in self._handlers), (EVENTS, self._events)):
            try:
                file.close()
            except OSError as error:  # what a full disk refused before is tried once more
                self._lost(name, error)
        self._lock.close()

    def _lost(self, name: str, error: Exception) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            LOG.warning(
                "%s of %s could not be written (%s); further losses are counted only",
                name,
                self.path,
                error,
            )


class _LogFile(logging.FileHandler):
    """A line that a full disk refuses is told to `lost`, without a traceback of its own in the terminal."""

    def __init__(self, path: Path, lost: Callable[[str, Exception], None]):
        super().__init__(path, encoding="utf-8")
        self._lost = lost

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._lost(DRIVER_LOG, error)
        else:
            super().handleError(record)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk the space is wanted back
        raise


def _overwrite(path: Path, text: str) -> None:
    """In place: a short text fits into the blocks that the file has, where the disk has no other left."""
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)
        file.truncate()


def check_usable(path: Path | str, *, is_held: bool = True) -> None:
    """Whether `RunDir.open` could write here now; writes nothing. path: "" = where auto_path leads.

    is_held: whether the directory will be locked. Raises RunDirError: another process holds it, or it is not writable.
    """
    path = Path(path) if str(path) else RUNS
    there = existing(path)
    if not there.is_dir():
        raise RunDirError(f"cannot write the run directory {path}: {there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunDirError(f"cannot write the run directory {path}: {there} is not writable")
    if not is_held or not (path / LOCK).exists():
        return
    try:
        with open(path / LOCK, encoding="utf-8") as lock:
            _flock(path, lock, fcntl.LOCK_SH)
    except OSError as error:
        raise RunDirError(f"cannot write the run directory {path}: {error}") from error


def holder(path: Path | str) -> str | None:
    """Who holds the directory now, as its lock says ("pid 7 on host"); None if nobody does. Raises OSError."""
    try:
        with open(Path(path) / LOCK, encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "another process"
    except FileNotFoundError:
        pass
    return None


def _take_lock(path: Path) -> TextIO:
    lock = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        _flock(path, lock, fcntl.LOCK_EX)
    except BaseException:
        lock.close()
        raise
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _flock(path: Path, lock: TextIO, kind: int) -> None:
    """Raises RunDirError if another process holds the directory."""
    try:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(GLANCE_S)
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        raise RunDirError(
            f"{path} is in use by {holder}; wait for it, stop it, or use another --run_dir"
        ) from None


def _prepare(decision: Decision, settings: Settings, files: Mapping[str, str]) -> None:
    """Write what makes the directory ours; set aside what a start from another point would confuse."""
    path = decision.path
    tree = schema.to_tree(replace(settings, run_id=decision.run_id))
    config, old_records = (
        encode(tree, indent=1) + "\n",
        path / QUARANTINE / f"before_attempt_{decision.attempt}",
    )
    if decision.resume_from is None and (path / CONFIG).exists():
        _keep_changed(path, {CONFIG: config, **files}, old_records)
    _replace(path / CONFIG, config)
    aside = [path / name for name in ATTEMPT_FILES] if decision.resume_from is None else []
    for kept in (path / CHECKPOINTS, path / ROLLOUTS):  # of steps that will be made again
        aside += [p for p in kept.glob("step_*") if step_of(p) > decision.resume_step]
    for old in aside:
        if old.exists():
            target = old_records / old.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(old, target)
    logs = path / LOGS / f"attempt_{decision.attempt}"
    logs.mkdir(parents=True, exist_ok=True)
    latest = path / LOGS / f".latest.{os.getpid()}"
    latest.unlink(missing_ok=True)
    latest.symlink_to(logs.name)
    os.replace(latest, path / LOGS / "latest")
    for name, text in files.items():
        _replace(path / name, text)
    _replace(path / ENV, encode(_environment(), indent=1) + "\n")


def _keep_changed(path: Path, files: Mapping[str, str], old_records: Path) -> None:
    """What a fresh start replaces by another text stays beside the records that it belongs to. Copied, not moved: a
    directory never is without a config."""
    for name, text in files.items():
        old = path / name
        if old.exists() and (before := old.read_bytes()) != text.encode():
            old_records.mkdir(parents=True, exist_ok=True)
            (old_records / name).write_bytes(before)


def _environment() -> dict[str, Any]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "versions": versions,
        "git": _git(["rev-parse", "HEAD"]),
        "git_changed": _git(["status", "--porcelain", "--untracked-files=no"]),
    }


def _git(command: Sequence[str]) -> str | None:
    """Output of a git command in the checkout; None without git."""
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
