"""Curves of a run: a picture where matplotlib is there (extra `notebook`), a line of characters in any case.

The only file that imports matplotlib, and no part of it that keeps state: no backend is chosen, nothing is patched.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_jax.notebook.display import spark, text_table

MISSING = "no picture: matplotlib is not installed; pip install -e '.[notebook]'"
WIDTH, HEIGHT, COLUMNS = 4.0, 2.4, 3  # inches of one curve; curves side by side

Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]  # name -> (steps, values)


class Plot:
    """What `run.plot` gives: shown as a picture by a notebook, as lines by a terminal."""

    def __init__(self, curves: Curves, title: str):
        self.curves, self.title = curves, title

    def __repr__(self) -> str:
        if not self.curves:
            return f"{self.title}: no step yet"
        rows: list[tuple[str, ...]] = [("", "first", "last", "lowest", "highest", "")]
        for name, (_, values) in self.curves.items():
            ends = (values[0], values[-1], min(values), max(values))
            rows.append((name, *(f"{value:.4g}" for value in ends), spark(values)))
        lines = f"{self.title}\n{text_table(rows)}"
        return lines if _figure_class() is not None else f"{lines}\n{MISSING}"

    def _repr_png_(self) -> bytes | None:
        figure = self.figure()
        if figure is None:
            return None
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=72)
        return out.getvalue()

    def save(self, path: str | Path) -> None:
        """As a picture of the kind that the name says. Raises ImportError without matplotlib."""
        figure = self.figure()
        if figure is None:
            raise ImportError(MISSING)
        figure.savefig(path)

    def figure(self) -> Any:
        """A matplotlib Figure that belongs to nobody; None without matplotlib, or a step."""
        figure_class = _figure_class()
        if figure_class is None or not self.curves:
            return None
        columns = min(COLUMNS, len(self.curves))
        rows = -(-len(self.curves) // columns)
        figure = figure_class(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for place, (name, (steps, values)) in zip(axes.flat, self.curves.items()):
            place.plot(steps, values, marker="." if len(steps) < 40 else "")
            place.set_title(name, fontsize=9, parse_math=False)
            place.tick_params(labelsize=8)
            place.grid(alpha=0.3)
        for place in axes.flat[len(self.curves) :]:
            place.set_axis_off()
        figure.suptitle(self.title, fontsize=10, parse_math=False)
        return figure


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure
