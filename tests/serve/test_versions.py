"""Weights that change under running turns: which version sampled what, over which KV, and who waits for whom."""

import threading

import numpy as np
import pytest

from rl_jax.engine.prefix_tree import Origin
from rl_jax.serve.sessions import Session


def spans(turn):
    return [(s.start, s.end, s.version) for s in turn.spans]


def test_every_token_has_the_version_that_sampled_it(kit):
    """Lesson L2, with the swap between two known blocks."""
    d = kit.decode(steps_per_block=5)
    d.gate.close()
    future = d.turns.start(kit.request(max_new_tokens=12))
    d.gate.arrive()
    reply = kit.commit_later(d.server, 1, "keep")
    d.gate.open()
    ack = reply.wait(kit.PATIENCE_S, "commit")
    turn = future.result(kit.PATIENCE_S)
    assert (ack.server, ack.version, ack.block) == ("decode.0", 1, 1)
    assert turn.versions.tolist() == [0] * 5 + [1] * 7
    assert spans(turn) == [(0, 5, 0), (5, 12, 1)]
    assert turn.context_mixed.tolist() == [False] * 5 + [True] * 7
    assert d.server.version == 1


def test_commit_waits_for_one_block_and_never_for_a_turn(kit):
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request(max_new_tokens=50))
    d.gate.arrive()
    for version in range(1, 6):
        reply = kit.commit_later(d.server, version, "keep")
        d.gate.step()  # one block, no more
        assert reply.wait(kit.PATIENCE_S, "commit").block == version
        assert not future.done()
    d.gate.open()
    turn = future.result(kit.PATIENCE_S)
    assert spans(turn) == [(4 * v, 4 * v + 4, v) for v in range(5)] + [(20, 50, 5)]


def test_recompute_rebuilds_the_kv_of_a_running_turn(kit):
    """Lesson L1, paused mid-decode: what follows the swap is what a cold server with the new weights says."""
    d = kit.decode()
    d.gate.close()
    context = [5, 3, 8]
    future = d.turns.start(kit.request(tokens=context, max_new_tokens=12, seed=9))
    d.gate.arrive()
    reply = kit.commit_later(d.server, 7)
    d.gate.open()
    reply.wait(kit.PATIENCE_S, "commit")
    turn = future.result(kit.PATIENCE_S)
    first = d.engine.expected(context, 4, seed=9)
    rest = d.engine.expected(context + first, 8, offset=7, seed=9, token_index=4)
    assert turn.tokens.tolist() == first + rest
    assert spans(turn) == [(0, 4, 0), (4, 12, 7)]
    assert not turn.context_mixed.any()
    stats = d.server.stats()
    assert stats["parked"] == 1
    assert (
        stats["recompute_tokens"] == 6
    )  # the context's 3 and the first 3 sampled: the last has no KV yet


def test_recompute_rebuilds_an_idle_history_when_its_next_turn_comes(kit):
    d = kit.decode()
    context = [1, 2, 3]
    for version in range(6):  # five swaps in a row
        if version:
            kit.commit(d.server, version)
            assert d.server.live_tokens("a#0", version) == 0
        turn = d.turns.run(kit.request(tokens=context, turn=version, max_new_tokens=3))
        assert turn.tokens.tolist() == d.engine.expected(context, 3, offset=version)
        assert turn.cached_prompt == 0
        assert not turn.context_mixed.any()
        context = [*context, *turn.tokens.tolist(), 4]
    stats = d.server.stats()
    assert stats["recompute_tokens"] == sum(3 + 4 * v - 2 for v in range(1, 6))


def test_keep_goes_on_over_old_kv_and_marks_the_tokens(kit):
    d = kit.decode()
    context = [1, 2, 3]
    first = d.turns.run(kit.request(tokens=context, max_new_tokens=3))
    kit.commit(d.server, 1, kv="keep")
    context = [*context, *first.tokens.tolist(), 4]
    assert d.server.live_tokens("a#0", 1) == 5
    second = d.turns.run(kit.request(tokens=context, turn=1, max_new_tokens=2))
    assert second.context_mixed.tolist() == [True, True]
    assert second.cached_prompt == 5
    kv = sum(context[:5]) + sum(t + 1 for t in context[5:])  # five tokens' KV is of version 0
    assert second.tokens[0] == kv % 97
    fresh = d.turns.run(kit.request("b", tokens=context, max_new_tokens=2))
    assert not fresh.context_mixed.any()
    assert fresh.tokens.tolist() == d.engine.expected(context, 2, offset=1)


def test_swap_while_a_long_context_is_being_extended_starts_it_anew(kit):
    d = kit.decode(chunks_per_block=1)
    d.gate.close()
    blocker = d.turns.start(kit.request("blocker", max_new_tokens=60))
    d.gate.arrive()
    context = list(range(40))  # three chunks of 16
    future = d.turns.start(kit.request("long", tokens=context, max_new_tokens=3))
    d.gate.step()  # the long one's first chunk comes after this block
    reply = kit.commit_later(d.server, 2)
    d.gate.open()
    reply.wait(kit.PATIENCE_S, "commit")
    turn = future.result(kit.PATIENCE_S)
    assert turn.tokens.tolist() == d.engine.expected(context, 3, offset=2)
    assert not turn.context_mixed.any()
    assert d.server.stats()["recompute_tokens"] >= 16
    blocker.result(kit.PATIENCE_S)


def test_one_rebuilt_turn_decodes_while_others_are_still_rebuilt(kit):
    d = kit.decode(chunks_per_block=1, chunk_requests=1, chunk_sizes=(16,), slots=3)
    d.gate.close()
    contexts = [list(range(i, i + 10)) for i in range(3)]
    futures = [
        d.turns.start(kit.request(f"e{i}", context, max_new_tokens=40))
        for i, context in enumerate(contexts)
    ]
    d.gate.arrive()
    kit.until(lambda: (d.gate.step(), d.server.stats()["running"] == 3)[1])
    reply = kit.commit_later(d.server, 1)
    d.gate.step()  # the swap, then chunks until one is whole again: it stands before its block
    reply.wait(kit.PATIENCE_S, "commit")
    assert d.server.stats()["running"] == 1
    assert d.server.stats()["filling"] == 2
    d.gate.open()
    for future, context in zip(futures, contexts):
        turn = future.result(kit.PATIENCE_S)
        swap = turn.spans[0].end
        want = d.engine.expected(context, 40, offset=[0] * swap + [1] * (40 - swap))
        assert turn.tokens.tolist() == want
        assert not turn.context_mixed.any()


def test_commit_waits_for_one_compile_and_not_for_all(kit):
    d = kit.decode(version=None, compiling=True)
    d.gate.close()
    d.server.start()
    d.gate.arrive()
    future = d.turns.start(kit.request())
    reply = kit.commit_later(d.server, 3)
    d.gate.step()
    assert reply.wait(kit.PATIENCE_S, "commit").version == 3
    assert d.server.progress()[1] == "compiling, after program 0"
    assert not future.done()
    d.gate.open()
    assert spans(future.result(kit.PATIENCE_S)) == [(0, 6, 3)]
    d.server.wait_ready(kit.PATIENCE_S)


def test_min_version_waits_for_the_commit(kit):
    d = kit.decode()
    future = d.turns.start(kit.request(min_version=2))
    kit.commit(d.server, 1)
    other = d.turns.run(kit.request("b", min_version=1))
    assert not future.done() and spans(other) == [(0, 6, 1)]
    kit.commit(d.server, 2)
    assert spans(future.result(kit.PATIENCE_S)) == [(0, 6, 2)]
    with pytest.raises(Exception, match="waiting for a slot and pages under version 9 or later"):
        d.turns.run(kit.request("c", min_version=9, deadline_s=0.02))


def test_commit_is_idempotent_and_its_mistakes_are_named(kit):
    d = kit.decode(version=None)
    sync_id = kit.stage(d.server, 3)
    digest = d.server.digest(sync_id)
    assert set(digest.values) == {"offset"} and not digest.differing(d.server.digest(sync_id))
    ack = d.server.commit(sync_id, "recompute", kit.PATIENCE_S)
    assert d.server.commit(sync_id, "recompute", kit.PATIENCE_S) == ack
    assert d.server.stats()["swaps"] == 1
    with pytest.raises(KeyError, match="nothing is staged under sync 'other'"):
        d.server.commit("other", "recompute", kit.PATIENCE_S)
    d.server.stage("empty", 4, 0, {})
    with pytest.raises(ValueError, match="lacks 1 of 1 parameters, first 'offset'"):
        d.server.commit("empty", "recompute", kit.PATIENCE_S)
    with pytest.raises(ValueError, match="'bias', which its model does not have"):
        d.server.stage("odd", 4, 0, {"bias": d.engine.params(0)["offset"]})
    d.server.discard(kit.stage(d.server, 5))
    with pytest.raises(KeyError):
        d.server.commit("v5", "recompute", kit.PATIENCE_S)
    assert d.server.version == 3


def test_weights_on_another_mesh_are_refused(kit):
    d, other = kit.decode(), kit.prefill(device=3)
    with pytest.raises(ValueError, match="offset was staged as .* but the engine compiled for"):
        d.server.stage("x", 1, 0, other.engine.params(1))


def test_a_commit_that_was_given_up_never_happens(kit):
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request(max_new_tokens=8))
    d.gate.arrive()
    sync_id = kit.stage(d.server, 1)
    with pytest.raises(TimeoutError, match="decode.0: commit of v1: no answer in 0.01 s"):
        d.server.commit(sync_id, "keep", 0.01)
    d.gate.open()
    assert spans(future.result(kit.PATIENCE_S)) == [(0, 8, 0)]
    assert d.server.version == 0
    assert d.server.commit(sync_id, "keep", kit.PATIENCE_S).version == 1


def test_no_lock_is_held_while_it_computes(kit):
    """Status, release and submit return at once though the thread stands in a block."""
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request())
    d.gate.arrive()
    done = threading.Event()

    def ask():
        d.server.stats(), d.server.progress(), d.server.events(), d.server.live_tokens("a#0", 0)
        d.server.release("x"), d.server.abort("x", ""), d.turns.start(kit.request("b"))
        kit.stage(d.server, 1), d.server.digest("v1"), d.server.discard("v1")
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(kit.PATIENCE_S)
    assert not future.done()
    d.gate.open()
    future.result(kit.PATIENCE_S)


def test_mixed_kv_that_is_found_again_is_mixed_whatever_was_computed_meanwhile():
    """Listed under two versions, dropped, computed anew under one, dropped again: what is found is the old KV."""
    session = Session("s", 64)
    session.set_context(np.arange(40, dtype=np.int32))
    session.wrote_kv(16, version=3)
    session.wrote_kv(32, version=5)
    listed = session.list_kv()
    session.drop_kv()
    session.wrote_kv(8, version=5)
    assert not session.is_mixed(5)
    session.drop_kv()
    session.found_kv(32, listed)
    assert session.is_mixed(5) and session.origin == listed
    session.found_kv(32, Origin(5, owner=None))
    assert not session.is_mixed(5)
