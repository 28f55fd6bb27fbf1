"""TextArena's games through the adapter (extra textarena): games in one process do not disturb one another."""

import random

import pytest

pytest.importorskip("textarena", reason="needs the extra textarena")

import textarena

from envs.textarena import TextArena, _said
from rl_jax.types import Action


def answers(env, task, guesses, between=lambda: None):
    out = [env.reset(task, 0)]
    for guess in guesses:
        between()
        if not out[-1].done:
            out.append(env.step(Action(f"[{guess}]")))
    return out


def test_a_game_tells_each_message_once_and_is_won():
    env, task = TextArena(), TextArena.tasks({}, "train")[0]
    seen = answers(env, task, range(1, 21))
    assert "Guess The Number" in seen[0].messages[0].content
    assert seen[1].messages[0].content == "The target number is higher."
    assert seen[-1].done and 0.0 < seen[-1].reward <= 1.0


def test_games_of_one_process_do_not_share_a_generator():
    task, other = TextArena.tasks({"id": "2048-v0"}, "train")[:2]  # each move draws a tile
    moves = ["up", "left", "down", "right"] * 3
    alone = answers(TextArena(), task, moves)
    assert len(alone) == 13
    random.random()
    before = random.getstate()
    mixed = answers(TextArena(), task, moves, lambda: TextArena().reset(other, 0))
    assert mixed == alone and random.getstate() == before
    assert answers(TextArena(), other, [])[0] != alone[0]


def test_a_game_goes_on_as_it_does_alone_with_pythons_own_generator():
    """Its state is kept from move to move: a state that began anew at each would draw the same tile again."""
    task = TextArena.tasks({"id": "2048-v0"}, "train")[0]
    moves = ["up", "left", "down", "right"] * 3
    before = random.getstate()
    try:
        random.setstate(random.Random(task.payload["seed"]).getstate())
        game = textarena.make("2048-v0-raw")
        game.reset(num_players=1, seed=task.payload["seed"])
        alone = [_said(game)]
        for move in moves:
            game.step(action=f"[{move}]")
            alone.append(_said(game))
    finally:
        random.setstate(before)
    seen = answers(TextArena(), task, moves)
    assert [one.messages[0].content for one in seen] == alone and len(set(alone)) == 13


def test_what_cannot_be_played_is_told():
    with pytest.raises(ValueError, match="id='Halma-v0' cannot be made"):
        TextArena.tasks({"id": "Halma-v0"}, "train")
    with pytest.raises(ValueError, match="Nim-v0 is no game of one"):
        TextArena.tasks({"id": "Nim-v0"}, "train")
