"""What became of episodes, by kind, from ledger.jsonl: counts of every state and reason, and the newest examples.

Owns: how far the ledger was read. Invariants: read only where it is asked for, and then what is new; a line is looked
at as bytes, since a ledger of 100,000 episodes has 500,000 lines, and parsed only as an example; memory is bounded:
MAX_KINDS kinds, the others counted together. Not the law of conservation: that is rl_jax/ledger.py's, which replays.
"""

import json
import re
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any

from rl_jax.ledger import NEEDS_REASON, STATES
from rl_jax.resume import LEDGER
from rl_jax.viewer.episode import short

CHUNK = 8 << 20
MAX_LINE = 1 << 20
MAX_KINDS = 500
NUM_EXAMPLES = 20  # of a kind, the newest
_RECORD = re.compile(
    rb'"tag":"((?:[^"\\\n]|\\.){0,2000})","state":"([A-Z]+)","reason":(null|"(?:[^"\\\n]|\\.)*")'
)
_VOID = re.compile(rb'\{"state":"VOID"')


class Failures:
    """Sole reader of a run's ledger. Any thread."""

    def __init__(self, run: Path):
        self.path = run / LEDGER
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._inode: int | None = None
        self._kinds: Counter[tuple[bytes, bytes, bytes]] = Counter()  # (state, reason, tag)
        self._examples: dict[tuple[bytes, bytes], deque[tuple[int, int]]] = {}
        self._others = self._void = self._num_bad = 0

    def table(self) -> dict[str, Any]:
        """Counts by state, and of those that need a reason by reason and tag. A ledger that is not there is empty."""
        with self._lock:
            fault = ""
            try:
                self._read()
            except FileNotFoundError:
                fault = f"{LEDGER} is not there"
            except OSError as error:
                fault = f"{LEDGER} cannot be read: {error}"
            states, reasons = Counter(), {}
            for (state, reason, tag), num in self._kinds.items():
                name = state.decode("ascii")
                states[name] += num
                if name in NEEDS_REASON:
                    kind = reasons.setdefault((name, reason), {"num": 0, "tags": Counter()})
                    kind["num"] += num
                    kind["tags"][_text(b'"' + tag + b'"')] += num
            if self._num_bad:
                fault = f"{LEDGER}: {self._num_bad} lines are no records"
            return {
                "states": {s: states[s] for s in (*STATES, *sorted(set(states) - set(STATES))) if states[s]},
                "kinds": [
                    {
                        "state": state, "reason": _text(reason), "num": kind["num"],
                        "tags": dict(kind["tags"].most_common(20)),
                    }
                    for (state, reason), kind in sorted(reasons.items(), key=lambda item: -item[1]["num"])
                ],
                "others": self._others, "resumes": self._void, "fault": fault,
            }  # fmt: skip

    def examples(self, state: str, reason: str) -> list[dict[str, Any]]:
        """The newest records of a kind, newest first."""
        found = []
        with self._lock:
            spans = [
                span
                for (s, r), held in self._examples.items()
                if s.decode("ascii") == state and _text(r) == reason
                for span in held
            ]
        if not spans:
            return []
        with open(self.path, "rb") as file:
            for start, end in sorted(spans, reverse=True)[:NUM_EXAMPLES]:
                file.seek(start)
                try:
                    record = json.loads(file.read(min(end - start, MAX_LINE)))
                    found.append(
                        {
                            "uid": short(record["uid"]),
                            "attempt": record["attempt"],
                            "group": short(record["group"]),
                            "tag": short(record["tag"]),
                            "num_tokens": record["num_tokens"],
                            "start_version": record["start_version"],
                        }  # fmt: skip
                    )
                except (ValueError, KeyError, TypeError):
                    continue
        return found

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            stat = self.path.stat()
            if stat.st_size < self._offset or self._inode not in (None, stat.st_ino):
                self._begin()
            self._inode = stat.st_ino
            file.seek(self._offset)
            while chunk := file.read(CHUNK):
                whole = chunk.rfind(b"\n") + 1
                if not whole:
                    if len(chunk) < CHUNK:
                        return  # a line that is being written
                    self._num_bad += 1  # longer than a chunk: passed over
                    whole = len(chunk)
                self._take(chunk[:whole], self._offset)
                self._offset += whole
                file.seek(self._offset)

    def _take(self, data: bytes, base: int) -> None:
        found = 0
        for match in _RECORD.finditer(data):
            found += 1
            tag, state, reason = match.groups()
            key = (state, reason[:2000], tag)
            if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
                self._others += 1
                continue
            self._kinds[key] += 1
            if reason != b"null":
                start = data.rfind(b"\n", 0, match.start()) + 1
                end = data.find(b"\n", match.end())
                held = self._examples.setdefault((state, key[1]), deque(maxlen=NUM_EXAMPLES))
                held.append((base + start, base + (end if end >= 0 else len(data))))
        void = len(_VOID.findall(data))
        self._void += void
        self._num_bad += max(data.count(b"\n") - found - void, 0)


def _text(raw: bytes) -> str:
    """Of a JSON string; what is none, as it stands."""
    try:
        value = json.loads(raw)
    except ValueError:
        return short(raw.decode("latin-1"))
    return short(value) if isinstance(value, str) else ""
