"""Turns that share the pages of one cache: what is computed once, what happens when pages run out, and storms."""

import random
import time

import numpy as np
import pytest

from kernels.kv import KVSpec
from rl_jax.engine.prefix_tree import Origin
from rl_jax.serve.paging import Found, Paging
from rl_jax.types import FinishReason
from tests.serve.test_prefill_server import ask


def baseline(d, kit):
    """Every page is free again once nothing is listed any more, and every slot."""
    kit.until(lambda: not d.server.stats()["running"] + d.server.stats()["waiting"])
    d.server.pause()
    kit.until(lambda: d.server.progress()[1] == "waiting for commands")
    paging = d.server._paging
    paging.tree.check()
    paging.tree.evict(paging.pool.num_pages)
    stats = d.server.stats()
    d.server.resume()
    assert stats["free_pages"] == stats["pages"] and stats["listed_pages"] == 0
    assert stats["free_slots"] == d.engine.settings.slots
    assert (paging.tables == -1).all()


def test_samples_of_one_prompt_hold_it_once_and_compute_it_once(kit):
    sizes = {"context": 2112, "page_size": 64, "chunk_sizes": (512,), "slots": 8}
    d = kit.decode(**sizes)
    d.gate.close()
    prompt = np.random.default_rng(0).integers(0, 97, 2000).tolist()
    futures = [
        d.turns.start(kit.request(f"g/{i}", prompt, seed=i, max_new_tokens=40)) for i in range(8)
    ]
    d.gate.arrive()
    kit.until(lambda: (d.gate.step(), d.server.stats()["running"] == 8)[1])
    stats = d.server.stats()
    assert stats["prefill_tokens"] + stats["append_tokens"] == 1999
    assert stats["cached_tokens"] == 7 * 1999
    held = stats["pages"] - stats["free_pages"]
    assert held <= 31 + 8 * 2  # of the prompt the whole ones; of each its tail and the next one
    d.gate.open()
    for i, future in enumerate(futures):
        assert future.result(kit.PATIENCE_S).tokens.tolist() == d.engine.expected(
            prompt, 40, seed=i
        )
    baseline(d, kit)


def test_a_branch_within_a_page_leaves_the_other_as_it_was(kit):
    d = kit.decode()  # pages of 8
    trunk = list(range(10, 30))
    for uid, tail in (("a", [1, 2, 3]), ("b", [4, 5]), ("c", []), ("a2", [1, 2, 3])):
        turn = d.turns.run(kit.request(uid, trunk + tail, max_new_tokens=12))
        assert turn.tokens.tolist() == d.engine.expected(trunk + tail, 12)
    cached = d.server.stats()["cached_tokens"]
    assert cached == 20 + 19 + 22  # b after the trunk, c but for its last token, a2 all of a
    baseline(d, kit)


@pytest.mark.parametrize("num_pages", [8, 11, 20])
def test_turns_that_ran_out_of_pages_go_on_with_the_same_tokens(kit, num_pages):
    """A full context takes 8 pages. With 8 one turn at a time has room, whatever the prefix tree holds."""
    d = kit.decode(num_pages=num_pages, slots=4)
    contexts = [list(range(i, i + 9)) for i in range(6)]
    futures = [
        d.turns.start(kit.request(f"e{i}", context, max_new_tokens=50, priority=i % 2))
        for i, context in enumerate(contexts)
    ]
    for context, future in zip(contexts, futures):
        turn = future.result(kit.PATIENCE_S)
        assert (turn.tokens.tolist(), turn.finish) == (
            d.engine.expected(context, 50),
            FinishReason.LENGTH,
        )
        assert not turn.context_mixed.any() and len(turn.spans) == 1
    assert d.server.stats()["preempted"] > 0 or num_pages == 20
    # Each has 59 tokens in the end; again, on top of pages that are listed, and with a page to copy.
    for i, context in enumerate(contexts):
        longer = [*context, *d.engine.expected(context, 50)][:53]
        turn = d.turns.run(kit.request(f"e{i}", longer, turn=1, max_new_tokens=8))
        assert turn.tokens.tolist() == d.engine.expected(longer, 8)
    baseline(d, kit)


def test_who_came_last_gives_way_and_a_small_one_does_not_pass_who_waits(kit):
    d = kit.decode(num_pages=9, slots=4)
    d.gate.close()
    first = d.turns.start(kit.request("first", [1] * 20, max_new_tokens=40))
    second = d.turns.start(kit.request("second", [2] * 20, max_new_tokens=40))
    d.gate.arrive()
    kit.until(lambda: (d.gate.step(), d.server.stats()["preempted"] == 1)[1])
    assert d.server.stats()["running"] == 1 and not second.done()
    small = d.turns.start(kit.request("small", [3], max_new_tokens=1))
    d.gate.step()
    assert d.server.stats()["waiting"] == 2  # there is a page for it, but the other was here before
    d.gate.open()
    for context, future in (([1] * 20, first), ([2] * 20, second)):
        assert future.result(kit.PATIENCE_S).tokens.tolist() == d.engine.expected(context, 40)
    small.result(kit.PATIENCE_S)


def test_kv_of_a_session_that_saw_a_swap_is_its_own(kit):
    """Under `keep`: its next turn reads it, marked; nobody else does."""
    d = kit.decode()
    context = list(range(30))
    first = d.turns.run(kit.request("mine", context))
    kit.commit(d.server, 1, kv="keep")
    longer = [*context, *first.tokens.tolist(), 5]
    mine = d.turns.run(kit.request("mine", longer, turn=1))
    assert mine.cached_prompt == 35 and mine.context_mixed.all()
    other = d.turns.run(kit.request("other", longer))
    assert other.cached_prompt == 0 and not other.context_mixed.any()
    assert other.tokens.tolist() == d.engine.expected(longer, 6, offset=1)
    third = [*longer, *mine.tokens.tolist(), 6]
    again = d.turns.run(kit.request("mine", third, turn=2))
    assert again.cached_prompt == 42 and again.context_mixed.all()
    for uid in ("mine", "other"):
        d.server.release(f"{uid}#0")
    kit.until(lambda: not d.server.stats()["sessions"])
    assert all(origin.owner is None for origin in d.server._paging.tree.origins)
    baseline(d, kit)


def test_a_history_alone_finds_room_whatever_is_listed():
    """Pages of 4. The last page of the first 12 tokens is listed behind others' pages, and behind its own session's."""
    paging = Paging(KVSpec(1, 1, 1, 4, 6, "float32"), slots=2, table_pages=5)
    tokens, nothing = np.arange(20, dtype=np.int32), Found(Origin(0), (), 0)
    mixed = Origin(0, owner="s#0")
    for slot, num in ((0, 8), (1, 12)):  # each brought its own pages, as prefixes do
        assert paging.admit(slot, nothing, num) == nothing
    for slot, num in ((0, 8), (1, 12)):
        paging.share(slot, Origin(0), tokens[:num])
    paging.drop(0)
    assert paging.grow(1, 16)
    paging.share(1, mixed, tokens[:16])
    found = paging.find([Origin(1), mixed], tokens)
    assert (found.origin, found.num_tokens) == (mixed, 16)
    assert paging.admit(0, found, 20) is None  # the other one will end
    paging.drop(1)
    # Held, its four pages keep the other two, so what was found is given up.
    assert paging.admit(0, found, 20) == Found(mixed, (), 0)
    assert len(set(paging.tables[0].tolist())) == 5
    paging.drop(0)
    paging.tree.check()


def test_who_does_not_fit_evicts_nothing():
    paging = Paging(KVSpec(1, 1, 1, 4, 6, "float32"), slots=2, table_pages=5)
    tokens, nothing = np.arange(12, dtype=np.int32), Found(Origin(0), (), 0)
    paging.admit(0, nothing, 12)
    paging.share(0, Origin(0), tokens)
    paging.drop(0)
    paging.admit(0, nothing, 8)
    assert paging.admit(1, nothing, 20) is None
    assert paging.find([Origin(0)], tokens).num_tokens == 12


@pytest.mark.parametrize("brings", [False, True])
def test_a_session_whose_pages_lie_behind_others_goes_on_under_keep(kit, brings):
    """Eight pages of 8. Two turns bring a prefix each, so both have pages of the 16 tokens that they share."""
    d, p = kit.decode(num_pages=8, slots=2), kit.prefill()
    trunk = list(range(16))
    contexts = {"x": [*trunk, 90], "s": [*trunk, *range(40, 51)]}
    d.server.pause()
    turns = {}
    for uid, context in contexts.items():
        prefix, _ = ask(p, kit.request(uid, context), d.server).result(kit.PATIENCE_S)
        request = kit.request(uid, context, max_new_tokens=3 if uid == "x" else 6)
        turns[uid] = d.turns.start(request, prefix)
    d.gate.close()
    d.server.resume()
    d.gate.arrive()
    assert d.server.stats()["running"] == 2
    reply = kit.commit_later(d.server, 1, "keep")
    kit.commit(p, 1)
    d.gate.open()
    reply.wait(kit.PATIENCE_S, "commit")
    turn = turns["s"].result(kit.PATIENCE_S)
    assert [(span.start, span.version) for span in turn.spans] == [(0, 0), (4, 1)]
    longer = [*contexts["s"], *turn.tokens.tolist(), *range(60, 80)]
    request, prefix = kit.request("s", longer, turn=1), None
    if brings:
        held = d.server.live_tokens("s#0", 1)
        prefix, _ = ask(p, request, d.server, held).result(kit.PATIENCE_S)
        assert prefix.start == 32
    turn = d.turns.run(request, prefix)
    # What was found is given up, and with it the pages that were to come behind it.
    assert turn.cached_prompt == 0 and not turn.context_mixed.any()
    assert turn.tokens.tolist() == d.engine.expected(longer, 6, offset=1)
    assert d.server.stats()["refused_prefixes"] == brings
    baseline(d, kit)


def test_a_prefix_is_never_written_over_pages_that_others_read(kit):
    """Nine pages of 8: one that was found whole would be copied in part, and there is no page for that."""
    d, p = kit.decode(num_pages=9, slots=2), kit.prefill()
    kit.commit(d.server, 1, kv="keep")
    listed = list(range(20))
    d.turns.run(kit.request("x", listed))
    d.gate.close()
    blocker = d.turns.start(kit.request("blocker", [7] * 40, max_new_tokens=8))
    d.gate.arrive()
    context = listed[:14]
    prefix, _ = ask(p, kit.request("y", context), d.server).result(kit.PATIENCE_S)
    turn = d.turns.start(kit.request("y", context), prefix)
    assert prefix.version == 0 and (prefix.start, prefix.num_tokens) == (0, 13)
    d.gate.step()
    d.gate.open()
    turn, _ = turn.result(kit.PATIENCE_S), blocker.result(kit.PATIENCE_S)
    assert turn.cached_prompt == 8
    third = [*listed[:8], 50, 51]
    turn = d.turns.run(kit.request("z", third))
    assert turn.cached_prompt == 8 and not turn.context_mixed.any()
    assert turn.tokens.tolist() == d.engine.expected(third, 6, offset=1)


@pytest.mark.parametrize(
    ("seed", "num_pages", "num"),
    [(0, 9, 400), (1, 14, 400), (2, 0, 400), pytest.param(3, 12, 10_000, marks=pytest.mark.slow)],
)
def test_storm(kit, seed, num_pages, num):
    """Adds, aborts, releases and swaps at random: one answer each, tokens as if alone, pages and slots all back."""
    rng = random.Random(seed)
    d = kit.decode(num_pages=num_pages, slots=5, queue_size=64)
    histories, asked, live, version = {}, [], [], 0
    trunks = [[rng.randrange(97) for _ in range(rng.randrange(1, 30))] for _ in range(6)]
    for step in range(num):
        draw = rng.random()
        live = [one for one in live if not one[2].done()]
        if draw < 0.02:
            version += 1
            kit.commit(d.server, version)
        elif draw < 0.15 and live:
            d.server.abort(rng.choice(live)[0], "storm")
        elif draw < 0.2 and histories:
            d.server.release(f"{rng.choice(list(histories))}#0")
        elif len(live) < 40:
            uid = f"e{step}" if draw < 0.7 or not histories else rng.choice(list(histories))
            if any(one[0] == uid for one in live):
                continue
            context, turn = histories.get(uid, (None, 0))
            if context is None or len(context) > 50:
                context = rng.choice(trunks) + [
                    rng.randrange(97) for _ in range(rng.randrange(1, 9))
                ]
            request = kit.request(
                uid, context, turn=turn, seed=step, priority=rng.randrange(3),
                max_new_tokens=rng.randrange(1, 20),
            )  # fmt: skip
            future = d.turns.start(request)
            asked.append((uid, request, future))
            live.append(asked[-1])
            histories[uid] = ([*context, 7], turn + 1)
        else:
            time.sleep(0.001)
    for uid, request, future in asked:
        turn = future.result(kit.PATIENCE_S)
        offsets = [v for s in turn.spans for v in [s.version] * (s.end - s.start)]
        n = len(turn.tokens)
        want = d.engine.expected(request.tokens, n, offset=offsets, seed=request.seed)
        assert turn.tokens.tolist() == want, (uid, turn.spans)
        assert turn.finish in (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.CONTEXT)
        assert not turn.context_mixed.any()
    assert set(d.turns.num_answers.values()) == {1} and len(d.turns.num_answers) == len(asked)
    for uid in histories:
        d.server.release(f"{uid}#0")
    kit.until(lambda: not d.server.stats()["sessions"])
    assert num_pages == 0 or d.server.stats()["preempted"] > 0
    baseline(d, kit)
