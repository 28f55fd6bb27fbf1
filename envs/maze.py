"""A maze as text, of rising difficulty: walk from P to the goal G between walls.

A level is a size: level 1 has 3 x 3 rooms, each further level a row and a column more, up to 12. The grid is drawn with
walls, so n rooms a side are 2n + 1 characters: "#" wall, "." free, "P" the player, "G" the goal. Every maze is a
spanning tree of its rooms, so each two rooms are joined by exactly one way: solvable by construction. Start and goal
are drawn at random, at least as many steps apart as the grid has rooms a side times two.

What the policy says: a word of the letters L, D, R, U (either case), at most moves_per_turn of them, such as "RRD".
They are walked in order; a wall ends the turn's walk and is counted in info["bumps"]. A text without such a word is an
invalid move: it costs a turn, changes nothing and is counted in info["invalid_moves"]. Reward 1.0 on the goal, else
0.0. For a curriculum give each level a task source, hence a tag, of its own.

Splits `train` and `eval` share no maze; both depend on the seed and the level alone.
Must not: keep anything between episodes.
"""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs import read_config
from envs.grids import MOVES, Cell, shortest_way
from envs.splits import check_split, distinct
from rl_jax.types import Action, Message, StepResult, Task

WORD = re.compile(r"(?<![\w'])[LDRU]+(?![\w'])", re.I)  # a word of moves; not the "d" of "I'd"
MAX_LEVEL = 10
MAX_TRIES = 50  # random grids per wanted one before the settings are called impossible

INSTRUCTIONS = (
    "You are P in a maze. Reach G; # is a wall and . is free. Answer with a word of up to {moves} letters, one a step:"
    " L (left), D (down), R (right), U (up)."
)


@dataclass(frozen=True)
class MazeConfig:
    level: int = 1  # 1..10
    num_tasks: int = 64  # of train
    eval_size: int = 32
    seed: int = 0
    moves_per_turn: int = 4
    spare_turns: int = 4  # beyond those that the shortest way takes
    instructions: str = INSTRUCTIONS  # {moves} = moves_per_turn; "" = the grid alone

    def __post_init__(self):
        if not 1 <= self.level <= MAX_LEVEL:
            raise ValueError(f"maze: level={self.level} must be in 1..{MAX_LEVEL}")
        if min(self.num_tasks, self.eval_size, self.moves_per_turn) < 1 or self.spare_turns < 0:
            raise ValueError(
                f"maze: num_tasks={self.num_tasks}, eval_size={self.eval_size} and"
                f" moves_per_turn={self.moves_per_turn} must be at least 1, spare_turns={self.spare_turns} at least 0"
            )


class Maze:
    """One live episode in one maze."""

    splits = ("train", "eval")

    def __init__(self):
        self._rows: Sequence[str] = ()
        self._at: Cell = (0, 0)
        self._moves_per_turn = 1
        self._counts = {"invalid_moves": 0, "bumps": 0}
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key or split, a level that is not there, or too few distinct mazes."""
        config: MazeConfig = read_config(MazeConfig, cfg)
        check_split("maze", split, cls.splits)
        mazes = _mazes(config)
        chosen = mazes[: config.eval_size] if split == "eval" else mazes[config.eval_size :]
        return [_task(config, split, i, rows) for i, rows in enumerate(chosen)]

    def reset(self, task: Task, seed: int) -> StepResult:
        """The first grid; the seed decides nothing."""
        self._rows, self._at = task.payload["maze"], find(task.payload["maze"], "P")
        self._moves_per_turn = task.payload["moves_per_turn"]
        self._counts, self._is_solving = dict.fromkeys(self._counts, 0), None
        return self._seen(task.payload["instructions"])

    def step(self, action: Action) -> StepResult:
        """Walks. The last result of an episode (done) has no message: nobody reads it."""
        word = parse_moves(action.text, self._moves_per_turn)
        self._counts["invalid_moves"] += not word
        for letter in word:
            down, right = MOVES[letter]
            row, column = self._at[0] + down, self._at[1] + right
            if self._rows[row][column] == "#":
                self._counts["bumps"] += 1
                break
            self._at = (row, column)
            if self._rows[row][column] == "G":
                return StepResult((), 1.0, True, info=self._info(True))
        return self._seen("", 0.0)

    def close(self) -> None:
        self._rows = ()

    def script(self, rng: random.Random, skill: float) -> str:
        """The next moves of the way to the goal, in a share `skill` of all episodes; else a move into nowhere."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        if not self._is_solving:
            return "stay"
        way = shortest_way(self._rows, self._at) or ""
        return way[: self._moves_per_turn]

    def _seen(self, intro: str, reward: float | None = None) -> StepResult:
        rows = [row.replace("P", ".") for row in self._rows]
        row, column = self._at
        rows[row] = rows[row][:column] + "P" + rows[row][column + 1 :]
        grid = "\n".join(rows)
        message = Message("user", f"{intro}\n\n{grid}" if intro else grid)
        info = {} if reward is None else self._info(False)
        return StepResult((message,), reward, state_key=_digest(rows), info=info)

    def _info(self, is_home: bool) -> dict[str, float]:
        return {"success": float(is_home), **{k: float(v) for k, v in self._counts.items()}}


def parse_moves(text: str, most: int) -> str:
    """The first word of the letters L, D, R, U in the text, in capitals, cut at `most`; "" without one."""
    found = WORD.search(text)
    return found[0].upper()[:most] if found else ""


def find(rows: Sequence[str], mark: str) -> Cell:
    """(row, column) of the first cell that shows the mark."""
    return next((r, row.index(mark)) for r, row in enumerate(rows) if mark in row)


def _mazes(config: MazeConfig) -> list[tuple[str, ...]]:
    """Distinct mazes: first those of eval, whose number decides nothing about the mazes themselves, then train's."""
    rng = random.Random(f"maze/{config.seed}/{config.level}")
    wanted = config.eval_size + config.num_tasks

    def make(_: int) -> tuple[Sequence[str], tuple[str, ...]] | None:
        rows = _maze(rng, config.level + 2)
        is_long = len(shortest_way(rows, find(rows, "P")) or "") >= 2 * (config.level + 2)
        return (rows, rows) if is_long else None

    complaint = lambda num: (
        f"maze: only {num} distinct mazes of {wanted} found for level={config.level}; lower num_tasks or eval_size, or"
        " raise level"
    )
    return distinct(make, wanted, MAX_TRIES, complaint)


def _maze(rng: random.Random, side: int) -> tuple[str, ...]:
    """A spanning tree of side x side rooms by depth first search, with a start and a goal."""
    grid = [["#"] * (2 * side + 1) for _ in range(2 * side + 1)]
    way = [(rng.randrange(side), rng.randrange(side))]
    grid[2 * way[0][0] + 1][2 * way[0][1] + 1] = "."
    while way:
        row, column = way[-1]
        steps = list(MOVES.values())
        rng.shuffle(steps)
        for down, right in steps:
            r, c = row + down, column + right
            if 0 <= r < side and 0 <= c < side and grid[2 * r + 1][2 * c + 1] == "#":
                grid[2 * r + 1][2 * c + 1] = grid[2 * row + 1 + down][2 * column + 1 + right] = "."
                way.append((r, c))
                break
        else:
            way.pop()
    for mark, room in zip("PG", rng.sample(range(side * side), 2)):
        grid[2 * (room // side) + 1][2 * (room % side) + 1] = mark
    return tuple("".join(row) for row in grid)


def _task(config: MazeConfig, split: str, i: int, rows: tuple[str, ...]) -> Task:
    way = shortest_way(rows, find(rows, "P")) or ""
    return Task(
        id=f"{split}/{i}-{_digest(rows)[:8]}",
        env="maze",
        tag="maze",
        messages=(),
        payload={
            "maze": list(rows),
            "moves_per_turn": config.moves_per_turn,
            "instructions": config.instructions.replace("{moves}", str(config.moves_per_turn)),
        },
        reward="env",
        max_turns=-(-len(way) // config.moves_per_turn) + config.spare_turns,
    )


def _digest(rows: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
