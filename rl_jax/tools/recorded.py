"""What a run wrote down about one of its steps, read without touching the run.

Owns: `Recorded`, all that a replay of a step compares itself with, and which of it is missing. Sources: config.json and
events.jsonl (settings of the attempt that trained the step, the machine, the digest of each published version),
metrics.jsonl, ledger.jsonl (the sha256 of each trained episode), rollouts/step_N/train.
Invariant: nothing is locked, written or moved; a line that a live run is writing is left out.
Must not: import jax.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax import schema
from rl_jax.algorithms.options import is_known, learns_from_rows
from rl_jax.config import parse
from rl_jax.resume import CONFIG, LEDGER, METRICS, ROLLOUTS, RunDirError, checkpoint_steps
from rl_jax.rollout.traces import INDEX, TraceError, read_groups, trajectory_sha256
from rl_jax.run_dir import EVENTS
from rl_jax.settings import ClusterSettings, GuardSettings, Settings
from rl_jax.types import Group, Outcome, Trajectory

STEP_ROW = "time/step_s"  # only rows of steps have it; evaluations have rows, too
MACHINE = ("jax", "jaxlib", "platform", "device_kind", "xla_flags")
DEVICE_FLAG = "--xla_force_host_platform_device_count"  # how many are simulated changes no sum


@dataclass(frozen=True)
class Recorded:
    """One step of a run."""

    run: Path
    step: int
    settings: Settings  # as the attempt had them that trained the step
    mode: str  # train | train_only
    run_id: str
    row: Mapping[str, float]
    attempts: Mapping[int, int]  # step -> the attempt that trained it
    machines: Mapping[int, Mapping[str, Any]]  # attempt -> its "attempt" event
    digests: Mapping[int, str]  # version -> of its published weights

    @classmethod
    def read(cls, run: Path, step: int) -> "Recorded":
        """Raises: RunDirError: no run, no such step, or one of a kind that has no saved batches; ConfigError."""
        if not (run / CONFIG).is_file():
            raise RunDirError(f"{run} holds no run; name a run directory")
        settings = parse([f"--run_dir={run}"]).settings
        if is_known(settings.algorithm) and learns_from_rows(settings.algorithm, settings.data):
            raise RunDirError(
                f"{run} trained on rows of files, which are not recorded; the same command with the same seed in"
                " another --run_dir trains them again"
            )
        rows = {row["step"]: row for row in _lines(run / METRICS) if STEP_ROW in row}
        if step not in rows:
            known = f"{min(rows)} to {max(rows)}" if rows else "none"
            raise RunDirError(f"{run} has no step {step} in {METRICS}; it trained steps: {known}")
        events = list(_lines(run / EVENTS))
        machines = {e["attempt"]: e for e in events if e["kind"] == "attempt"}
        attempts = {k: row["attempt"] for k, row in rows.items()}
        row, mine = rows[step], machines.get(attempts[step], {})
        return cls(
            run, step, _as_then(settings, mine, events, step), mine.get("mode", "train"),
            json.loads((run / CONFIG).read_text(encoding="utf-8"))["run_id"], row, attempts, machines,
            _digests(events, attempts),
        )  # fmt: skip

    def starts(self) -> list[int]:
        """Steps of the checkpoints before this step, newest first; unverified."""
        return [k for k in reversed(checkpoint_steps(self.run)) if k < self.step]

    def groups(self, step: int) -> list[Group]:
        """What a step trained, as the ledger knows it.

        Raises: FileNotFoundError: no traces; TraceError: they are not what was trained.
        """
        groups = read_groups(self.run / ROLLOUTS / f"step_{step}" / "train")
        if self.mode == "train":  # train_only has no ledger: its batches were another run's
            _check_sha256(step, groups, _trained(self.run / LEDGER, step))
        return groups

    def missing(self, start: int) -> list[int]:
        """Steps after `start` up to this one that have no traces."""
        folder = self.run / ROLLOUTS
        steps = range(start + 1, self.step + 1)
        return [k for k in steps if not (folder / f"step_{k}" / "train" / INDEX).is_file()]

    def differences(self, start: int, machine: Mapping[str, str]) -> list[str]:
        """Why a replay from `start` on this machine need not give the same bits; [] where it must."""
        found = []
        attempts = sorted({self.attempts.get(k, -1) for k in range(start + 1, self.step + 1)})
        for attempt in attempts:
            then = self.machines.get(attempt)
            if then is None:
                found.append(
                    f"attempt {attempt} did not record on what it trained: versions and device may differ"
                )
                continue
            for name in MACHINE:
                now, before = _comparable(machine[name]), _comparable(then.get(name, ""))
                if now != before:
                    found.append(f"{name} was {before or 'none'}, here it is {now or 'none'}")
        lengths = {self.machines[a]["steps"] for a in attempts if a in self.machines}
        if len(lengths) > 1:
            found.append(
                f"the steps since checkpoint {start} were trained under steps={sorted(lengths)}, and the learning"
                " rate's schedule follows the last"
            )
        if num := self.settings.cluster.learner_processes:
            found.append(
                f"the learner was {num} processes, here it is one: sums between devices may round otherwise"
            )
        return list(dict.fromkeys(found))

    @property
    def here(self) -> Settings:
        """The settings with everything in this process."""
        return replace(self.settings, cluster=ClusterSettings())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines that may grow meanwhile. Raises: RunDirError if there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RunDirError(f"{path} is not there; a run that trained has it") from None
    for line in data.splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the last line of a killed or a live process
            continue


def _as_then(
    settings: Settings,
    attempt: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    step: int,
) -> Settings:
    """What a later attempt may have changed and a step's numbers depend on, as it was; guards as they were steered."""
    if "steps" not in attempt:
        return settings
    values = dict(attempt["guards"])
    for event in events:
        if event["kind"] == "steer" and event["attempt"] <= attempt["attempt"]:
            section, _, name = event.get("key", "").partition(".")
            is_in_force = event["answer"] == "done" and event["step"] < step
            # A resume whose config says something else than what was steered away from has won.
            if section == "guards" and is_in_force and values.get(name) == event["old"]:
                values[name] = event["new"]
    guards = schema.build(GuardSettings, values, "guards", [])
    return replace(settings, steps=attempt["steps"], guards=guards)


def _digests(events: Sequence[Mapping[str, Any]], attempts: Mapping[int, int]) -> dict[int, str]:
    """Of versions that survive: published by the attempt that trained them; the start's by any."""
    out: dict[int, str] = {}
    for event in events:
        if event["kind"] == "published":
            version: int = event["version"]
            if event["attempt"] >= attempts.get(version, 0):
                out[version] = event["digest"]
    return out


def _comparable(text: str) -> str:
    return " ".join(word for word in text.split() if not word.startswith(DEVICE_FLAG))


def _trained(ledger: Path, step: int) -> dict[tuple[str, int], str]:
    """(uid, attempt) -> sha256 of what the ledger has as TRAINED at a step, and no resume made void."""
    out: dict[tuple[str, int], str] = {}
    for r in _lines(ledger):
        if r["state"] == "TRAINED" and r["step"] == step:
            out[r["uid"], r["attempt"]] = r["sha256"]
        elif r["state"] == "VOID" and r["step"] < step:  # a resume went on from there
            out.clear()
    return out


def _check_sha256(
    step: int, groups: Sequence[Group], recorded: Mapping[tuple[str, int], str]
) -> None:
    """Raises: TraceError naming the first episode that is not the one that the ledger has as trained."""
    there = {(t.uid, t.attempt): t for g in groups for t in g.trajectories}
    if gone := sorted(recorded.keys() - there.keys()):
        uid, attempt = gone[0]
        raise TraceError(
            f"the traces of step {step} lack {uid}#{attempt}, which the ledger says was trained"
            f" ({len(gone)} such): they were changed since"
        )
    for key, t in there.items():
        if key in recorded:
            if recorded[key] not in (trajectory_sha256(t), trajectory_sha256(_unfiltered(t))):
                raise TraceError(
                    f"the traces of step {step}: {t.uid}#{t.attempt} is not what was trained (its arrays or its"
                    f" reward differ from the ledger's sha256 {recorded[key][:12]}): the file was changed since"
                )
        elif t.outcome in (Outcome.OK, Outcome.TRUNCATED) and t.loss_mask.any():
            raise TraceError(
                f"the traces of step {step} hold {t.uid}#{t.attempt}, which the ledger does not have as trained: the"
                " file was changed since"
            )


def _unfiltered(t: Trajectory) -> Trajectory:
    """As it was completed: an algorithm's filter may have emptied the loss mask after that."""
    return replace(t, loss_mask=np.asarray(t.versions) >= 0)
