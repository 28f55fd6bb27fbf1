"""The episode ledger: one JSON line for every state an attempt at an episode enters, and the law that none is lost.

Owns: ledger.jsonl of a run (sole writer) and the current state of every attempt (uid, attempt).
Invariants: only the transitions of NEXT happen; E1 issued = in flight + trained + dropped + errored + cancelled +
evaluated + void, by attempt; E3 a uid is TRAINED at most once over the surviving history; what is lost has a reason.
Life of an attempt:
1. ISSUED when the scheduler starts it, RUNNING when its environment was reset.
2. COMPLETED or TRUNCATED after scoring, with the trajectory's sha256; or ERRORED or CANCELLED, both final.
3. TRAINED (with the step, after the learner's step returned), DROPPED or EVALUATED: final.
4. A resume from step s appends VOID: what was TRAINED after s, and every attempt that had not ended, counts as void;
   the episode is issued again as the next attempt.
Opening an existing file replays it; a torn last line (the process died in it) was never acknowledged and is cut.
`flush` makes earlier records durable; the buffer flushes before it hands a batch on, and when the batch was trained.
Thread-safe: the rollout's thread and the driver's both write. fsync is outside the lock: no writer waits for a disk.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_jax.disk import cut_torn_line, naming, open_lines
from rl_jax.waits import Wait

# state -> states that may follow; () = terminal.
NEXT: Mapping[str | None, tuple[str, ...]] = {
    None: ("ISSUED",),
    "ISSUED": ("RUNNING", "ERRORED", "CANCELLED"),
    "RUNNING": ("COMPLETED", "TRUNCATED", "ERRORED", "CANCELLED"),
    "COMPLETED": ("TRAINED", "DROPPED", "EVALUATED"),
    "TRUNCATED": ("TRAINED", "DROPPED", "EVALUATED"),
    "TRAINED": (),
    "DROPPED": (),
    "EVALUATED": (),
    "ERRORED": (),
    "CANCELLED": (),
}
STATES = tuple(s for s in NEXT if s is not None) + ("VOID",)
NEEDS_REASON = ("DROPPED", "ERRORED", "CANCELLED")


class LedgerError(RuntimeError):
    """An illegal transition, a broken conservation law or an unreadable ledger file."""


@dataclass(frozen=True)
class EpisodeRef:
    """Names one attempt at an episode."""

    uid: str
    attempt: int
    group: str
    epoch: int
    index: int
    sample: int
    tag: str


@dataclass(frozen=True)
class EpisodeFacts:
    """What a record says of the tokens; later records of the attempt repeat it."""

    start_version: int = 0
    versions: tuple[int, ...] = ()  # distinct versions of the sampled tokens, ascending
    num_tokens: int = 0  # sampled
    sha256: str = ""  # of the trajectory; "" until it is closed


@dataclass
class _Entry:
    """An attempt that has not ended."""

    ref: EpisodeRef
    state: str
    facts: EpisodeFacts = field(default_factory=EpisodeFacts)


class Ledger:
    """Sole writer of `path`. Raises LedgerError where a caller would break a law, before anything is written."""

    def __init__(self, path: str | Path, run_id: str):
        self.path, self.run_id = Path(path), run_id
        self._lock = threading.Lock()
        self._flushing_s: float | None = None  # monotonic, when the flush under way began
        self._open: dict[tuple[str, int], _Entry] = {}
        self._attempts: dict[str, int] = {}  # uid -> newest attempt
        self._trained: dict[str, int] = {}  # uid -> step
        self._counts: Counter[str] = Counter()  # attempts by current state
        self._dropped: Counter[str] = Counter()  # DROPPED attempts by reason
        self._issued = 0
        self._seq = 0
        self._replay()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(self.path)  # closed by close()

    @property
    def seq(self) -> int:
        """Number of the next record."""
        return self._seq

    def write(
        self,
        ref: EpisodeRef,
        state: str,
        reason: str | None = None,
        step: int | None = None,
        facts: EpisodeFacts | None = None,
    ) -> None:
        """Move one attempt to `state`.

        Args:    reason: needed by DROPPED, ERRORED and CANCELLED.  step: needed by TRAINED.
                 facts: None = as in the attempt's earlier record.
        Raises:  LedgerError on an illegal transition, a missing reason, or a uid that is TRAINED already.
        """
        with self._lock:
            entry = self._apply(ref, state, reason, step, facts)
            record = {
                "seq": self._seq,
                "t_mono_s": round(time.monotonic(), 6),
                **vars(ref),
                "state": state,
                "reason": reason,
                "step": step,
                **vars(entry.facts),
            }
            self._append(record)

    def void(self, step: int) -> int:
        """Resume from `step`: what was TRAINED later and what had not ended is void. Returns how many attempts."""
        with self._lock:
            num = self._apply_void(step)
            self._append({"state": "VOID", "step": step, "seq": self._seq})
            return num

    def counts(self) -> dict[str, int]:
        """Attempts by the state they are in now; every state of STATES is a key."""
        with self._lock:
            return {state: self._counts[state] for state in STATES}

    def num_dropped(self, reason: str) -> int:
        """DROPPED attempts with exactly this reason."""
        with self._lock:
            return self._dropped[reason]

    def check_seq(self, seq: int) -> None:
        """Raises LedgerError if records are gone that a checkpoint knew of. seq: of that checkpoint."""
        with self._lock:
            if self._seq < seq:
                raise LedgerError(
                    f"{self.path} ends before record {self._seq}, but the checkpoint was saved after record {seq - 1}:"
                    " records were deleted; restore the file, or go on in a new directory with"
                    f" --run_dir=NEW --resume={self.path.parent}"
                )

    def check(self, in_flight: int) -> None:
        """Conservation law E1. Args: in_flight: attempts the caller holds, counted without this ledger.

        Raises: LedgerError with the numbers.
        """
        with self._lock:
            ended = sum(n for state, n in self._counts.items() if not NEXT.get(state, ()))
            if len(self._open) == in_flight and self._issued == in_flight + ended:
                return
            oldest = ", ".join(
                f"{e.ref.uid}#{e.ref.attempt} {e.state}" for e in list(self._open.values())[:3]
            )
            counts = ", ".join(f"{state} {n}" for state, n in sorted(self._counts.items()) if n)
            raise LedgerError(
                f"{self.path}: {self._issued} attempts issued, {ended} ended and {len(self._open)} open, but the"
                f" rollout holds {in_flight}; by state: {counts}; oldest open: {oldest or 'none'}. An episode was lost"
                " or counted twice: keep the run directory and report it"
            )

    def next_attempt(self, uid: str) -> int:
        """0 for an episode that was never issued; also counts attempts of the processes before a resume."""
        with self._lock:
            return self._attempts.get(uid, -1) + 1

    def sha256(self, uid: str, attempt: int) -> str:
        """As written with the attempt's COMPLETED or TRUNCATED record; "" if it is not open or not closed yet."""
        with self._lock:
            entry = self._open.get((uid, attempt))
            return entry.facts.sha256 if entry else ""

    def waits(self) -> list[Wait]:
        """The flush under way. Any thread."""
        since_s = self._flushing_s
        return [] if since_s is None else [Wait(f"{self.path} to be on disk", since_s)]

    def flush(self) -> None:
        """All records written so far are on disk when this returns. Raises OSError (a full disk stops the run)."""
        self._flushing_s = time.monotonic()
        try:
            self._flush()
        finally:
            self._flushing_s = None

    def _flush(self) -> None:
        with self._lock:
            if self._file.closed:
                return
            with naming(self.path):
                self._file.flush()
            descriptor = os.dup(self._file.fileno())
        try:
            with naming(self.path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """As flush; the file is closed whatever is raised: else the interpreter tries again when it frees it, and
        complains."""
        try:
            self.flush()
        finally:
            with self._lock, naming(self.path):
                self._file.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        with naming(self.path):
            self._file.write(line)
        self._seq += 1

    def _apply(self, ref, state, reason, step, facts) -> _Entry:
        """Check the transition, then change the counts. Nothing changes if it raises."""
        key = (ref.uid, ref.attempt)
        entry = self._open.get(key)
        now = entry.state if entry else None
        name = f"{ref.uid}#{ref.attempt}"
        if state not in NEXT[now]:
            raise LedgerError(
                f"{name}: {now} -> {state} is not a transition; from {now} only {NEXT[now]} are"
            )
        if now is None and ref.attempt <= self._attempts.get(ref.uid, -1):
            raise LedgerError(
                f"{name}: issued twice; the next attempt is {self._attempts[ref.uid] + 1}"
            )
        if state in NEEDS_REASON and not reason:
            raise LedgerError(f"{name}: {state} needs a reason")
        if state == "TRAINED":
            if step is None:
                raise LedgerError(f"{name}: TRAINED needs the step")
            if ref.uid in self._trained:
                raise LedgerError(
                    f"{name}: TRAINED at step {step}, but already at step {self._trained[ref.uid]}"
                )
            self._trained[ref.uid] = step
        if entry is None:
            entry = self._open[key] = _Entry(ref, state)
            self._attempts[ref.uid] = ref.attempt
            self._issued += 1
        else:
            self._counts[entry.state] -= 1
        entry.state = state
        if facts is not None:
            entry.facts = facts
        self._counts[state] += 1
        if state == "DROPPED":
            self._dropped[reason] += 1
        if not NEXT[state]:
            del self._open[key]
        return entry

    def _apply_void(self, step: int) -> int:
        late = [uid for uid, at in self._trained.items() if at > step]
        for uid in late:
            del self._trained[uid]
        for entry in self._open.values():
            self._counts[entry.state] -= 1
        num = len(late) + len(self._open)
        self._counts["TRAINED"] -= len(late)
        self._counts["VOID"] += num
        self._open.clear()
        return num

    def _replay(self) -> None:
        if not self.path.exists():
            return
        cut_torn_line(self.path)
        for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
            try:
                self._replay_record(json.loads(line))
            except (ValueError, KeyError, TypeError, LedgerError) as error:
                raise LedgerError(
                    f"{self.path}: line {number} is not a legal record ({error}); restore the file from a backup or"
                    " start in another run directory"
                ) from error

    def _replay_record(self, record: Mapping[str, Any]) -> None:
        self._seq = record["seq"] + 1
        if record["state"] == "VOID":
            self._apply_void(record["step"])
            return
        ref = EpisodeRef(*(record[name] for name in EpisodeRef.__dataclass_fields__))
        facts = EpisodeFacts(
            record["start_version"],
            tuple(record["versions"]),
            record["num_tokens"],
            record["sha256"],
        )
        self._apply(ref, record["state"], record["reason"], record["step"], facts)
