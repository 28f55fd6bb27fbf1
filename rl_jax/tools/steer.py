"""`python -m rl_jax.tools.steer RUN pause | resume | stop | save | set KEY=VALUE`: steer a run that goes on.

    pause            no further step begins; servers, workers and learner stay as they are
    resume           the end of a pause
    stop             the run ends as after its last step: evaluation, save, summary, exit code 0
    save             a checkpoint now, between two steps
    set KEY=VALUE    another value of a setting; which ones may change: rl_jax/steering.py

The command goes into RUN/control.jsonl; the run reads it between two steps, while it waits for a batch, and while it is
paused, and answers with an event `steer` in RUN/events.jsonl, which is waited for here.
Exit codes: 0 it is done, 1 it was refused or is not answered yet, 2 there is no such run, or none that lives.
Must not: import jax, or write anything but the control file.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_jax import schema
from rl_jax.console import say
from rl_jax.control import VERBS, Command, send
from rl_jax.resume import CONFIG
from rl_jax.run_dir import EVENTS, STATUS, holder
from rl_jax.settings import Settings
from rl_jax.steering import changed_settings

LOOK_S = 0.1
OVER = ("done", "failed", "preempted", "interrupted")  # states of STATUS.json


class SteerError(Exception):
    """One line; exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    args = parser().parse_args(argv)
    try:
        attempt = attempt_of(args.run)
        key, value = read_value(args)
        events = args.run / EVENTS
        begin = events.stat().st_size if events.exists() else 0
        command = send(args.run, attempt, args.verb, key, value)
    except (SteerError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        code, line = answer_of(args.run, command, begin, args.timeout_s)
    except KeyboardInterrupt:
        return 130
    say(line)
    return code


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m rl_jax.tools.steer", allow_abbrev=False)
    out.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    out.add_argument("verb", choices=VERBS)
    out.add_argument("change", nargs="?", default="", metavar="KEY=VALUE", help="of set")
    out.add_argument(
        "--timeout_s", type=float, default=60.0, help="for the answer; the command stands after it"
    )
    return out


def attempt_of(run: Path) -> int:
    """Of the process that holds the run now. Raises: SteerError."""
    if not (run / CONFIG).is_file():
        raise SteerError(f"{run} is no run directory: it has no {CONFIG}")
    status = read_status(run)
    if holder(run) is None:
        state = status.get("state", "unknown")
        said = f"is over ({state})" if state in OVER else f"is dead (its last state: {state})"
        raise SteerError(f"{run} {said}: no process holds it; the launch command resumes it")
    if not isinstance(status.get("attempt"), int):
        raise SteerError(f"{run} has begun just now: there is no {STATUS} yet; try again")
    return status["attempt"]


def read_status(run: Path) -> dict[str, Any]:
    try:
        said = json.loads((run / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def read_value(args: argparse.Namespace) -> tuple[str, Any]:
    """Of set. Raises: SteerError, for what no run would do."""
    if args.verb != "set":
        if args.change:
            raise SteerError(f"{args.verb} takes no {args.change!r}")
        return "", None
    key, equals, text = args.change.removeprefix("--config.").partition("=")
    if not equals:
        raise SteerError(f"set {args.change!r} is no KEY=VALUE; for example eval.every=10")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    tree = json.loads((args.run / CONFIG).read_text(encoding="utf-8"))
    errors: list[str] = []
    settings = schema.build(Settings, tree, "", errors)
    _, why = changed_settings(settings, key, value)
    if why:
        raise SteerError(why)
    return key, value


def answer_of(run: Path, command: Command, begin: int, timeout_s: float) -> tuple[int, str]:
    """(exit code, line). begin: size of events.jsonl before the command was sent."""
    end_s = time.monotonic() + timeout_s
    for event in _events(run / EVENTS, begin, end_s, run):
        if event.get("kind") != "steer" or event.get("seq") != command.seq:
            continue
        if event.get("answer") != "done":
            return 1, f"refused: {event.get('why')}"
        changed = f": {event.get('old')} -> {event.get('new')}" if command.key else ""
        return (
            0,
            f"{command.verb} {command.key}".rstrip() + f"{changed}, after step {event['step']}",
        )
    status = read_status(run)
    if holder(run) is None:
        return 1, f"not answered: the run has ended meanwhile ({status.get('state', 'unknown')})"
    return 1, (
        f"not answered within {timeout_s:g} s (command {command.seq} stands): the run is {status.get('state')} at step"
        f" {status.get('step', 'none')}, and reads it between two steps and while it waits for a batch"
    )


def _events(path: Path, begin: int, end_s: float, run: Path) -> Iterator[dict[str, Any]]:
    """Whole lines behind `begin`, until the deadline or the run's end."""
    rest, last_look = b"", False
    while True:
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                text = file.read()
        except OSError:
            text = b""
        begin += len(text)
        *lines, rest = (rest + text).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict):
                yield said
        if last_look:
            return
        last_look = time.monotonic() >= end_s or holder(run) is None
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
