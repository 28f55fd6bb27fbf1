"""A prefill server hands prefixes to a decode server on another device."""

import random
import time
from concurrent.futures import Future

import numpy as np
import pytest

from rl_jax.types import Prefix, TurnError


def ask(server, request, target, held=0) -> Future:
    future = Future()
    server.submit(request, target, lambda *result: future.set_result(result), held)
    return future


def test_turn_over_a_handed_prefix_equals_one_extended_locally(kit):
    d, p = kit.decode(), kit.prefill()
    contexts = {f"e{i}": list(range(i, i + n)) for i, n in enumerate((2, 9, 40, 17))}
    futures = {
        uid: ask(p, kit.request(uid, context), d.server) for uid, context in contexts.items()
    }
    for uid, context in contexts.items():
        prefix, times_s = futures[uid].result(kit.PATIENCE_S)
        assert isinstance(prefix, Prefix)
        assert (prefix.num_tokens, prefix.version) == (len(context) - 1, 0)
        assert set(times_s) == {"queue", "prefill", "transfer"}
        turn = d.turns.run(kit.request(uid, context), prefix)
        assert turn.tokens.tolist() == d.engine.expected(context, 6)
        assert turn.cached_prompt == 0
    stats = d.server.stats()
    assert stats["received_tokens"] == p.stats()["prefill_tokens"] == 1 + 8 + 39 + 16
    assert stats["prefill_tokens"] == stats["append_tokens"] == stats["recompute_tokens"] == 0
    assert p.stats()["waiting"] == 0


def test_prefix_of_another_version_is_refused_or_marked(kit):
    d, p = kit.decode(), kit.prefill()
    context = [4, 5, 6, 7]
    prefix, _ = ask(p, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
    kit.commit(d.server, 1)
    turn = d.turns.run(kit.request(tokens=context), prefix)
    assert turn.tokens.tolist() == d.engine.expected(context, 6, offset=1)
    assert not turn.context_mixed.any()
    stats = d.server.stats()
    assert (stats["refused_prefixes"], stats["recompute_tokens"]) == (1, 3)
    kit.commit(d.server, 2, kv="keep")
    turn = d.turns.run(kit.request("b", context), prefix)
    assert turn.context_mixed.all()
    assert turn.tokens[0] == (sum(context) + 2) % 97  # only the last token's KV is of version 2


def test_prefix_of_other_tokens_is_refused(kit):
    d, p = kit.decode(), kit.prefill()
    prefix, _ = ask(p, kit.request(tokens=[4, 5, 6, 7]), d.server).result(kit.PATIENCE_S)
    turn = d.turns.run(kit.request(tokens=[4, 9, 6, 7]), prefix)
    assert turn.tokens.tolist() == d.engine.expected([4, 9, 6, 7], 6)
    assert d.server.stats()["refused_prefixes"] == 1


def test_commit_between_chunks_starts_half_done_prefixes_anew(kit):
    d, p = kit.decode(), kit.prefill()
    inner, done = p.engine.append, []

    def append(*args):
        if not done:  # the first chunk of two: the commit is obeyed before the second
            done.append(kit.commit_later(p, 5))
        return inner(*args)

    p.engine.append = append
    context = list(range(30))
    prefix, _ = ask(p, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
    assert prefix.version == 5
    assert (p.stats()["recompute_tokens"], p.stats()["prefill_tokens"]) == (16, 29)
    kit.commit(d.server, 5)
    turn = d.turns.run(kit.request(tokens=context), prefix)
    assert turn.tokens.tolist() == d.engine.expected(context, 6, offset=5)


def test_more_prefixes_than_it_has_pages_for_take_their_turn(kit):
    """Four contexts in pieces at once are all that its cache holds; those of a high priority go first."""
    d, p = kit.decode(), kit.prefill(version=None)
    contexts = {f"e{i}": list(range(i, i + 41)) for i in range(9)}
    futures = {
        uid: ask(p, kit.request(uid, context, priority=int(uid[1])), d.server)
        for uid, context in contexts.items()
    }
    order = []
    for uid, future in futures.items():
        future.add_done_callback(lambda _, uid=uid: order.append(uid))
    kit.commit(p, 0)
    for uid, context in contexts.items():
        prefix, _ = futures[uid].result(kit.PATIENCE_S)
        turn = d.turns.run(kit.request(uid, context), prefix)
        assert turn.tokens.tolist() == d.engine.expected(context, 6)
        d.server.release(f"{uid}#0")
    assert order == sorted(contexts, reverse=True)
    stats = p.stats()
    assert stats["prompt_chunks"] == stats["chunks"] and stats["waiting"] == 0
    assert stats["chunks"] + 9 < stats["chunk_prompts"] <= 9 * stats["chunks"]
    assert sorted(p._free_rows) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tokens", "kind"), [(range(64), "context"), ([1], "unsupported"), ([], "unsupported")]
)
def test_contexts_without_a_prefix_are_refused(kit, tokens, kind):
    d, p = kit.decode(), kit.prefill()
    error, _ = ask(p, kit.request(tokens=tokens), d.server).result(kit.PATIENCE_S)
    assert error.kind == kind


def test_every_job_is_answered_whatever_ends_it(kit):
    d, p = kit.decode(), kit.prefill(version=None)  # without weights nothing is computed
    aborted = ask(p, kit.request("aborted"), d.server)
    late = ask(p, kit.request("late", deadline_s=0.01), d.server)
    many = [ask(p, kit.request(f"e{i}"), d.server) for i in range(16)]
    p.abort("aborted", "test")
    results = [f.result(kit.PATIENCE_S)[0] for f in (aborted, late)]
    assert [r.kind for r in results] == ["closed", "deadline"]
    p.fence("out of memory")
    kinds = [f.result(kit.PATIENCE_S)[0].kind for f in many]
    assert kinds == ["closed"] * 14 + ["queue_full"] * 2
    refused, _ = ask(p, kit.request("next"), d.server).result(kit.PATIENCE_S)
    assert "out of memory" in str(refused)
    kit.commit(p, 1)
    assert isinstance(ask(p, kit.request("again"), d.server).result(kit.PATIENCE_S)[0], Prefix)
    p.engine.append = None
    error, _ = ask(p, kit.request("last", [7, 8, 9]), d.server).result(kit.PATIENCE_S)
    assert isinstance(error, TurnError) and error.kind == "engine" and "TypeError" in str(error)
    assert p.stats()["waiting"] == 0


def kv_of(prefix) -> list[int]:
    """What a FakeEngine keeps of each token that the prefix covers."""
    pages = np.asarray(prefix.kv[0][0])[prefix.first :].reshape(-1)
    return pages[: prefix.num_tokens - prefix.start].tolist()


def expect(p, prefix, context) -> None:
    assert kv_of(prefix) == [t + prefix.version for t in context[prefix.start : -1]]


def test_a_suffix_whose_history_is_gone_is_computed_by_the_decode_server(kit):
    d, p = kit.decode(), kit.prefill()
    context = list(range(40))
    prefix, _ = ask(p, kit.request(tokens=context), d.server, held=20).result(kit.PATIENCE_S)
    assert (prefix.start, p.stats()["sent_tokens"]) == (16, 39 - 16)
    expect(p, prefix, context)
    turn = d.turns.run(kit.request(tokens=context), prefix)
    assert turn.tokens.tolist() == d.engine.expected(context, 6)
    assert d.server.stats()["refused_prefixes"] == 1
    # With another's 19 tokens of it there it fits.
    other = [*range(19), 90]
    d.turns.run(kit.request("b", other))
    longer = [*range(19), *range(50, 70)]
    prefix, _ = ask(p, kit.request("c", longer), d.server, held=19).result(kit.PATIENCE_S)
    turn = d.turns.run(kit.request("c", longer), prefix)
    assert turn.tokens.tolist() == d.engine.expected(longer, 6) and turn.cached_prompt == 16
    assert d.server.stats()["refused_prefixes"] == 1


def test_under_keep_a_suffix_comes_behind_an_older_history_and_is_marked(kit):
    d, p = kit.decode(), kit.prefill()
    context = list(range(20))
    turn = d.turns.run(kit.request(tokens=context, max_new_tokens=3))
    for server in (d.server, p):
        kit.commit(server, 1, kv="keep")
    context = [*context, *turn.tokens.tolist(), *range(30, 50)]
    held = d.server.live_tokens("a#0", 1, np.array(context[:-1], np.int32))
    assert held == 22 and d.server.live_tokens("a#0", 1, np.array([0, 1, 5, 3], np.int32)) == 2
    prefix, _ = ask(p, kit.request(tokens=context), d.server, held).result(kit.PATIENCE_S)
    expect(p, prefix, context)
    turn = d.turns.run(kit.request(tokens=context, turn=1), prefix)
    assert turn.context_mixed.all() and turn.cached_prompt == 16
    assert turn.tokens[0] == (sum(context) + len(context) - 16) % 97  # of 16 the KV is of version 0
    fresh = d.turns.run(kit.request("b", context))
    assert not fresh.context_mixed.any()
    assert fresh.tokens.tolist() == d.engine.expected(context, 6, offset=1)


def idle(p, kit):
    """All pages are free once nothing is listed any more, and every row."""
    kit.until(lambda: p.progress()[1] == "waiting for commands" and not p.stats()["waiting"])
    paging = p._paging
    paging.tree.check()
    paging.tree.evict(paging.pool.num_pages)
    stats = p.stats()
    assert stats["free_pages"] == stats["pages"] and stats["listed_pages"] == 0
    assert (paging.tables == -1).all() and len(p._free_rows) == len(paging.tables)
    assert not p._computing


def test_what_an_earlier_context_has_in_common_is_not_computed_again(kit):
    d, p = kit.decode(), kit.prefill()  # pages of 8
    header = list(range(20))
    contexts = [header + [30, 31, 32, 33], header + [40, 41], header + [30, 31, 32, 33, 9, 9, 9, 1]]
    for context in contexts:
        prefix, _ = ask(p, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
        expect(p, prefix, context)
    stats = p.stats()
    # Of the second the header; of the third, a later turn, all of the first but its last token.
    assert stats["found_tokens"] == 20 + 23
    assert stats["prefill_tokens"] == 23 + 1 + 4
    idle(p, kit)


def test_one_that_is_here_whole_is_handed_over_without_a_chunk(kit):
    d, p = kit.decode(), kit.prefill()
    context = list(range(30))
    first, again = (ask(p, kit.request(u, context), d.server) for u in ("a", "b"))
    for future in (first, again):
        prefix, times_s = future.result(kit.PATIENCE_S)
        expect(p, prefix, context)
        assert min(times_s.values()) >= 0
    # They came together: the second waited for the first.
    assert (p.stats()["prefill_tokens"], p.stats()["found_tokens"]) == (29, 29)
    assert p.stats()["chunks"] == 2
    before = p.progress().num_done
    ask(p, kit.request("c", context), d.server).result(kit.PATIENCE_S)
    kit.until(lambda: p.progress().is_idle)
    assert (p.stats()["chunks"], p.progress().num_done) == (2, before + 1)  # it is no standstill
    idle(p, kit)


def test_nobody_overtakes_who_waits_for_pages(kit):
    """Nine pages: the second needs eight, of which the first holds three; the third needs one that is free."""
    d, p = kit.decode(), kit.prefill(version=None, num_pages=9)
    order = []
    futures = []
    for uid, num in (("first", 18), ("second", 60), ("third", 3)):
        tokens = [len(uid) + num] * num
        futures.append(ask(p, kit.request(uid, tokens), d.server))
        futures[-1].add_done_callback(lambda _, uid=uid: order.append(uid))
    kit.commit(p, 0)
    assert all(isinstance(f.result(kit.PATIENCE_S)[0], Prefix) for f in futures)
    assert order == ["first", "second", "third"]


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_nothing_of_an_older_version_is_found(kit, kv):
    d, p = kit.decode(), kit.prefill()
    context = list(range(30))
    for version in range(3):
        if version:
            kit.commit(p, version, kv=kv)
        prefix, _ = ask(p, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
        assert prefix.version == version
        expect(p, prefix, context)
    assert (p.stats()["found_tokens"], p.stats()["prefill_tokens"]) == (0, 3 * 29)
    idle(p, kit)


def test_one_who_waits_for_another_goes_on_when_that_is_aborted(kit):
    d, p = kit.decode(), kit.prefill(version=None)
    context = list(range(30))
    first, second = (ask(p, kit.request(u, context), d.server) for u in ("a", "b"))
    inner = p.engine.append

    def append(*args):
        p.abort("a", "test")  # obeyed before the second chunk
        return inner(*args)

    p.engine.append = append
    kit.commit(p, 0)
    assert first.result(kit.PATIENCE_S)[0].kind == "closed"
    expect(p, second.result(kit.PATIENCE_S)[0], context)
    idle(p, kit)


def test_where_whole_contexts_are_computed_faster_a_short_common_part_is_not_used(kit):
    d, p = kit.decode(), kit.prefill()
    p.engine.packs_fresh = True
    header = list(range(8))
    for tail, found in ((20, 0), (21, 0), (4, 8)):
        before = p.stats()["found_tokens"]
        context = header + [90 + tail] * tail
        prefix, _ = ask(p, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
        expect(p, prefix, context)
        assert p.stats()["found_tokens"] - before == found
    idle(p, kit)


@pytest.mark.parametrize(
    ("seed", "num_pages", "fresh", "num"),
    [(0, 8, False, 300), (1, 13, True, 300), (2, 0, False, 300)]
    + [pytest.param(3, 11, True, 8000, marks=pytest.mark.slow)],
)
def test_storm(kit, seed, num_pages, fresh, num):
    """Jobs, aborts and swaps at random over few pages: one answer each, the KV of its version, and all pages back."""
    rng = random.Random(seed)
    d, p = kit.decode(), kit.prefill(num_pages=num_pages, queue_size=64)
    p.engine.packs_fresh = fresh
    trunks = [[rng.randrange(97) for _ in range(rng.randrange(1, 40))] for _ in range(5)]
    asked, live, version = [], [], 0
    for step in range(num):
        draw = rng.random()
        live = [one for one in live if not one[2].done()]
        if draw < 0.03:
            version += 1
            kit.commit(p, version, kv=rng.choice(["recompute", "keep"]))
        elif draw < 0.1 and live:
            p.abort(rng.choice(live)[0], "storm")
        elif len(live) < 40:
            tail = [rng.randrange(97) for _ in range(rng.randrange(1, 24))]
            context = rng.choice(trunks) + tail
            request = kit.request(f"e{step}", context, priority=rng.randrange(3))
            held = rng.choice([0, 0, rng.randrange(len(context))])
            asked.append((f"e{step}", context, ask(p, request, d.server, held)))
            live.append(asked[-1])
        else:
            time.sleep(0.001)
    for _, context, future in asked:
        result, _ = future.result(kit.PATIENCE_S)
        if isinstance(result, TurnError):
            assert result.kind == "closed"
        else:
            expect(p, result, context)
    stats = p.stats()
    assert stats["requests"] == len(asked) == stats["finished"] + stats["failed"]
    assert stats["found_tokens"] > 0 and stats["failed"] == stats["aborted"]
    idle(p, kit)
