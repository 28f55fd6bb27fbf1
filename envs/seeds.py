"""Which seeds of somebody else's environment make the tasks of a split, so that no held-out task is one of train's.

split_by "observation" (of the adapters' configs): two seeds that begin with the same text are the same task, so only
the first of them counts; the first eval_size tasks are eval's, the others train's. "seed": every seed is a task of its
own, for environments whose beginning never differs (what is hidden, or where a slippery step goes, then does).
Must not: know an environment.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rl_jax.types import Task

SPLIT_BY = ("observation", "seed")
MAX_TRIES = 20  # seeds per wanted task before the environment is said to have too few


def split_seeds(
    split: str, sizes: tuple[int, int], seed: int, split_by: str, first_text: Callable[[int], str]
) -> list[int]:
    """The seeds of split "train" or "eval". sizes: (train, eval). first_text: what an episode of a seed begins with.

    Raises: ValueError if there are too few, with the remedy.
    """
    num_train, num_eval = sizes
    first, wanted = seed * 1_000_003, num_train + num_eval
    if split_by == "seed":
        seeds = list(range(first, first + wanted))
    else:
        found: dict[str, int] = {}
        for candidate in range(first, first + MAX_TRIES * wanted):
            found.setdefault(first_text(candidate), candidate)
            if len(found) == wanted:
                break
        else:
            raise ValueError(
                f"only {len(found)} of {wanted} tasks begin differently; lower num_tasks={num_train} or"
                f" eval_size={num_eval}, or set split_by=seed if what differs is not seen at the beginning"
            )
        seeds = list(found.values())
    return seeds[:num_eval] if split == "eval" else seeds[num_eval:]


def seeded_tasks(
    name: str, split: str, seeds: list[int], payload: Mapping[str, Any], max_turns: int
) -> list[Task]:
    """A task for each seed, whose payload says it, and all else that the environment of this name is made by."""
    return [
        Task(
            id=f"{split}/{seed}",
            env=name,
            tag=name,
            messages=(),
            payload={**payload, "seed": seed},
            reward="env",
            max_turns=max_turns,
        )
        for seed in seeds
    ]
