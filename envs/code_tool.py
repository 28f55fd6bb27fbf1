"""Programming tasks with Python as a tool, graded by hidden tests: what a policy that writes code learns.

A task asks for a function f. The tool `python` runs a program of the policy's in a sandbox and answers with what it
printed, an error in words too; `max_calls` calls an episode, 0 = the tool is not there. A turn without a call is the
answer: the function, or an expression of f's parameters where that is enough, as code alone or in a fenced block. Its
reward is 1.0 if all hidden tests pass, else 0.0, or with reward_by="fraction" the share of tests that pass.

    level  asks for                                   answer, for example
    1      an operation of two operands               a+7
    2      two or three operations, in words          (a+7)*b-c
    3      a number from a list of numbers            sum(x*x for x in xs if x % 2 == 0)
    4      a text from the words of a text            '-'.join(w[::-1] for w in s.split() if len(w) > 3)
    5      the n-th term of a sequence                def f(n): ...

Splits `train` and `eval` share no problem; both depend on the seed alone. All that runs is a program of the sandbox
(rl_jax/sandbox/grade.py); without one, tasks() raises, so that a run is refused before it begins.

Must not: evaluate what the policy says in this process, or let tests' expected values into the sandbox.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envs import read_config
from envs.splits import check_split, distinct
from rl_jax.sandbox.grade import Grader, answered_code, ended, open_grader
from rl_jax.sandbox.records import Job
from rl_jax.sandbox.text import readable
from rl_jax.types import Action, Message, StepResult, Task, ToolCall

LEVELS = 5
MAX_TRIES = 50  # random problems per wanted one before the settings are called impossible
VARIABLES = "abc"

INSTRUCTIONS = "Write Python code for {what}. {how}Answer with the code alone."
TRIES = "You may run programs with the tool first, {calls} at most. "


@dataclass(frozen=True)
class CodeToolConfig:
    num_tasks: int = 512  # of train
    eval_size: int = 64
    seed: int = 0
    min_level: int = 1  # tasks are of all levels from here
    max_level: int = 1  # to here, in turn
    max_digits: int = 2  # of a number in levels 1 and 2
    num_tests: int = 6
    max_calls: int = 3  # of the tool
    reward_by: str = "all"  # all | fraction
    sandbox: str = "bubblewrap"  # a name of rl_jax.sandbox.BACKENDS
    python: str = "python3"  # on the sandbox's PATH
    wall_s: float = (
        4.0  # of a program, and of all tests together; twice is below rollout.step_timeout_s
    )
    memory_mb: int = 256
    max_chars: int = 1000  # of what a program printed, as the policy sees it
    # the system message; {what} is the function, {how} says of the tool; "" = none
    instructions: str = INSTRUCTIONS

    def __post_init__(self):
        least_one = ("num_tasks", "eval_size", "num_tests", "max_digits", "max_chars", "memory_mb")
        if bad := [
            f"{name}={getattr(self, name)}" for name in least_one if getattr(self, name) < 1
        ]:
            raise ValueError(f"code_tool: {', '.join(bad)} must be at least 1")
        if not 1 <= self.min_level <= self.max_level <= LEVELS:
            raise ValueError(
                f"code_tool: min_level={self.min_level} and max_level={self.max_level} must rise within 1..{LEVELS}"
            )
        if self.max_calls < 0 or self.wall_s <= 0 or self.memory_mb < 64:
            raise ValueError(
                f"code_tool: max_calls={self.max_calls} must be at least 0, wall_s={self.wall_s:g} above 0 and"
                f" memory_mb={self.memory_mb} at least 64"
            )
        if self.reward_by not in ("all", "fraction"):
            raise ValueError(f"code_tool: reward_by={self.reward_by!r} is not one of all, fraction")


class CodeTool:
    """One live episode on one problem."""

    splits = ("train", "eval")

    def __init__(self):
        self._payload: Mapping[str, Any] = {}
        self._state = hashlib.sha256()
        self._counts = dict.fromkeys(("calls", "failed_calls"), 0)
        self._num_turns = 0  # of the script
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises: ValueError for an unknown key or split, or settings that allow too few problems; SandboxMissing."""
        config: CodeToolConfig = read_config(CodeToolConfig, cfg)
        check_split("code_tool", split, cls.splits)
        _grader(_run_settings(config))
        chosen = held_out = _problems(config, "eval", config.eval_size, frozenset())
        if split == "train":
            used = frozenset(problem.asks for problem in held_out)
            chosen = _problems(config, "train", config.num_tasks, used)
        return [_task(config, split, i, problem) for i, problem in enumerate(chosen)]

    def reset(self, task: Task, seed: int) -> StepResult:
        """The problem already stands in task.messages, so there is nothing to add."""
        self._payload, self._state = task.payload, hashlib.sha256(task.id.encode())
        self._counts = dict.fromkeys(self._counts, 0)
        self._num_turns, self._is_solving = 0, None
        return StepResult((), state_key=self._key())

    def step(self, action: Action) -> StepResult:
        """Runs the calls, or grades the answer. Raises SandboxError if the sandbox failed."""
        if action.tool_calls:
            messages = tuple(Message("tool", self._call(call)) for call in action.tool_calls)
            for message in messages:
                self._state.update(message.content.encode("utf-8", "surrogatepass") + b"\0")
            return StepResult(messages, 0.0, state_key=self._key(), info=self._info(0.0, 0.0))
        grade = _grader(self._payload).grade(
            self._function(answered_code(action.text)), self._payload["tests"]
        )
        reward = (
            grade.fraction if self._payload["reward_by"] == "fraction" else float(grade.is_right)
        )
        return StepResult((), reward, True, info=self._info(float(grade.is_right), grade.fraction))

    def close(self) -> None:
        self._payload = {}

    def script(self, rng: random.Random, skill: float) -> Message:
        """One call of the tool where there is one, then the solution, in a share `skill` of all episodes; else one with
        a wrong sign or digit: what is right about it can be learned from it too."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        self._num_turns += 1
        tests, solution = self._payload["tests"], self._payload["solution"]
        if self._num_turns == 1 and self._payload["max_calls"]:
            arguments = ", ".join(map(repr, tests[0]["args"]))
            code = f"{self._function(solution)}\nprint(f({arguments}))"
            return Message("assistant", "", (ToolCall("python", {"code": code}),))
        if self._is_solving:
            return Message("assistant", solution)
        return Message("assistant", _slip(solution, rng))

    def _function(self, code: str) -> str:
        """The code, or an expression as the function's value."""
        if "def f" in code:
            return code
        return f"def f({', '.join(self._payload['parameters'])}):\n    return (\n{code}\n)"

    def _call(self, call: ToolCall) -> str:
        """What the tool says."""
        code = call.arguments.get("code")
        self._counts["calls"] += 1
        said = ""
        if call.name != "python" or not isinstance(code, str):
            said = "error: the tool is python(code: string)"
        elif self._counts["calls"] > self._payload["max_calls"]:
            said = f"error: no more than {self._payload['max_calls']} calls; answer with the code"
        if said:
            self._counts["failed_calls"] += 1
            return said
        grader = _grader(self._payload)
        files = {"main.py": code.encode("utf-8", "replace")}
        result = grader.sandbox.run(Job((grader.python, "main.py"), files, limits=grader.limits))
        printed = readable(result.stdout, self._payload["max_chars"])
        if bad := ended(result):
            self._counts["failed_calls"] += 1
            printed += f"error: {bad}"
        return printed or "(it printed nothing)"

    def _info(self, success: float, passed: float) -> dict[str, float]:
        counts = {key: float(value) for key, value in self._counts.items()}
        return {"success": success, "tests_passed": passed, **counts}

    def _key(self) -> str:
        return self._state.hexdigest()[:16]


def _slip(code: str, rng: random.Random) -> str:
    """The code with one sign, or where it has none one digit, that is another."""
    for kind in ("+-*", "0123456789"):
        if places := [i for i, char in enumerate(code) if char in kind]:
            i = rng.choice(places)
            return code[:i] + rng.choice(kind.replace(code[i], "")) + code[i + 1 :]
    return ""


def _run_settings(config: CodeToolConfig) -> dict[str, Any]:
    names = ("sandbox", "python", "wall_s", "memory_mb")
    return {name: getattr(config, name) for name in names}


def _grader(settings: Mapping[str, Any]) -> Grader:
    return open_grader(
        settings["sandbox"], settings["python"], settings["wall_s"], settings["memory_mb"]
    )


# --- problems ------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    asks: str  # in words; names the problem
    parameters: tuple[str, ...]
    solution: str  # an expression of the parameters, or a function f
    value: Callable[..., Any]  # what f gives, worked out here
    arguments: Callable[[random.Random], list[Any]]  # of one test


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 20) for _ in VARIABLES]


BINARY: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "plus": ("sum", "+", lambda x, y: x + y),
    "minus": ("difference", "-", lambda x, y: x - y),
    "times": ("product", "*", lambda x, y: x * y),
}


class Term(NamedTuple):
    """A part of a formula: in words, as Python, and its value for the variables."""

    words: str
    code: str
    value: Callable[[Mapping[str, int]], int]


def _variable(rng: random.Random) -> Term:
    name = rng.choice(VARIABLES)
    return Term(name, name, lambda at: at[name])


def _operand(rng: random.Random, max_digits: int) -> Term:
    if rng.random() < 0.5:
        return _variable(rng)
    number = rng.randrange(10 ** rng.randint(1, max_digits))
    return Term(str(number), str(number), lambda at: number)


def _formula(asks: str, term: Term) -> Problem:
    return Problem(
        asks, tuple(VARIABLES), term.code, lambda *args: term.value(dict(zip(VARIABLES, args))), _numbers
    )  # fmt: skip


def _operation(rng: random.Random, max_digits: int) -> Problem:
    word = rng.choice(list(BINARY))
    _, sign, work_out = BINARY[word]
    sides = [_variable(rng), _operand(rng, max_digits)]
    rng.shuffle(sides)
    left, right = sides
    term = Term("", f"{left.code}{sign}{right.code}", lambda at: work_out(left.value(at), right.value(at)))  # fmt: skip
    return _formula(f"{left.words} {word} {right.words}", term)


def _nested(rng: random.Random, max_digits: int) -> Problem:
    term = _variable(rng)
    for _ in range(rng.randint(2, 3)):
        noun, sign, work_out = BINARY[rng.choice(list(BINARY))]
        sides = [term, _operand(rng, max_digits)]
        rng.shuffle(sides)
        term = _joined(noun, sign, work_out, *sides)
    return _formula(term.words, term)


def _joined(
    noun: str, sign: str, work_out: Callable[[int, int], int], left: Term, right: Term
) -> Term:
    return Term(
        f"the {noun} of {left.words} and {right.words}",
        f"({left.code}{sign}{right.code})",
        lambda at: work_out(left.value(at), right.value(at)),
    )


TOTALS: dict[str, tuple[str, Callable[[list[int]], int]]] = {
    "the sum of": ("sum({})", sum),
    "the largest of 0 and": ("max([0, *({})])", lambda xs: max([0, *xs])),
    "the smallest of 0 and": ("min([0, *({})])", lambda xs: min([0, *xs])),
    "the number of different values of": ("len({{*({})}})", lambda xs: len({*xs})),
}
CHANGES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "{k} times": ("{k} * x", lambda x, k: k * x),
    "the squares of": ("x * x", lambda x, k: x * x),
    "{k} more than": ("x + {k}", lambda x, k: x + k),
    "the remainders modulo {k} of": ("x % {k}", lambda x, k: x % k),
}
CHOICES: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    "the numbers": ("True", lambda x, k: True),
    "the even numbers": ("x % 2 == 0", lambda x, k: x % 2 == 0),
    "the numbers above {k}": ("x > {k}", lambda x, k: x > k),
    "the multiples of {k}": ("x % {k} == 0", lambda x, k: x % k == 0),
}


def _from_list(rng: random.Random, max_digits: int) -> Problem:
    total, change, choice = (rng.choice(list(d)) for d in (TOTALS, CHANGES, CHOICES))
    j, k = rng.randint(2, 9), rng.randint(2, 9)
    outer, add_up = TOTALS[total]
    changed, alter = CHANGES[change]
    chosen, is_chosen = CHOICES[choice]
    inner = f"{changed.format(k=j)} for x in xs if {chosen.format(k=k)}"
    return Problem(
        f"{total} {change.format(k=j)} {choice.format(k=k)} in xs",
        ("xs",),
        outer.format(inner),
        lambda xs: add_up([alter(x, j) for x in xs if is_chosen(x, k)]),
        lambda r: [[r.randint(-30, 30) for _ in range(r.randint(0, 12))]],
    )


SPELLINGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "the words": ("w", lambda w: w),
    "the words, spelt backwards,": ("w[::-1]", lambda w: w[::-1]),
    "the words in capitals": ("w.upper()", lambda w: w.upper()),
    "the first letters of the words": ("w[0]", lambda w: w[0]),
}
ORDERS: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "": ("{}", lambda ws: ws),
    ", in alphabetical order": ("sorted({})", sorted),
    ", in reverse order": ("({})[::-1]", lambda ws: ws[::-1]),
}
WORDS = ("tea", "river", "a", "moss", "under", "oh", "lantern", "sky", "be", "quartz", "it", "no")


def _from_words(rng: random.Random, max_digits: int) -> Problem:
    spelling, order = rng.choice(list(SPELLINGS)), rng.choice(list(ORDERS))
    join, least = rng.choice("-_+/:"), rng.randint(1, 5)
    spelt, spell = SPELLINGS[spelling]
    ordered, put = ORDERS[order]
    code = ordered.format(f"[{spelt} for w in s.split() if len(w) >= {least}]")
    return Problem(
        f"{spelling} of s that have {least} letters or more{order}, joined by {join}",
        ("s",),
        f"{join!r}.join({code})",
        lambda s: join.join(put([spell(w) for w in s.split() if len(w) >= least])),
        lambda r: [" ".join(r.choice(WORDS) for _ in range(r.randint(0, 8)))],
    )


def _term_of(n: int, first: int, times: int, plus: int, modulo: int) -> int:
    x = first
    for _ in range(n):
        x = (times * x + plus) % modulo
    return x


def _sequence(rng: random.Random, max_digits: int) -> Problem:
    first, times, plus, modulo = (rng.randint(*r) for r in ((0, 9), (2, 9), (1, 9), (11, 97)))
    body = f"    for _ in range(n):\n        x = ({times} * x + {plus}) % {modulo}\n    return x"
    solution = f"def f(n):\n    x = {first}\n{body}"
    return Problem(
        f"x(n), where x(0) is {first} and x(i + 1) is {times} times x(i) plus {plus}, modulo {modulo}",
        ("n",),
        solution,
        lambda n: _term_of(n, first, times, plus, modulo),
        lambda r: [r.randint(0, 40)],
    )


LEVEL_MAKERS: dict[int, Callable[[random.Random, int], Problem]] = {
    1: _operation,
    2: _nested,
    3: _from_list,
    4: _from_words,
    5: _sequence,
}


def _problems(config: CodeToolConfig, split: str, count: int, but: frozenset[str]) -> list[Problem]:
    """Distinct ones, not in `but`, of each level in turn."""
    rng = random.Random(f"code_tool/{split}/{config.seed}")
    levels = range(config.min_level, config.max_level + 1)

    def make(num: int) -> tuple[str, Problem]:
        problem = LEVEL_MAKERS[levels[num % len(levels)]](rng, config.max_digits)
        return problem.asks, problem

    complaint = lambda num: (
        f"code_tool: only {num} distinct problems of {count} found for the split {split}; lower num_tasks or"
        " eval_size, or raise max_digits or max_level"
    )
    return distinct(make, count, MAX_TRIES, complaint, but)


def _task(config: CodeToolConfig, split: str, i: int, problem: Problem) -> Task:
    level = config.min_level + i % (config.max_level - config.min_level + 1)
    rng = random.Random(f"tests/{problem.asks}")
    tests = []
    for _ in range(config.num_tests):
        arguments = problem.arguments(rng)
        tests.append({"args": arguments, "expected": problem.value(*arguments)})
    what = f"a function f({', '.join(problem.parameters)})"
    if level < LEVELS:
        what += ", or an expression of its parameters"
    how = TRIES.format(calls=config.max_calls) if config.max_calls else ""
    told = config.instructions.replace("{what}", what).replace("{how}", how)
    return Task(
        id=f"{split}/{i}-{hashlib.sha256(problem.asks.encode()).hexdigest()[:8]}",
        env="code_tool",
        tag="code_tool",
        messages=(*([Message("system", told)] if told else ()), Message("user", problem.asks)),
        payload={
            "tests": tests,
            "parameters": list(problem.parameters),
            "solution": problem.solution,
            "level": level,
            **{name: getattr(config, name) for name in ("max_calls", "max_chars")},
            "reward_by": config.reward_by,
            **_run_settings(config),
        },
        reward="env",
        max_turns=config.max_calls + 2 if config.max_calls else 1,
        tools=(TOOL,) if config.max_calls else (),
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a program and see what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}
