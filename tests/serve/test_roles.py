"""Decode servers in both roles: prefixes for others, moves by what waits, and nothing lost or doubled meanwhile."""

import asyncio
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.cluster import InProcCluster
from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.serve import Router
from rl_jax.serve.balance import Balance, Band
from rl_jax.settings import EngineSettings, MeshSettings, PoolSettings, ServeSettings, Settings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.types import FinishReason, Prefix, TurnError
from tests.serve.test_prefill_server import ask, expect
from tests.serve.test_router import play, run

PLAN = MeshPlan.from_settings(
    MeshSettings(
        pools=(
            PoolSettings("prefill", "prefill"),
            PoolSettings("decode", "decode", devices=3, replicas=3),
            PoolSettings("train", "train"),
        )
    )
)
NEVER = Balance(Band(least_s=1e9))  # roles as they begin


def asked(server, request, target, held=0):
    """As `ask`, of a decode server in the prefill role."""
    return ask(SimpleNamespace(submit=server.submit_prefix), request, target, held)


def many(kit, num=4, **fields):
    """Dual servers on one device each, the first of the pool prefill."""
    pools = ["prefill.0", *[f"decode.{i}" for i in range(num - 1)]]
    return [kit.decode(name=name, pool=name.partition(".")[0], **fields) for name in pools]


def router_of(made, balance):
    servers = [one.server for one in made]
    return Router(servers[1:], servers[:1], PLAN, balance=balance)


def is_idle(server, kit):
    """No slot, row or page is held, and nothing is listed any more."""
    kit.until(lambda: server.progress().is_idle and not server._table.turns)
    kit.until(lambda: not server._table.sessions, "sessions to be released")
    paging = server._paging
    paging.tree.check()
    paging.tree.evict(paging.pool.num_pages)
    stats = server.stats()
    assert stats["free_pages"] == stats["pages"] and stats["free_slots"] == len(paging.tables)
    assert stats["sessions"] == 0 and (paging.tables == -1).all()
    assert not server._table._filled_now


@pytest.mark.parametrize("word", ["fixed", "auto"])
def test_a_cluster_builds_every_server_for_both_roles_under_auto_only(word):
    model, _ = tiny_model()
    plan = MeshPlan.from_settings(
        MeshSettings(
            pools=(
                PoolSettings("prefill", "prefill", devices=2, replicas=2),
                PoolSettings("decode", "decode", devices=2, replicas=2),
                PoolSettings("train", "train"),
            )
        )
    )
    settings = Settings(
        engine=EngineSettings(slots=2, context=64, page_size=16, chunk_sizes=(16,)),
        serve=ServeSettings(pd_balance=word),
    )
    cluster = InProcCluster(plan, build_meshes(plan).servers, model, settings)
    kinds = {server.name: server.kind for server in cluster.targets}
    first = "prefill" if word == "fixed" else "decode"
    assert kinds == {
        "prefill.0": first,
        "prefill.1": first,
        "decode.0": "decode",
        "decode.1": "decode",
    }
    assert [server.name for server in cluster.prefill] == ["prefill.0", "prefill.1"]
    for server in cluster.targets:
        server.fence("not started")  # of two a side none is live
    assert cluster.router.capacity() == (
        {"decode": 0} if word == "fixed" else {"decode": 0, "prefill": 0}
    )
    assert cluster.counters()["role_moves"] == 0 and (cluster.router._roles.balance is None) == (
        word == "fixed"
    )
    names = [name for name, _ in cluster.lower()]
    generates = [name.partition(" ")[0] for name in names if "generate" in name]
    assert generates == (["decode.0"] if word == "fixed" else ["prefill.0"])


@pytest.mark.parametrize("held", [0, 20])
def test_a_decode_server_hands_over_what_a_prefill_server_does(kit, held):
    d, p, dual = kit.decode(), kit.prefill(), kit.decode(name="dual").server
    context = list(range(40))
    made = []
    for give in (ask(p, kit.request(tokens=context), d.server, held),
                 asked(dual, kit.request(tokens=context), d.server, held)):  # fmt: skip
        prefix, times_s = give.result(kit.PATIENCE_S)
        assert isinstance(prefix, Prefix) and set(times_s) == {"queue", "prefill", "transfer"}
        assert min(times_s.values()) >= 0
        expect(None, prefix, context)
        made.append((prefix.start, prefix.num_tokens, prefix.version, prefix.tokens_sha))
    assert made[0] == made[1] and made[0][0] == held // 8 * 8
    stats = dual.stats()
    names = ("prefill_tokens", "sent_tokens", "append_tokens", "decode_tokens", "cached_tokens")
    assert [stats[n] for n in names] == [39, 39 - held // 8 * 8, 0, 0, 0]
    assert min(dual.token_s) > 0
    turn = d.turns.run(kit.request(tokens=[*range(19), 7]))  # with those there, a part fits behind
    longer = [*range(19), *range(50, 70)]
    prefix, _ = asked(dual, kit.request("c", longer), d.server, 19).result(kit.PATIENCE_S)
    assert dual.stats()["found_tokens"] == 19 and prefix.start == 16
    turn = d.turns.run(kit.request("c", longer), prefix)
    assert turn.tokens.tolist() == d.engine.expected(longer, 6) and turn.cached_prompt == 16
    is_idle(dual, kit)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_prefix_never_mixes_versions_nor_takes_older_ones(kit, kv):
    d, dual = kit.decode(), kit.decode(name="dual")
    inner, done = dual.engine.append, []

    def append(*args):
        if not done:  # the first chunk of two: the commit is obeyed before the second
            done.append(kit.commit_later(dual.server, 5, kv))
        return inner(*args)

    dual.engine.append = append
    context = list(range(30))
    for version in (5, 6):
        if version == 6:
            kit.commit(dual.server, 6, kv=kv)
        prefix, _ = asked(dual.server, kit.request(tokens=context), d.server).result(kit.PATIENCE_S)
        assert prefix.version == version
        expect(None, prefix, context)
    assert dual.server.stats()["found_tokens"] == 0
    is_idle(dual.server, kit)


def test_a_prefix_that_lost_its_pages_starts_anew_after_a_swap_that_keeps(kit):
    """Nine pages of 8: a turn of 30 tokens grows into its sixth while 23 are computed, 4 a chunk, one a block."""
    d = kit.decode()
    dual = kit.decode(name="dual", version=None, num_pages=9, chunk_sizes=(4,), chunks_per_block=1)
    server, done = dual.server, []

    def swap(engine):
        if server.stats()["preempted"] and not done:
            done.append(kit.commit_later(server, 1, "keep"))

    dual.engine.before_block = swap
    turn = dual.turns.start(kit.request("turn", [2] * 30, max_new_tokens=24, priority=1))
    context = list(range(24))
    job = asked(server, kit.request("job", context), d.server)
    kit.commit(server, 0)
    prefix, _ = job.result(kit.PATIENCE_S)
    assert len(turn.result(kit.PATIENCE_S).tokens) == 24 and done
    assert prefix.version == 1 and server.stats()["found_tokens"] == 0
    expect(None, prefix, context)


def test_every_prefix_job_is_answered_whatever_ends_it(kit):
    d, dual = kit.decode(), kit.decode(name="dual", version=None).server
    aborted = asked(dual, kit.request("aborted"), d.server)
    late = asked(dual, kit.request("late", deadline_s=0.01), d.server)
    short = asked(dual, kit.request("short", [1]), d.server)
    many = [asked(dual, kit.request(f"e{i}"), d.server) for i in range(16)]
    dual.abort("aborted", "test")
    kinds = [f.result(kit.PATIENCE_S)[0].kind for f in (aborted, late, short)]
    assert kinds == ["closed", "deadline", "unsupported"]
    dual.fence("out of memory")
    kinds = [f.result(kit.PATIENCE_S)[0].kind for f in many]
    assert kinds == ["closed"] * 14 + ["queue_full"] * 2
    assert asked(dual, kit.request("next"), d.server).result(1)[0].kind == "closed"
    kit.commit(dual, 1)
    again, _ = asked(dual, kit.request("again"), d.server).result(kit.PATIENCE_S)
    assert isinstance(again, Prefix)
    is_idle(dual, kit)


def test_the_turn_itself_may_come_to_the_server_that_computes_its_prefix(kit):
    d, dual = kit.decode(), kit.decode(name="dual", version=None)
    context = list(range(20))
    job = asked(dual.server, kit.request(tokens=context), d.server)
    turn = dual.turns.start(kit.request(tokens=context))
    kit.commit(dual.server, 0)
    assert turn.result(kit.PATIENCE_S).tokens.tolist() == dual.engine.expected(context, 6)
    expect(None, job.result(kit.PATIENCE_S)[0], context)


def test_waits_are_told_by_role_and_not_of_who_waits_for_a_version(kit):
    d, dual = kit.decode(), kit.decode(name="dual", slots=1)
    dual.gate.close()
    running = dual.turns.start(kit.request("runs"))
    dual.gate.arrive()
    dual.turns.start(kit.request("version", min_version=7, deadline_s=1.0))
    job = asked(dual.server, kit.request("job", [1, 2, 3]), d.server)
    assert dual.server.queue_s("prefill") == dual.server.queue_s("decode") == 0.0
    dual.gate.step()  # one of two blocks: what came is in the line now
    kit.until(lambda: dual.server.queue_s("prefill") > 0.02)
    assert dual.server.queue_s("decode") == 0.0
    dual.gate.open()
    assert running.result(kit.PATIENCE_S).finish is FinishReason.LENGTH
    expect(None, job.result(kit.PATIENCE_S)[0], [1, 2, 3])
    kit.until(lambda: dual.server.queue_s("prefill") == 0.0)


def test_roles_decide_where_sessions_and_prefixes_go(kit):
    made = many(kit)
    router = router_of(made, NEVER)
    first = made[0].server
    # Three servers decode: a third more than their slots, as many as all have.
    assert router.capacity() == {"decode": 15, "prefill": 0} and router.places("") == ("decode",)

    async def main():
        asks = [kit.request(f"e{i}", [i, 1, 4, 1, 5, i]) for i in range(9)]
        return await asyncio.gather(*map(router.generate, asks))

    for i, turn in enumerate(run(main())):
        assert turn.pool == "decode" and turn.times_s["transfer"] > 0
        assert turn.tokens.tolist() == made[0].engine.expected([i, 1, 4, 1, 5, i], 6)
    assert router.stats()["prefilled"] == 9 and first.stats()["decode_tokens"] == 0
    assert sum(one.server.stats()["received_tokens"] for one in made) == 9 * 5
    for one in made[1:]:  # who prefills serves when nobody else is left, and makes its own prefixes
        one.server.fence("gone")
    assert router.capacity() == {"decode": 0, "prefill": 4}
    turns, context = run(play(router, kit, "last", 2))
    assert {t.server for t in turns} == {"prefill.0"}
    assert turns[0].tokens.tolist() == made[0].engine.expected(context[:6], 3)


def test_a_session_stays_where_it_is_when_its_server_goes_over(kit):
    made = many(kit)
    router = router_of(made, NEVER)

    async def main():
        a = await router.generate(kit.request("a", [1, 2, 3], max_new_tokens=3))
        home = next(one for one in made if one.server.name == a.server)
        router._roles._move(home.server, "prefill")
        assert router.places("") == ("decode",) and router.stats()["role_moves"] == 1
        assert router.capacity() == {"prefill": 0, "decode": 16}
        context = [1, 2, 3, *a.tokens.tolist(), *range(20)]
        again = await router.generate(kit.request("a", context, 1, max_new_tokens=3))
        assert again.server == a.server and again.cached_prompt == 5
        assert again.tokens.tolist() == home.engine.expected(context, 3)
        others = [
            router.generate(kit.request(f"o{i}", [5, i, 6], max_new_tokens=3)) for i in range(6)
        ]
        return a, await asyncio.gather(*others)

    a, others = run(main())
    assert a.server not in {turn.server for turn in others}


def test_auto_refuses_servers_that_cannot_change_or_share_pages(kit):
    d, p, other = kit.decode(), kit.prefill(), kit.decode(name="decode.1", page_size=16)
    with pytest.raises(ValueError, match="prefill.0 is a PrefillServer, which cannot decode"):
        Router([d.server], [p], PLAN, balance=Balance())
    with pytest.raises(ValueError, match="decode.1 has pages of .* pages of one size"):
        Router([d.server, other.server], [], PLAN, balance=Balance())


def slow(one, verb, seconds):
    """Each call of the engine's verb takes so much longer; 0 lets it be."""
    if not hasattr(one.engine, "plain"):
        one.engine.plain = {name: getattr(one.engine, name) for name in ("append", "generate")}
    plain = one.engine.plain[verb]

    def call(*args):
        time.sleep(seconds)
        return plain(*args)

    setattr(one.engine, verb, call if seconds else plain)


@pytest.mark.slow
def test_roles_follow_a_load_and_come_back(kit, caplog):
    """Chunks that take long, then blocks that do: servers go over to prefill, then to decode; every turn is right."""
    caplog.set_level("INFO", "rl_jax.serve.roles")
    made = many(kit)
    band = Band(least_s=0.01, looks=3, rest=5, fade=10.0)
    router = router_of(made, Balance(band))
    router._look_s = 0.013
    rng, counts = random.Random(0), []

    async def session(uid):
        context = [rng.randrange(97) for _ in range(40)]
        turn = await router.generate(kit.request(uid, context, max_new_tokens=16))
        assert turn.tokens.tolist() == made[0].engine.expected(context, 16), uid
        router.release(f"{uid}#0")

    async def load(name, verb, other, until):
        for one in made:
            slow(one, verb, 0.02)
            slow(one, other, 0.0)
        num = 0
        end = asyncio.get_running_loop().time() + 15
        live = set()
        while not until() or live:
            assert asyncio.get_running_loop().time() < end, (name, counts, caplog.text)
            if not until() and len(live) < sum(router.capacity().values()):
                live.add(asyncio.ensure_future(session(f"{name}{num}")))
                num += 1
                continue
            done, live = await asyncio.wait(live, return_when="FIRST_COMPLETED")
            for task in done:
                task.result()
        return num

    async def main():
        roles = router._roles
        num = await load("chunks", "append", "generate", lambda: len(roles.prefill) == 3)
        num += await load("blocks", "generate", "append", lambda: len(roles.decode) == 3)
        return num + await load("again", "append", "generate", lambda: len(roles.prefill) >= 2)

    num = run(main())
    stats = router.stats()
    assert stats["turns"] == num and stats["errors"] == stats["sessions"] == 0
    assert stats["role_moves"] == caplog.text.count("goes over to") >= 2 + 2 + 1
    assert "goes over to prefill: prefixes wait" in caplog.text
    assert "goes over to decode: prefixes wait" in caplog.text
    for one in made:
        is_idle(one.server, kit)


@pytest.mark.parametrize(
    ("seed", "num"), [(0, 250), (1, 250), pytest.param(2, 2000, marks=pytest.mark.slow)]
)
def test_storm(kit, seed, num):
    """Sessions of several turns, aborts, swaps and moves at random over few pages: each turn once, of one version's KV,
    and all pages back.
    """
    rng = random.Random(seed)
    made = many(kit, queue_size=256, num_pages=16)
    router = router_of(made, NEVER)
    trunks = [[rng.randrange(97) for _ in range(rng.randrange(2, 25))] for _ in range(4)]
    version, answers = 0, []

    def move():
        gains, loses = rng.sample(["prefill", "decode"], 2)
        servers = getattr(router._roles, loses)
        if len(servers) > 1:
            router._roles._move(rng.choice(servers), gains)

    async def session(uid):
        context = rng.choice(trunks) + [rng.randrange(97) for _ in range(rng.randrange(1, 8))]
        for turn in range(3):
            request = kit.request(uid, context, turn, max_new_tokens=4, priority=rng.randrange(2))
            made_turn = await router.generate(request)
            answers.append((context, made_turn))
            if made_turn.finish is FinishReason.ABORT:
                break
            context = [
                *context,
                *made_turn.tokens.tolist(),
                *rng.choices(range(97), k=rng.randrange(1, 12)),
            ]
        router.release(f"{uid}#0")

    async def main():
        nonlocal version
        live = {}
        for step in range(num):
            draw = rng.random()
            live = {uid: task for uid, task in live.items() if not task.done() or task.result()}
            if draw < 0.05:
                version += 1
                for one in made:
                    await asyncio.to_thread(kit.commit, one.server, version)
            elif draw < 0.25:
                move()
            elif draw < 0.3 and live:
                router.abort(rng.choice(list(live)), "storm")
            elif len(live) < 16:
                live[f"e{step}"] = asyncio.ensure_future(session(f"e{step}"))
            await asyncio.sleep(0.001)
        await asyncio.gather(*live.values())

    run(main())
    for context, turn in answers:
        n = len(turn.tokens)
        assert n == 4 or turn.finish is FinishReason.ABORT
        assert turn.tokens.tolist() == made[0].engine.expected(
            context, n, offset=turn.versions.tolist()
        )
    stats = router.stats()
    assert stats["turns"] == len(answers) and stats["errors"] == stats["sessions"] == 0
    assert stats["role_moves"] > 10 and stats["prefilled"] > 10
    for one in made:
        assert one.server.stats()["callback_errors"] == 0
        is_idle(one.server, kit)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_storm_of_prefixes_beside_turns_over_few_pages(kit, seed):
    """Both kinds on one server, preempted, aborted and swapped under both policies: a prefix is of one version."""
    rng = random.Random(seed)
    d, dual = kit.decode(), kit.decode(name="dual", num_pages=9, queue_size=64)
    server, jobs, turns, version = dual.server, [], [], 0
    for step in range(250):
        draw = rng.random()
        if draw < 0.06:
            version += 1
            kit.commit(server, version, kv=rng.choice(["recompute", "keep", "keep"]))
        elif draw < 0.1 and jobs:
            server.abort(rng.choice(jobs)[0], "storm")
        elif sum(not f.done() for f in (*turns, *(job[2] for job in jobs))) < 12:
            context = [rng.randrange(4)] * rng.randrange(2, 50)
            request = kit.request(f"e{step}", context, priority=rng.randrange(3), max_new_tokens=12)
            if rng.random() < 0.6:
                held = rng.choice([0, rng.randrange(len(context))])
                jobs.append((f"e{step}", context, asked(server, request, d.server, held)))
            else:
                turns.append(dual.turns.start(request))
        else:
            time.sleep(0.001)
    for _, context, future in jobs:
        result, _ = future.result(kit.PATIENCE_S)
        if isinstance(result, TurnError):
            assert result.kind == "closed"
        else:
            expect(None, result, context)
    for i, future in enumerate(turns):
        assert len(future.result(kit.PATIENCE_S).tokens) > 0, i
    stats = server.stats()
    assert stats["preempted"] > 0 and stats["found_tokens"] > 0 and stats["sent_tokens"] > 0
    assert set(dual.turns.num_answers.values()) == {1}
    for uid in {key.partition("#")[0] for key in dual.turns.num_answers}:
        server.release(f"{uid}#0")
    is_idle(server, kit)


def test_a_prefill_role_server_that_dies_costs_time_only(kit):
    made = many(kit)
    router = router_of(made, NEVER)
    made[0].engine.append = None
    turn = run(router.generate(kit.request()))
    assert turn.tokens.tolist() == made[1].engine.expected([1, 2, 3], 6)
    assert router.stats()["prefill_fallbacks"] == 1
    # It counts for nothing: one that decodes takes its place at the next look.
    router._look()
    assert len(router._roles.prefill) == 2 and router._roles.moves == 1
    turn = run(router.generate(kit.request("b", [4, 5, 6])))
    assert turn.times_s["transfer"] > 0 and router.stats()["prefill_fallbacks"] == 1
    np.testing.assert_array_equal(turn.tokens, made[1].engine.expected([4, 5, 6], 6))
    assert not isinstance(turn, TurnError)
