"""Sokoban as text, of rising difficulty: push every box onto a goal.

A level is a room, a number of boxes and of inner walls, and of how many pulls the boxes are away from home (LEVELS).
Symbols: "#" wall, "." floor, "P" the player, "B" a box, "G" a goal, "*" a box on a goal, "+" the player on a goal. A
puzzle is made backwards: boxes stand on the goals and are pulled away, so that the pulls, pushed back in reverse order,
solve it: solvable by construction. `solve` finds a solution with the fewest pushes from any state, for the script.

What the policy says: a word of the letters L, D, R, U as in maze.py, at most moves_per_turn of them. A move against a
wall, or a box that cannot be pushed, ends the turn's walk and is counted in info["bumps"]; a text without such a word
is counted in info["invalid_moves"]. Reward 1.0 when every box is home, else 0.0. A box pushed into a corner stays
there: the episode then ends by its turns. For a curriculum give each level a task source, hence a tag, of its own.

Splits `train` and `eval` share no puzzle; both depend on the seed and the level alone.
Must not: keep anything between episodes.
"""

import hashlib
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envs import read_config
from envs.grids import MOVES, Cell
from envs.maze import parse_moves
from envs.splits import check_split, distinct
from rl_jax.types import Action, Message, StepResult, Task

# (rows and columns with the outer wall, boxes, inner walls, pulls)
LEVELS = (
    (6, 1, 2, 2),
    (6, 1, 2, 4),
    (7, 1, 3, 6),
    (6, 2, 1, 5),
    (7, 2, 3, 8),
    (7, 3, 2, 10),
    (8, 3, 5, 12),
)
MAX_TRIES = 200  # random puzzles per wanted one before the settings are called impossible

INSTRUCTIONS = (
    "You are P in a storehouse (+ on a goal). Push each box B onto a goal G; a box on a goal is *, # is a wall and . is"
    " free. You cannot pull. Answer with a word of up to {moves} letters, one a step: L (left), D (down), R (right),"
    " U (up)."
)


class Puzzle(NamedTuple):
    """A state: walls and goals stay, the player and the boxes move."""

    size: int
    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def rows(self) -> list[str]:
        """As it is shown."""

        def mark(cell: Cell) -> str:
            if cell in self.walls:
                return "#"
            is_goal = cell in self.goals
            if cell in self.boxes:
                return "*" if is_goal else "B"
            if cell == self.player:
                return "+" if is_goal else "P"
            return "G" if is_goal else "."

        return ["".join(mark((r, c)) for c in range(self.size)) for r in range(self.size)]

    def moved(self, letter: str) -> "Puzzle | None":
        """The state after one move; None if it is against a wall, or a box that cannot be pushed."""
        to, beyond = _next(self.player, letter), _next(self.player, letter, 2)
        if to in self.walls:
            return None
        if to not in self.boxes:
            return self._replace(player=to)
        if beyond in self.walls or beyond in self.boxes:
            return None
        return self._replace(player=to, boxes=self.boxes - {to} | {beyond})


@dataclass(frozen=True)
class SokobanConfig:
    level: int = 1  # 1..7, of LEVELS
    num_tasks: int = 64  # of train
    eval_size: int = 32
    seed: int = 0
    moves_per_turn: int = 4
    max_turns: int = 16
    instructions: str = INSTRUCTIONS  # {moves} = moves_per_turn; "" = the grid alone

    def __post_init__(self):
        if not 1 <= self.level <= len(LEVELS):
            raise ValueError(f"sokoban: level={self.level} must be in 1..{len(LEVELS)}")
        for name in ("num_tasks", "eval_size", "moves_per_turn", "max_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"sokoban: {name}={getattr(self, name)} must be at least 1")


class Sokoban:
    """One live episode on one puzzle."""

    splits = ("train", "eval")

    def __init__(self):
        self._puzzle: Puzzle | None = None
        self._moves_per_turn = 1
        self._counts = {"invalid_moves": 0, "bumps": 0}
        self._is_solving: bool | None = None

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key or split, a level that is not there, or too few distinct puzzles."""
        config: SokobanConfig = read_config(SokobanConfig, cfg)
        check_split("sokoban", split, cls.splits)
        puzzles = _puzzles(config)
        chosen = puzzles[: config.eval_size] if split == "eval" else puzzles[config.eval_size :]
        return [_task(config, split, i, puzzle) for i, puzzle in enumerate(chosen)]

    def reset(self, task: Task, seed: int) -> StepResult:
        """The first grid; the seed decides nothing."""
        self._puzzle = read_puzzle(task.payload["rows"])
        self._moves_per_turn = task.payload["moves_per_turn"]
        self._counts, self._is_solving = dict.fromkeys(self._counts, 0), None
        grid = "\n".join(self._live().rows)
        intro = task.payload["instructions"]
        first = Message("user", f"{intro}\n\n{grid}" if intro else grid)
        return StepResult((first,), state_key=_digest(grid))

    def step(self, action: Action) -> StepResult:
        """Walks and pushes. The last result of an episode (done) has no message: nobody reads it."""
        word = parse_moves(action.text, self._moves_per_turn)
        self._counts["invalid_moves"] += not word
        for letter in word:
            moved = self._live().moved(letter)
            if moved is None:
                self._counts["bumps"] += 1
                break
            self._puzzle = moved
        puzzle = self._live()
        home = len(puzzle.boxes & puzzle.goals)
        info = {"success": float(home == len(puzzle.boxes)), "boxes_home": float(home)}
        info |= {name: float(num) for name, num in self._counts.items()}
        if info["success"]:
            return StepResult((), 1.0, True, info=info)
        grid = "\n".join(puzzle.rows)
        return StepResult((Message("user", grid),), 0.0, state_key=_digest(grid), info=info)

    def close(self) -> None:
        self._puzzle = None

    def script(self, rng: random.Random, skill: float) -> str:
        """The solver's next moves, in a share `skill` of all episodes; else a move into nowhere."""
        if self._is_solving is None:
            self._is_solving = rng.random() < skill
        if not self._is_solving:
            return "stay"
        return (solve(self._live()) or "stay")[: self._moves_per_turn]

    def _live(self) -> Puzzle:
        assert self._puzzle is not None, "reset() comes before everything else"
        return self._puzzle


def solve(puzzle: Puzzle) -> str | None:
    """Moves that bring every box home with the fewest pushes; None if nothing does."""
    first = (puzzle.boxes, min(_reach(puzzle)))
    seen, frontier = {first}, deque([(puzzle, "")])
    while frontier:
        state, way = frontier.popleft()
        if state.boxes == state.goals:
            return way
        reach = _reach(state)
        for box in sorted(state.boxes):
            for letter in MOVES:
                behind = _next(box, letter, -1)
                if behind not in reach:
                    continue
                pushed = state._replace(player=behind).moved(letter)
                if pushed is None:
                    continue
                key = (pushed.boxes, min(_reach(pushed)))
                if key not in seen:
                    seen.add(key)
                    frontier.append((pushed, way + reach[behind] + letter))
    return None


def read_puzzle(rows: Sequence[str]) -> Puzzle:
    """The state that a grid shows."""
    cells = {(r, c): mark for r, row in enumerate(rows) for c, mark in enumerate(row)}

    def where(marks: str) -> frozenset[Cell]:
        return frozenset(cell for cell, mark in cells.items() if mark in marks)

    return Puzzle(len(rows), where("#"), where("G*+"), where("B*"), min(where("P+")))


def _next(cell: Cell, letter: str, steps: int = 1) -> Cell:
    down, right = MOVES[letter]
    return cell[0] + steps * down, cell[1] + steps * right


def _reach(puzzle: Puzzle) -> dict[Cell, str]:
    """Cells that the player can walk to without a push, and by which moves."""
    ways, frontier = {puzzle.player: ""}, deque([puzzle.player])
    while frontier:
        cell = frontier.popleft()
        for letter in MOVES:
            to = _next(cell, letter)
            if to not in ways and to not in puzzle.walls and to not in puzzle.boxes:
                ways[to] = ways[cell] + letter
                frontier.append(to)
    return ways


def _puzzles(config: SokobanConfig) -> list[Puzzle]:
    """Distinct puzzles: first those of eval, then train's."""
    rng = random.Random(f"sokoban/{config.seed}/{config.level}")
    wanted = config.eval_size + config.num_tasks
    most = config.max_turns * config.moves_per_turn

    def make(_: int) -> tuple[Puzzle, Puzzle] | None:
        made = _puzzle(rng, *LEVELS[config.level - 1])
        return (made[0], made[0]) if made is not None and made[1] <= most else None

    complaint = lambda num: (
        f"sokoban: only {num} distinct puzzles of {wanted} found for level={config.level} within"
        f" max_turns={config.max_turns} of moves_per_turn={config.moves_per_turn}; lower num_tasks or eval_size, or"
        " raise these"
    )
    return distinct(make, wanted, MAX_TRIES, complaint)


def _puzzle(
    rng: random.Random, size: int, boxes: int, walls: int, pulls: int
) -> tuple[Puzzle, int] | None:
    """A puzzle made backwards, and the moves that undo it; None if it got stuck, or a box stands on a goal."""
    outer = {
        (r, c)
        for r in range(size)
        for c in range(size)
        if not (0 < r < size - 1 and 0 < c < size - 1)
    }
    inner = sorted({(r, c) for r in range(size) for c in range(size)} - outer)
    drawn = rng.sample(inner, walls + boxes + 1)
    goals = frozenset(drawn[walls : walls + boxes])
    state = Puzzle(size, frozenset(outer | set(drawn[:walls])), goals, goals, drawn[-1])
    num_moves, seen = 0, {goals}
    for _ in range(pulls):
        reach = _reach(state)
        choices = []
        for box in sorted(state.boxes):
            for letter in MOVES:
                beside, to = _next(box, letter), _next(box, letter, 2)
                after = state.boxes - {box} | {beside}
                is_free = to not in state.walls and to not in state.boxes
                if beside in reach and is_free and after not in seen:
                    choices.append((after, to, len(reach[beside]) + 1))
        if not choices:
            return None
        after, to, moves = rng.choice(choices)
        state, num_moves = state._replace(boxes=after, player=to), num_moves + moves
        seen.add(after)
    return None if state.boxes & state.goals else (state, num_moves)


def _task(config: SokobanConfig, split: str, i: int, puzzle: Puzzle) -> Task:
    return Task(
        id=f"{split}/{i}-{_digest('/'.join(puzzle.rows))[:8]}",
        env="sokoban",
        tag="sokoban",
        messages=(),
        payload={
            "rows": puzzle.rows,
            "moves_per_turn": config.moves_per_turn,
            "instructions": config.instructions.replace("{moves}", str(config.moves_per_turn)),
        },
        reward="env",
        max_turns=config.max_turns,
    )


def _digest(grid: str) -> str:
    return hashlib.sha256(grid.encode()).hexdigest()[:16]
