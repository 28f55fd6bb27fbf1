"""Two players: rules and credit by hand, and self-play through the real rollout up to each side's advantages."""

import random
from dataclasses import replace

import numpy as np
import pytest

from envs.two_player import TwoPlayer, best_move, nim_sum, parse_move
from rl_jax.rewards.check import from_steps, with_roles
from rl_jax.testing.fake_pool import FakePool
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.types import Action, Task
from tests.algorithms.test_common import estimates, make
from tests.algorithms.test_named import turn_values
from tests.rollout.doubles import running, say


def game(heaps, opponent="self", sides=("first", "second")):
    payload = {"heaps": heaps, "opponent": opponent, "sides": list(sides), "instructions": ""}
    return Task("t", "two_player", "two_player", (), payload, "env", 9)


def test_a_game_of_self_play_by_hand():
    env = TwoPlayer()
    seen = env.reset(game([1, 2]), 0)
    assert seen.messages[0].content == "A:1 B:2\nYou are the first player."
    assert seen.to_agent == "first"
    seen = env.step(Action("I take B1"))
    assert seen.messages[0].content == "A:1 B:1\nYou are the second player."
    assert (seen.to_agent, seen.reward, seen.done) == ("second", 0.0, False)
    env.step(Action("a1"))
    seen = env.step(Action("b 1"))
    assert (seen.done, seen.reward, seen.messages) == (True, 0.0, ())
    assert seen.info == {"reward/first": 1.0, "reward/second": -1.0, "forfeit": 0.0}


@pytest.mark.parametrize("text", ["", "pass", "A3", "A0", "C1", "B\x00", "A1000", "\ud835"])
def test_what_is_no_move_forfeits(text):
    env = TwoPlayer()
    env.reset(game([2, 1]), 0)
    env.step(Action("A1"))
    seen = env.step(Action(text))
    assert seen.done and seen.reward == -1.0
    assert seen.info == {"reward/second": -1.0, "reward/first": 0.0, "forfeit": 1.0}


def test_a_scripted_side_moves_within_the_step_and_gets_no_credit():
    env = TwoPlayer()
    seen = env.reset(game([2, 2], "perfect", ["second"]), 0)
    assert "The first player takes" in seen.messages[0].content and seen.to_agent == "second"
    rng = random.Random(0)
    while not seen.done:
        seen = env.step(Action(env.script(rng, 1.0)))
    assert seen.reward == 1.0
    assert seen.info == {"reward/second": 1.0, "forfeit": 0.0, "success": 1.0}
    env.reset(game([1, 2], "perfect", ["first"]), 0)
    env.step(Action("A1"))  # a mistake: the perfect player takes the rest
    assert env._heaps == [0, 0]


def test_moves_and_the_winning_one():
    assert parse_move("a2, no: B12") == (1, 12) and parse_move("AB2") == (-1, 0)
    rng = random.Random(0)
    for heaps in ([1, 2], [3, 4, 5], [7, 1]):
        heap, number = best_move(heaps, rng)
        left = [size - number * (i == heap) for i, size in enumerate(heaps)]
        assert min(left) >= 0 and nim_sum(heaps) != 0 and nim_sum(left) == 0


def test_eval_positions_can_be_won_and_are_no_position_of_train():
    config = {"num_tasks": 30, "eval_size": 20}
    splits = {s: TwoPlayer.tasks(config, s) for s in TwoPlayer.splits}
    heaps = {s: {tuple(sorted(t.payload["heaps"])) for t in ts} for s, ts in splits.items()}
    assert len(heaps["train"]) == 30 and len(heaps["eval"]) == 20
    assert not heaps["train"] & heaps["eval"]
    for task in splits["eval"]:
        first_wins = nim_sum(task.payload["heaps"]) != 0
        assert task.payload["sides"] == ["first" if first_wins else "second"]
        assert task.payload["opponent"] == "perfect"
    assert all(t.payload["sides"] == ["first", "second"] for t in splits["train"])


def test_what_a_role_got_is_a_part_of_a_scored_reward_only():
    info = {"reward/first": 1.0, "forfeit": 0.0}
    assert with_roles(from_steps([0.0]), info).parts == {"first": 1.0, "env": 0.0}
    assert with_roles(from_steps([None]), info).parts == {}


def test_self_play_in_the_rollout_credits_each_side(tmp_path):
    """Sample 0 plays B1, A1, B1: first wins. Sample 1 says no move: first forfeits.

    role_ema, decay 0.95, baselines from 0: first 1, then -1 - 0.05; second -1.
    """
    moves = {0: "B1", 1: "A1", 2: "B1"}

    def play(request):
        return say("hm" if request.uid.endswith("/1") else moves[request.turn])

    tasks = [replace(game([1, 2]), id=f"two/{i}", tag="two") for i in range(2)]
    pool = FakePool({"two_player": TwoPlayer})
    with running(
        tmp_path, tasks={"two": tasks}, pool=pool, sampler=FakeSampler(script=play)
    ) as world:
        groups = world.step(1)
    won, forfeited = groups[0].trajectories
    assert won.roles == ("first", "second", "first") and forfeited.roles == ("first",)
    assert (won.reward.value, forfeited.reward.value) == (0.0, -1.0)
    assert won.reward.parts == {"first": 1.0, "second": -1.0, "env": 0.0}
    assert forfeited.reward.parts == {"first": -1.0, "second": 0.0, "env": -1.0}
    values = estimates(make("role_ema", decay=0.95), [groups[0]])
    assert turn_values(values[0], won) == pytest.approx([1.0, -1.0, 1.0])
    assert turn_values(values[1], forfeited) == pytest.approx([-1.05])
    assert all(np.all(v[~t.loss_mask] == 0) for v, t in zip(values, (won, forfeited)))


@pytest.mark.parametrize(
    "config, told",
    [
        ({"opponent": "me"}, "opponent='me' is not one of self, random, perfect"),
        ({"num_heaps": 9}, "num_heaps=9 must be in 1..8"),
        ({"max_heap": 0}, "max_heap=0 in 1..99"),
        ({"num_tasks": 100}, "make 84 positions"),
    ],
)
def test_settings_that_cannot_be_are_told(config, told):
    with pytest.raises(ValueError) as error:
        TwoPlayer.tasks(config, "train")
    assert told in str(error.value)
