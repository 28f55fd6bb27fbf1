"""A chat template as a function: jinja2, sandboxed, with what templates expect to find, and nothing that changes.

As transformers has it: trim_blocks, lstrip_blocks, loop controls, raise_exception, tojson without HTML escapes, and the
tag {% generation %}, whose body is rendered as if the tag were not there. strftime_now tells a fixed day, so that a
prompt and its hash are the same tomorrow; a template that needs today's date does not get it.

What a rendering may cost is limited (template_limits.py), as it is of a program that somebody else wrote.

Must not: let a template write, call or import anything (ImmutableSandboxedEnvironment), or keep state between two
renderings.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context

from rl_jax.tokens.marks import Marks
from rl_jax.tokens.template_costs import LimitedEnvironment
from rl_jax.tokens.template_limits import (
    Budget,
    LimitedContext,
    LimitExceeded,
    TemplateLimitError,
    charged,
)

MAX_TEMPLATE = 1_000_000  # characters
MAX_DATE = 200  # characters
MAX_TOLD = 500  # characters of what a template raises
NOW = datetime.datetime(
    2024, 7, 26
)  # the day that Llama 3's template names where it is not told one
MARKS = "rl_jax_marks"  # the variable in which a rendering's Marks reach tojson

# What a template may raise by what it is given, beside its own exceptions.
FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
)  # fmt: skip

# What jinja2 and Python raise for a text that is no template, or one too deep for their compilers.
UNCOMPILABLE = (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError)

Render = Callable[..., str]  # (marks, **variables)


def compile_template(text: str, where: str) -> Render:
    """The function of a template. Calling it raises ValueError for what the template refuses or cannot do.

    Raises: ValueError, one line, for a text that is no template.
    """
    if len(text) > MAX_TEMPLATE:
        raise ValueError(f"{where} has {len(text)} characters, more than {MAX_TEMPLATE}")
    environment = _environment()
    functions: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _strftime}
    environment.globals.update(functions)
    try:
        template = environment.from_string(charged(environment.parse(text)))
    except LimitExceeded as error:
        raise _beyond(where, error) from None
    except UNCOMPILABLE as error:
        raise ValueError(
            f"{where} is no chat template ({type(error).__name__}: {_told(error)})"
        ) from None

    def render(marks: Marks | None, **variables: Any) -> str:
        context = template.new_context({MARKS: marks, **variables})
        assert isinstance(context, LimitedContext)
        context.budget = Budget(variables)
        try:
            return "".join(template.root_render_func(context))
        except LimitExceeded as error:
            raise _beyond(where, error) from None
        except FAULTS as error:
            raise ValueError(f"{where} refuses the messages: {_told(error)}") from None

    return render


@functools.lru_cache(maxsize=16)
def variables_of(text: str) -> frozenset[str]:
    """Names that a template reads of what it is given. text: one that compile_template took."""
    return frozenset(find_undeclared_variables(_environment().parse(text)))


def _environment() -> LimitedEnvironment:
    return LimitedEnvironment(
        {"tojson": _tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, LoopControlExtension],
    )


def _beyond(where: str, error: LimitExceeded) -> TemplateLimitError:
    return TemplateLimitError(
        f"{where} {error}; take the template that the model was published with, or one that does less"
    )


def _told(error: BaseException) -> str:
    """On one line, which a template may not make longer than anybody reads."""
    told = " ".join(str(error)[:MAX_TOLD].split())
    return told or type(error).__name__


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime(form: str) -> str:
    """The form is C's, and may name a width: what is longer than a date is none."""
    if len(form) > MAX_DATE or any(len(digits) > 2 for digits in re.findall(r"\d+", form)):
        raise ValueError(f"strftime_now takes a form of a date, at most {MAX_DATE} characters")
    return NOW.strftime(form)


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    marks = context.get(MARKS)
    if marks is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)
    return json.dumps(_escaped(value, marks.escapes(ensure_ascii)), ensure_ascii=False, **form)


def _escaped(value: Any, table: Mapping[int, str]) -> Any:
    """Marked characters that JSON escapes, as their escapes, still marked."""
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_escaped(k, table): _escaped(v, table) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item, table) for item in value]
    return value
