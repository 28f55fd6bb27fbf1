"""Episodes of a run: which there are, from index.npz of each step; and one of them, from its line of traces.jsonl.

Owns: the indexes read so far. Invariants: nothing of a step is read before it is asked for; an index is read again
where its file changed; a line is found by its offset, so one episode costs one read; lines over MAX_LINE bytes are not
parsed: their head is shown as bytes, with their size. A step whose files cannot be read is told and passed over.
Columns of an Index, one entry an episode: reward f32 (NaN = unscored), length i32, group i32, tag and outcome by index.
Must not: hold text of more than one episode.
"""

import json
import re
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax.resume import ROLLOUTS
from rl_jax.rollout.traces import ADVANTAGES, INDEX, TRACES

SPLITS = ("train", "eval")
MAX_LINE = 128 << 20  # bytes
MAX_INDEX = 64 << 20
HEAD = 4000  # bytes shown of a line that is not parsed
_STEP = re.compile(r"step_(\d{1,12})")
_UID = re.compile(rb'^\{"uid":("(?:[^"\\]|\\.){0,400}"),"attempt":(\d+),"group":("(?:[^"\\]|\\.){0,400}"),'
                  rb'"task_id":("(?:[^"\\]|\\.){0,400}")')  # fmt: skip


class SampleError(ValueError):
    """What is asked for is not there, or cannot be read; one line."""


@dataclass(frozen=True)
class Index:
    """The episodes of one step and split; arrays [num]."""

    offset: np.ndarray  # i64 of the line
    end: np.ndarray  # i64 behind it
    reward: np.ndarray  # f32
    length: np.ndarray  # i32 tokens
    tag: np.ndarray  # i16 into tags
    outcome: np.ndarray  # i8 into outcomes
    group: np.ndarray  # i32
    tags: tuple[str, ...]
    outcomes: tuple[str, ...]

    @property
    def num(self) -> int:
        return len(self.offset)


class Samples:
    """Sole reader of rollouts/. Any thread."""

    def __init__(self, run: Path):
        self.root = run / ROLLOUTS
        self._lock = threading.Lock()
        self._indexes: dict[tuple[int, str], tuple[tuple[int, int, int], Index]] = {}
        self._bad: dict[tuple[int, str], str] = {}

    def steps(self) -> list[int]:
        """Ascending; of a directory that is not there, none."""
        try:
            names = [entry.name for entry in self.root.iterdir()]
        except OSError:
            return []
        return sorted(int(m[1]) for name in names if (m := _STEP.fullmatch(name)))

    def directory(self, step: int, split: str) -> Path:
        """Raises SampleError for a split that does not exist."""
        if split not in SPLITS:
            raise SampleError(f"split {split!r} is none of {', '.join(SPLITS)}")
        return self.root / f"step_{step}" / split

    def index(self, step: int, split: str) -> Index | None:
        """None where the step has none (yet). Raises SampleError where it cannot be read."""
        path = self.directory(step, split) / INDEX
        try:
            stat = path.stat()
        except OSError:
            return None
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        with self._lock:
            held = self._indexes.get((step, split))
        if held is not None and held[0] == stamp:
            return held[1]
        try:
            index = _read_index(path, (path.parent / TRACES).stat().st_size)
        except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
            raise SampleError(
                f"{path.relative_to(self.root.parent)} cannot be read ({type(error).__name__}: {str(error)[:160]})"
            ) from None
        with self._lock:
            self._indexes[step, split] = (stamp, index)
        return index

    def try_index(self, step: int, split: str) -> Index | None:
        """None where there is none that can be read; why not is in faults()."""
        try:
            index = self.index(step, split)
        except SampleError as error:
            self._bad[step, split] = str(error)
            return None
        self._bad.pop((step, split), None)
        return index

    def faults(self) -> list[str]:
        bad = [self._bad[key] for key in sorted(self._bad)]
        return bad[:20] + (
            [f"and {len(bad) - 20} more steps that cannot be read"] if bad[20:] else []
        )

    def names(self, step: int, split: str, i: int) -> dict[str, Any]:
        """uid, attempt, group and task_id of one episode, from the head of its line; {} where they are not there."""
        index = self._checked(step, split, i)
        try:
            raw = self._bytes(
                step,
                split,
                int(index.offset[i]),
                min(int(index.end[i]), int(index.offset[i]) + 2000),
            )
        except OSError:
            return {}
        if (found := _UID.match(raw)) is None:
            return {}
        uid, attempt, group, task = found.groups()
        return {
            "uid": json.loads(uid), "attempt": int(attempt), "group_uid": json.loads(group), "task": json.loads(task),
        }  # fmt: skip

    def record(self, step: int, split: str, i: int) -> dict[str, Any]:
        """The trajectory's line as an object. Raises SampleError."""
        index = self._checked(step, split, i)
        start, end = int(index.offset[i]), int(index.end[i])
        where = (
            f"{self.directory(step, split).relative_to(self.root.parent)}/{TRACES} at byte {start}"
        )
        if end - start > MAX_LINE:
            raise SampleError(
                f"{where}: a line of {end - start} bytes, of which at most {MAX_LINE} are read; see its raw bytes"
            )
        try:
            record = json.loads(self._bytes(step, split, start, end))
            if not isinstance(record, dict) or not isinstance(record["tokens"], list):
                raise ValueError("it is no trajectory")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SampleError(
                f"{where}: {type(error).__name__}: {str(error)[:160]}; see its raw bytes"
            ) from None
        return record

    def raw(self, step: int, split: str, i: int, start: int, num: int) -> dict[str, Any]:
        """Bytes [start, start + num) of the line, as latin-1. Raises SampleError."""
        index = self._checked(step, split, i)
        first, end = int(index.offset[i]), int(index.end[i])
        at = min(first + max(start, 0), end)
        try:
            found = self._bytes(step, split, at, min(at + min(num, 1 << 16), end))
        except OSError as error:
            raise SampleError(f"{TRACES} cannot be read: {error}") from None
        return {"start": at - first, "size": end - first, "bytes": found.decode("latin-1")}

    def advantages(self, step: int, split: str, i: int) -> np.ndarray | None:
        """f32[T], NaN where not trained; None where the step has none, or they are not of these trajectories."""
        index = self._checked(step, split, i)
        path = self.directory(step, split) / ADVANTAGES
        try:
            flat = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            return None
        if flat.dtype != np.float32 or flat.shape != (int(index.length.sum(dtype=np.int64)),):
            return None
        start = int(index.length[:i].sum(dtype=np.int64))
        return np.array(flat[start : start + int(index.length[i])])

    def _checked(self, step: int, split: str, i: int) -> Index:
        index = self.index(step, split)
        if index is None:
            raise SampleError(f"step {step} has no complete traces of {split}")
        if not 0 <= i < index.num:
            raise SampleError(f"step {step} {split} has episodes 0 to {index.num - 1}, not {i}")
        return index

    def _bytes(self, step: int, split: str, start: int, end: int) -> bytes:
        with open(self.directory(step, split) / TRACES, "rb") as file:
            file.seek(start)
            return file.read(max(end - start, 0))


def _read_index(path: Path, size: int) -> Index:
    """size: of traces.jsonl beside it."""
    if path.stat().st_size > MAX_INDEX:
        raise ValueError(f"longer than {MAX_INDEX} bytes")
    arrays = _read_npz(path)
    offset = arrays["offset"].astype(np.int64)
    num = len(offset)
    columns = {name: arrays[name] for name in ("reward", "length", "tag", "outcome", "group")}
    for name, array in columns.items():
        if array.shape != (num,):
            raise ValueError(f"{name} has shape {array.shape}, not ({num},)")
    ends = np.append(offset[1:], size)
    if num and (offset[0] < 0 or (ends < offset).any()):
        raise ValueError("offsets that do not ascend to the size of the traces")
    tags, outcomes = (tuple(map(str, arrays[name].tolist())) for name in ("tags", "outcomes"))
    for name, most in (("tag", len(tags)), ("outcome", len(outcomes))):
        if num and not (columns[name].min() >= 0 and columns[name].max() < most):
            raise ValueError(f"{name} is no index of its {most} names")
    return Index(
        offset, ends, columns["reward"].astype(np.float32), columns["length"].astype(np.int32),
        columns["tag"].astype(np.int16), columns["outcome"].astype(np.int8),
        columns["group"].astype(np.int32), tags, outcomes,
    )  # fmt: skip


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        for info in archive.zip.infolist():
            if info.file_size > MAX_INDEX:
                raise ValueError(f"{info.filename} is longer than {MAX_INDEX} bytes")
        return dict(archive)
