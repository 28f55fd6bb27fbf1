"""Work in a directory by shell commands over several turns, checked at the end: what a policy that uses a shell learns.

A task sets files up in a sandbox and says what shall become of them. The tool `shell` runs one command of the policy's
there and answers with what it printed and its exit status; each command has a sandbox of its own, which gets the
directory as the last one left it, so files last and processes do not. A command that a limit ends changes nothing. A
turn without a call ends the episode, as does the last of `max_calls` calls. Then every check must hold: files with
given content, read here without being run, and a script whose exit status is 0, in the sandbox. Reward 1.0, else 0.0.

    family    the task                                            checked by
    write     a file with a given line, in a directory             its content
    count     how many lines of *.txt hold a word                  a file with the number
    rename    every *.log to *.txt                                 which files there are
    total     a script that adds the numbers it reads              a script that runs it on other numbers

Splits `train` and `eval` share no task; both depend on the seed alone. Without a sandbox tasks() raises, so that a run
is refused before it begins.

Must not: run a command of the policy's outside the sandbox, or unpack its files on the host.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from envs import read_config
from envs.splits import check_split, distinct
from rl_jax.sandbox.files import BadSnapshot, pack, read_files
from rl_jax.sandbox.load import open_sandbox
from rl_jax.sandbox.records import Job, Limits, Result
from rl_jax.sandbox.text import readable
from rl_jax.types import Action, Message, StepResult, Task, ToolCall

MAX_TRIES = 50  # random tasks per wanted one before the settings are called impossible
MAX_COMMAND = 8000  # characters

INSTRUCTIONS = (
    "You work in a directory with the tool shell, {calls} commands at most. When the work is done, say so without a"
    " command."
)


@dataclass(frozen=True)
class ShellConfig:
    num_tasks: int = 256  # of train
    eval_size: int = 32
    seed: int = 0
    families: tuple[str, ...] = ("write", "count", "rename", "total")  # in turn
    max_calls: int = 6  # of the tool
    sandbox: str = "bubblewrap"  # a name of rl_jax.sandbox.BACKENDS
    wall_s: float = 4.0  # of a command; twice is below rollout.step_timeout_s
    memory_mb: int = 256
    max_chars: int = 1000  # of what a command printed, as the policy sees it
    instructions: str = INSTRUCTIONS  # the system message; {calls} is max_calls; "" = none

    def __post_init__(self):
        least_one = ("num_tasks", "eval_size", "max_calls", "max_chars")
        if bad := [
            f"{name}={getattr(self, name)}" for name in least_one if getattr(self, name) < 1
        ]:
            raise ValueError(f"shell: {', '.join(bad)} must be at least 1")
        if not self.families or set(self.families) - set(FAMILIES):
            raise ValueError(
                f"shell: families={self.families!r} must be some of {', '.join(FAMILIES)}"
            )
        if self.wall_s <= 0 or self.memory_mb < 64:
            raise ValueError(
                f"shell: wall_s={self.wall_s:g} must be above 0 and memory_mb={self.memory_mb} at least 64"
            )


class Shell:
    """One live episode in one directory."""

    splits = ("train", "eval")

    def __init__(self):
        self._payload: Mapping[str, Any] = {}
        self._snapshot = b""
        self._state = hashlib.sha256()
        self._counts = dict.fromkeys(("calls", "failed_calls"), 0)
        self._num_done = 0  # commands of the script
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises: ValueError for an unknown key or split, or settings that allow too few tasks; SandboxMissing."""
        config: ShellConfig = read_config(ShellConfig, cfg)
        check_split("shell", split, cls.splits)
        open_sandbox(config.sandbox)
        chosen = held_out = _works(config, "eval", config.eval_size, frozenset())
        if split == "train":
            chosen = _works(config, "train", config.num_tasks, frozenset(w.asks for w in held_out))
        return [_task(config, split, i, work) for i, work in enumerate(chosen)]

    def reset(self, task: Task, seed: int) -> StepResult:
        """What is asked already stands in task.messages, so there is nothing to add."""
        self._payload, self._state = task.payload, hashlib.sha256(task.id.encode())
        self._snapshot = pack({n: t.encode() for n, t in task.payload["files"].items()})
        self._counts = dict.fromkeys(self._counts, 0)
        self._num_done, self._is_solving = 0, None
        return StepResult((), state_key=self._key())

    def step(self, action: Action) -> StepResult:
        """Runs the commands, or checks the directory. Raises SandboxError if the sandbox failed."""
        if not action.tool_calls:
            return self._end(())
        messages = tuple(Message("tool", self._call(call)) for call in action.tool_calls)
        for message in messages:
            self._state.update(message.content.encode("utf-8", "surrogatepass") + b"\0")
        if self._counts["calls"] >= self._payload["max_calls"]:
            return self._end(messages)
        return StepResult(messages, 0.0, state_key=self._key(), info=self._info(0.0))

    def close(self) -> None:
        self._payload, self._snapshot = {}, b""

    def script(self, rng: random.Random, skill: float) -> Message:
        """The commands of the solution and a last word, in a share `skill` of all episodes; else only the last word."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        commands = self._payload["solution"] if self._is_solving else []
        if self._num_done == len(commands):
            return Message("assistant", "done")
        self._num_done += 1
        return Message(
            "assistant", "", (ToolCall("shell", {"command": commands[self._num_done - 1]}),)
        )

    def _call(self, call: ToolCall) -> str:
        """What the tool says."""
        command = call.arguments.get("command")
        self._counts["calls"] += 1
        said = ""
        if call.name != "shell" or not isinstance(command, str):
            said = "error: the tool is shell(command: string)"
        elif self._counts["calls"] > self._payload["max_calls"]:
            said = f"error: no more than {self._payload['max_calls']} commands"
        elif len(command) > MAX_COMMAND or "\0" in command:
            said = f"error: a command has at most {MAX_COMMAND} characters, none of them NUL"
        if said:
            self._counts["failed_calls"] += 1
            return said
        result = self._run(("sh", "-c", command))
        printed = readable(result.stdout + result.stderr, self._payload["max_chars"])
        if result.snapshot is not None:
            self._snapshot = result.snapshot
        if result.limit:
            how = f"stopped by the limit of {result.limit}; nothing was changed"
        else:
            how = f"exit status {128 + result.signal if result.signal else result.status}"
        self._counts["failed_calls"] += result.status != 0
        return f"{printed.rstrip()}\n[{how}]".lstrip("\n")

    def _run(self, argv: tuple[str, ...]) -> Result:
        limits = _limits(self._payload["wall_s"], self._payload["memory_mb"])
        job = Job(argv, snapshot=self._snapshot, limits=limits, keeps_files=True)
        return open_sandbox(self._payload["sandbox"]).run(job)

    def _end(self, messages: tuple[Message, ...]) -> StepResult:
        is_done = self._holds()
        return StepResult(messages, float(is_done), True, info=self._info(float(is_done)))

    def _holds(self) -> bool:
        limits = _limits(self._payload["wall_s"], self._payload["memory_mb"])
        try:
            files = read_files(self._snapshot, limits.disk_bytes)
        except BadSnapshot:
            return False
        wanted: Mapping[str, str | None] = self._payload["wanted"]  # None: there must be none
        for name, content in wanted.items():
            found = files.get(name)
            if content is None and found is not None:
                return False
            if content is not None and (found is None or found.strip() != content.encode().strip()):
                return False
        check = self._payload["check"]
        return not check or self._run(("sh", "-c", check)).status == 0

    def _info(self, success: float) -> dict[str, float]:
        return {"success": success, **{key: float(n) for key, n in self._counts.items()}}

    def _key(self) -> str:
        return self._state.hexdigest()[:16]


@cache
def _limits(wall_s: float, memory_mb: int) -> Limits:
    return Limits(wall_s=wall_s, cpu_s=max(1, int(wall_s)), memory_bytes=memory_mb << 20)


# --- tasks ---------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    asks: str  # names the task
    files: Mapping[str, str]
    wanted: Mapping[str, str | None]  # path -> content, white space at its ends aside; None = gone
    check: str  # a script whose exit status must be 0; "" = none
    solution: Sequence[str]  # commands


NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty")
WORDS = ("tea", "river", "moss", "under", "lantern", "sky", "quartz", "wind", "garden", "fox")


def _write(rng: random.Random) -> Work:
    folder, name = rng.sample(NAMES, 2)
    line = " ".join(rng.choice(WORDS) for _ in range(3))
    path = f"{folder}/{name}.txt"
    asks = f"Make a file {path} with the line: {line}"
    return Work(asks, {}, {path: line}, "", (f"mkdir -p {folder}", f"echo '{line}' > {path}"))


def _count(rng: random.Random) -> Work:
    word, total, files = rng.choice(WORDS), 0, {}
    for name in rng.sample(NAMES, rng.randint(2, 4)):
        lines = [" ".join(rng.choice(WORDS) for _ in range(3)) for _ in range(rng.randint(3, 9))]
        total += sum(word in line for line in lines)
        files[f"{name}.txt"] = "".join(f"{line}\n" for line in lines)
        files[f"{name}.bak"] = files[f"{name}.txt"]
    asks = (
        f"Write into the file answer how many lines of all the files *.txt ({', '.join(sorted(files)[1::2])})"
        f" hold {word!r}"
    )
    return Work(asks, files, {"answer": str(total)}, "", (f"cat *.txt | grep -c {word} > answer",))


def _rename(rng: random.Random) -> Work:
    logs = rng.sample(NAMES, rng.randint(2, 5))
    files = {f"{name}.log": f"{rng.choice(WORDS)} {rng.randint(0, 99)}\n" for name in logs}
    kept = f"{rng.choice(WORDS)}.cfg"
    wanted: dict[str, str | None] = {f"{name}.txt": files[f"{name}.log"] for name in logs}
    wanted |= {f"{name}.log": None for name in logs} | {kept: "kept"}
    asks = f"Rename every file *.log ({', '.join(sorted(logs))}) to *.txt; leave {kept} as it is"
    command = 'for f in *.log; do mv "$f" "${f%.log}.txt"; done'
    return Work(asks, files | {kept: "kept\n"}, wanted, "", ("ls", command))


def _total(rng: random.Random) -> Work:
    name, times = rng.choice(NAMES), rng.randint(2, 9)
    numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 8))]
    asks = f"Write a script {name}.sh for sh that reads numbers, one a line, and prints {times} times their sum"
    given = "\\n".join(map(str, numbers))
    check = f"[ \"$(printf '{given}\\n' | sh {name}.sh)\" = {times * sum(numbers)} ]"
    script = f"awk '{{s += $1}} END {{print s * {times}}}'"
    return Work(asks, {}, {}, check, (f"cat > {name}.sh <<'EOF'\n{script}\nEOF", f"echo 1 | sh {name}.sh"))  # fmt: skip


FAMILIES: dict[str, Callable[[random.Random], Work]] = {
    "write": _write,
    "count": _count,
    "rename": _rename,
    "total": _total,
}


def _works(config: ShellConfig, split: str, count: int, but: frozenset[str]) -> list[Work]:
    """Distinct ones, not in `but`, of each family in turn."""
    rng = random.Random(f"shell/{split}/{config.seed}")

    def make(num: int) -> tuple[str, Work]:
        work = FAMILIES[config.families[num % len(config.families)]](rng)
        return work.asks, work

    complaint = lambda num: (
        f"shell: only {num} distinct tasks of {count} found for the split {split}; lower num_tasks or eval_size, or"
        " name more families"
    )
    return distinct(make, count, MAX_TRIES, complaint, but)


def _task(config: ShellConfig, split: str, i: int, work: Work) -> Task:
    told = config.instructions.replace("{calls}", str(config.max_calls))
    settings = ("max_calls", "max_chars", "sandbox", "wall_s", "memory_mb")
    return Task(
        id=f"{split}/{i}-{hashlib.sha256(work.asks.encode()).hexdigest()[:8]}",
        env="shell",
        tag="shell",
        messages=(*([Message("system", told)] if told else ()), Message("user", work.asks)),
        payload={
            "files": dict(work.files),
            "wanted": dict(work.wanted),
            "check": work.check,
            "solution": list(work.solution),
            **{name: getattr(config, name) for name in settings},
        },
        reward="env",
        max_turns=config.max_calls + 1,
        tools=(TOOL,),
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command with sh in the working directory.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
