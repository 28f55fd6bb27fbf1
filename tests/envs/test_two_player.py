"""Two players: rules and credit by hand, and self-play through the real rollout up to each side's advantages."""

import json
import random
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


@contextmanager
def endpoint(answers):
    """(url, what was asked) of a chat API that says one of `answers` after the other; bytes as they are."""
    asked = []

    class Api(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, self.headers.get("Authorization"), json.loads(body)))
            said = answers[len(asked) - 1]
            if not isinstance(said, bytes):
                said = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def frozen_game(heaps, sides, url, **more):
    task = game(heaps, "endpoint", sides)
    settings = {"url": url, "model": "past", "timeout_s": 2.0, **more}
    return replace(task, payload={**task.payload, "instructions": "Nim.", "endpoint": settings})


def test_a_frozen_policy_plays_the_other_side_and_its_turns_get_no_credit(tmp_path):
    """Heaps 2 and 2, the policy second: the past one takes A1, then says nonsense, for which A1 or a rest is taken."""
    (tmp_path / "token").write_text("secret\n")
    with endpoint(["I take A1", "well", "A1"]) as (url, asked):
        env = TwoPlayer()
        task = frozen_game([2, 2], ["second"], url, token_file=str(tmp_path / "token"))
        seen = env.reset(task, 0)
        assert seen.messages[0].content == (
            "Nim.\n\nThe first player takes A1.\n\nA:1 B:2\nYou are the second player."
        )
        assert asked[0][:2] == ("/v1/chat/completions", "Bearer secret")
        assert asked[0][2]["model"] == "past" and asked[0][2]["messages"] == [
            {"role": "user", "content": "Nim.\n\nA:2 B:2\nYou are the first player."}
        ]
        seen = env.step(
            Action("B1")
        )  # 1, 1: the other side says no move, and takes one or the other
        assert seen.to_agent == "second" and sum(env._heaps) == 1
        seen = env.step(Action("A1" if env._heaps[0] else "B1"))
    assert seen.done and seen.reward == 1.0
    assert seen.info == {
        "reward/second": 1.0, "forfeit": 0.0, "success": 1.0, "opponent_slips": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "said, told",
    [(b"<html>", "status 200, no chat completion: '<html>'"), (b'{"choices": []}', "no chat")],
)
def test_an_endpoint_that_gives_no_answer_decides_no_game(said, told):
    with endpoint([said]) as (url, _), pytest.raises(ConnectionError, match=told):
        TwoPlayer().reset(frozen_game([2, 1], ["second"], url), 0)
    with pytest.raises(ConnectionError, match="Connection refused"):  # it is closed now
        TwoPlayer().reset(frozen_game([2, 1], ["second"], url), 0)


def test_tasks_against_a_frozen_policy_hold_where_it_is_and_eval_has_the_perfect_one():
    config = {"opponent": "endpoint", "endpoint": {"url": "http://h:1/v1", "model": "m"}}
    for split, name in (("train", "endpoint"), ("eval", "perfect")):
        task = TwoPlayer.tasks(config, split)[0]
        assert task.payload["opponent"] == name and len(task.payload["sides"]) == 1
        assert ("endpoint" in task.payload) == (split == "train")


@pytest.mark.parametrize(
    "config, told",
    [
        ({"opponent": "endpoint"}, "the keys of endpoint are what opponent=endpoint needs"),
        ({"endpoint": {"url": "http://h", "model": "m"}}, "with opponent='self'"),
        ({"opponent": "endpoint", "endpoint": {"url": "h:1", "model": "m"}}, "url='h:1' and model"),
        ({"opponent": "endpoint", "endpoint": {"uri": 1}}, "'uri' (use url)"),
        ({"opponent": "me"}, "opponent='me' is not one of self, random, perfect, endpoint"),
        ({"num_heaps": 9}, "num_heaps=9 must be in 1..8"),
        ({"max_heap": 0}, "max_heap=0 in 1..99"),
        ({"num_tasks": 100}, "make 84 positions"),
    ],
)
def test_settings_that_cannot_be_are_told(config, told):
    with pytest.raises(ValueError) as error:
        TwoPlayer.tasks(config, "train")
    assert told in str(error.value)
