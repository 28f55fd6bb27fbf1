"""All rows of a supervised run: read once, checked, counted, and split into what is trained and what is held out.

Owns: what happens to rows that are bad (refused, all of the first lines at once), too long (data.too_long) or empty
(two equal sides of a pair: no preference). Invariants: no row leaves without being counted; which rows are held out
depends on the seed and their number only; a row that is read again later is the one that was checked, byte for byte.
Must not: hold the text of the files.
"""

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from rl_jax.data.examples import Example, ExampleRules, make_example
from rl_jax.data.order import epoch_order
from rl_jax.data.rows import DataError, RowError, find_files, parse_row
from rl_jax.settings import DataSettings
from rl_jax.tokens import Renderer
from rl_jax.types import Group

MAX_ERRORS = 5  # bad rows that are told; the others are counted
MAX_KEYS = 6  # of those that nothing reads, that are named


class Rows(Protocol):
    """Groups by their number; what reading one costs is theirs."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Group: ...


@dataclass(frozen=True)
class Corpus:
    train: Rows
    held_out: Rows
    digest: str  # of the bytes, or of the tokens, that it was made from
    # rows read, and what became of some: too_long, cut, equal; tokens and trained_tokens of those kept; also_trained:
    # held-out rows whose equal is trained on
    counts: Mapping[str, int]
    first_also_trained: str = ""  # where such a row stands
    unread: tuple[str, ...] = ()  # keys of its rows that nothing reads

    def describe(self) -> str:
        """One line for a person."""
        c = self.counts
        lost = {
            "dropped as too long": c["too_long"],
            "dropped as pairs of equals": c["equal"],
            "cut to the row's length": c["cut"],
        }
        told = "".join(f", {num} {what}" for what, num in lost.items() if num)
        also = ""
        if num := c["also_trained"]:
            also = f", {num} of them also trained on (the first: {self.first_also_trained})"
        keys = ", ".join(self.unread[:MAX_KEYS]) + (" ..." if len(self.unread) > MAX_KEYS else "")
        unread = f"; not read: {keys}" if keys else ""
        return (
            f"data: {c['rows']} rows{told}; {len(self.train)} to train on, {len(self.held_out)} held out{also};"
            f" {c['tokens']} tokens, {c['trained_tokens']} of them trained{unread}"
        )


class JsonlExamples:
    """Groups of checked lines; each is read and rendered again when it is asked for. Thread-safe."""

    def __init__(self, renderer: Renderer, rules: ExampleRules):
        self._renderer, self._rules = renderer, rules
        self._files: list[Path] = []
        # file, number from 1, offset, size, crc32
        self._lines: list[tuple[int, int, int, int, int]] = []
        self.digests: list[int] = []  # 64 bits of the tokens of each
        self.unread: dict[str, None] = {}  # keys that nothing reads, in order

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> Group:
        """Raises DataError if the file is not what it was."""
        file, _, offset, size, crc = self._lines[i]
        path = self._files[file]
        with open(path, "rb") as stream:
            raw = os.pread(stream.fileno(), size, offset)
        if zlib.crc32(raw) != crc:
            raise DataError(f"{path} was changed while the run reads it; start again")
        return make_example(parse_row(raw, self._rules.form), i, self._renderer, self._rules).group

    def where(self, i: int) -> str:
        """The file and line of a group."""
        file, number, *_ = self._lines[i]
        return f"{self._files[file]}:{number}"

    def read(self, key: str, pattern: str, too_long: str) -> tuple[Counter[str], str]:
        """Check every line of the files and keep those that train; (counts, sha256 of the bytes).

        Raises DataError: no file, bad rows (the first MAX_ERRORS, by file and line), or none left to train on.
        """
        counts: Counter[str] = Counter()
        digest, errors = hashlib.sha256(), []
        self._files = find_files(key, pattern)
        for file, path in enumerate(self._files):
            for number, offset, raw in _lines(path):
                digest.update(raw)
                if not raw.strip():
                    continue
                counts["rows"] += 1
                try:
                    row = parse_row(raw, self._rules.form)
                    self.unread.update(dict.fromkeys(row.unread))
                    example = make_example(row, len(self), self._renderer, self._rules)
                    if self._keeps(example, too_long, counts):
                        self._lines.append((file, number, offset, len(raw), zlib.crc32(raw)))
                        self.digests.append(_digest(example.group))
                except RowError as error:
                    counts["bad"] += 1
                    errors += [f"{path}:{number}: the row {error}"][: MAX_ERRORS - len(errors)]
        if counts["bad"] > len(errors):
            errors.append(f"{pattern}: {counts['bad'] - len(errors)} more rows are bad")
        if not errors and not len(self):
            what = (
                "is empty" if not counts["rows"] else f"has {counts['rows']} rows and none trains"
            )
            errors.append(
                f"{key}={pattern} {what} ({counts['too_long']} are longer than learner.row_tokens="
                f"{self._rules.max_tokens}, {counts['equal']} prefer nothing); give other rows, or longer ones"
            )
        if errors:
            raise DataError(*errors)
        return counts, digest.hexdigest()[:16]

    def _keeps(self, example: Example, too_long: str, counts: Counter[str]) -> bool:
        if example.is_cut and too_long == "error":
            raise RowError(
                f"has {example.num_tokens} tokens, more than learner.row_tokens={self._rules.max_tokens}; raise that,"
                " or set data.too_long to drop or truncate"
            )
        members = example.group.trajectories
        if example.is_cut and (too_long == "drop" or not all(m.num_trained for m in members)):
            counts["too_long"] += 1
            return False
        if not example.trains:
            counts["equal"] += 1
            return False
        counts["cut"] += example.is_cut
        counts["tokens"] += sum(len(m.tokens) for m in members)
        counts["trained_tokens"] += sum(m.num_trained for m in members)
        return True


def read_corpus(
    settings: DataSettings, renderer: Renderer, rules: ExampleRules, seed: int
) -> Corpus:
    """Of data.path and data.eval_path, or data.eval_share. Raises DataError."""
    rows = JsonlExamples(renderer, rules)
    counts, digest = rows.read("data.path", settings.path, settings.too_long)
    if not settings.eval_path:
        kept, out = held_out_places(len(rows), settings.eval_share, seed)
        corpus = Corpus(Chosen(rows, kept), Chosen(rows, out), digest, counts)
        return _telling(corpus, rows, kept, rows, out)
    held_out = JsonlExamples(renderer, rules)
    more, other = held_out.read("data.eval_path", settings.eval_path, settings.too_long)
    corpus = Corpus(rows, held_out, f"{digest}+{other}", counts + more)
    return _telling(corpus, rows, range(len(rows)), held_out, range(len(held_out)))


def _telling(
    corpus: Corpus,
    rows: JsonlExamples,
    trained: Iterable[int],
    others: JsonlExamples,
    held_out: Iterable[int],
) -> Corpus:
    """The corpus with what is held out and trained on too: its figures say nothing of what is new to the policy."""
    known = {rows.digests[i] for i in trained}
    also = [i for i in held_out if others.digests[i] in known]
    counts = Counter(corpus.counts)
    counts["also_trained"] = len(also)
    return replace(
        corpus,
        counts=counts,
        first_also_trained=others.where(also[0]) if also else "",
        unread=tuple(rows.unread | others.unread),
    )


def played_corpus(groups: Sequence[Group], eval_share: float, seed: int) -> Corpus:
    """Of episodes that scripts played. Raises DataError if the share leaves nothing on one side."""
    digest, counts = hashlib.sha256(), Counter(rows=len(groups))
    for trajectory in (t for group in groups for t in group.trajectories):
        digest.update(trajectory.tokens.tobytes())
        counts["tokens"] += len(trajectory.tokens)
        counts["trained_tokens"] += trajectory.num_trained
    kept, out = held_out_places(len(groups), eval_share, seed)
    return Corpus(Chosen(groups, kept), Chosen(groups, out), digest.hexdigest()[:16], counts)


def held_out_places(num_rows: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(places to train on, places held out), ascending. Raises DataError as num_held_out."""
    num = num_held_out(num_rows, share)
    order = epoch_order(f"held_out/{seed}", num_rows)(0)
    return np.sort(order[num:]), np.sort(order[:num])


def num_held_out(num_rows: int, share: float) -> int:
    """Rows of a share. Raises DataError if it leaves nothing on one side."""
    num = round(num_rows * share)
    if share and not 0 < num < num_rows:
        raise DataError(
            f"data.eval_share={share} of {num_rows} rows is {num}, which leaves nothing to"
            f" {'train on' if num else 'evaluate'}; use another share"
        )
    return num


class Chosen:
    """Some members of a sequence."""

    def __init__(self, rows: Rows, places: np.ndarray):
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> Group:
        return self._rows[int(self._places[i])]


def batches(rows: Rows, size: int) -> Iterator[list[Group]]:
    """All rows in order, `size` at a time; the last batch may be short."""
    for start in range(0, len(rows), size):
        yield [rows[i] for i in range(start, min(start + size, len(rows)))]


def _digest(group: Group) -> int:
    """64 bits of what its members say: equal rows are told by it, wherever they stand."""
    digest = hashlib.blake2b(digest_size=8)
    for member in group.trajectories:
        digest.update(member.tokens.tobytes() + member.loss_mask.tobytes())
    return int.from_bytes(digest.digest(), "little")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, bytes) of every line."""
    offset = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            yield number, offset, raw
            offset += len(raw)
