"""The episodes that a run saved, one line of a file at a time.

Owns: `Episodes`, a sequence over rollouts/step_N/{train,eval} in the order of steps, and `Episode`, one of them with
its texts. Invariant: asking for one reads one line, however many there are; files are only read.
Must not: import jax, or trust a text.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np

from rl_jax.notebook.display import GREY, MONO, block, coloured, escaped, one_line, visible
from rl_jax.resume import ROLLOUTS, step_of
from rl_jax.rollout.traces import INDEX, TRACES, decode_trajectory
from rl_jax.types import Trajectory

MAX_LINES = 40  # of an episode in a terminal
MAX_TOKENS = 4_000  # of an episode that are coloured one by one

Decode = Callable[[np.ndarray], str]


@dataclass(frozen=True)
class Episode:
    """A trajectory as it was trained or evaluated, and its texts as they were rendered then."""

    step: int
    split: str  # train | eval
    trajectory: Trajectory
    texts: tuple[tuple[str, str], ...]  # of each turn: what the policy saw, and what it said
    decode: Decode | None = (
        None  # tokens -> text, for single tokens; None: the run's tokenizer is not here
    )

    @property
    def reward(self) -> float | None:
        """None where it was not scored."""
        return self.trajectory.reward.value

    @property
    def text(self) -> str:
        """All that was seen and said."""
        return "".join(seen + said for seen, said in self.texts)

    def __repr__(self) -> str:
        lines = [self._title()]
        for turn, (seen, said) in enumerate(self.texts):
            lines += [f"  turn {turn}", *_indented(seen), *_indented(said, "  > ")]
        if len(lines) > MAX_LINES:
            half = MAX_LINES // 2
            lines = [*lines[:half], f"  ... ({len(lines) - 2 * half} lines)", *lines[-half:]]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        t, parts, at = self.trajectory, [f"<div><b>{escaped(self._title())}</b></div>"], 0
        left = MAX_TOKENS
        for turn, (seen, said) in enumerate(self.texts):
            num_seen, num_said = (
                len(x) for x in (t.turns[turn].prompt_tokens, t.turns[turn].tokens)
            )
            parts.append(block(seen, GREY))
            start, at = at + num_seen, at + num_seen + num_said
            if self.decode is None or num_said > left:
                parts.append(block(said))
                continue
            left -= num_said
            pieces = [self.decode(t.tokens[i : i + 1]) for i in range(start, at)]
            spans = coloured(pieces, t.logprobs[start:at].tolist())
            parts.append(f'<div style="{MONO}">{spans}</div>')
        return "".join(parts)

    def _title(self) -> str:
        t = self.trajectory
        reward = "not scored" if self.reward is None else f"reward {self.reward:g}"
        versions = sorted({int(v) for v in t.versions if v >= 0})
        by = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions}"
        cut = f", cut by {t.truncated_by}" if t.truncated_by else ""
        return (
            f"{self.split} episode of step {self.step}: {one_line(t.tag)}, task {one_line(t.task_id)}, {reward},"
            f" {len(t.turns)} turns,"
            f" {t.num_sampled} tokens by {by}, {t.outcome.value}{cut}"
        )


@dataclass
class _Folder:
    """The traces of one step."""

    path: Path
    step: int
    stamp: int  # mtime of its index
    offsets: np.ndarray  # i64[n] bytes of each line


@dataclass
class Episodes(Sequence[Episode]):
    """All that a run saved of one split, oldest first; a live run's grow. run: its directory."""

    run: Path
    split: str = "train"
    decode: Decode | None = None
    settled: Callable[[], None] = lambda: (
        None
    )  # called before files are looked at: what is being written is done
    _known: dict[Path, _Folder] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return sum(len(folder.offsets) for folder in self._folders())

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        """Raises IndexError, which says how many there are and why there may be none."""
        folders = self._folders()
        ends = list(accumulate(len(folder.offsets) for folder in folders))
        num = ends[-1] if ends else 0
        if isinstance(index, slice):
            return [self._at(folders, ends, i) for i in range(*index.indices(num))]
        if not -num <= index < num:
            why = "" if num else "; none is saved yet, or metrics.rollouts_every is 0"
            raise IndexError(f"episode {index} of {num} ({self.split}) in {self.run}{why}")
        return self._at(folders, ends, index % num)

    def of(self, step: int) -> list[Episode]:
        """Those of one step (of an evaluation: of one version)."""
        return [
            self._read(folder, i)
            for folder in self._folders()
            if folder.step == step
            for i in range(len(folder.offsets))
        ]

    @property
    def steps(self) -> list[int]:
        """That have any."""
        return [folder.step for folder in self._folders()]

    def __repr__(self) -> str:
        steps = self.steps
        of = f" of steps {steps[0]} to {steps[-1]}" if steps else ""
        return (
            f"{len(self)} {self.split} episodes{of}; [-1] is the last one, of(step) those of a step"
        )

    def _folders(self) -> list[_Folder]:
        self.settled()
        found = []
        for index in self.run.glob(f"{ROLLOUTS}/step_*/{self.split}/{INDEX}"):
            path, stamp = index.parent, index.stat().st_mtime_ns
            known = self._known.get(path)
            if known is None or known.stamp != stamp:
                with np.load(index) as arrays:
                    offsets = arrays["offset"]
                known = self._known[path] = _Folder(path, step_of(path.parent), stamp, offsets)
            found.append(known)
        return sorted(found, key=lambda folder: folder.step)

    def _at(self, folders: Sequence[_Folder], ends: Sequence[int], index: int) -> Episode:
        i = bisect_right(ends, index)
        before = ends[i - 1] if i else 0
        return self._read(folders[i], index - before)

    def _read(self, folder: _Folder, i: int) -> Episode:
        with open(folder.path / TRACES, "rb") as file:
            file.seek(int(folder.offsets[i]))
            line = file.readline()
        record: dict[str, Any] = json.loads(line)
        texts = tuple((turn["prompt_text"], turn["text"]) for turn in record["turns"])
        return Episode(folder.step, self.split, decode_trajectory(line), texts, self.decode)


def _indented(text: str, mark: str = "    ") -> Iterator[str]:
    for line in visible(text).splitlines() or [""]:
        yield f"{mark}{line}"
        mark = "    "
