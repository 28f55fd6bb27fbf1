"""What clients of a served model ask for, between a FakeEngine and whoever asked: scores, stops held off, salts."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.serve.events import Tokens
from rl_jax.serve.prefill_choice import Context
from rl_jax.serve.router import context_hash
from rl_jax.types import BlockTokens, TurnError

LONG = tuple(range(5, 45))


def follow(d, request):
    """(future, pieces as they come)"""
    pieces = []
    return d.turns.start(request, on_tokens=pieces.append), pieces


def test_scores_come_whole_and_before_the_first_token(kit):
    d = kit.decode()
    d.turns.run(kit.request("before", LONG))  # whose KV is there, and cannot be used
    future, pieces = follow(d, kit.request("a", LONG, scores=True, likely=True))
    other, plain = follow(d, kit.request("b", LONG[:20]))
    turn = future.result(kit.PATIENCE_S)
    scores = pieces[0]
    assert scores.tokens.tolist() == list(LONG[1:]) and scores.version == 0
    np.testing.assert_allclose(scores.logprobs, [d.engine.logprob(t) for t in LONG[1:]], rtol=1e-6)
    assert scores.ranks.tolist() == [t + 1 for t in LONG[1:]]
    assert scores.likely[0][:, 0].tolist() == list(LONG[1:]) and len(scores.likely[1]) == 39
    assert all(piece.ranks is None for piece in pieces[1:])
    assert np.concatenate([p.tokens for p in pieces[1:]]).tolist() == turn.tokens.tolist()
    assert turn.cached_prompt == 0 and turn.tokens.tolist() == d.engine.expected(LONG, 6)
    assert other.result(kit.PATIENCE_S).tokens.tolist() == d.engine.expected(LONG[:20], 6)
    assert all(piece.ranks is None for piece in plain)
    # Its KV serves others as any.
    assert d.turns.run(kit.request("after", LONG)).cached_prompt == len(LONG) - 1


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_scores_are_of_one_version(kit, kv):
    """A commit comes between the chunks of a prompt: all of it is scored again."""
    d = kit.decode(chunks_per_block=1)
    score, scored = d.engine.score, []
    d.engine.score = lambda params, *a: scored.append(int(params["offset"])) or score(params, *a)
    d.gate.close()
    busy, _ = follow(d, kit.request("busy", max_new_tokens=50))  # a block between two chunks
    d.gate.arrive()
    future, pieces = follow(d, kit.request("a", LONG, scores=True))
    d.gate.step()
    assert d.server.stats()["filling"] == 1 and not pieces
    reply = kit.commit_later(d.server, 1, kv)
    d.gate.open()
    reply.wait(kit.PATIENCE_S, "the commit")
    future.result(kit.PATIENCE_S), busy.result(kit.PATIENCE_S)
    assert pieces[0].version == 1 and pieces[0].tokens.tolist() == list(LONG[1:])
    assert scored == [0, 1, 1, 1]  # chunks of 16 by the weights that were there


def test_scores_that_are_no_numbers_fail_their_turn_alone(kit):
    d = kit.decode(version=None)
    kit.commit(d.server, 0, offset=-1)  # fake_engine.NAN_OFFSET
    future, pieces = follow(d, kit.request("a", LONG, scores=True))
    with pytest.raises(TurnError, match="non-finite logits"):
        future.result(kit.PATIENCE_S)
    assert not pieces and d.server.stats()["free_slots"] == 4


def test_stops_are_held_off_until_the_least_came(kit):
    d = kit.decode()
    context = (1, 2, 3)
    plain = d.engine.expected(context, 8)
    stop = plain[1]
    assert len(d.turns.run(kit.request("a", context, stop_token_ids=(stop,))).tokens) == 2
    assert d.server._table.held() is None
    generate, asked = d.engine.generate, []
    d.engine.generate = lambda *a, **named: asked.append("held" in named) or generate(*a, **named)
    ask = {"stop_token_ids": (stop,), "min_new_tokens": 5, "max_new_tokens": 20}
    turn = d.turns.run(kit.request("b", context, **ask))
    assert len(turn.tokens) >= 5 and stop not in turn.tokens[:5] and turn.tokens[1] == stop + 1
    assert asked[:2] == [True, True] and not any(asked[3:]) and len(asked) > 3  # blocks of 4


def test_a_resumed_turn_holds_its_stops_as_the_whole_would(kit):
    d = kit.decode()
    stop = d.engine.expected((1, 2, 3), 4)[3]
    ask = {"stop_token_ids": (stop,), "min_new_tokens": 5}
    whole = d.turns.run(kit.request("a", (1, 2, 3), **ask, max_new_tokens=8))
    context = (1, 2, 3, *whole.tokens[:3].tolist())
    rest = d.turns.run(
        kit.request("b", context, **(ask | {"min_new_tokens": 2}), token_index=3, max_new_tokens=5)
    )
    assert rest.tokens.tolist() == whole.tokens[3:].tolist()


@pytest.mark.parametrize("field", [{"likely": True}, {"scores": True}, {"min_new_tokens": 1}])
def test_a_server_without_the_programs_says_so(kit, field):
    d = kit.decode()
    d.server._table._has_extras = False
    with pytest.raises(TurnError, match="build the server with `likely`") as error:
        d.turns.run(kit.request(**field))
    assert error.value.kind == "unsupported"


def test_a_salt_keeps_kv_apart(kit):
    d = kit.decode()
    cached = lambda uid, salt: d.turns.run(kit.request(uid, LONG, salt=salt)).cached_prompt
    assert cached("a", "") == 0 and cached("b", "") > 0
    assert cached("c", "x") == 0 and cached("d", "x") > 0
    assert cached("e", "y") == 0 and cached("f", "") > 0
    turns = [d.turns.run(kit.request("talk", LONG, i, salt=s)) for i, s in enumerate("xxz")]
    assert [turn.cached_prompt > 0 for turn in turns] == [True, True, False]  # by its own name, too


def test_a_salt_keeps_a_mixed_history_apart(kit):
    """Under `keep` a session's own KV is found by its name, but under its own salt only."""
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request("talk", LONG, salt="x", max_new_tokens=12))
    d.gate.arrive()
    reply = kit.commit_later(d.server, 1, "keep")
    d.gate.open()
    reply.wait(kit.PATIENCE_S, "the commit")
    turn = future.result(kit.PATIENCE_S)
    context = (*LONG, *turn.tokens.tolist())
    assert d.turns.run(kit.request("talk", context, 1, salt="y")).cached_prompt == 0


def test_a_salt_is_told_wherever_contexts_are_known_by_their_tokens(kit):
    plain, salted = kit.request("a", LONG), kit.request("a", LONG, salt="x")
    assert context_hash(plain) != context_hash(salted) == context_hash(replace(salted, uid="b"))
    tokens = plain.tokens
    assert not set(Context.of(tokens, 8).pages) & set(Context.of(tokens, 8, "x").pages)


def test_a_prefill_server_keeps_salts_apart(kit):
    p, d = kit.prefill(), kit.decode()
    found = []
    for i, salt in enumerate(("", "", "x", "x", "y")):
        done = Future()
        ask = kit.request(f"{i}", LONG, salt=salt)
        p.submit(ask, d.server, lambda *result, done=done: done.set_result(result))
        done.result(kit.PATIENCE_S)
        found.append(p.stats()["found_tokens"])
    assert [b > a for a, b in zip([0, *found], found)] == [False, True, False, True, False]


def test_what_another_epoch_made_in_its_slot_is_not_told(kit):
    """A block that was under way when its turn ended comes after the slot is somebody else's."""
    d = kit.decode()
    d.gate.close()
    future, pieces = follow(d, kit.request("a", max_new_tokens=8))
    d.gate.arrive()
    table = d.server._table
    (slot,) = table.running_slots()
    row = np.zeros((4, 4), np.int32)
    block = BlockTokens(row + 7, row * 1.0, row * 1.0, row == 0, row[0], row[0] - 1, row[0] > 0)
    counts = np.zeros(4, np.int64)
    counts[slot] = 4
    stale = Tokens(0, np.full(4, table.running_turn(slot).epoch - 1), counts, block)
    d.server._events.write(stale)  # the thread stands at the gate: nothing races
    d.gate.open()
    turn = future.result(kit.PATIENCE_S)
    assert np.concatenate([p.tokens for p in pieces]).tolist() == turn.tokens.tolist()
    assert 7 not in turn.tokens and d.server.stats()["stale_tokens"] >= 4
