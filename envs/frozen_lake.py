"""FrozenLake as text: walk from the start to the goal over frozen cells and fall into no hole.

Several turns, short actions, a context that grows by one grid a turn: prefill-heavy. The rules are gymnasium's
FrozenLake-v1; the maps, the text and the parsing of moves are ours.

What the policy sees: the grid, rows joined by newlines, its own cell marked "P" (S start, F frozen, H hole,
G goal); before the first grid, in the same message, `instructions` if there are any. What it says: a text whose
first letter out of L, D, R, U (either case) is the move. A text without one is an invalid move: it costs a turn,
changes nothing and is counted in info["invalid_moves"]. Reward 1.0 on the goal, else 0.0; the episode ends on the
goal, in a hole, or by the task's max_turns.

Maps come from one seeded sequence of distinct solvable maps whose shortest path fits into max_turns. Splits:
    train   the first num_maps
    eval    the same maps again, as eval_episodes tasks
    unseen  the next num_maps, disjoint from the training maps by content, as eval_episodes tasks

reset_latency and step_latency make each call take a while, as latency.py says: what a browser or a remote machine
would do to the rollout, by a seed.

Must not: keep anything between episodes.
"""

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from envs import read_config
from envs.grids import shortest_way
from envs.latency import Latency, read_latency
from envs.splits import check_split, distinct
from rl_jax.types import Action, Message, StepResult, Task

MOVES = "LDRU"  # index = gymnasium's action
MAX_TRIES = 200  # random maps per wanted map before the settings are called impossible

INSTRUCTIONS = (
    "You are P on a frozen lake. Reach the goal G and avoid the holes H; F is safe ice and S the start. "
    "Answer with one letter: L (left), D (down), R (right) or U (up)."
)


@dataclass(frozen=True)
class FrozenLakeConfig:
    num_maps: int = 16  # training maps, and as many unseen ones
    map_size: int = 4  # rows = columns, at least 2
    map_seed: int = 0
    frozen_share: float = 0.8  # chance that a cell is no hole, in (0, 1]
    max_turns: int = 10
    is_slippery: bool = False  # a move then goes astray two times out of three
    eval_episodes: int = 64  # tasks of the splits eval and unseen
    instructions: str = INSTRUCTIONS  # "" = the grid alone
    reset_latency: Mapping[str, Any] = field(default_factory=dict)  # as latency.py; {} = none
    step_latency: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        read_latency(self.reset_latency), read_latency(self.step_latency)
        if self.num_maps < 1 or self.map_size < 2 or self.eval_episodes < 1:
            raise ValueError(
                f"frozen_lake: num_maps={self.num_maps} and eval_episodes={self.eval_episodes} must be at least 1 and "
                f"map_size={self.map_size} at least 2"
            )
        if self.max_turns < 2 * (self.map_size - 1):
            raise ValueError(
                f"frozen_lake: max_turns={self.max_turns} is too short for map_size={self.map_size}; the goal is at "
                f"least {2 * (self.map_size - 1)} moves away"
            )
        if not 0 < self.frozen_share <= 1:
            raise ValueError(
                f"frozen_lake: frozen_share={self.frozen_share} must be above 0 and at most 1"
            )


class FrozenLake:
    """One live episode on one map."""

    splits = ("train", "eval", "unseen")

    def __init__(self):
        self._env: gymnasium.Env | None = None
        self._invalid_moves = 0
        self._is_solving: bool | None = None  # whether this episode's script is the solution
        self._step_latency, self._waits = Latency(), random.Random(0)

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key or split, or settings that allow too few distinct maps."""
        config: FrozenLakeConfig = read_config(FrozenLakeConfig, cfg)
        check_split("frozen_lake", split, cls.splits)
        maps = _maps(config, 2 * config.num_maps if split == "unseen" else config.num_maps)
        maps = maps[config.num_maps :] if split == "unseen" else maps
        count = config.num_maps if split == "train" else config.eval_episodes
        return [_task(config, split, i, maps[i % len(maps)]) for i in range(count)]

    def reset(self, task: Task, seed: int) -> StepResult:
        """The first grid. `seed` decides where a slippery move goes, and how long the calls take."""
        self.close()
        payload = task.payload
        self._waits = random.Random(f"{seed}/{task.id}")
        self._step_latency = read_latency(payload["step_latency"])
        read_latency(payload["reset_latency"]).wait(self._waits)
        self._env = gymnasium.make(
            "FrozenLake-v1",
            desc=list(payload["map"]),
            is_slippery=payload["is_slippery"],
            max_episode_steps=-1,  # the task's max_turns is the limit
            disable_env_checker=True,
        )
        self._env.reset(seed=seed % 2**31)
        self._invalid_moves, self._is_solving = 0, None
        grid = self._grid()
        intro = payload["instructions"]
        first = Message("user", f"{intro}\n\n{grid}" if intro else grid)
        return StepResult((first,), state_key=_key(grid))

    def step(self, action: Action) -> StepResult:
        """One move. The last result of an episode (done) has no message: nobody reads it."""
        self._step_latency.wait(self._waits)
        move = parse_move(action.text)
        reward, done = 0.0, False
        if move is None:
            self._invalid_moves += 1
        else:
            _, reward, terminated, truncated, _ = self._live().step(move)
            reward, done = float(reward), terminated or truncated
        info = {"invalid_moves": float(self._invalid_moves), "success": float(reward == 1.0)}
        if done:
            return StepResult((), reward, True, info=info)
        grid = self._grid()
        return StepResult((Message("user", grid),), reward, state_key=_key(grid), info=info)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def script(self, rng: random.Random, skill: float) -> str:
        """The next move of the shortest way from here, in a share `skill` of all episodes; else a random move."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        if not self._is_solving:
            return rng.choice(MOVES)
        rows, cell = self._where()
        way = shortest_way(rows, cell)
        # A slippery lake may carry the player where no way leads on.
        return way[0] if way else rng.choice(MOVES)

    def _live(self) -> gymnasium.Env:
        assert self._env is not None, "reset() comes before everything else"
        return self._env

    def _where(self) -> tuple[list[str], tuple[int, int]]:
        """The map's rows, and the player's (row, column)."""
        lake = cast(FrozenLakeEnv, self._live().unwrapped)
        rows = [b"".join(row).decode() for row in lake.desc]
        return rows, divmod(int(lake.s), len(rows[0]))

    def _grid(self) -> str:
        rows, (row, column) = self._where()
        rows[row] = rows[row][:column] + "P" + rows[row][column + 1 :]
        return "\n".join(rows)


def parse_move(text: str) -> int | None:
    """gymnasium's action for the first of the letters L, D, R, U in the text, None without one."""
    for letter in text.upper():
        if letter in MOVES:
            return MOVES.index(letter)
    return None


def _maps(config: FrozenLakeConfig, count: int) -> list[tuple[str, ...]]:
    """The first `count` distinct maps of the sequence whose goal can be reached within max_turns."""
    seeds = itertools.count(config.map_seed)

    def make(_: int) -> tuple[Sequence[str], tuple[str, ...]] | None:
        rows = tuple(generate_random_map(config.map_size, config.frozen_share, next(seeds)))
        is_near = len(shortest_way(rows, (0, 0)) or "") <= config.max_turns
        return (rows, rows) if is_near else None

    complaint = lambda num: (
        f"frozen_lake: only {num} distinct maps of {count} found for map_size={config.map_size}, "
        f"frozen_share={config.frozen_share}, max_turns={config.max_turns}; lower num_maps or change these"
    )
    return distinct(make, count, MAX_TRIES, complaint)


def _task(config: FrozenLakeConfig, split: str, i: int, rows: tuple[str, ...]) -> Task:
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:8]
    return Task(
        id=f"{split}/{i}-{digest}",
        env="frozen_lake",
        tag="frozen_lake",
        messages=(),
        payload={
            "map": list(rows),
            "is_slippery": config.is_slippery,
            "instructions": config.instructions,
            "reset_latency": dict(config.reset_latency),
            "step_latency": dict(config.step_latency),
        },
        reward="env",
        max_turns=config.max_turns,
    )


def _key(grid: str) -> str:
    return hashlib.sha256(grid.encode()).hexdigest()[:16]
