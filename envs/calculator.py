"""Arithmetic of several steps over large numbers, with a calculator as a tool: what a policy that calls tools learns.

A task is an expression such as ((4821 * 377) - 90514) * 62, worked off from the inside. The tool `calculator` takes at
most `call_operators` operators a call, so that an expression of n operators needs n calls; each answer comes as a
message of the tool, an error in words too. The episode ends with the answer, a text "Answer: N" (the last one of the
turn, in a turn without calls) or, with answer_by="submit", a call of the tool `submit`. Reward 1.0 if it is exact, else
0.0; a turn that neither calls nor answers is told what to do and counted in info["idle_turns"].

Splits `train` and `eval` share no expression; both depend on the seed alone. With `examples` every task begins with so
many solved ones of neither split, for a model that was never taught to call tools.

Must not: evaluate text as Python. `evaluate` knows numbers and seven operators, and bounds the size of each result.
"""

import ast
import hashlib
import math
import operator
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs import read_config
from envs.splits import check_split, distinct
from rl_jax.types import Action, Message, StepResult, Task, ToolCall

MAX_CHARS = 400  # of an expression
MAX_BITS = 4096  # of an integer result: 1,234 digits
MAX_CALLS = 8  # that one turn may make
MAX_TRIES = 50  # random expressions per wanted one before the settings are called impossible

INSTRUCTIONS = "Work the expression out with the calculator, {calls}. {ending}"
ANSWER = re.compile(r"answer\s*:\s*\**\s*([-+−]?\d[\d,]*)", re.I)


@dataclass(frozen=True)
class CalculatorConfig:
    num_tasks: int = 512  # of train
    eval_size: int = 64
    seed: int = 0
    min_steps: int = 2  # operators of an expression
    max_steps: int = 4
    max_digits: int = 4  # of a number in it
    operators: str = "+-*"  # out of + - *
    call_operators: int = 1  # most operators that one call works out; 0 = any number
    answer_by: str = "text"  # text | submit
    spare_turns: int = 2  # a task's turns beyond those that its solution takes
    examples: int = 0  # solved ones that a task's messages begin with, behind the instructions
    # the system message; {calls} and {ending} say what call_operators and answer_by mean; "" = none
    instructions: str = INSTRUCTIONS

    def __post_init__(self):
        if min(self.num_tasks, self.eval_size) < 1 or min(self.spare_turns, self.examples) < 0:
            raise ValueError(
                f"calculator: num_tasks={self.num_tasks} and eval_size={self.eval_size} must be at least 1,"
                f" spare_turns={self.spare_turns} and examples={self.examples} at least 0"
            )
        if not 1 <= self.min_steps <= self.max_steps <= 8:
            raise ValueError(
                f"calculator: min_steps={self.min_steps} and max_steps={self.max_steps} must rise within 1..8"
            )
        if not 1 <= self.max_digits <= 12 or self.call_operators < 0:
            raise ValueError(
                f"calculator: max_digits={self.max_digits} must be in 1..12 and call_operators={self.call_operators}"
                " at least 0"
            )
        if not self.operators or set(self.operators) - set("+-*"):
            raise ValueError(f"calculator: operators={self.operators!r} must be some of +-*")
        if self.answer_by not in ("text", "submit"):
            raise ValueError(f"calculator: answer_by={self.answer_by!r} is not one of text, submit")


class Calculator:
    """One live episode on one expression."""

    splits = ("train", "eval")

    def __init__(self):
        self._payload: Mapping[str, Any] = {}
        self._state = hashlib.sha256()
        self._counts = dict.fromkeys(("calls", "failed_calls", "idle_turns"), 0)
        self._last = ""  # result of the last call that worked, for the script
        self._num_done = 0  # operators that the script worked off
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key or split, or settings that allow too few distinct expressions."""
        config: CalculatorConfig = read_config(CalculatorConfig, cfg)
        check_split("calculator", split, cls.splits)
        chosen = held_out = _problems(config, "eval", config.eval_size, frozenset())
        used = frozenset(map(_expression, held_out))
        solved = _problems(config, "examples", config.examples, used) if config.examples else []
        if split == "train":
            used |= frozenset(map(_expression, solved))
            chosen = _problems(config, "train", config.num_tasks, used)
        tasks = [_task(config, split, i, problem) for i, problem in enumerate(chosen)]
        shown = [
            m for i, problem in enumerate(solved) for m in _solved(_task(config, "", i, problem))
        ]
        num_told = 1 if config.instructions else 0
        return [
            replace(task, messages=(*task.messages[:num_told], *shown, *task.messages[num_told:]))
            for task in tasks
        ]

    def reset(self, task: Task, seed: int) -> StepResult:
        """The question already stands in task.messages, so there is nothing to add."""
        self._payload, self._state = task.payload, hashlib.sha256(task.id.encode())
        self._counts = dict.fromkeys(self._counts, 0)
        self._last, self._num_done, self._is_solving = "", 0, None
        return StepResult((), state_key=self._key())

    def step(self, action: Action) -> StepResult:
        """Answers the calls, or takes the answer."""
        if action.tool_calls:
            return self._call(action.tool_calls)
        found = ANSWER.findall(action.text) if self._payload["answer_by"] == "text" else []
        if found:
            return self._end(found[-1])
        self._counts["idle_turns"] += 1
        return self._go_on([Message("user", f"Call a tool. {self._payload['ending']}")])

    def close(self) -> None:
        self._payload = {}

    def script(self, rng: random.Random, skill: float) -> Message:
        """The next call of the solution, then its answer, in a share `skill` of all episodes; else a wrong answer."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        problem, right = self._payload["problem"], int(self._payload["answer"])
        if not self._is_solving:
            return self._answer(right + rng.choice((-1, 1)) * rng.randint(1, 99))
        if self._num_done == len(problem) // 2:
            return self._answer(right)
        self._num_done += 1
        number = self._last or problem[0]
        asked = f"{number} {problem[2 * self._num_done - 1]} {problem[2 * self._num_done]}"
        return Message("assistant", "", (ToolCall("calculator", {"expression": asked}),))

    def _answer(self, number: int) -> Message:
        if self._payload["answer_by"] == "submit":
            return Message("assistant", "", (ToolCall("submit", {"answer": str(number)}),))
        return Message("assistant", f"Answer: {number}")

    def _call(self, calls: Sequence[ToolCall]) -> StepResult:
        out = []
        for i, call in enumerate(calls):
            if call.name == "submit" and self._payload["answer_by"] == "submit":
                return self._end(str(call.arguments.get("answer", "")))
            said, worked = "error: at most 8 calls a turn", False
            if i < MAX_CALLS:
                said, worked = self._work_out(call)
            self._counts["calls"] += 1
            self._counts["failed_calls"] += not worked
            self._last = said if worked else self._last
            out.append(Message("tool", said))
        return self._go_on(out)

    def _work_out(self, call: ToolCall) -> tuple[str, bool]:
        """(what the tool says, whether it is a result)"""
        expression = call.arguments.get("expression")
        if call.name != "calculator" or not isinstance(expression, str):
            return "error: the tool is calculator(expression: string)", False
        try:
            return show(evaluate(expression, self._payload["call_operators"])), True
        except ValueError as error:
            return f"error: {error}", False

    def _go_on(self, messages: Sequence[Message]) -> StepResult:
        for message in messages:
            self._state.update(message.content.encode("utf-8", "surrogatepass") + b"\0")
        return StepResult(tuple(messages), 0.0, state_key=self._key(), info=self._info(False))

    def _end(self, answer: str) -> StepResult:
        text = answer.replace(",", "").replace("−", "-").strip()
        is_number = re.fullmatch(r"[-+]?\d{1,400}", text, re.A) is not None
        is_right = is_number and int(text) == int(self._payload["answer"])
        return StepResult((), float(is_right), True, info=self._info(is_right))

    def _info(self, is_right: bool) -> dict[str, float]:
        return {"success": float(is_right), **{k: float(v) for k, v in self._counts.items()}}

    def _key(self) -> str:
        return self._state.hexdigest()[:16]


def evaluate(text: str, max_operators: int = 0) -> int | float:
    """The value of an expression of numbers, parentheses and + - * / // % **. max_operators: 0 = any number.

    Raises: ValueError in words for a policy. Bounded in time: no integer passes MAX_BITS on the way.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's, on what looks odd in Python
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("that is no arithmetic expression") from None
    num = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
    if max_operators and num > max_operators:
        raise ValueError(f"at most {max_operators} operator{'s' * (max_operators > 1)} a call")
    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None


def show(value: int | float) -> str:
    """A result as the tool says it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if isinstance(node.op, ast.Div):
            both = isinstance(left, int) and isinstance(right, int)
            exact = both and right != 0 and left % right == 0
            return _bounded(left // right if exact else left / right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, parentheses and + - * / // % ** are known")


def _power(base: int | float, exponent: int | float) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if base.bit_length() * exponent > MAX_BITS + base.bit_length():
            raise OverflowError
        return base**exponent
    return float(base) ** float(exponent)


def _bounded(value: Any) -> int | float:
    if isinstance(value, int):
        is_bounded = value.bit_length() <= MAX_BITS
    elif isinstance(value, complex):
        raise ValueError("that is no real number")
    else:
        is_bounded = math.isfinite(value)
    if not is_bounded:
        raise OverflowError
    return value


def _problems(
    config: CalculatorConfig, split: str, count: int, but: frozenset[str]
) -> list[tuple[str, ...]]:
    """(number, operator, number, ...) of distinct expressions that are not in `but`."""
    rng = random.Random(f"calculator/{split}/{config.seed}")

    def make(_: int) -> tuple[str, tuple[str, ...]]:
        parts = [str(_number(rng, config.max_digits))]
        for _ in range(rng.randint(config.min_steps, config.max_steps)):
            parts += [rng.choice(config.operators), str(_number(rng, config.max_digits))]
        return _expression(parts), tuple(parts)

    complaint = lambda num: (
        f"calculator: only {num} distinct expressions of {count} found for the split {split}; lower num_tasks or"
        " eval_size, or raise max_steps or max_digits"
    )
    return distinct(make, count, MAX_TRIES, complaint, but)


def _number(rng: random.Random, max_digits: int) -> int:
    digits = rng.randint(1, max_digits)
    return rng.randint(10 ** (digits - 1), 10**digits - 1)


def _expression(parts: Sequence[str]) -> str:
    text = parts[0]
    for i in range(1, len(parts), 2):
        text = f"({text})" if i > 1 else text
        text += f" {parts[i]} {parts[i + 1]}"
    return text


def _task(config: CalculatorConfig, split: str, i: int, problem: Sequence[str]) -> Task:
    expression = _expression(problem)
    ending = (
        'End with the text "Answer: N".'
        if config.answer_by == "text"
        else "End with a call of submit."
    )
    n = config.call_operators
    calls = f"at most {n} operator{'s' * (n > 1)} a call" if n else "in as many calls as you need"
    told = config.instructions.replace("{calls}", calls).replace("{ending}", ending)
    messages = [Message("system", told)] if told else []
    return Task(
        id=f"{split}/{i}-{hashlib.sha256(expression.encode()).hexdigest()[:8]}",
        env="calculator",
        tag="calculator",
        messages=(*messages, Message("user", f"{expression} = ?")),
        payload={
            "problem": list(problem),
            "answer": str(evaluate(expression)),
            "call_operators": n,
            "answer_by": config.answer_by,
            "ending": ending,
        },
        reward="env",
        max_turns=len(problem) // 2 + 1 + config.spare_turns,
        tools=_tools(config.answer_by),
    )


def _solved(task: Task) -> list[Message]:
    """The question, and all that is said until its answer."""
    env, rng = Calculator(), random.Random(0)
    env.reset(task, 0)
    messages, is_done = [task.messages[-1]], False
    while not is_done:
        said = env.script(rng, 1.0)
        result = env.step(Action(said.content, said.tool_calls))
        messages += [said, *result.messages]
        is_done = result.done
    return messages


def _tools(answer_by: str) -> tuple[Mapping[str, Any], ...]:
    calculator = _tool("calculator", "Work out an expression.", "expression")
    if answer_by == "text":
        return (calculator,)
    return (calculator, _tool("submit", "Give the answer.", "answer"))


def _tool(name: str, about: str, argument: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }
