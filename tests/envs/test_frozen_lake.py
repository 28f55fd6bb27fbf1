"""FrozenLake's text, moves, maps and scripts, by hand."""

import random

import pytest

from envs.frozen_lake import FrozenLake, parse_move, shortest_way
from rl_jax.types import Action, Task

ROWS = ["SFFF", "FHFH", "FFFH", "HFFG"]


def lake(rows=ROWS, instructions="", is_slippery=False):
    payload = {"map": rows, "is_slippery": is_slippery, "instructions": instructions}
    payload |= {"reset_latency": {}, "step_latency": {}}
    return Task("t", "frozen_lake", "frozen_lake", (), payload, "env", 10)


def test_the_way_to_the_goal_by_hand():
    env = FrozenLake()
    first = env.reset(lake(), 0)
    assert first.messages[0].content == "PFFF\nFHFH\nFFFH\nHFFG"
    assert first.reward is None and not first.done
    grids, rewards = [], []
    for letter in "DDRDRR":
        result = env.step(Action(letter))
        grids.append(result.messages[0].content if result.messages else None)
        rewards.append(result.reward)
    assert grids[0] == "SFFF\nPHFH\nFFFH\nHFFG"
    assert grids[3] == "SFFF\nFHFH\nFFFH\nHPFG"
    assert rewards == [0.0] * 5 + [1.0]
    assert (
        result.done
        and result.messages == ()
        and result.info == {"invalid_moves": 0.0, "success": 1.0}
    )


def test_a_hole_ends_the_episode_without_reward():
    env = FrozenLake()
    env.reset(lake(), 0)
    env.step(Action("r"))
    result = env.step(Action("d"))
    assert (result.done, result.reward, result.info["success"]) == (True, 0.0, 0.0)


def test_an_invalid_move_costs_a_turn_and_changes_nothing():
    env = FrozenLake()
    first = env.reset(lake(), 0)
    for i in (1, 2):
        result = env.step(Action("?!"))
        assert result.messages == first.messages and result.state_key == first.state_key
        assert (result.reward, result.done, result.info["invalid_moves"]) == (0.0, False, float(i))
    # A move against the edge is valid, though it leads nowhere.
    assert env.step(Action("U")).info["invalid_moves"] == 2.0


def test_instructions_open_the_first_message_only():
    env = FrozenLake()
    assert (
        env.reset(lake(instructions="Go."), 0).messages[0].content
        == "Go.\n\nPFFF\nFHFH\nFFFH\nHFFG"
    )
    assert "Go." not in env.step(Action("D")).messages[0].content
    assert (
        "Answer with one letter"
        in env.reset(FrozenLake.tasks({}, "train")[0], 0).messages[0].content
    )


@pytest.mark.parametrize(
    "text, move",
    [
        ("L", 0),
        ("d", 1),
        ("R.", 2),
        ("u", 3),
        (" x L", 0),
        ("go Down", 1),
        ("", None),
        ("12?", None),
        ("\ud835", None),
    ],
)
def test_the_first_letter_of_the_four_is_the_move(text, move):
    assert parse_move(text) == move


@pytest.mark.parametrize(
    "rows, start, way",
    [
        (ROWS, (0, 0), "DDRDRR"),
        (ROWS, (3, 2), "R"),
        (ROWS, (3, 3), ""),
        (["SH", "HG"], (0, 0), None),
        (["SFH", "HFG"], (0, 0), "RDR"),
    ],
)
def test_shortest_way_by_hand(rows, start, way):
    assert shortest_way(rows, start) == way


def test_maps_are_distinct_and_solvable_and_unseen_ones_are_others():
    splits = {split: FrozenLake.tasks({"num_maps": 20}, split) for split in FrozenLake.splits}
    assert {split: len(tasks) for split, tasks in splits.items()} == {
        "train": 20,
        "eval": 64,
        "unseen": 64,
    }
    maps = {
        split: [tuple(task.payload["map"]) for task in tasks] for split, tasks in splits.items()
    }
    assert len(set(maps["train"])) == 20 and len(set(maps["unseen"])) == 20
    assert set(maps["eval"]) == set(maps["train"]) and not set(maps["unseen"]) & set(maps["train"])
    for rows in maps["train"] + maps["unseen"]:
        assert len(shortest_way(rows, (0, 0))) <= 10
    other = FrozenLake.tasks({"num_maps": 20, "map_seed": 100_000}, "train")
    assert {tuple(task.payload["map"]) for task in other} != set(maps["train"])


def test_skill_is_the_share_of_solved_episodes():
    task = FrozenLake.tasks({}, "train")[0]

    def is_solved(seed):
        env, rng = FrozenLake(), random.Random(seed)
        env.reset(task, 0)
        for _ in range(10):
            result = env.step(Action(env.script(rng, 0.5)))
            if result.done:
                return result.reward == 1.0
        return False

    solved = sum(is_solved(seed) for seed in range(200)) / 200
    assert 0.4 < solved < 0.6


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"max_turns": 5},
            "max_turns=5 is too short for map_size=4; the goal is at least 6 moves away",
        ),
        ({"map_size": 2, "max_turns": 4}, "only 3 distinct maps of 16 found for map_size=2"),
        ({"map_size": 1}, "map_size=1 at least 2"),
        ({"frozen_share": 0.0}, "frozen_share=0.0 must be above 0"),
    ],
)
def test_impossible_settings_are_told_with_the_numbers(config, message):
    with pytest.raises(ValueError, match=message):
        FrozenLake.tasks(config, "train")


def test_calls_take_what_the_latency_says(monkeypatch):
    waits = []
    monkeypatch.setattr("envs.latency.time.sleep", waits.append)
    slow = {"kind": "lognormal", "mean_s": 0.2, "std_s": 0.1}
    config = {"reset_latency": {"mean_s": 0.5}, "step_latency": slow}
    task, other = FrozenLake.tasks(config, "train")[:2]

    def waited(task, seed):
        waits.clear()
        env = FrozenLake()
        env.reset(task, seed)
        for _ in range(3):
            env.step(Action("?"))
        return list(waits)

    first = waited(task, 1)
    assert first[0] == 0.5 and len(set(first)) == 4 and waited(task, 1) == first
    assert waited(task, 2)[1:] != first[1:] and waited(other, 1)[1:] != first[1:]
    assert FrozenLake.tasks({}, "train")[0].payload["step_latency"] == {}
