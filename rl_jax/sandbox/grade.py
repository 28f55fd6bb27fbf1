"""Code that a model wrote, graded by hidden tests in a sandbox.

A test is data: {"args": [...], "expected": VALUE} calls a function, {"stdin": TEXT, "stdout": TEXT} runs the code as a
program. Only the arguments and inputs go into the sandbox; what comes out is compared here, so that no code can read
what is expected, whatever it does. It may claim any output, which is no more than an answer.

Functions: all cases in one sandbox (harness.py), one after another; what a case breaks, later ones may find broken.
Programs: a sandbox a test. Values are equal as JSON, with their types: 1 is not 1.0 and not true; a tuple is a list.

Must not: run, import or evaluate the code in this process.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rl_jax.sandbox.load import open_sandbox
from rl_jax.sandbox.records import Job, Limits, Result, SandboxMissing
from rl_jax.sandbox.run import Sandbox
from rl_jax.sandbox.text import readable

KINDS = ({"args", "expected"}, {"stdin", "stdout"})
MAX_CODE = 64 << 10  # bytes of an answer
_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.S)


@dataclass(frozen=True)
class Grade:
    passed: tuple[bool, ...]  # one a test
    said: str  # what went wrong first; "" = nothing
    wall_s: float  # in sandboxes

    @property
    def fraction(self) -> float:
        return sum(self.passed) / len(self.passed)

    @property
    def is_right(self) -> bool:
        return all(self.passed)


@dataclass(frozen=True)
class Grader:
    """How code is run."""

    sandbox: Sandbox
    limits: Limits = Limits(output_bytes=256 << 10)
    python: str = "python3"

    def grade(self, code: str, tests: Sequence[Mapping[str, Any]], function: str = "f") -> Grade:
        """Raises: ValueError for tests that are none (check_tests), SandboxError if the sandbox failed."""
        check_tests(tests)
        source = code.encode("utf-8", "replace")
        if len(source) > MAX_CODE:
            return _failed(tests, f"the code has more than {MAX_CODE} bytes")
        if "stdin" in tests[0]:
            return self._programs(source, tests)
        return self._calls(source, tests, function)

    def _calls(self, source: bytes, tests: Sequence[Mapping[str, Any]], function: str) -> Grade:
        asked = {"function": function, "cases": [test["args"] for test in tests]}
        files = {
            "solution.py": source,
            "harness.py": _harness(),
            "cases.json": json.dumps(asked).encode(),
        }
        result = self.sandbox.run(Job((self.python, "harness.py"), files, limits=self.limits))
        found = _answers(result.stdout)
        if -1 in found or not found:
            _, said = found.get(-1, ("", ended(result) or "it printed no answers"))
            return _failed(tests, str(said), result.wall_s)
        passed, said = [], ""
        for i, test in enumerate(tests):
            kind, value = found.get(i, ("error", ended(result) or "no answer"))
            passed.append(kind == "value" and same(value, test["expected"]))
            if not passed[-1] and not said:
                said = f"test {i}: {value}" if kind == "error" else f"test {i}: wrong value"
        return Grade(tuple(passed), said, result.wall_s)

    def _programs(self, source: bytes, tests: Sequence[Mapping[str, Any]]) -> Grade:
        passed, said, wall_s = [], "", 0.0
        for i, test in enumerate(tests):
            stdin = test["stdin"].encode("utf-8", "replace")
            job = Job(
                (self.python, "main.py"), {"main.py": source}, stdin=stdin, limits=self.limits
            )
            result = self.sandbox.run(job)
            wall_s += result.wall_s
            right = _lines(result.stdout) == _lines(test["stdout"].encode("utf-8", "replace"))
            passed.append(result.status == 0 and right)
            if not passed[-1] and not said:
                said = f"test {i}: {ended(result) or 'wrong output'}"
        return Grade(tuple(passed), said, wall_s)


def check_tests(tests: Any) -> None:
    """Raises ValueError naming the first thing that is no test."""
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError("tests must be a list of at least one test")
    for i, test in enumerate(tests):
        keys = set(test) if isinstance(test, Mapping) else None
        if keys not in KINDS or keys != set(tests[0]):
            raise ValueError(
                f"tests[{i}] must have args and expected, or stdin and stdout, and all tests the same; it is"
                f" {str(test):.80}"
            )


def answered_code(text: str) -> str:
    """The code of an answer: its last fenced block, or all of it."""
    found = _FENCED.findall(text)
    return (found[-1] if found else text).strip()


def same(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal with their types."""
    if type(value) is not type(expected):
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[k], expected[k]) for k in value)
    return value == expected


def ended(result: Result) -> str:
    """How a program ended badly, in a few words; "" = it did not."""
    if result.limit:
        return f"stopped: {LIMIT_SAYS[result.limit]}"
    if result.signal is not None:
        return f"ended by signal {result.signal}"
    last = readable(result.stderr, 2000).strip().rpartition("\n")[2]
    return last[:300] or f"exit status {result.status}" if result.status else ""


LIMIT_SAYS = {
    "wall": "it took too long",
    "cpu": "it computed for too long",
    "memory": "it took too much memory",
    "file": "a file became too large",
    "disk": "the files became too large",
    "files": "there were too many files",
    "output": "it printed too much",
}


@cache
def open_grader(name: str, python: str, wall_s: float, memory_mb: int) -> Grader:
    """Raises: ValueError, SandboxMissing; the latter too if the sandbox has no such Python."""
    sandbox = open_sandbox(name)
    result = sandbox.run(Job((python, "-c", "print(1)")))
    if result.stdout != b"1\n":
        raise SandboxMissing(
            f"sandbox {name} has no Python {python} ({ended(result) or 'no answer'}); install python3 where it sees it"
            " (/usr), or name another"
        )
    limits = Limits(
        wall_s=wall_s,
        cpu_s=max(1, int(wall_s)),
        memory_bytes=memory_mb << 20,
        output_bytes=256 << 10,
    )
    return Grader(sandbox, limits, python)


def _answers(stdout: bytes) -> dict[int, tuple[str, Any]]:
    out: dict[int, tuple[str, Any]] = {}
    for line in stdout.splitlines():
        try:
            number, kind, value = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue  # cut off, or printed by the code
        if isinstance(number, int) and kind in ("value", "error"):
            out.setdefault(number, (kind, value))
    return out


def _failed(tests: Sequence[Any], said: str, wall_s: float = 0.0) -> Grade:
    return Grade((False,) * len(tests), said, wall_s)


def _lines(text: bytes) -> list[bytes]:
    """Lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split(b"\n")]


@cache
def _harness() -> bytes:
    return Path(__file__).with_name("harness.py").read_bytes()
