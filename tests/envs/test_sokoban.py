"""Sokoban's moves by hand, its solver against hand-made puzzles, and that every level's puzzles can be solved."""

import pytest

from envs.sokoban import LEVELS, Sokoban, read_puzzle, solve
from rl_jax.types import Action, Task

ROWS = ["#####", "#P..#", "#.BG#", "#...#", "#####"]


def task(rows=ROWS):
    payload = {"rows": list(rows), "moves_per_turn": 4, "instructions": ""}
    return Task("t", "sokoban", "sokoban", (), payload, "env", 9)


def test_pushes_by_hand():
    env = Sokoban()
    env.reset(task(), 0)
    seen = env.step(Action("RD"))
    assert seen.messages[0].content == "#####\n#...#\n#.PG#\n#.B.#\n#####"
    assert seen.info == {"success": 0.0, "boxes_home": 0.0, "invalid_moves": 0.0, "bumps": 0.0}
    seen = env.step(Action("DD"))  # the box is against the wall
    assert seen.info["bumps"] == 1.0
    assert seen.messages[0].content == "#####\n#...#\n#.PG#\n#.B.#\n#####"
    assert env.step(Action("what?")).info["invalid_moves"] == 1.0
    env.reset(task(), 0)
    seen = env.step(Action("DR"))
    assert (seen.done, seen.reward) == (True, 1.0) and seen.info["boxes_home"] == 1.0


def test_symbols_of_goals_under_player_and_box():
    puzzle = read_puzzle(["#####", "#+*.#", "#####"])
    assert len(puzzle.goals) == 2 and puzzle.boxes == {(1, 2)} and puzzle.player == (1, 1)
    wide = read_puzzle(["#####", "#+*.#", "#####", "#####", "#####"])
    assert wide.rows == ["#####", "#+*.#", "#####", "#####", "#####"]
    assert wide.moved("R").rows[1] == "#G+B#" and wide.moved("L") is None


@pytest.mark.parametrize(
    "rows, solution",
    [
        (ROWS, "DR"),
        (["#####", "#.PB#", "#..G#", "#...#", "#####"], None),  # against the wall, from no side
        (["#####", "#PBG#", "#...#", "#...#", "#####"], "R"),
        (["#####", "#P..#", "#.B.#", "#.G.#", "#####"], "RD"),
    ],
)
def test_the_solver_by_hand(rows, solution):
    assert solve(read_puzzle(rows)) == solution


@pytest.mark.parametrize("level", range(1, len(LEVELS) + 1))
def test_every_puzzle_can_be_solved_within_its_turns(level):
    tasks = Sokoban.tasks({"level": level, "num_tasks": 3, "eval_size": 3}, "train")
    for one in tasks:
        puzzle = read_puzzle(one.payload["rows"])
        assert puzzle.rows == one.payload["rows"]
        assert len(puzzle.boxes) == len(puzzle.goals) == LEVELS[level - 1][1]
        moves = solve(puzzle)
        assert moves
        for letter in moves:
            puzzle = puzzle.moved(letter)
        assert puzzle.boxes == puzzle.goals


@pytest.mark.parametrize(
    "config, told",
    [
        ({"level": 8}, "level=8 must be in 1..7"),
        ({"max_turns": 0}, "max_turns=0 must be at least 1"),
        ({"max_turns": 1, "moves_per_turn": 1}, "only 0 distinct puzzles of 3 found"),
    ],
)
def test_settings_that_cannot_be_are_told(config, told):
    with pytest.raises(ValueError) as error:
        Sokoban.tasks({"num_tasks": 2, "eval_size": 1, **config}, "train")
    assert told in str(error.value)
