"""The last steps as a table that is redrawn at the foot of a terminal; what else is said scrolls above it.

Owns: the package rich, which is optional and imported when a view is opened. A column is a step, a row a figure of its
plain line; below stands what is awaited, if that was said since. A terminal that cannot move its cursor has no view.
Must not: format a figure, write to a log, or lock (Progress calls it under its own lock).
"""

import importlib.util
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO

MOST_STEPS = 8  # columns
LABEL_SIZE, COLUMN_SIZE = 16, 20  # characters, about: how many columns a narrow terminal shows

Figures = Sequence[tuple[str, str]]  # label, value; the first is the step itself


def missing() -> str | None:
    """Why there can be no view, and what helps; None if the package is installed."""
    if importlib.util.find_spec("rich") is not None:
        return None
    return (
        "metrics.progress=rich needs the package rich, which is not installed: pip install rich (the extra rich), or"
        " use --progress=plain"
    )


class LiveView:
    """Writes to `stream` until it is closed, and catches there what other code prints meanwhile."""

    def __init__(self, console: Any):  # rich.console.Console
        from rich.live import Live

        self._console = console
        self._steps: deque[Figures] = deque(maxlen=MOST_STEPS)
        self._awaited = ""
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._render)
        self._live.start()

    @classmethod
    def open(cls, stream: TextIO) -> "LiveView | None":
        """None where the stream is no terminal, or one that cannot redraw. Raises ImportError without rich."""
        from rich.console import Console

        console = Console(file=stream, markup=False, highlight=False, emoji=False)
        is_terminal = stream.isatty() and console.is_terminal and not console.is_dumb_terminal
        return cls(console) if is_terminal else None

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def step(self, figures: Figures) -> None:
        self._steps.append(figures)
        self._awaited = ""
        self._live.refresh()

    def awaited(self, text: str) -> None:
        """Stands below the table until the next step."""
        self._awaited = text
        self._live.refresh()

    def close(self) -> None:
        """Leave the last table where it stands, and give the terminal back."""
        self._live.stop()

    def _render(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = []
        if self._steps:
            fit = max(1, (self._console.width - LABEL_SIZE) // COLUMN_SIZE)
            shown = list(self._steps)[-fit:]
            table = Table(box=None, pad_edge=False)
            for label, value in [("", ""), *(figures[0] for figures in shown)]:
                table.add_column(Text(f"{label} {value}".strip()), justify="right", no_wrap=True)
            columns = [dict(figures[1:]) for figures in shown]
            labels = dict.fromkeys(label for column in reversed(columns) for label in column)
            for label in labels:
                table.add_row(Text(label), *(Text(column.get(label, "")) for column in columns))
            parts.append(table)
        if self._awaited:
            parts.append(Text(self._awaited))
        return Group(*parts)
