"""Text and HTML of what a notebook shows: made from data that nobody trusts, without a script or a style sheet.

Owns: `visible` and `escaped`, the only ways in which a text of a model, an environment or a config reaches a page or a
terminal; tables, coloured tokens, curves of characters; the views of a mesh plan and of config differences.
Invariants: every `__repr__` says what the HTML says; what is long is cut, and the cut says how much is left out.
Must not: read a file, or import jax.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_jax import schema
from rl_jax.inert import inert
from rl_jax.mesh import MeshPlan
from rl_jax.mesh.rules import cut, ranges
from rl_jax.settings import Settings

MAX_CHARS = 20_000  # of one text that is shown
BARS = "▁▂▃▄▅▆▇█"
CELL = "padding:2px 10px;text-align:left;vertical-align:top;white-space:pre-wrap"
MONO = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere"
GREY = "color:#777"
# Log-prob of a token at which its colour is full: one of a thousand is as surprising as it gets here.
LOWEST = math.log(1e-3)


def visible(text: str) -> str:
    """Control characters, surrogates and marks of direction as what they are called; lines and tabs stay."""
    return inert(clipped(text))


def one_line(text: str) -> str:
    """`visible`, lines and tabs too, of a name."""
    return visible(text[:200]).replace("\n", "\\n").replace("\t", "\\t")


def escaped(text: str) -> str:
    """`visible`, for a page."""
    return html.escape(visible(text), quote=True)


def clipped(text: str) -> str:
    """Its first MAX_CHARS, and how many are left out."""
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]} ... ({len(text) - MAX_CHARS} more characters)"


def text_table(rows: Sequence[Sequence[Any]]) -> str:
    """Columns side by side; the first row is the head."""
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells)


def html_table(rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """The same for a page."""
    head, *body = rows
    lines = [f"<tr>{''.join(_cell('th', cell) for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>" for row in body]
    title = f"<div><b>{escaped(caption)}</b></div>" if caption else ""
    return f'{title}<table style="border-collapse:collapse">{"".join(lines)}</table>'


def block(text: str, style: str = "") -> str:
    """A text with its lines as they are."""
    return f'<div style="{MONO};{style}">{escaped(text)}</div>'


def coloured(pieces: Sequence[str], logprobs: Sequence[float]) -> str:
    """Sampled tokens: the less likely, the redder; each says its log-prob."""
    spans = []
    for piece, logprob in zip(pieces, logprobs, strict=True):
        share = min(max(logprob / LOWEST, 0.0), 1.0) if math.isfinite(logprob) else 1.0
        colour = f"background:rgba(220,60,40,{0.08 + 0.62 * share:.2f})"
        title = f"log-prob {logprob:.3f}"
        spans.append(f'<span style="{colour}" title="{title}">{escaped(piece)}</span>')
    return "".join(spans)


def spark(values: Sequence[float]) -> str:
    """One character a value, at most 60, lowest to highest."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    step = max(1, math.ceil(len(finite) / 60))
    means = [
        math.fsum(finite[i : i + step]) / len(finite[i : i + step])
        for i in range(0, len(finite), step)
    ]
    low, high = min(means), max(means)
    width = high - low or 1.0
    return "".join(BARS[min(int((v - low) / width * len(BARS)), len(BARS) - 1)] for v in means)


@dataclass(frozen=True)
class PlanView:
    """Which devices do what."""

    plan: MeshPlan

    def __repr__(self) -> str:
        return self.plan.describe()

    def _repr_html_(self) -> str:
        plan = self.plan
        rows: list[tuple[str, ...]] = [("", "does", "devices", "axes", "hardware", "tags")]
        for s in plan.servers:
            tags = ", ".join(s.tags) or "any"
            rows.append((s.name, s.kind, ranges(s.devices), cut(s.axes), s.hardware, tags))
        trains = [(plan.train, "train")] if plan.train is not None else []
        for t, does in [*trains, *((role, "role") for role in plan.roles)]:
            rows.append((t.pool, does, ranges(t.devices), cut(t.axes), t.hardware, ""))
        return html_table(rows, f"mesh {plan.name}: {plan.num_devices} device(s)")


@dataclass(frozen=True)
class ConfigDiff:
    """Config values that differ, by key."""

    names: tuple[str, str]
    rows: tuple[
        tuple[str, Any, Any], ...
    ]  # key, ours, theirs; "absent" where a side has no such key

    @classmethod
    def of(cls, ours: Settings, theirs: Settings, names: tuple[str, str]) -> "ConfigDiff":
        """run_id aside, which every run has its own of."""
        a, b = (schema.leaves(schema.to_tree(settings)) for settings in (ours, theirs))
        keys = sorted(({*a, *b}) - {"run_id"})
        found = [(key, a.get(key, "absent"), b.get(key, "absent")) for key in keys]
        return cls(names, tuple(row for row in found if row[1] != row[2]))

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        if not self.rows:
            return f"no difference between {self.names[0]} and {self.names[1]}"
        return text_table(self._table())

    def _repr_html_(self) -> str:
        if not self.rows:
            return block(repr(self))
        return html_table(self._table(), f"{len(self.rows)} differences")

    def _table(self) -> list[tuple[Any, ...]]:
        return [("key", *self.names), *self.rows]


def facts_table(facts: Mapping[str, Any]) -> str:
    """Names and values, for a page."""
    rows = "".join(
        f"<tr>{_cell('td', name, GREY)}{_cell('td', value)}</tr>" for name, value in facts.items()
    )
    return f'<table style="border-collapse:collapse">{rows}</table>'


def _cell(kind: str, value: Any, style: str = "") -> str:
    return f'<{kind} style="{CELL};{style}">{escaped(str(value))}</{kind}>'
