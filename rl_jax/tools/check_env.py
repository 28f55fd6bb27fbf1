"""`python -m rl_jax.tools.check_env NAME [--config KEY=VALUE ...]`: what is wrong with an environment.

NAME is one of ENVS, "package.module:Class", or "path/to/file.py:Class". The environment runs in worker processes, as in
a run: a hang is killed. Played are a random policy, its script if it has one, hostile text, and with --openai a model
behind an endpoint; what is checked stands in env_checks.py. One line on stdout for each fault, with its remedy. Exit
code: 0 nothing is wrong, 1 something is, 2 the arguments cannot be used, 130 interrupted.
Must not: import an environment itself.
"""

import argparse
import ast
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs import ENVS
from rl_jax.asgi import read_token
from rl_jax.console import say
from rl_jax.rewards import REWARDS
from rl_jax.rollout.blocking import run_blocking
from rl_jax.settings import RewardSettings, RolloutSettings, TaskSource
from rl_jax.tools.env_checks import Checker, Report
from rl_jax.tools.openai_policy import OpenAIPolicy

TAG = "checked"
WORST_FAILURES = 1000  # deaths of a worker before its place is given up; the time limit comes first


class ArgumentError(ValueError):
    """One line; exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.tools.check_env", allow_abbrev=False)
    parser.add_argument(
        "name", metavar="NAME", help="of ENVS, package.module:Class, or file.py:Class"
    )
    parser.add_argument("--config", nargs="*", action="extend", default=[], metavar="KEY=VALUE",
                        help="of the task source's config; a.b=1 sets b of a")  # fmt: skip
    parser.add_argument("--reward", default="env", help="env, a name of REWARDS, or module:Class")
    parser.add_argument("--step_timeout_s", type=float, default=RolloutSettings.step_timeout_s)
    parser.add_argument("--reset_timeout_s", type=float, default=RolloutSettings.reset_timeout_s)
    parser.add_argument("--max_obs_bytes", type=int, default=RolloutSettings.max_obs_bytes)
    parser.add_argument("--timeout_s", type=float, default=300.0, help="for all checks together")
    parser.add_argument("--openai", default="", metavar="URL",
                        help="an OpenAI-compatible API whose model plays too, as http://127.0.0.1:8000/v1")  # fmt: skip
    parser.add_argument("--model", default="", help="the model there")
    parser.add_argument("--token_file", default="", help="of that API: a file with its token")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead")
    args = parser.parse_args(argv)
    begin_s = time.monotonic()
    try:
        report = check(args)
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    seconds = round(time.monotonic() - begin_s, 2)
    if args.json:
        say(json.dumps({**report.as_json(), "seconds": seconds}))
    else:
        for line in lines_of(report, seconds):
            say(line)
    return 1 if report.faults else 0


def check(args: argparse.Namespace) -> Report:
    """Raises: ArgumentError."""
    for name in ("step_timeout_s", "reset_timeout_s", "timeout_s", "max_obs_bytes"):
        if not getattr(args, name) > 0:
            raise ArgumentError(f"--{name}={getattr(args, name)} must be above 0")
    source = TaskSource(TAG, named(args.name, ENVS, "environment"), config=read_values(args.config),
                        reward=named(args.reward, {"env": "", **REWARDS}, "reward"))  # fmt: skip
    settings = RolloutSettings(
        step_timeout_s=args.step_timeout_s,
        reset_timeout_s=args.reset_timeout_s,
        start_timeout_s=max(RolloutSettings.start_timeout_s, args.reset_timeout_s),
        max_obs_bytes=args.max_obs_bytes,
        max_env_failures=WORST_FAILURES,
    )
    try:
        checker = Checker(source, settings, RewardSettings(), model_of(args))
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    return run_blocking(_bounded(checker, args.timeout_s))


def model_of(args: argparse.Namespace) -> OpenAIPolicy | None:
    """Raises: ArgumentError."""
    if bool(args.openai) != bool(args.model) or (args.token_file and not args.openai):
        raise ArgumentError(
            "--openai URL and --model NAME belong together, and --token_file to them"
        )
    if not args.openai:
        return None
    try:
        return OpenAIPolicy(args.openai, args.model, read_token(args.token_file, "--token_file"))
    except (ValueError, OSError) as error:
        raise ArgumentError(f"--openai: {error}") from None


async def _bounded(checker: Checker, timeout_s: float) -> Report:
    try:
        async with asyncio.timeout(timeout_s):
            return await checker.run()
    except TimeoutError:
        told = f"the checks were not done within --timeout_s={timeout_s:g}"
        checker.report.add("time", "late", told, "raise it, or look at the faults above first")
        return checker.report


def named(name: str, table: dict[str, str], kind: str) -> str:
    """The name as a task source has it; the folder of a file becomes importable. Raises: ArgumentError."""
    path, _, attribute = name.rpartition(":")
    if name in table or (path and attribute and not path.endswith(".py")):
        return name
    if not attribute or not path:
        raise ArgumentError(
            f"no {kind} {name!r}; use one of {', '.join(table)}, package.module:Class or file.py:Class"
        )
    file = Path(path)
    if not file.is_file() or not file.stem.isidentifier():
        raise ArgumentError(
            f"{path} is no file whose name can be imported; give its path, as my_env.py:MyEnv"
        )
    sys.path.insert(0, str(file.resolve().parent))  # workers import what this process can import
    return f"{file.stem}:{attribute}"


def read_values(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE ... as a config. A value is a Python literal, true, false or null, else text. Raises: ArgumentError."""
    config: dict[str, Any] = {}
    for word in words:
        key, is_given, text = word.partition("=")
        *outer, last = key.split(".")
        if not is_given or not all((*outer, last)):
            raise ArgumentError(f"--config {word!r} is no KEY=VALUE; write it as map_size=8")
        place = config
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ArgumentError(f"--config {word!r}: {name} has a value already, and no keys")
        place[last] = _value(text)
    return config


def lines_of(report: Report, seconds: float) -> list[str]:
    """What is told: faults first."""
    out = []
    for fault in report.faults.values():
        times = f" ({fault.count} times)" if fault.count > 1 else ""
        out.append(f"FAULT {fault.check}: {fault.detail}{times}; {fault.remedy}")
    out += [f"note: {note}" for note in report.notes]
    tasks = ", ".join(f"{num} {split}" for split, num in report.tasks.items()) or "none"
    longest = report.as_json()["longest_s"]
    num = len(report.faults)
    what = f"{num} fault{'s' * (num > 1)}" if num else "nothing wrong"
    out.append(
        f"{report.env}: {what}; tasks: {tasks}; {report.num_episodes} episodes played; longest reset"
        f" {longest['reset']:.3f} s, step {longest['step']:.3f} s; took {seconds:g} s"
    )
    return out


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    sys.exit(main())
