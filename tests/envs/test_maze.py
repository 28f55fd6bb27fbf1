"""The maze's moves by hand; every maze of every level can be solved, and levels grow."""

import pytest

from envs.maze import MAX_LEVEL, Maze, find, parse_moves, shortest_way
from rl_jax.types import Action, Task

ROWS = ("#####", "#P..#", "###.#", "#G..#", "#####")


def task(moves_per_turn=4):
    payload = {"maze": ROWS, "moves_per_turn": moves_per_turn, "instructions": ""}
    return Task("t", "maze", "maze", (), payload, "env", 9)


def test_a_walk_by_hand():
    env = Maze()
    assert env.reset(task(), 0).messages[0].content == "\n".join(ROWS)
    seen = env.step(Action("I'd say rrR"))  # the third R is a wall
    assert seen.messages[0].content == "#####\n#..P#\n###.#\n#G..#\n#####"
    assert seen.reward == 0.0 and seen.info == {"success": 0.0, "invalid_moves": 0.0, "bumps": 1.0}
    key = seen.state_key
    seen = env.step(Action("down!"))
    assert seen.state_key == key and seen.info["invalid_moves"] == 1.0
    seen = env.step(Action("DDLL"))
    assert (seen.done, seen.reward, seen.messages, seen.info["success"]) == (True, 1.0, (), 1.0)


def test_moves_of_a_turn_are_cut():
    env = Maze()
    env.reset(task(moves_per_turn=1), 0)
    assert env.step(Action("RR")).messages[0].content.split("\n")[1] == "#.P.#"
    assert parse_moves("go RRDD now", 3) == "RRD" and parse_moves("Round", 3) == ""


@pytest.mark.parametrize("level", [1, 4, MAX_LEVEL])
def test_every_maze_has_one_way_and_turns_enough(level):
    for split in ("train", "eval"):
        for one in Maze.tasks({"level": level, "num_tasks": 12, "eval_size": 6}, split):
            rows = one.payload["maze"]
            side = level + 2
            assert len(rows) == 2 * side + 1 == len(rows[0])
            way = shortest_way(rows, find(rows, "P"))
            assert way is not None and 2 * side <= len(way) <= 4 * one.max_turns
            # A tree: cells joined by one passage less than there are rooms.
            assert sum(row.count("#") for row in rows) == (2 * side + 1) ** 2 - 2 * side**2 + 1


def test_the_level_and_the_seed_decide_the_mazes():
    mazes = [
        [t.payload["maze"] for t in Maze.tasks({"num_tasks": 8, **config}, "train")]
        for config in ({}, {"seed": 1}, {"level": 2})
    ]
    assert mazes[0] != mazes[1] and len(mazes[2][0]) > len(mazes[0][0])


@pytest.mark.parametrize(
    "config, told",
    [
        ({"level": 0}, "level=0 must be in 1..10"),
        ({"level": 11}, "level=11 must be in 1..10"),
        ({"num_tasks": 0}, "num_tasks=0"),
        ({"num_tasks": 10**5}, "lower num_tasks or eval_size"),
    ],
)
def test_settings_that_cannot_be_are_told(config, told, monkeypatch):
    monkeypatch.setattr("envs.maze.MAX_TRIES", 0 if config.get("num_tasks", 1) > 9 else 50)
    with pytest.raises(ValueError) as error:
        Maze.tasks(config, "train")
    assert told in str(error.value)
