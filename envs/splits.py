"""What the tasks of a split are made by, whatever they are: a name that is one, and items that differ.

Must not: know an environment.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def check_split(name: str, split: str, splits: Sequence[str]) -> None:
    """Raises: ValueError if the environment of this name has no such split."""
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; use one of {', '.join(splits)}")


def distinct(
    make: Callable[[int], tuple[Hashable, Item] | None],
    count: int,
    tries: int,
    complaint: Callable[[int], str],
    but: Collection[Hashable] = frozenset(),
) -> list[Item]:
    """The first `count` items that `make` comes up with whose keys differ from each other and are not in `but`.

    make: how many are found already -> (key, item), or None for one that is of no use. It is asked tries * count times
    at most. Raises: ValueError with what `complaint` says of the number found, if they are fewer.
    """
    found: dict[Hashable, Item] = {}
    for _ in range(tries * count):
        made = make(len(found))
        if made is not None and made[0] not in but:
            found.setdefault(*made)
        if len(found) == count:
            return list(found.values())
    raise ValueError(complaint(len(found)))
