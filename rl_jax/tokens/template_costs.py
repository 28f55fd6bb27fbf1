"""What operators, calls, filters and tests of a chat template cost, and the sandbox that charges a Budget for them.

Three kinds of filters. CONSTANT: nothing beside the step. ITEMS: the items of what is given, not what they hold. ALL:
everything that is given, with all that it holds, as text, JSON, sorting and comparing go into it. What is made is
charged afterwards, which is soon enough where it is about as long as what was given. Where it may be longer
(repetition, padding, replacing, joining, formatting, powers), its size is worked out before.
What is in no table here is not offered: jinja2's filters batch, filesizeformat, groupby, pprint, random, slice,
striptags, urlize, wordwrap and xmlattr, its function lipsum, and methods such as str.expandtabs or int.to_bytes. Some
of them make more than they are given, some take the square of its time, one differs from run to run; no family's
template has them.

Must not: compile or render.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import (
    BlockReference,
    Context,
    LoopContext,
    Macro,
    Markup,
    Undefined,
    escape,
)
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace

from rl_jax.tokens.template_limits import (
    CALL_STEPS,
    COMPARE,
    FILTER_STEPS,
    ITEM,
    ITEM_STEPS,
    MAX_DEPTH,
    OURS,
    Budget,
    LimitedContext,
    LimitExceeded,
    check_key,
    sized,
)

CONSTANT = frozenset(("attr", "count", "d", "default", "first", "last", "length"))
ITEMS = frozenset(
    ("items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
)
ALL = frozenset(
    (
        "abs", "capitalize", "center", "dictsort", "e", "escape", "float", "forceescape", "format", "indent", "int",
        "join", "lower", "max", "min", "replace", "round", "safe", "sort", "string", "sum", "title", "tojson", "trim",
        "truncate", "unique", "upper", "urlencode", "wordcount",
    )
)  # fmt: skip
BY_ATTRIBUTE = frozenset(("join", "max", "min", "sort", "sum", "unique"))
COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
    "gteq": operator.ge, "in": lambda a, b: a in b, "notin": lambda a, b: a not in b,
}  # fmt: skip
TESTS = {  # of jinja2's tests those that compare, by what they are as an operator
    "==": "eq", "eq": "eq", "equalto": "eq", "!=": "ne", "ne": "ne", ">": "gt", "gt": "gt", "greaterthan": "gt",
    ">=": "gteq", "ge": "gteq", "<": "lt", "lt": "lt", "lessthan": "lt", "<=": "lteq", "le": "lteq", "in": "in",
}  # fmt: skip
TEXT_METHODS = frozenset(
    (
        "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
        "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
        "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
        "swapcase", "title", "upper", "zfill",
    )
)  # fmt: skip
METHODS = {
    str: TEXT_METHODS,
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(("bit_length",)),
    float: frozenset(("is_integer",)),
}
PADDING = frozenset(("center", "ljust", "rjust", "zfill"))
ENDS = frozenset(("startswith", "endswith"))  # read no more than they are given
# Callables that hand on what they are given, and look at none of it.
HANDS_ON = (Macro, LoopContext, BlockReference, Joiner)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a charge for whatever takes work."""

    context_class = LimitedContext
    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any):
        """filters: beside, or in the place of, jinja2's. options: of jinja2's Environment."""
        # A filter whose cost depends on what it is given cannot be folded either: finalize with a context forbids it.
        super().__init__(optimized=False, finalize=pass_context(sized), **options)
        plain: dict[Any, Callable[..., Any]] = {**self.filters, **filters}
        self.filters = {name: pass_context(function) for name, function in OURS.items()}
        for name in CONSTANT | ITEMS | ALL:
            # The environment can run what it charges for; a template cannot name it.
            hidden: Any = object()
            self.filters[hidden] = plain[name]
            self.filters[name] = _filter(hidden, name)
        self.filters[COMPARE] = pass_context(_compared)
        self.tests |= {name: _comparing(op) for name, op in TESTS.items()}
        for name in ("odd", "even", "divisibleby", "lower", "upper"):
            self.tests[name] = _test(self.tests[name], name)
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment."""
        _before_binop(_budget(context), operator, left, right)
        return self.binop_table[operator](left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See SandboxedEnvironment."""
        check_key(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        """See SandboxedEnvironment: the text itself, which call() formats."""
        owner = getattr(value, "__self__", None)
        is_format = isinstance(owner, str) and value.__name__ in ("format", "format_map")
        return _Format(owner, value.__name__) if is_format else None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See SandboxedEnvironment."""
        budget = _budget(__context)
        budget.step(CALL_STEPS + len(args) + len(kwargs))
        if isinstance(__obj, _Format):
            return __obj._apply(__self, budget, args, kwargs)
        args = _before_call(budget, __obj, args, kwargs)
        if budget.depth >= MAX_DEPTH:
            raise LimitExceeded(f"calls from inside calls, more than {MAX_DEPTH} deep")
        budget.depth += 1
        try:
            return budget.made(super().call(__context, __obj, *args, **kwargs), "a call")
        finally:
            budget.depth -= 1


def _budget(context: Any) -> Budget:
    return context.budget


# --- operators -------------------------------------------------------------------------------------------------------


def _before_binop(budget: Budget, op: str, left: Any, right: Any) -> None:
    """Raises LimitExceeded for an operator whose result, or the way to it, is too long."""
    what = f"the operator {op}"
    if op == "+" and isinstance(left, SEQUENCES):
        budget.charge(_length(left) + (_length(right) if isinstance(right, SEQUENCES) else 0), what)
    elif op == "*" and isinstance(left, SEQUENCES) and isinstance(right, int):
        budget.charge(_length(left) * max(right, 0), what)
    elif op == "*" and isinstance(right, SEQUENCES) and isinstance(left, int):
        budget.charge(_length(right) * max(left, 0), what)
    elif op == "%" and isinstance(left, str):
        _before_percent(budget, left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length()) + 1
        if op == "*":
            bits = left.bit_length() + right.bit_length()
        elif op == "**" and right > 0:
            bits = left.bit_length() * right if abs(left) > 1 else 1
        budget.check_number(bits, what)


SEQUENCES = (str, list, tuple)


def _length(sequence: Any) -> int:
    return len(sequence) * (1 if isinstance(sequence, str) else ITEM)


# Width and precision of a field of %: behind it, or behind the name that a field has in brackets.
_WIDTHS = re.compile(r"[%)][#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


def _before_percent(budget: Budget, text: str, values: Any) -> None:
    what = f"the format {text[:40]!r}"
    widths = {width for found in _WIDTHS.findall(text) for width in found if width}
    if "*" in widths:
        widths |= (
            {str(abs(x)) for x in values if isinstance(x, int)}
            if isinstance(values, tuple)
            else set()
        )
    widest = max((_number(width) for width in widths - {"*"}), default=0)
    budget.check_width(widest, what)
    _before_fields(budget, text, "%", values, widest)


def _before_fields(budget: Budget, text: str, mark: str, values: Any, width: int = 0) -> None:
    """mark: what begins a field, each of which may write all of the values."""
    what = f"the format {text[:40]!r}"
    before = budget.size
    budget.charge_all(values, what)
    budget.charge(len(text) + text.count(mark) * (before - budget.size + width), what)


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**9


class _Format:
    """str.format or str.format_map of a text, which a template may call, and do no more with."""

    def __init__(self, text: str, method: str):
        self._text, self._method = text, method

    def _apply(
        self, environment: LimitedEnvironment, budget: Budget, args: tuple[Any, ...], kwargs: Any
    ) -> str:
        if self._method == "format_map":
            if len(args) != 1 or kwargs:
                raise TypeError("format_map takes one mapping")
            args, kwargs = (), args[0]
        _before_fields(budget, self._text, "{", [list(args), kwargs])
        escapes = isinstance(self._text, Markup)
        text = _Formatter(environment, budget, escapes).vformat(self._text, args, kwargs)
        return type(self._text)(text)


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: LimitedEnvironment, budget: Budget, escapes: bool):
        super().__init__(environment)
        self._budget, self._escapes = budget, escapes

    def format_field(self, value: Any, format_spec: str) -> Any:
        """See Formatter. The width may come from another field."""
        for digits in re.findall(r"\d+", format_spec):
            self._budget.check_width(_number(digits), "a format")
            self._budget.charge(_number(digits), "a format")
        # Attributes of a field lead to values that were not given themselves.
        self._budget.charge_all(value, "a format")
        text = super().format_field(value, format_spec)
        return escape(text) if self._escapes and not hasattr(value, "__html__") else text


# --- comparisons -----------------------------------------------------------------------------------------------------


def _compared(context: LimitedContext, left: Any, op: str, right: Any) -> Any:
    if op in ("in", "notin"):
        right = _before_search(context.budget, left, right)
    else:
        _before_comparison(context.budget, left, right, op in ("eq", "ne"))
    return COMPARISONS[op](left, right)


def _before_comparison(budget: Budget, left: Any, right: Any, is_equality: bool) -> None:
    if _is_single(left) or _is_single(right):
        return
    if isinstance(left, str) and isinstance(right, str):
        if len(left) == len(right) or not is_equality:
            budget.charge(min(len(left), len(right)), "a comparison")
        return
    of_sizes = is_equality and type(left) in _SIZED and type(right) in _SIZED
    if of_sizes and (type(left) is not type(right) or len(left) != len(right)):
        return
    budget.charge_all(left, "a comparison")
    budget.charge_all(right, "a comparison")


_SIZED = (str, list, tuple, dict)


def _is_single(value: Any) -> bool:
    """Holds nothing that a comparison would go into."""
    return value is None or isinstance(value, (int, float, Undefined))


def _before_search(budget: Budget, wanted: Any, values: Any) -> Any:
    """The values in which to look, as something that can be looked through."""
    if isinstance(values, str):
        budget.charge(len(values), "a search")
        return values
    if isinstance(values, (Mapping, type({}.keys()))):
        check_key(wanted)
        return values
    if isinstance(values, type({}.items())):
        values = list(values)  # in which no hash is taken
    elif isinstance(values, Iterator):
        values = list(budget.counted(values, ITEM_STEPS))
    if isinstance(values, (Sequence, type({}.values()))):
        budget.charge(ITEM * len(values), "a search")
        for value in () if _is_single(wanted) else values:
            _before_comparison(budget, wanted, value, True)
    return values


def _comparing(op: str) -> Callable[..., Any]:
    @pass_context
    def test(context: LimitedContext, left: Any, right: Any) -> Any:
        return _compared(context, left, op, right)

    return test


# --- calls -----------------------------------------------------------------------------------------------------------


def _before_call(
    budget: Budget, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments to call it with."""
    owner = getattr(called, "__self__", None)
    if called in (dict, Namespace):
        return (_mapping(budget, args[0]), *args[1:]) if args else ()
    if owner is None or isinstance(owner, (LoopContext, Cycler)):
        if not isinstance(called, HANDS_ON) and called is not Cycler:
            for value in (*args, *kwargs.values()):
                budget.charge_all(value, "a call")
        return args
    name = called.__name__
    kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
    if kind is None or name not in METHODS[kind]:
        raise LimitExceeded(
            f"calls {type(owner).__name__}.{name}, which is not offered to templates"
        )
    if kind is str:
        return _before_text_method(budget, owner, name, args, kwargs)
    if kind in (list, tuple) and name != "copy" and args:
        _before_search(budget, args[0], owner)
    elif name == "get" and args:
        check_key(args[0])
    return args


def _mapping(budget: Budget, given: Any) -> Any:
    """What dict() is given: a mapping, or pairs."""
    if isinstance(given, Mapping):
        budget.charge(ITEM * len(given), "a call")
        return given
    pairs = list(budget.counted(given, ITEM_STEPS))
    for pair in pairs:
        if not isinstance(pair, (list, tuple, str)):
            raise TypeError("dict takes a mapping, or pairs that are lists")
        check_key(pair[0])
    return pairs


def _before_text_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    what = f"str.{name}"
    given = (*args, *kwargs.values())  # Markup's methods take their arguments by name, too
    if name == "join" and given:
        if isinstance(given[0], Iterator):
            args = given = (list(budget.counted(given[0], ITEM_STEPS)),)
            kwargs.clear()
        budget.charge(len(text) * (len(given[0]) if hasattr(given[0], "__len__") else 0), what)
    elif name == "replace":
        _before_replace(budget, text, *(*args, kwargs.get("old"), kwargs.get("new"))[:2])
    elif name in PADDING:
        for width in given:
            budget.check_width(width if isinstance(width, int) else 0, what)
    for value in given:
        budget.charge_all(value, what)
    budget.charge(0 if name in ENDS else len(text), what)
    return args


def _before_replace(budget: Budget, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.charge(len(text), "replace")
        budget.charge(text.count(old) * len(new), "replace")


# --- filters and tests -----------------------------------------------------------------------------------------------


def _filter(hidden: Any, name: str) -> Callable[..., Any]:
    """A filter that charges before it runs the one that the environment has as `hidden`."""
    what = f"the filter {name}"

    @pass_context
    def run(context: LimitedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        given = (*args, *kwargs.values())
        # Filters that look up an attribute of each item look up each of its parts.
        parts = 1 + sum(
            text.count(".") + text.count(",") for text in given if isinstance(text, str)
        )
        budget.step(FILTER_STEPS + len(given))
        if name not in CONSTANT and isinstance(value, Iterator):
            # Never an iterator of an iterator: of many, Python runs out of its stack and dies.
            value = list(budget.counted(value, ITEM_STEPS * parts))
        elif name in ITEMS or name in BY_ATTRIBUTE:
            budget.step(ITEM_STEPS * parts * (len(value) if hasattr(value, "__len__") else 0))
        if name in ALL:
            _before_filter(budget, name, value, args, kwargs)
        for one in given if name not in CONSTANT else ():
            budget.charge_all(one, what)
        return budget.made(
            context.environment.call_filter(hidden, value, args, kwargs, context), what
        )

    return run


def _before_filter(
    budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Of a filter that goes into all it is given."""
    what = f"the filter {name}"
    get = lambda at, key, default: args[at] if at < len(args) else kwargs.get(key, default)
    if name == "tojson":
        # By place: ensure_ascii, indent, separators.
        indent, separators = get(1, "indent", 0), get(2, "separators", None) or ()
        wide = indent if isinstance(indent, int) else len(str(indent or ""))
        budget.check_width(wide, what)
        between = sum(len(text) for text in separators if isinstance(text, str))
        budget.charge_all(value, what, item=between, level=max(wide, 0))
        return
    budget.charge_all(value, what)
    if name == "center":
        width = get(0, "width", 80)
        budget.check_width(width if isinstance(width, int) else 0, what)
    elif name == "indent":
        width = get(0, "width", 4)
        wide = width if isinstance(width, int) else len(str(width))
        budget.check_width(wide, what)
        budget.charge((1 + len(str(value).splitlines())) * max(wide, 0), what)
    elif name == "replace":
        _before_replace(
            budget, str(value), *(str(get(at, k, "")) for at, k in ((0, "old"), (1, "new")))
        )
    elif name == "join":
        between = get(0, "d", "")
        budget.charge_all(between, what)
        num = len(value) if hasattr(value, "__len__") else 0
        budget.charge(num * len(str(between)), what)
    elif name == "format":
        _before_percent(budget, str(value), kwargs or args)
    elif name == "round":
        precision = get(0, "precision", 0)
        budget.check_width(abs(precision) if isinstance(precision, int) else 0, what)
    elif name == "unique":
        if get(1, "attribute", None) is not None:
            raise LimitExceeded("calls unique by an attribute, which is not offered to templates")
        for one in value:
            check_key(one)
    elif name == "sum" and not isinstance(get(1, "start", 0), (int, float)):
        raise TypeError("sum adds numbers")


def _test(plain: Callable[..., bool], name: str) -> Callable[..., bool]:
    """A test of jinja2 that charges before it runs."""
    # The others take a remainder: of a text it would be a format.
    is_of_texts = name in ("lower", "upper")

    @pass_context
    def test(context: LimitedContext, value: Any, *args: Any) -> bool:
        if not is_of_texts and not isinstance(value, (int, float)):
            raise TypeError(f"{name} is asked of {type(value).__name__}, which is no number")
        context.budget.charge_all(value, f"the test {name}")
        return plain(value, *args)

    return test
