"""One decode server round a FakeEngine: turns, sessions, aborts, budgets, failures."""

import time
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.serve.events import Finished, Started, Swapped, Tokens
from rl_jax.testing.fake_engine import NAN_OFFSET
from rl_jax.types import FinishReason, TurnError


def test_turn_holds_what_was_added_sampled_and_when(kit):
    d = kit.decode()
    turn = d.turns.run(kit.request(tokens=[5, 7, 11], max_new_tokens=6))
    want = d.engine.expected([5, 7, 11], 6)
    assert turn.tokens.tolist() == want
    assert turn.prompt_tokens.tolist() == [5, 7, 11]
    np.testing.assert_allclose(turn.logprobs, [d.engine.logprob(t) for t in want], rtol=1e-6)
    assert turn.sampled_logprobs is None
    assert [(s.start, s.end, s.version) for s in turn.spans] == [(0, 6, 0)]
    assert not turn.context_mixed.any() and len(turn.context_mixed) == 6
    assert (turn.finish, turn.cached_prompt) == (FinishReason.LENGTH, 0)
    assert (turn.server, turn.pool) == ("decode.0", "decode")
    assert set(turn.times_s) == {"queue", "prefill", "transfer", "decode", "first_token"}
    assert min(turn.times_s.values()) >= 0
    assert turn.times_s["first_token"] <= turn.times_s["decode"]
    assert (turn.tokens.dtype, turn.logprobs.dtype) == (np.int32, np.float32)


def test_sampled_logprobs_are_there_only_where_they_differ(kit):
    d = kit.decode()
    assert d.turns.run(kit.request("a", top_p=0.9)).sampled_logprobs is not None
    assert d.turns.run(kit.request("b", top_k=3)).sampled_logprobs is not None
    assert d.turns.run(kit.request("c", top_k=3, temperature=0.0)).sampled_logprobs is None


def test_history_stays_in_its_slot_and_each_turn_appends_only_what_is_new(kit):
    d = kit.decode()
    context, cached = [3, 1, 4, 1, 5], []
    for turn in range(5):
        got = d.turns.run(kit.request(tokens=context, turn=turn, max_new_tokens=3))
        assert got.tokens.tolist() == d.engine.expected(context, 3)
        cached.append(got.cached_prompt)
        if turn:
            assert got.prompt_tokens.tolist() == [9, 2, 6]
        context = [*context, *got.tokens.tolist(), 9, 2, 6]
    assert cached == [0, 7, 13, 19, 25]  # all but the last sampled token of the turn before
    stats = d.server.stats()
    # Every token of the context but the last sampled one has its KV computed exactly once.
    computed = ("prefill_tokens", "append_tokens", "decode_tokens")
    assert sum(stats[name] for name in computed) == len(context) - 3 - 1
    assert stats["recompute_tokens"] == 0
    assert d.server.live_tokens("a#0", 0) == len(context) - 3 - 1


def test_blocks_count_what_ran_waited_and_was_held_while_they_ran(kit):
    d = kit.decode(slots=2)
    d.gate.close()
    futures = [
        d.turns.start(kit.request(f"e{i}", [i] * 20, max_new_tokens=4 + 8 * i)) for i in range(4)
    ]
    d.gate.arrive()
    seen = []  # before each block: what it runs for
    while True:
        stats = d.server.stats()
        paging = d.server._paging  # the server's thread stands at the gate
        held = {page for table in paging.tables for page in table if page >= 0}
        seen.append((1, stats["running"], stats["waiting"], len(held), stats["pages"]))
        if len(seen) == 4:
            break
        d.gate.step()
    names = ("blocks", "block_running", "block_waiting", "block_held_pages", "block_pages")
    done = [sum(values) for values in zip(*seen[:-1])]  # the last one has not run yet
    assert [stats[name] for name in names] == done
    assert done[1] >= 4 and done[2] >= 2 and stats["listed_pages"] > len(held) > 0
    d.gate.open()
    for future in futures:
        future.result(kit.PATIENCE_S)


def test_changed_history_is_recomputed_from_where_it_changed(kit):
    d = kit.decode()
    d.turns.run(kit.request(tokens=[1, 2, 3, 4, 5, 6], max_new_tokens=2))
    changed = [1, 2, 3, 9, 5, 6, 7]
    turn = d.turns.run(kit.request(tokens=changed, turn=1, max_new_tokens=4))
    assert turn.cached_prompt == 3
    assert turn.prompt_tokens.tolist() == [9, 5, 6, 7]
    assert turn.tokens.tolist() == d.engine.expected(changed, 4)


def test_more_sessions_than_slots_wait_and_none_mixes_with_another(kit):
    d = kit.decode()
    prompts = {f"e{i}": [i + 1, 2 * i + 1, 7] for i in range(11)}
    futures = {
        u: d.turns.start(kit.request(u, p, seed=i)) for i, (u, p) in enumerate(prompts.items())
    }
    for i, (uid, prompt) in enumerate(prompts.items()):
        turn = futures[uid].result(kit.PATIENCE_S)
        assert turn.tokens.tolist() == d.engine.expected(prompt, 6, seed=i)
        d.server.release(f"{uid}#0")
    assert d.engine.max_active <= kit.SETTINGS.slots
    assert set(d.turns.num_answers.values()) == {1}
    kit.until(lambda: d.server.stats()["free_slots"] == 4, "the slots to be free")
    assert d.server.stats()["stale_tokens"] == 0


def test_sessions_between_turns_hold_no_slot_and_who_waits_for_one_is_told(kit):
    d = kit.decode()
    for i in range(9):
        d.turns.run(kit.request(f"e{i}"))
    stats = d.server.stats()
    assert (stats["sessions"], stats["free_slots"]) == (9, 4)
    d.gate.close()
    generating = [
        d.turns.start(kit.request(f"e{i}", [i] * 5, turn=1, max_new_tokens=40)) for i in range(4)
    ]
    d.gate.arrive()
    kit.until(lambda: (d.gate.step(), d.server.stats()["running"] == 4)[1])
    late = d.turns.start(kit.request("late", deadline_s=0.01))
    waiting = d.turns.start(kit.request("next"))
    time.sleep(0.02)
    d.gate.step()
    line = "0 of 4 slots and .* of 32 pages are free; run fewer"
    with pytest.raises(TurnError, match=line) as error:
        late.result(kit.PATIENCE_S)
    assert (error.value.kind, error.value.retryable) == ("deadline", True)
    d.gate.open()
    assert [len(f.result(kit.PATIENCE_S).tokens) for f in (*generating, waiting)] == [40] * 4 + [6]


@pytest.mark.parametrize(
    "chunks_per_block, seen", [(1, [(2, 2), (3, 1), (4, 0)]), (2, [(3, 1), (4, 0)]), (16, [(4, 0)])]
)
def test_a_server_that_fills_up_fills_first(kit, chunks_per_block, seen):
    """(running, filling) when the server stands before each of its next blocks."""
    d = kit.decode(chunks_per_block=chunks_per_block, chunk_requests=1, chunk_sizes=(16,), slots=4)
    d.gate.close()
    blocker = d.turns.start(kit.request("e0", list(range(5)), max_new_tokens=40))
    d.gate.arrive()
    futures = [blocker] + [
        d.turns.start(kit.request(f"e{i}", list(range(i, i + 5)), max_new_tokens=20))
        for i in (1, 2, 3)
    ]
    for want in seen:
        d.gate.step()
        stats = d.server.stats()
        assert (stats["running"], stats["filling"]) == want
    d.gate.open()
    for i, future in enumerate(futures):
        num = 20 if i else 40
        want = d.engine.expected(list(range(i, i + 5)), num)
        assert future.result(kit.PATIENCE_S).tokens.tolist() == want


def test_priority_goes_first_then_arrival(kit):
    d = kit.decode(slots=1)
    d.gate.close()
    first = d.turns.start(kit.request("first", max_new_tokens=4))
    d.gate.arrive()
    order = []
    futures = [
        d.turns.start(kit.request(uid, max_new_tokens=1, priority=priority))
        for uid, priority in (("low", 0), ("high", 5), ("low2", 0), ("high2", 5))
    ]
    for uid, future in zip(("low", "high", "low2", "high2"), futures):
        future.add_done_callback(
            lambda _, uid=uid: (order.append(uid), d.server.release(f"{uid}#0"))
        )
    first.add_done_callback(lambda _: d.server.release("first#0"))
    d.gate.open()
    for future in futures:
        future.result(kit.PATIENCE_S)
    assert order == ["high", "high2", "low", "low2"]


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"tokens": range(64)}, "context", "has 64 tokens but engine.context=64"),
        ({"tokens": []}, "unsupported", "empty context"),
        ({"stop": ("end",)}, "unsupported", "use stop_token_ids"),
        ({"adapter": "lora"}, "unsupported", "adapter 'lora'"),
        ({"stop_token_ids": (1, 2, 3)}, "unsupported", "engine.num_stop_tokens=2"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(kit, fields, kind, text):
    d = kit.decode()
    with pytest.raises(TurnError, match=text) as error:
        d.turns.run(kit.request(**fields))
    assert (error.value.kind, error.value.retryable) == (kind, False)
    assert d.server.stats()["refused"] == 1
    assert len(d.turns.run(kit.request("next")).tokens) == 6


def test_queue_is_bounded(kit):
    d = kit.decode(version=None)  # without weights all wait
    futures = [d.turns.start(kit.request(f"e{i}")) for i in range(17)]
    with pytest.raises(TurnError, match="serve.queue_size=16") as error:
        futures[16].result(kit.PATIENCE_S)
    assert (error.value.kind, error.value.retryable) == ("queue_full", True)
    kit.commit(d.server, 0)
    for i in range(16):
        futures[i].result(kit.PATIENCE_S)
        d.server.release(f"e{i}#0")


def test_edge_lengths(kit):
    """Lesson L20: no budget, one token, a context with room for one."""
    d = kit.decode()
    none = d.turns.run(kit.request("none", [4, 5], max_new_tokens=0))
    assert (len(none.tokens), none.finish, none.spans) == (0, FinishReason.LENGTH, ())
    assert (len(none.logprobs), len(none.context_mixed)) == (0, 0)
    one = d.turns.run(kit.request("one", [4], max_new_tokens=1))
    assert one.tokens.tolist() == d.engine.expected([4], 1)
    last = d.turns.run(kit.request("last", list(range(63)), max_new_tokens=9))
    assert (len(last.tokens), last.finish) == (1, FinishReason.CONTEXT)
    full = d.turns.run(kit.request("full", list(range(60)), max_new_tokens=9))
    assert (len(full.tokens), full.finish) == (4, FinishReason.CONTEXT)


def test_finish_reasons_are_told_apart_and_counted(kit):
    """Lesson L19."""
    d = kit.decode()
    tokens = d.engine.expected([1, 2, 3], 6)
    assert len(set(tokens)) == 6
    cases = {
        "eos": {"stop_token_ids": (tokens[2],)},
        "stop": {"stop_token_ids": (96, tokens[3])},
        "length": {"max_new_tokens": 5},
        "context": {"tokens": [0] * 59 + [1, 2, 3], "max_new_tokens": 50},
    }
    for name, fields in cases.items():
        turn = d.turns.run(kit.request(name, **fields))
        assert turn.finish.value == name
        assert len(turn.tokens) == {"eos": 3, "stop": 4, "length": 5, "context": 2}[name]
        assert d.server.stats()[f"finish_{name}"] == 1
        d.server.release(f"{name}#0")


def test_abort_returns_what_was_sampled_and_keeps_the_history(kit):
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request(tokens=[1, 2, 3], max_new_tokens=20))
    d.gate.arrive()
    d.gate.step(2)
    d.server.abort("a", "test")
    d.gate.open()
    turn = future.result(kit.PATIENCE_S)
    assert turn.finish is FinishReason.ABORT
    assert turn.tokens.tolist() == d.engine.expected([1, 2, 3], 12)
    assert d.server.live_tokens("a#0", 0) == 3 + 12 - 1


def test_abort_of_a_waiting_turn_gives_an_empty_turn(kit):
    d = kit.decode(version=None)
    future = d.turns.start(kit.request(tokens=[1, 2]))
    d.server.abort("other", "not this one")
    d.server.abort("a", "test")
    turn = future.result(kit.PATIENCE_S)
    assert (turn.finish, len(turn.tokens)) == (FinishReason.ABORT, 0)
    assert turn.prompt_tokens.tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_aborted_ten_times_a_turn_keeps_its_budget_and_its_tokens(kit, seed):
    """Lesson L8: resumed with token_index, at random places, the parts equal the uninterrupted turn."""
    rng = np.random.default_rng(seed)
    d = kit.decode(steps_per_block=1)
    context, budget, kept = [2, 7, 1], 40, []
    d.gate.close()
    for _ in range(10):
        request = kit.request(
            tokens=context + kept, max_new_tokens=budget - len(kept), token_index=len(kept), seed=5
        )
        future = d.turns.start(request)
        d.gate.arrive()
        d.gate.step(int(rng.integers(0, 4)))
        d.server.abort("a", "test")
        d.gate._permits.release()
        turn = future.result(kit.PATIENCE_S)
        assert turn.prompt_tokens.tolist() == ([] if kept else context)
        assert turn.finish is FinishReason.ABORT
        kept += turn.tokens.tolist()
    d.gate.open()
    request = replace(request, tokens=np.array(context + kept, np.int32), token_index=len(kept))
    kept += d.turns.run(replace(request, max_new_tokens=budget - len(kept))).tokens.tolist()
    assert len(kept) == budget
    assert kept == d.engine.expected(context, budget, seed=5)
    assert d.server.stats()["recompute_tokens"] == 0


def test_deadline_while_generating_frees_the_slot(kit):
    d = kit.decode(slots=1)
    d.gate.close()
    future = d.turns.start(kit.request(max_new_tokens=40, deadline_s=0.05))
    d.gate.arrive()
    kit.until(lambda: d.server._table.turns["a#0.0"].deadline_s < time.monotonic())
    d.gate.open()
    with pytest.raises(TurnError, match="while generating") as error:
        future.result(kit.PATIENCE_S)
    assert error.value.kind == "deadline"
    again = d.turns.run(kit.request(max_new_tokens=6, turn=1))
    assert again.tokens.tolist() == d.engine.expected([1, 2, 3], 6)
    d.server.release("a#0")
    assert len(d.turns.run(kit.request("b")).tokens) == 6


def test_nan_is_an_error_of_its_turn_and_never_a_token(kit):
    d = kit.decode()
    kit.commit(d.server, 1, NAN_OFFSET)
    with pytest.raises(TurnError, match="non-finite logits under version 1") as error:
        d.turns.run(kit.request())
    assert error.value.kind == "nan"
    kit.commit(d.server, 2)
    turn = d.turns.run(kit.request(turn=1))
    assert turn.tokens.tolist() == d.engine.expected([1, 2, 3], 6, offset=2)


def test_a_session_has_one_turn_at_a_time(kit):
    d = kit.decode(version=None)
    first = d.turns.start(kit.request())
    with pytest.raises(TurnError, match="another turn of its session"):
        d.turns.run(kit.request(turn=1))
    kit.commit(d.server, 0)
    assert len(first.result(kit.PATIENCE_S).tokens) == 6


def test_release_during_a_turn_frees_the_slot_at_its_end(kit):
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request())
    d.gate.arrive()
    d.server.release("a#0")
    d.gate.open()
    assert len(future.result(kit.PATIENCE_S).tokens) == 6
    kit.until(lambda: d.server.stats()["sessions"] == 0)
    assert d.server.stats()["free_slots"] == 4


def test_pause_stops_between_blocks_and_resume_goes_on(kit):
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request(max_new_tokens=12))
    d.gate.arrive()
    d.server.pause()
    d.gate.open()
    kit.until(lambda: d.server.progress()[1] == "waiting for commands")
    assert not future.done() and d.server.stats()["blocks"] == 1
    d.server.resume()
    assert future.result(kit.PATIENCE_S).tokens.tolist() == d.engine.expected([1, 2, 3], 12)


def test_drain_waits_refuses_and_aborts_what_is_left(kit):
    d = kit.decode()
    assert d.server.drain(kit.PATIENCE_S)
    with pytest.raises(TurnError, match="being drained") as error:
        d.turns.run(kit.request())
    assert error.value.retryable
    d.server.resume()
    d.server.pause()
    future = d.turns.start(kit.request("b"))
    assert not d.server.drain(0.01)
    assert future.result(kit.PATIENCE_S).finish is FinishReason.ABORT
    d.server.resume()
    assert len(d.turns.run(kit.request("c")).tokens) == 6


def test_a_dying_thread_fails_everyone_and_never_hangs(kit):
    d = kit.decode(slots=1)
    d.gate.close()
    running = d.turns.start(kit.request("a", max_new_tokens=40))
    d.gate.arrive()
    waiting = d.turns.start(kit.request("b"))
    reply = kit.commit_later(d.server, 1)
    d.engine._step = None  # the next block raises
    d.gate.open()
    for future in (running, waiting):
        with pytest.raises(TurnError, match="TypeError") as error:
            future.result(kit.PATIENCE_S)
        assert (error.value.kind, error.value.retryable) == ("engine", True)
    with pytest.raises(RuntimeError, match="died while generating"):
        reply.wait(kit.PATIENCE_S, "the commit")
    with pytest.raises(TurnError, match="fenced"):
        d.turns.run(kit.request("c"))
    with pytest.raises(RuntimeError):
        kit.commit(d.server, 2)
    assert "TypeError" in d.server.fenced
    assert set(d.turns.num_answers.values()) == {1}


def test_fence_fails_what_is_here_until_a_commit_lifts_it(kit):
    d = kit.decode()
    d.gate.close()
    future = d.turns.start(kit.request(max_new_tokens=40))
    d.gate.arrive()
    d.server.fence("the digest differs")
    d.gate.open()
    for failed in (future, d.turns.start(kit.request("b"))):
        with pytest.raises(TurnError, match="the digest differs") as error:
            failed.result(kit.PATIENCE_S)
        assert (error.value.kind, error.value.retryable) == ("closed", True)
    kit.commit(d.server, 1)
    assert d.server.fenced is None
    turn = d.turns.run(kit.request())
    assert turn.tokens.tolist() == d.engine.expected([1, 2, 3], 6, offset=1)


def test_close_fails_what_is_left_and_is_told_apart(kit):
    d = kit.decode(version=None)
    future = d.turns.start(kit.request())
    d.server.close()
    for failed in (future, d.turns.start(kit.request("b"))):
        with pytest.raises(TurnError, match="the server is closed") as error:
            failed.result(kit.PATIENCE_S)
        assert error.value.kind == "closed"
    d.server.close()


def test_a_raising_callback_does_not_stop_the_server(kit):
    d = kit.decode()

    def on_done(result):
        raise RuntimeError("event loop is closed")

    d.server.submit(kit.request("a"), None, on_done)
    assert len(d.turns.run(kit.request("b")).tokens) == 6
    kit.until(lambda: d.server.stats()["callback_errors"] == 1)


def test_event_stream_tells_one_ordered_story(kit):
    d = kit.decode()
    d.turns.run(kit.request(max_new_tokens=6))
    kit.commit(d.server, 1)
    numbers, events = zip(*d.server.events())
    assert list(numbers) == list(range(len(events)))
    assert [type(e) for e in events] == [Swapped, Started, Tokens, Tokens, Finished, Swapped]
    started, first, second = events[1:4]
    assert (started.key, started.epoch) == ("a#0.0", first.epochs[started.slot])
    assert [first.counts[started.slot], second.counts[started.slot]] == [4, 2]


def test_tokens_of_an_epoch_that_is_over_are_refused_and_counted(kit):
    d = kit.decode()
    d.turns.run(kit.request())
    over = d.server.events()[-2][1]  # of the last block, whose epoch is over; it made 2 tokens
    stale = replace(over, counts=over.counts + [1, 0, 0, 0], block=object())
    d.server._events.write(stale)  # the thread is idle: nothing races
    assert d.server.stats()["stale_tokens"] == 3
    turn = d.turns.run(kit.request("b"))
    assert turn.tokens.tolist() == d.engine.expected([1, 2, 3], 6)
