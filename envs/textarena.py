"""The single-player games of TextArena (extra textarena): an adapter.

What the policy sees: what the game says to its player since the last turn, one message. What it says goes to the game
as it is; each game says how a move is written (mostly in brackets, as [5]). One move that breaks the rules is
corrected, a second in a row ends the game. Reward: the game's, with its last turn: 1 for a game that is won, else the
share that the game says was reached, or below 0.

A task is a seed of the game; splits as seeds.py (by seed unless the beginning of the game shows what differs).
The games draw from Python's one global generator. Each instance here has a state of its own that is put in place for
its calls, so that games which live in one worker do not disturb one another.
Upkeep: written against TextArena 0.7 (29 packages with it, 0.1 GB, half a second to import). Its games for more players
are not offered: they hide cards and words from each other, and in one conversation each side would read them.
Must not: let two games share a random state.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from envs import read_config
from envs.seeds import SPLIT_BY, seeded_tasks, split_seeds
from envs.splits import check_split
from rl_jax.types import Action, Message, StepResult, Task

PLAYER = 0


@dataclass(frozen=True)
class TextArenaConfig:
    id: str = "GuessTheNumber-v0"
    kwargs: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the game, such as {"max_number": 9}
    num_tasks: int = 64  # of train
    eval_size: int = 32
    seed: int = 0
    split_by: str = "seed"  # observation | seed, as seeds.py
    max_turns: int = 32

    def __post_init__(self):
        if min(self.num_tasks, self.eval_size, self.max_turns) < 1 or self.seed < 0:
            raise ValueError(
                f"textarena: num_tasks={self.num_tasks}, eval_size={self.eval_size} and max_turns={self.max_turns} must"
                f" be at least 1, seed={self.seed} at least 0"
            )
        if self.split_by not in SPLIT_BY:
            raise ValueError(
                f"textarena: split_by={self.split_by!r} is not one of {', '.join(SPLIT_BY)}"
            )


class TextArena:
    """One live game."""

    splits = ("train", "eval")

    def __init__(self):
        self._game: Any = None
        self._random: Any = None  # the state of Python's generator that is this game's

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key, split or game, a game of more players, the extra is missing, or too few."""
        config: TextArenaConfig = read_config(TextArenaConfig, cfg)
        check_split("textarena", split, cls.splits)
        if not isinstance(config.kwargs, Mapping):
            raise ValueError(f"textarena: kwargs={config.kwargs!r:.80} must be a mapping")
        player, payload = cls(), {"id": config.id, "kwargs": dict(config.kwargs)}

        def first_text(seed: int) -> str:
            return player._begin(payload, seed)

        first_text(config.seed)  # a game that cannot be played is told here
        sizes = (config.num_tasks, config.eval_size)
        seeds = split_seeds(split, sizes, config.seed, config.split_by, first_text)
        return seeded_tasks("textarena", split, seeds, payload, config.max_turns)

    def reset(self, task: Task, seed: int) -> StepResult:
        """The rules and the first position. The task's own seed decides all that is random."""
        return StepResult((Message("user", self._begin(task.payload, task.payload["seed"])),))

    def step(self, action: Action) -> StepResult:
        """One move."""
        with self._own_random():
            done, _ = self._game.step(action=action.text)
            if not done:
                text = _said(self._game)
                return StepResult((Message("user", text),), 0.0)
            rewards, _ = self._game.close()
        reward = float((rewards or {}).get(PLAYER, 0.0))
        return StepResult((), reward, True, info={"success": float(reward == 1.0)})

    def close(self) -> None:
        self._game = None

    def _begin(self, payload: Mapping[str, Any], seed: int) -> str:
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game = _make(payload["id"], payload["kwargs"])
            try:
                self._game.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ValueError(f"textarena: {payload['id']} is no game of one: {error}") from None
            return _said(self._game)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(others)


def _make(id_: str, kwargs: Mapping[str, Any]) -> Any:
    """The game without wrappers: it tells each message once."""
    try:
        import textarena
    except ImportError as error:
        raise ValueError(
            f"textarena: it cannot be imported ({error}); pip install -e '.[textarena]'"
        ) from None
    try:
        return textarena.make(f"{id_}-raw", **kwargs)
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"textarena: id={id_!r} cannot be made: {error}") from None


def _said(game: Any) -> str:
    """What the game told its player since this was asked before; not the player's own words."""
    _, messages = game.get_observation()
    return "\n".join(text for sender, text, _ in messages if sender != PLAYER) or "(nothing)"
