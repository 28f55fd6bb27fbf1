"""The Router as rollout's Sampler, over servers round FakeEngines."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.mesh import MeshPlan
from rl_jax.serve import Router
from rl_jax.serve.prefill_choice import (
    UNMEASURED_LIMIT,
    Context,
    Costs,
    PrefillLine,
    appends,
    choose_line,
)
from rl_jax.serve.router import TemplateMismatch
from rl_jax.settings import MeshSettings, PoolSettings
from rl_jax.types import FinishReason, Sampler, TurnError

PLAN = MeshPlan.from_settings(
    MeshSettings(
        pools=(
            PoolSettings("prefill", "prefill"),
            PoolSettings("decode", "decode", devices=2, replicas=2),
            PoolSettings("fast", "decode", tags=("hot",)),
            PoolSettings("train", "train"),
        )
    )
)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def play(router, kit, uid, num_turns=3, **fields):
    """An episode: its turns, and its whole context. The env says [9, 2] after each turn."""
    context, turns = [3, 1, 4, 1, 5, len(uid)], []
    for turn in range(num_turns):
        request = kit.request(uid, context, turn, max_new_tokens=3, **fields)
        turns.append(await router.generate(request))
        await asyncio.sleep(0)
        context = [*context, *turns[-1].tokens.tolist(), 9, 2]
    router.release(f"{uid}#0")
    return turns, context


def test_is_a_sampler_and_each_turn_is_right(kit):
    d, p = kit.decode(), kit.prefill()
    router = Router([d.server], [p], PLAN)
    assert isinstance(router, Sampler)
    turns, context = run(play(router, kit, "a", 10))
    at = 6
    for turn in turns:
        assert turn.tokens.tolist() == d.engine.expected(context[:at], 3)
        at += 5
    assert [len(t.prompt_tokens) for t in turns] == [6] + [2] * 9
    assert turns[0].cached_prompt == 0 and turns[-1].cached_prompt == len(context) - 8
    assert turns[0].times_s["transfer"] > 0
    # Each token's KV is computed once, the first turn's on the prefill server, the rest in place.
    stats = d.server.stats()
    assert (p.stats()["prefill_tokens"], stats["received_tokens"]) == (5, 5)
    assert stats["append_tokens"] + stats["decode_tokens"] == len(context) - 3 - 5
    assert (router.stats()["prefilled"], stats["recompute_tokens"]) == (1, 0)


def test_without_prefill_servers_the_decode_server_does_it_all(kit):
    d = kit.decode()
    turns, context = run(play(Router([d.server], [], PLAN), kit, "a"))
    assert turns[-1].tokens.tolist() == d.engine.expected(context[:-5], 3)
    assert d.server.stats()["prefill_tokens"] == 5


def test_sessions_stick_and_new_ones_go_where_fewest_live(kit):
    servers = [kit.decode(name=f"decode.{i}") for i in range(2)]
    router = Router([d.server for d in servers], [], PLAN)

    async def main():
        return await asyncio.gather(*[play(router, kit, f"e{i}") for i in range(8)])

    names = []
    for turns, _ in run(main()):
        assert len({t.server for t in turns}) == 1
        names.append(turns[0].server)
    assert sorted(names) == ["decode.0"] * 4 + ["decode.1"] * 4
    assert router.stats()["sessions"] == 0


def test_tags_go_to_their_pool_and_capacity_says_how_many(kit):
    plain = kit.decode(name="decode.0")
    hot = kit.decode(name="fast.0", pool="fast", tags=("hot",), slots=2)
    router = Router([plain.server, hot.server], [], PLAN)
    assert router.capacity() == {"decode": 4, "fast": 2}
    assert (router.places("hot"), router.places("cold")) == (("fast",), ("decode",))

    async def main():
        return await asyncio.gather(
            play(router, kit, "a", tag="hot"), play(router, kit, "b", tag="cold")
        )

    (a, _), (b, _) = run(main())
    assert (a[0].pool, b[0].pool) == ("fast", "decode")
    hot.server.fence("gone")
    assert router.capacity() == {"decode": 4, "fast": 0}
    assert router.places("hot") == ("decode",)  # a preference, not a demand
    assert run(play(router, kit, "c", tag="hot"))[0][0].pool == "decode"


def test_session_goes_to_its_tags_pool_while_that_has_a_slot_and_elsewhere_at_once_where_not(kit):
    plain = kit.decode(name="decode.0")
    hot = kit.decode(name="fast.0", pool="fast", tags=("hot",), slots=2)
    router = Router([plain.server, hot.server], [], PLAN)

    async def pool_of(uid):
        request = kit.request(uid, tag="hot", max_new_tokens=1)
        return (await router.generate(request)).pool

    async def main():
        pools = [await pool_of(f"e{i}") for i in range(3)]
        router.release("e0#0")
        return [*pools, await pool_of("e4")]

    assert run(main()) == ["fast", "fast", "decode", "fast"]


def test_slots_of_a_pool_with_two_tags_are_counted_once_and_a_place_is_kept_to(kit):
    own = kit.decode(name="own.0", pool="own", tags=("a",))
    both = kit.decode(name="both.0", pool="both", tags=("a", "b"))
    pools = (
        PoolSettings("own", "decode", tags=("a",)),
        PoolSettings("both", "decode", tags=("a", "b")),
        PoolSettings("train", "train"),
    )
    router = Router(
        [own.server, both.server], [], MeshPlan.from_settings(MeshSettings(pools=pools))
    )
    assert router.capacity() == {"own": 4, "both": 4}
    assert router.places("a") == ("own", "both") and router.places("b") == ("both",)

    async def main():
        return await asyncio.gather(
            *[play(router, kit, f"e{i}", tag="a", place="both") for i in range(3)]
        )

    assert {turn.pool for turns, _ in run(main()) for turn in turns} == {"both"}
    both.server.fence("gone")
    assert run(play(router, kit, "f", tag="a", place="both"))[0][0].pool == "own"


def test_version_is_the_lowest_of_the_live(kit):
    servers = [kit.decode(name=f"decode.{i}", version=i + 3).server for i in range(2)]
    router = Router(servers, [], PLAN)
    assert router.version() == 3
    servers[0].fence("gone")
    assert router.version() == 4
    servers[1].fence("gone")
    assert router.version() == -1
    with pytest.raises(TurnError, match="no decode server is live: decode.0: gone; decode.1: gone"):
        run(router.generate(kit.request()))


def test_abort_returns_what_was_sampled(kit):
    d = kit.decode()
    router = Router([d.server], [], PLAN)
    d.gate.close()

    async def main():
        task = asyncio.create_task(router.generate(kit.request(max_new_tokens=40)))
        await asyncio.to_thread(d.gate.arrive)
        router.abort("a", "test")
        d.gate.open()
        return await task

    turn = run(main())
    assert (turn.finish, len(turn.tokens)) == (FinishReason.ABORT, 4)


def test_abort_while_the_prefix_is_computed_gives_an_empty_turn(kit):
    d, p = kit.decode(), kit.prefill(version=None)
    router = Router([d.server], [p], PLAN)

    async def main():
        task = asyncio.create_task(router.generate(kit.request()))
        while not p.stats()["waiting"]:
            await asyncio.sleep(0)
        router.abort("a", "test")
        return await task

    turn = run(main())
    assert (turn.finish, turn.tokens.tolist()) == (FinishReason.ABORT, [])
    assert turn.prompt_tokens.tolist() == [1, 2, 3]
    assert router.stats()["prefill_fallbacks"] == 0


def test_abort_of_one_that_waits_for_anothers_prefix_does_not_wait_for_it(kit):
    d, p = kit.decode(), kit.prefill(version=None)  # nothing is computed until it has weights
    router = Router([d.server], [p], PLAN)

    async def main():
        asks = [router.generate(kit.request(f"e{i}", [1, 2, 3, 4])) for i in range(3)]
        tasks = [asyncio.create_task(ask) for ask in asks]
        await asyncio.sleep(0.01)
        router.abort("e1", "test")
        aborted = await tasks[1]
        assert not tasks[0].done() and not tasks[2].done()
        await asyncio.to_thread(kit.commit, p, 0)
        return aborted, await tasks[0], await tasks[2]

    aborted, *others = run(main())
    assert (aborted.finish, aborted.tokens.tolist()) == (FinishReason.ABORT, [])
    for turn in others:
        assert turn.tokens.tolist() == d.engine.expected([1, 2, 3, 4], 6)
    assert router.stats()["prefill_shared"] == 1 and p.stats()["requests"] == 1


def test_generate_never_outlives_its_deadline(kit):
    d, idle = kit.decode(), kit.decode(name="decode.1", version=None)
    d.gate.close()
    for server in (d.server, idle.server):
        router = Router([server], [], PLAN)
        with pytest.raises(TurnError) as error:
            run(router.generate(kit.request(max_new_tokens=40, deadline_s=0.05)))
        assert error.value.kind == "deadline"
    d.gate.open()
    kit.until(lambda: not d.server._table.turns, "the abandoned turn to end at the server")


def test_cancelled_generate_ends_the_turn_at_the_server(kit):
    d = kit.decode(version=None)
    router = Router([d.server], [], PLAN)

    async def main():
        task = asyncio.create_task(router.generate(kit.request()))
        await asyncio.to_thread(kit.until, lambda: d.server.stats()["waiting"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    kit.until(lambda: d.server.stats()["finish_abort"] == 1)


def test_an_answer_after_its_callers_loop_was_closed_is_nobodys_and_no_fault(kit, caplog):
    d = kit.decode()
    router = Router([d.server], [], PLAN)
    d.gate.close()

    async def main():
        task = asyncio.create_task(router.generate(kit.request(max_new_tokens=40)))
        await asyncio.to_thread(d.gate.arrive)
        task.cancel()

    run(main())
    d.gate.open()
    kit.until(lambda: d.server.stats()["finish_abort"] == 1)
    d.server.close()
    assert d.server.stats()["callback_errors"] == 0 and not caplog.records


def test_failed_prefill_server_costs_nothing_but_time(kit):
    d, p = kit.decode(), kit.prefill()
    router = Router([d.server], [p], PLAN)
    p.engine.append = None  # its thread dies at the first job
    turn = run(router.generate(kit.request()))
    assert turn.tokens.tolist() == d.engine.expected([1, 2, 3], 6)
    assert router.stats()["prefill_fallbacks"] == 1
    assert run(router.generate(kit.request("b"))).tokens.tolist() == turn.tokens.tolist()
    assert router.stats()["prefill_fallbacks"] == 1  # it is not asked again


def test_session_of_a_fenced_server_starts_anew_elsewhere(kit):
    servers = [kit.decode(name=f"decode.{i}") for i in range(2)]
    router = Router([d.server for d in servers], [], PLAN)

    async def main():
        first = await router.generate(kit.request(tokens=[1, 2, 3], max_new_tokens=3))
        home = next(d for d in servers if d.server.name == first.server)
        home.gate.close()
        context = [1, 2, 3, *first.tokens.tolist(), 9, 2]
        request = kit.request(tokens=context, turn=1, max_new_tokens=9)
        task = asyncio.create_task(router.generate(request))
        await asyncio.to_thread(home.gate.arrive)
        home.server.fence("gone")
        home.gate.open()
        with pytest.raises(TurnError) as error:
            await task
        assert error.value.retryable
        return first, context, await router.generate(request)

    first, context, second = run(main())
    assert second.server != first.server
    assert second.prompt_tokens.tolist() == [9, 2]
    assert second.tokens.tolist() == servers[0].engine.expected(context, 9)
    assert router.stats()["moved_sessions"] == 1


def test_errors_of_the_request_are_raised_as_they_are(kit):
    router = Router([kit.decode().server], [kit.prefill()], PLAN)
    for fields, kind in (
        ({"tokens": np.arange(64)}, "context"),
        ({"adapter": "x"}, "unsupported"),
        ({"stop": ("x",)}, "unsupported"),
    ):
        with pytest.raises(TurnError) as error:
            run(router.generate(kit.request(**fields)))
        assert error.value.kind == kind


@pytest.mark.parametrize(
    ("kv", "sizes"),
    [
        ("recompute", {}),
        ("keep", {}),
        ("recompute", {"append_limit": 1, "num_pages": 10}),  # every suffix is a prefill server's
        ("keep", {"append_limit": 1, "num_pages": 10}),
        ("recompute", {"append_limit": 0}),
    ],
)
def test_slow_and_fast_episodes_with_swaps_and_more_than_fit_all_finish(kit, kv, sizes):
    """The shape that deadlocks where a sync waits for episodes: queued ones, slow ones, a sync in mid-stream."""
    servers = [kit.decode(name=f"decode.{i}", slots=2, chunk_requests=1, **sizes) for i in range(2)]
    prefill = kit.prefill(**sizes)
    router = Router([d.server for d in servers], [prefill], PLAN)
    targets = [prefill, *(d.server for d in servers)]

    async def main():
        lengths = [2 + 4 * (i % 3 == 0) for i in range(14)]
        tasks = [asyncio.create_task(play(router, kit, f"e{i}", n)) for i, n in enumerate(lengths)]
        for version in range(1, 6):
            for _ in range(20):
                await asyncio.sleep(0)
            for target in targets:
                await asyncio.to_thread(kit.commit, target, version, kv=kv)
        return await asyncio.gather(*tasks)

    for turns, context in run(main()):
        at = 6
        for turn in turns:
            versions = turn.versions.tolist()
            assert versions == sorted(versions)
            if kv == "recompute":
                want = servers[0].engine.expected(context[:at], 3, offset=versions)
                assert turn.tokens.tolist() == want
                assert not turn.context_mixed.any()
            at += 5
    for d in servers:
        stats = d.server.stats()
        assert stats["requests"] == stats["finished"] and stats["stale_tokens"] == 0
    assert (router.stats()["prefilled_suffixes"] > 0) >= (sizes.get("append_limit") == 1)
    assert prefill.stats()["requests"] == prefill.stats()["finished"]


def test_three_prefill_servers_one_slot_and_queues_of_one(kit):
    """Who finds a queue full is told so, comes again, and is answered once."""
    small = {"slots": 1, "chunk_requests": 1, "queue_size": 1}
    d = kit.decode(**small)
    prefill = [kit.prefill(name=f"prefill.{i}", **small) for i in range(3)]
    router = Router([d.server], prefill, PLAN)
    refused = 0

    async def client(i):
        nonlocal refused
        context = [1 + i, 2, 3, 4, 5, 6]
        while True:
            try:
                turn = await router.generate(kit.request(f"c{i}", context, max_new_tokens=5))
                router.release(f"c{i}#0")
                return context, turn
            except TurnError as error:
                assert error.retryable and "serve.queue_size=1" in str(error)
                refused += 1
                await asyncio.sleep(0.001)

    async def clients():
        return await asyncio.gather(*(client(i) for i in range(12)))

    for context, turn in run(clients()):
        assert turn.tokens.tolist() == d.engine.expected(context, 5)
    stats = d.server.stats()
    assert refused > 0 and stats["finished"] == 12 and stats["waiting"] == stats["running"] == 0


def test_a_server_of_another_chat_template_is_refused_with_both_hashes(kit):
    """L6: what it would be sent was rendered in another way than it was started for."""
    ours, theirs = "a" * 64, "b" * 64
    decode, prefill = kit.decode().server, kit.prefill()
    decode.template_sha256 = prefill.template_sha256 = ours
    assert Router([decode], [prefill], PLAN, ours).version() == 0
    for server in (decode, prefill):
        server.template_sha256 = theirs
        with pytest.raises(TemplateMismatch) as caught:
            Router([decode], [prefill], PLAN, ours)
        assert f"server {server.name} was started for the chat template {theirs}" in str(
            caught.value
        )
        assert f"this run renders with {ours}" in str(caught.value)
        server.template_sha256 = ours


def test_samples_of_one_prompt_are_prefilled_and_sent_once(kit):
    servers = [kit.decode(name=f"decode.{i}", slots=8) for i in range(2)]
    p = kit.prefill(version=None)
    router = Router([d.server for d in servers], [p], PLAN)
    prompt = list(range(3, 43))

    async def group(num, name):
        asks = [router.generate(kit.request(f"{name}/{i}", prompt, seed=i)) for i in range(num)]
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        if name == "g":
            await asyncio.sleep(0.01)
            await asyncio.to_thread(kit.commit, p, 0)
        return await asyncio.gather(*tasks)

    for i, turn in enumerate(run(group(4, "g"))):
        assert turn.tokens.tolist() == servers[0].engine.expected(prompt, 6, seed=i)
    made, (first, second) = p.stats(), (d.server.stats() for d in servers)
    # Two slots more than on the other server are a quarter of its slots: three go together, and one to the other.
    assert (first["finished"], second["finished"]) == (3, 1)
    assert made["finished"] == 2 and made["prefill_tokens"] == made["found_tokens"] == 39
    assert first["received_tokens"] + second["received_tokens"] == 2 * 39
    assert first["cached_tokens"] == 2 * 39 and router.stats()["prefill_shared"] == 2


def test_who_waits_for_anothers_prefix_goes_on_when_that_fails(kit):
    d, p = kit.decode(), kit.prefill(version=None)
    router = Router([d.server], [p], PLAN)

    async def both():
        asks = [
            router.generate(kit.request(f"e{i}", [1, 2, 3, 4], deadline_s=5.0)) for i in range(2)
        ]
        first, second = (asyncio.ensure_future(ask) for ask in asks)
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert run(both()).tokens.tolist() == d.engine.expected([1, 2, 3, 4], 6)
    assert not router._computing


def test_a_context_goes_to_the_prefill_server_that_has_most_of_it(kit):
    d = kit.decode()
    first, second = (kit.prefill(name=f"prefill.{i}") for i in range(2))
    router = Router([d.server], [first, second], PLAN)
    one, other = list(range(1, 40)), list(range(50, 90))

    async def ask(uid, context):
        await router.generate(kit.request(uid, context, max_new_tokens=1))
        router.release(f"{uid}#0")

    async def both():  # the second finds 38 tokens in the first one's line
        await asyncio.gather(ask("a", one), ask("b", other))

    run(both())
    assert [p.stats()["requests"] for p in (first, second)] == [1, 1]
    for uid, context in (("c", [*other, 1, 2]), ("d", [*one, 3]), ("e", [*other, 1, 2, 5])):
        run(ask(uid, context))
    assert [p.stats()["requests"] for p in (first, second)] == [2, 3]
    assert (first.stats()["prefill_tokens"], second.stats()["prefill_tokens"]) == (38 + 1, 39 + 3)
    for p in (first, second):
        kit.commit(p, 1)
    run(ask("f", [*other, 6]))  # nothing is known under the new version: the first of equals
    assert first.stats()["requests"] == 3


def test_a_line_of_work_outweighs_a_prefix():
    """By hand, pages of 4."""
    engine = SimpleNamespace(spec=SimpleNamespace(num_pages=6))
    lines = [PrefillLine(SimpleNamespace(version=0, engine=engine)) for _ in range(2)]
    tokens = np.arange(10, dtype=np.int32)
    context = Context.of(tokens, 4)
    longer = Context.of(np.append(tokens, np.ones(7, np.int32)), 4)
    sent = lines[0].send(context)
    assert (sent, lines[0].tokens, lines[0].missing(longer)) == (10, 10, 17 - 8)
    assert choose_line(lines, longer) is lines[1]  # 10 + 9 against 17
    lines[0].answered(context, sent, True)
    assert choose_line(lines, longer) is lines[0]
    assert lines[0].missing(context) == 0
    lines[0].answered(longer, lines[0].send(longer), False)  # it failed: only what it had before
    assert lines[0].missing(longer) == 9 and lines[0].tokens == 0
    other = Context.of(tokens + 50, 4)
    lines[0].send(other)
    lines[0].send(Context.of(tokens + 70, 4))  # with these six pages: the others are forgotten
    assert (lines[0].missing(other), lines[0].missing(context)) == (0, 10)
    lines[0].server.version = 1
    assert lines[0].missing(other) == 10


def test_a_long_suffix_is_a_prefill_servers_and_only_its_pages_travel(kit):
    """Pages of 8, append_limit=8. The second turn adds 4 tokens, the third 20, the fourth 8."""
    d, p = kit.decode(), kit.prefill()
    router = Router([d.server], [p], PLAN)
    context, cached, sent = [3, 1, 4, 1, 5], [], []

    async def turn(num, said):
        nonlocal context
        context = [*context, *said]
        made = await router.generate(kit.request("a", context, num, max_new_tokens=3))
        assert made.tokens.tolist() == d.engine.expected(context, 3)
        assert made.prompt_tokens.tolist() == (said if num else context)
        assert (made.times_s["transfer"] > 0) == (num in (0, 2))
        context = [*context, *made.tokens.tolist()]
        cached.append(made.cached_prompt)
        sent.append(p.stats()["sent_tokens"])

    async def main():
        for num, length in enumerate((0, 4, 20, 8)):
            await turn(num, [90 + num] * length)

    run(main())
    # After two turns 14 tokens are in the cache, so the third gets all from the page at 8 on: 35 - 1 - 8.
    assert (cached, sent) == ([0, 7, 8, 37], [4, 4, 4 + 26, 4 + 26])
    stats = d.server.stats()
    assert (
        stats["received_tokens"] == 30 and stats["refused_prefixes"] == stats["long_appends"] == 0
    )
    assert (router.stats()["prefilled"], router.stats()["prefilled_suffixes"]) == (2, 1)
    # Of the third context the prefill server had the first one's four tokens.
    assert (p.stats()["found_tokens"], p.stats()["prefill_tokens"]) == (4, 4 + 30)


def test_the_costs_of_both_ways_by_hand():
    # 10 tokens here at 1 ms while 3 others generate: 40 ms. There 100 to compute at 0.3 ms and 10 to move at 1 ms: 40.
    costs = Costs(append_token_s=1e-3, num_running=3, compute_token_s=3e-4, move_token_s=1e-3)
    assert appends(0, 10, 100, costs) and not appends(0, 10, 99, costs)
    assert not appends(0, 11, 100, costs)
    assert appends(0, UNMEASURED_LIMIT, 0, None) and not appends(0, UNMEASURED_LIMIT + 1, 0, None)
    assert appends(7, 7, 0, costs) and not appends(7, 8, 10**6, costs)  # a limit is a limit
    assert appends(0, 0, 0, costs)


def test_without_a_limit_the_measured_costs_choose(kit):
    d, p = kit.decode(append_limit=0), kit.prefill(append_limit=0)
    router = Router([d.server], [p], PLAN)

    def suffixes(uid, append_s, compute_s):
        d.server._append_rate._token.add(1e6, 1e6 * append_s)
        p._compute_rate.add(1e6, 1e6 * compute_s)
        p._move_rate.add(1e6, 1e-3)
        before = router.stats()["prefilled_suffixes"]
        run(play(router, kit, uid, 3))
        return router.stats()["prefilled_suffixes"] - before

    assert d.server.append_token_s is None and p.token_s is None
    run(play(router, kit, "first"))
    assert d.server.append_token_s > 0 and min(p.token_s) > 0
    assert suffixes("slow prefill", append_s=1e-3, compute_s=1.0) == 0
    assert suffixes("slow decode", append_s=1e3, compute_s=1e-3) == 2
    assert d.server.stats()["long_appends"] == 0
