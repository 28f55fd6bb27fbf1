"""What one rendering of a chat template may cost: it is somebody else's program, and the sandbox bounds no work.

How. Every rendering has a Budget, which its Context carries; nothing is timed, so the same rendering passes or fails on
every machine. Two counts go down: steps (syntax nodes that loops, macros and calls run) and size (characters that are
made or read; an item of a list counts as ITEM of them). Both grow with the messages and tools that are rendered, so
that a limit never depends on how long a conversation is.
1. LimitedEnvironment.from_text() writes charges into the template's syntax tree: where bodies of loops, macros and
   blocks begin, and round comparisons, ~, slices and keys, which the sandbox does not intercept.
2. Operators, calls, filters and tests are charged before they are run where their result may be larger than what they
   are given (template_costs.py), else for what they are given and what they made.
3. What is not counted is not there: filters and methods without an entry in template_costs.py.
4. Nothing is computed when the template is compiled: jinja2's folding of constants would run before any Budget.

Must not: change what a template within its limits renders, or keep anything between two renderings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

ITEM = 8  # an item of a list costs about as much as so many characters copied
VALUE = 32  # and one that is looked at as so many
BASE_STEPS, STEPS_PER_VALUE = (
    1_000_000,
    10_000,
)  # a loop in a loop over 1,000 messages of 3 values each passes
BASE_SIZE, SIZE_PER_VALUE, SIZE_FACTOR = 8_000_000, 4_096, 64  # each content is read about 20 times
MAX_DEPTH = 100  # calls inside calls: each takes 5 of Python's 1,000 frames
MAX_BITS = 4096  # of a whole number; the largest float has 1,024
MAX_WIDTH = 10_000  # characters to which one value may be padded

STEP, SIZED, MADE, KEY, COMPARE = " step", " sized", " made", " key", " compare"  # filters of ours
CALL_STEPS, FILTER_STEPS, ITEM_STEPS = (
    10,
    5,
    3,
)  # what a call, a filter and each item in it run beside the nodes


class TemplateLimitError(ValueError):
    """A template that goes beyond a limit, whatever way the messages are put to it. One line."""


class LimitExceeded(Exception):
    """Inside a rendering; no ValueError, which jinja2 catches in places. Says what the template did."""


class Budget:
    """What is left of one rendering's limits. Every method raises LimitExceeded."""

    def __init__(self, *given: Any):
        """given: the values that are rendered."""
        num_values, num_chars = _count(given)
        self.max_steps = self.steps = BASE_STEPS + STEPS_PER_VALUE * num_values
        self.max_size = self.size = (
            BASE_SIZE + SIZE_PER_VALUE * num_values + SIZE_FACTOR * num_chars
        )
        self.depth = 0

    def step(self, num: int) -> None:
        self.steps -= num
        if self.steps < 0:
            raise LimitExceeded(
                f"runs more than the {self.max_steps} steps that one rendering of these messages may take (in loops,"
                " macros and calls)"
            )

    def charge(self, num: int, what: str) -> None:
        """For characters made or read. what: by what, for the error."""
        self.size -= num
        if self.size < 0:
            raise LimitExceeded(
                f"makes or reads more than the {self.max_size} characters that one rendering of these messages may,"
                f" the last with {what}"
            )

    def charge_all(self, value: Any, what: str, *, item: int = 0, level: int = 0) -> None:
        """For all that a value holds, as often as it holds it.

        item, level: characters that each value takes more, and more for each level on which it stands.
        """
        if type(value) is str:
            self.charge(len(value), what)
            return
        stack = [(value, 1)]
        while stack:
            one, depth = stack.pop()
            self.charge(_own_size(one) + VALUE + item + level * depth, what)
            stack += [(held, depth + 1) for held in _held(one)]

    def counted(self, values: Iterable[Any], num_steps: int) -> Iterator[Any]:
        """The values of an iterator, each charged as it is taken."""
        for value in values:
            self.step(num_steps)
            yield value

    def made(self, value: Any, what: str) -> Any:
        """The value, charged as new."""
        if isinstance(value, str):
            self.charge(len(value), what)
        elif isinstance(value, (list, tuple, dict)):
            self.charge(ITEM * len(value), what)
        elif isinstance(value, int):
            self.check_number(value.bit_length(), what)
        return value

    def check_number(self, bits: int, what: str) -> None:
        if bits > MAX_BITS:
            raise LimitExceeded(
                f"computes a number of {bits} bits with {what}, more than {MAX_BITS}"
            )

    def check_width(self, width: int, what: str) -> None:
        if width > MAX_WIDTH:
            raise LimitExceeded(f"asks for {width} characters with {what}, more than {MAX_WIDTH}")


class LimitedContext(Context):
    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> "LimitedContext":
        """See Context: one of the same rendering."""
        new = super().derived(locals)
        assert isinstance(new, LimitedContext)
        new.budget = self.budget
        return new


def _held(value: Any) -> Sequence[Any]:
    """What str(), JSON and comparisons go into."""
    kind = type(value)
    if kind in _SINGLE:  # first what is most frequent: isinstance of an abstract class is slow
        return ()
    if kind is dict or isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)) or kind in _VIEWS:
        return list(value)
    return [value._Namespace__attrs] if kind is Namespace else ()  # type: ignore[attr-defined]


_SINGLE = frozenset((str, int, float, bool, type(None)))
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


def _own_size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3  # digits
    if isinstance(value, (dict, list, tuple)):
        return ITEM * len(value)
    return ITEM * len(value) if isinstance(value, (Mapping, Sequence, *_VIEWS)) else 0


def _count(value: Any) -> tuple[int, int]:
    """(values, characters) of what is rendered."""
    stack, num_values, num_chars = [value], 0, 0
    while stack:
        one = stack.pop()
        num_values += 1
        num_chars += len(one) if isinstance(one, str) else 0
        stack += _held(one)
    return num_values, num_chars


# --- charges in the syntax tree --------------------------------------------------------------------------------------


_BODIES = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)


def charged(tree: nodes.Template) -> nodes.Template:
    """The template with its charges. Raises LimitExceeded for a number that is too long as it stands there."""
    return _Charges().visit(tree)


class _Charges(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        body, test = _weigh(node.body), _weigh([node.test] if node.test else [])
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(body)))
        if node.test:  # is asked of every item, of which the body may see none
            node.test = nodes.And(_step(test), node.test)
        return node

    def _with_body(self, node: Any) -> nodes.Node:
        body = _weigh(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(body)))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _with_body

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1:
            operand = node.ops[0]
            return _filter(COMPARE, node.expr, nodes.Const(operand.op), operand.expr)
        node.expr = _filter(SIZED, node.expr)
        for operand in node.ops:
            operand.expr = _filter(SIZED, operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filter(SIZED, part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = node.key if isinstance(node.key, nodes.Const) else _filter(KEY, node.key)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if type(node.value) is int and (bits := node.value.bit_length()) > MAX_BITS:
            raise LimitExceeded(f"has a number of {bits} bits, more than {MAX_BITS}")
        return node


def _weigh(body: Sequence[nodes.Node]) -> tuple[int, int]:
    """(nodes, characters of its own text) of a body; bodies in it are charged where they begin."""
    stack, num_nodes, num_chars = list(body), 1, 0
    while stack:
        node = stack.pop()
        num_nodes += 1
        num_chars += len(node.data) if isinstance(node, nodes.TemplateData) else 0
        stack += node.iter_child_nodes(exclude=("body",) if isinstance(node, _BODIES) else None)
    return num_nodes, num_chars


def _step(weight: tuple[int, int]) -> nodes.Filter:
    return _filter(STEP, nodes.Const(weight[0]), nodes.Const(weight[1]))


def _filter(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None)


# --- charges that are made as it runs --------------------------------------------------------------------------------


def step(context: LimitedContext, num_nodes: int, num_chars: int) -> bool:
    """True. Any template can name a filter of ours: one that would give back what was charged is refused."""
    if type(num_nodes) is not int or type(num_chars) is not int or num_nodes < 0 or num_chars < 0:
        raise TypeError("steps are counted in whole numbers")
    context.budget.step(num_nodes)
    context.budget.charge(num_chars, "its own text")
    return True


def sized(context: LimitedContext, value: Any) -> Any:
    """The value, charged with all that it holds: what is written, joined or compared."""
    context.budget.charge_all(value, "what it writes, joins or compares")
    return value


def made(context: LimitedContext, value: Any) -> Any:
    """The part of a value, charged as new."""
    return context.budget.made(value, "a slice")


def key(context: LimitedContext, value: Any) -> Any:
    """The key of a mapping."""
    check_key(value)
    return value


def check_key(value: Any) -> None:
    """Raises LimitExceeded for a tuple, whose hash goes into all that it holds, each time anew."""
    if isinstance(value, tuple):
        raise LimitExceeded("uses a tuple as a key, which must be a text or a number")


Filter = Callable[..., Any]
OURS: Mapping[str, Filter] = {STEP: step, SIZED: sized, MADE: made, KEY: key}
