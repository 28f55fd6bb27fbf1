"""Checkpoints: a bundle per step that is either whole and verified or not used. The only file that imports orbax.

    <run>/checkpoints/step_12/MANIFEST.json    step, version, config hash, libraries, extra, leaves, every file's size
                                               and sha256, and a sha256 of the manifest itself
    <run>/checkpoints/step_12/state/...        the train state, as orbax writes it
    <run>/checkpoints/quarantine/              what did not verify; moved, never deleted

Orbax writes sharded arrays fast and restores them onto any mesh, but it returns flipped bits without an error and does
not fall back to an older step; the manifest and `latest` do that.
Life of a save: 1 arrays leave the devices (`save` returns: the learner may donate them); then on a thread: 2 orbax ends
writing into a temporary directory, 3 every file is synced and hashed, the manifest is written and synced, 4 one rename
makes it step_N, 5 older steps beyond `keep` are deleted. A kill at any point leaves the older steps whole.
Where several processes share the state (jax.distributed), each calls the same methods in the same order, and orbax
writes what each has; the first alone makes, names, verifies and deletes directories.
Invariants: a directory step_N was complete when it got its name; a step is used only after all its bytes verified; an
error of a save is raised by the next `save` or `wait`.
Must not: choose what to do about a failure, or know what the state means: leaves are a flat name -> array dict.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from rl_jax.disk import naming
from rl_jax.settings import CheckpointSettings
from rl_jax.waits import Wait

MANIFEST, STATE, QUARANTINE = "MANIFEST.json", "state", "quarantine"
FORMAT = 1
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
READ_BYTES = 1 << 20
QUIET_S = 2.0  # of a wait at the end that needs no line

log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, verified or read as asked."""


class Checkpointer:
    """Sole writer of <run>/checkpoints. Used from one thread."""

    def __init__(
        self,
        run_dir: str | Path,
        settings: CheckpointSettings,
        config_hash: str = "",
        keep_oldest: bool = False,
    ):
        """config_hash: stored in every manifest. keep_oldest: beside the newest `keep`, the step that a replay of all
        collected rollouts starts from. Touches nothing: a reader of another run's steps leaves them alone."""
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._settings, self._config_hash = settings, config_hash
        self._keep_oldest = keep_oldest
        self._verified: set[int] = set()
        self._orbax: Any = None
        self._is_overdue = False  # a wait has had its deadline; there is no second one at the end
        self._saving = ""  # the thread of a save that nobody waited for yet
        # Set when that thread is at its end. Before Python 3.13 a join that is interrupted takes the thread for dead.
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._swept = False
        self._wait: Wait | None = None  # what of a save is under way

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Begins to write `state` (a pytree of arrays; it may be donated after this returns) and `extra` (JSON).

        Waits for the save before. A step saved already is replaced. Raises: CheckpointError of the save before or if
        extra is not JSON (NaN included).
        """
        self.wait()
        self._sweep()
        leaves = _flatten(state)
        manifest = {
            "format": FORMAT,
            "step": step,
            "version": step,  # the policy version a step makes is its number
            "config_hash": self._config_hash,
            "libraries": _libraries(),
            "extra": dict(extra),
            "leaves": {name: [str(x.dtype), list(x.shape)] for name, x in leaves.items()},
        }
        try:
            json.dumps(manifest, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra of step {step} is not JSON: {error}") from error
        temporary = self.directory / f".tmp_step_{step}"
        limit = f"checkpoint.deadline_s={self._settings.deadline_s:g}"
        self._wait = Wait(f"the save of step {step} into {self.directory}", time.monotonic(), limit)
        self._reach("its arrays are fetched")
        try:
            if _is_first():
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            _meet(f"directory of step {step}")
            self._open_orbax().save(temporary / STATE, args=_save_args(leaves))
        except Exception as error:  # the boundary to orbax and the disk
            self._wait = None
            raise self._failed(step, error) from error
        self._start(f"save-{step}", lambda: self._finish(step, temporary, manifest))

    def waits(self) -> list[Wait]:
        """The save under way, and how far it is. Any thread."""
        wait = self._wait
        return [] if wait is None else [wait]

    def wait(self) -> None:
        """Returns once the save under way is on the disk. Raises: CheckpointError if it failed or is overdue."""
        if self._saving:
            if not self._done.wait(self._settings.deadline_s):
                self._is_overdue = True
                raise CheckpointError(
                    f"{self._saving} into {self.directory} is not done after {self._settings.deadline_s:g} s"
                    " (checkpoint.deadline_s); is the file system stuck?"
                )
            self._saving = ""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """For the end of a run, whatever ended it: waits as `wait` does, and logs what went wrong.

        An interrupt of a save leaves it under way, and one of this wait leaves at once. Raises nothing else.
        """
        if self._is_overdue:
            return
        if not self._saving and self._orbax is not None:  # a save may be interrupted in step 1
            self._start("save-rest", self._finish_orbax)
        if self._saving and not self._done.wait(QUIET_S):
            log.warning("waiting for %s to be on the disk; Ctrl-C leaves at once", self._saving)
        try:
            self.wait()
        except CheckpointError as error:
            log.error("%s", error)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """Begin what `wait` waits for, on a thread of its own."""

        def run(done: threading.Event) -> None:
            try:
                work()
            finally:
                done.set()

        self._saving, self._done = name, threading.Event()
        threading.Thread(target=run, args=(self._done,), name=name, daemon=True).start()

    def _finish_orbax(self) -> None:
        try:
            self._orbax.wait_until_finished()
        except Exception as error:  # of a save that never got its name
            log.info("orbax: %s", error)

    def latest(self) -> int | None:
        """The newest step whose bytes all verify, None if there is none. Newer ones that do not are quarantined."""
        self.wait()
        self._sweep()
        for step in sorted(self._steps(), reverse=True):
            if (fault := self.fault(step)) is None:
                return step
            self._quarantine(step, fault)
        return None

    def restore(
        self, step: int, abstract_state: Any, subset: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """(state, extra) of a step. abstract_state: a pytree of ShapeDtypeStruct; each leaf's sharding says where it
        goes (the first device if it has none), on whatever mesh, and its dtype must be the saved one. subset: what was
        saved beside the leaves asked for is left where it is.

        Raises: CheckpointError naming the file that does not verify, or the leaves that differ from what was saved.
        """
        self.wait()
        self._require(step)
        manifest = self.manifest(step)
        want = _flatten(abstract_state)
        saved = manifest["leaves"]
        _check_leaves(step, {n: saved[n] for n in saved if n in want} if subset else saved, want)
        try:
            leaves = self._open_orbax().restore(
                self._path(step) / STATE,
                args=_restore_args({n: _placed(x) for n, x in want.items()}),
            )
        except Exception as error:  # the boundary to orbax
            raise CheckpointError(f"orbax cannot restore {self._path(step)}: {error}") from error
        treedef = jax.tree.structure(abstract_state)
        return jax.tree.unflatten(treedef, [leaves[name] for name in want]), manifest["extra"]

    def holds(self, step: int, prefix: str) -> bool:
        """Whether a step has a leaf whose name starts so. Raises: CheckpointError if the step cannot be used."""
        self._require(step)
        return any(name.startswith(prefix) for name in self.manifest(step)["leaves"])

    def manifest(self, step: int) -> dict[str, Any]:
        """MANIFEST.json of a step, unverified. Raises: OSError, ValueError."""
        return json.loads((self._path(step) / MANIFEST).read_bytes())

    def _finish(self, step: int, temporary: Path, manifest: dict[str, Any]) -> None:
        """Steps 2 to 5 of a save, on its thread."""
        try:
            self._reach("orbax writes its arrays")
            self._orbax.wait_until_finished()
            if not _is_first():
                return
            self._reach("its files are synced and hashed")
            manifest["files"] = _sync_and_hash(temporary)
            manifest["sha256"] = _manifest_sha(manifest)
            _write_synced(temporary / MANIFEST, json.dumps(manifest, allow_nan=False, indent=1))
            self._reach("it gets its name")
            self._commit(step, temporary)
            self._verified.add(step)
            self._reach("older steps are deleted")
            self._retain()
        except BaseException as error:  # raised by the next save or wait
            self._error = self._failed(step, error)
            self._error.__cause__ = error
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk the space is wanted back
        finally:
            self._wait = None

    def _reach(self, where: str) -> None:
        """The save under way has come so far."""
        if self._wait is not None:
            self._wait = self._wait._replace(where=where)

    def _commit(self, step: int, temporary: Path) -> None:
        """One rename. A bundle of the same step is set aside first; a kill in between is mended by _sweep."""
        final, trash = self._path(step), self.directory / f".trash_step_{step}"
        _sync_directories(temporary)
        if final.exists():
            shutil.rmtree(trash, ignore_errors=True)
            final.rename(trash)
        temporary.rename(final)
        _sync_path(self.directory)
        shutil.rmtree(trash, ignore_errors=True)

    def _retain(self) -> None:
        """Deletes steps older than the newest `keep`; each loses its name before its bytes."""
        for step in sorted(self._steps())[self._keep_oldest : -max(1, self._settings.keep)]:
            trash = self.directory / f".trash_step_{step}"
            self._path(step).rename(trash)
            shutil.rmtree(trash)
            self._verified.discard(step)

    def _sweep(self) -> None:
        """Once, what a killed process left: complete bundles get their name, the rest goes."""
        if self._swept or not self.directory.is_dir() or not _is_first():
            return
        self._swept = True
        for path in self.directory.glob(".tmp_step_*"):
            final = self.directory / path.name.removeprefix(".tmp_")
            if not final.exists() and _verify(path) is None:
                path.rename(final)
                _sync_path(self.directory)
            else:
                shutil.rmtree(path)
        for path in self.directory.glob(".trash_step_*"):
            shutil.rmtree(path)

    def _require(self, step: int) -> None:
        """Raises: CheckpointError naming why the step cannot be used."""
        if (fault := self.fault(step)) is not None:
            raise CheckpointError(
                f"checkpoint step_{step} in {self.directory} cannot be used: {fault}"
            )

    def fault(self, step: int) -> str | None:
        """Why a step cannot be used; None if all its bytes verify. Asked once a process and step."""
        if step in self._verified:
            return None
        fault = _verify(self._path(step))
        if fault is None:
            self._verified.add(step)
        return fault

    def _quarantine(self, step: int, fault: str) -> None:
        place = self.directory / QUARANTINE
        place.mkdir(exist_ok=True)
        target, copies = place / f"step_{step}", 0
        while target.exists():
            copies += 1
            target = place / f"step_{step}.{copies}"
        self._path(step).rename(target)
        log.error(
            "CHECKPOINT step_%d IS CORRUPT (%s); moved to %s, trying the one before",
            step,
            fault,
            target,
        )

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        saved = max(self._steps(), default=None)
        newest = (
            "nothing older is saved" if saved is None else f"older steps are whole, up to {saved}"
        )
        return CheckpointError(
            f"step {step} was not saved into {self.directory}: {type(error).__name__}: {error};"
            f" {newest}; free space or fix the directory, then start the same command again"
        )

    def _steps(self) -> list[int]:
        names = (p.name.removeprefix("step_") for p in self.directory.glob("step_*"))
        return [int(n) for n in names if n.isdecimal()]

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def _open_orbax(self) -> Any:
        if self._orbax is None:
            import orbax.checkpoint as ocp  # takes 2.8 s, so only who saves or restores pays

            logging.getLogger("absl").addFilter(_orbax_to_log)

            self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        return self._orbax


def _is_first() -> bool:
    """Whether this process is the one that owns the directories."""
    return jax.process_index() == 0


def _meet(what: str) -> None:
    """Wait for the processes that share the state to get here, too."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def _orbax_to_log(record: logging.LogRecord) -> bool:
    """False for a warning or error of orbax, which goes to the log file: what it shows with a traceback it raises too,
    and that is told in one line."""
    if record.levelno < logging.WARNING or f"{os.sep}orbax{os.sep}" not in record.pathname:
        return True
    log.info("orbax %s: %s", record.levelname, record.getMessage(), exc_info=record.exc_info)
    return False


def _save_args(leaves: Mapping[str, Any]) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeSave(dict(leaves))


def _restore_args(leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    import orbax.checkpoint as ocp

    places = {
        name: ocp.ArrayRestoreArgs(sharding=x.sharding, dtype=x.dtype, global_shape=x.shape)
        for name, x in leaves.items()
    }
    # Partial: what is on the disk and not in `item` is not read.
    return ocp.args.PyTreeRestore(item=dict(leaves), restore_args=places, partial_restore=True)


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaves by a readable path such as params/layers.0.attention.query; independent of container types."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in flat}
    assert len(leaves) == len(flat), "two leaves of the state have one path"
    return leaves


def _placed(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _check_leaves(step: int, saved: Mapping[str, list], want: Mapping[str, Any]) -> None:
    asked = {name: [str(x.dtype), list(x.shape)] for name, x in want.items()}
    odd = sorted(n for n in saved.keys() | asked.keys() if saved.get(n) != asked.get(n))
    if odd:
        name = odd[0]
        raise CheckpointError(
            f"checkpoint step_{step} does not fit this model and optimizer: {len(odd)} of {len(asked)} leaves differ,"
            f" first {name}: saved {saved.get(name, 'nothing')}, wanted {asked.get(name, 'nothing')};"
            " resume with the settings it was saved with"
        )


def _verify(path: Path) -> str | None:
    """What is wrong with a bundle; None if every byte is as its manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["sha256"] != _manifest_sha(manifest):
            return f"{MANIFEST} does not match its own sha256"
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        if path.name.removeprefix(".tmp_") != f"step_{manifest['step']}":
            return f"{MANIFEST} is of step {manifest['step']}"
        for name, entry in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["size"]:
                return f"{name} has {file.stat().st_size} bytes, not {entry['size']}"
            if _sha256(file) != entry["sha256"]:
                return f"{name} does not match its sha256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    return None


def _sync_and_hash(root: Path) -> dict[str, dict[str, Any]]:
    """Every file below root: durable, with its size and sha256."""
    files = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        _sync_path(path)
        files[path.relative_to(root).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": _sha256(path),
        }
    return files


def _sync_directories(root: Path) -> None:
    for path in [*(p for p in root.rglob("*") if p.is_dir()), root]:
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, text: str) -> None:
    with naming(path), path.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _manifest_sha(manifest: Mapping[str, Any]) -> str:
    """Of everything in the manifest but this value itself."""
    rest = {k: v for k, v in manifest.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _libraries() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }
