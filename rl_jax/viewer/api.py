"""What the page may ask, as paths with parameters -> JSON values; the server, the export and the tests call it alike.

Invariants: every answer is bounded and plain JSON (NaN is null, a lone surrogate is an escape); a question that makes
no sense is a Refusal with one line, never a traceback; nothing is written.
"""

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_jax.viewer import episode
from rl_jax.viewer.failures import Failures
from rl_jax.viewer.run import Run
from rl_jax.viewer.samples import SPLITS, SampleError, Samples

if TYPE_CHECKING:
    from rl_jax.viewer.tokens import Texts

MAX_EPISODES = 25_000  # of one answer of columns
MAX_NAMES = 200  # of one answer
COLUMNS = {
    "step": "<i4",
    "i": "<i4",
    "reward": "<f4",
    "length": "<i4",
    "group": "<i4",
    "tag": "<i2",
    "outcome": "<i1",
}
Asked = Mapping[str, str]


class Refusal(Exception):
    """A question that is not answered."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status, self.detail = status, detail


class Api:
    """One run's answers. Any thread."""

    def __init__(self, path: Path, resolve: Callable[[str, Mapping[str, Any]], Any]):
        """resolve: a name of a tokenizer or parser and its table -> the object. Raises ValueError: no run is there."""
        self.run, self.samples, self.failures = Run(path), Samples(path), Failures(path)
        self._resolve = resolve
        self._texts: Any = None
        self.routes: Mapping[str, Callable[[Asked], Any]] = {
            "run": self._run,
            "metrics": lambda asked: self.run.catalogue(),
            "curves": self._curves,
            "columns": self._columns,
            "names": self._names,
            "episode": self._episode,
            "tokens": self._tokens,
            "raw": self._raw,
            "tools": self._tools,
            "failures": lambda asked: self.failures.table(),
            "examples": self._examples,
            "events": self._events,
        }

    @property
    def texts(self) -> "Texts":
        if self._texts is None:
            # tokenizers and jinja2 take a third of the program's start, and only an episode needs them.
            from rl_jax.viewer.tokens import Texts

            self._texts = Texts(self.run.config, self._resolve)
        return self._texts

    def answer(self, name: str, asked: Asked) -> Any:
        """Raises Refusal."""
        route = self.routes.get(name)
        if route is None:
            raise Refusal(404, f"nothing is at api/{name[:40]}; there are {', '.join(self.routes)}")
        try:
            return route(asked)
        except SampleError as error:
            raise Refusal(404, str(error)) from None

    def _run(self, asked: Asked) -> dict[str, Any]:
        return {
            **self.run.head(), "steps": self.samples.steps(), "splits": SPLITS,
            "faults": self.run.faults() + self.samples.faults(),
        }  # fmt: skip

    def _curves(self, asked: Asked) -> dict[str, Any]:
        names = [name for name in asked.get("names", "").split(",") if name][:MAX_NAMES]
        return self.run.curves(names, number(asked, "points", 300, 10, 5000))

    def _columns(self, asked: Asked) -> dict[str, Any]:
        """Episodes of steps from `last` down to `first`, newest step first, until MAX_EPISODES: `next` goes on."""
        split = asked.get("split", "train")
        first, last = number(asked, "first", 0, 0), number(asked, "last", 10**12, 0)
        steps = [step for step in self.samples.steps() if first <= step <= last][::-1]
        parts: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
        tags: dict[str, int] = {}
        outcomes: dict[str, int] = {}
        total, following = 0, None
        for step in steps:
            index = self.samples.try_index(step, split)
            if index is None or not index.num:
                continue
            if total and total + index.num > MAX_EPISODES:
                following = step
                break
            total += index.num
            codes = np.array([tags.setdefault(tag, len(tags)) for tag in index.tags], np.int16)
            ends = np.array(
                [outcomes.setdefault(o, len(outcomes)) for o in index.outcomes], np.int8
            )
            columns = {
                "step": np.full(index.num, step), "i": np.arange(index.num), "reward": index.reward,
                "length": index.length, "group": index.group, "tag": codes[index.tag],
                "outcome": ends[index.outcome],
            }  # fmt: skip
            for name, column in columns.items():
                parts[name].append(column)
        return {
            "num": total, "next": following, "tags": [episode.short(tag) for tag in tags], "outcomes": list(outcomes),
            "columns": {
                name: base64.b64encode(np.concatenate([np.zeros(0), *parts[name]]).astype(kind).tobytes()).decode()
                for name, kind in COLUMNS.items()
            },
        }  # fmt: skip

    def _names(self, asked: Asked) -> list[dict[str, Any]]:
        """uid and task of the episodes of `who`: STEP.I, comma-separated; {} for one that has none."""
        split, out = asked.get("split", "train"), []
        for one in asked.get("who", "").split(",")[:MAX_NAMES]:
            step, _, i = one.partition(".")
            if not (step.isdigit() and i.isdigit()):
                raise Refusal(400, f"who={one[:40]!r} is no STEP.I")
            found = self.samples.names(int(step[:12]), split, int(i[:12]))
            out.append({k: episode.short(v) if isinstance(v, str) else v for k, v in found.items()})
        return out

    def _who(self, asked: Asked) -> tuple[int, str, int]:
        return (
            number(asked, "step", None, 0),
            asked.get("split", "train"),
            number(asked, "i", None, 0),
        )

    def _episode(self, asked: Asked) -> dict[str, Any]:
        return episode.show(self.samples, self.texts, *self._who(asked))

    def _tokens(self, asked: Asked) -> dict[str, Any]:
        turn, start = number(asked, "turn", None, 0), number(asked, "start", 0, 0)
        return episode.more(self.samples, self.texts, self._who(asked), turn, start)

    def _raw(self, asked: Asked) -> dict[str, Any]:
        return self.samples.raw(
            *self._who(asked), number(asked, "start", 0, 0), number(asked, "num", 4000, 1, 1 << 16)
        )

    def _tools(self, asked: Asked) -> dict[str, Any]:
        return episode.tools(
            self.samples, self.texts, number(asked, "step", None, 0), asked.get("split", "train")
        )

    def _events(self, asked: Asked) -> dict[str, Any]:
        return self.run.events(number(asked, "most", 500, 1, 5000), asked.get("kind", ""))

    def _examples(self, asked: Asked) -> list[dict[str, Any]]:
        return self.failures.examples(asked.get("state", ""), asked.get("reason", ""))


def number(asked: Asked, name: str, default: int | None, low: int, high: int = 10**12) -> int:
    """An integer parameter. Raises Refusal."""
    text = asked.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise Refusal(400, f"{name}={str(text)[:40]!r} is no number") from None
    if not low <= value <= high:
        raise Refusal(400, f"{name}={value} is not {low} to {high}")
    return value


def to_json(value: Any) -> bytes:
    """ASCII, with every NaN as null."""
    try:  # nearly always plain already, and a walk over it costs more than all else
        return _dumped(value)
    except (ValueError, TypeError):
        return _dumped(_finite(value))


def _dumped(value: Any) -> bytes:
    """Raises ValueError or TypeError for what is not plain."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode(
        "ascii"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)[:1000]
