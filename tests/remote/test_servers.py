"""One suite for all backends, whoever starts the servers: the same answers, the same errors, the same syncs,
and the same way back from death."""

import asyncio
import os
import queue
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.serve import Router
from rl_jax.serve.balance import Balance
from rl_jax.tokens import ByteTokenizer, ChatRenderer
from rl_jax.types import FinishReason, Turn, TurnError

pytestmark = pytest.mark.slow
NO_TAGS = SimpleNamespace(pools_for=lambda tag: ())


@pytest.fixture(scope="module", params=["inproc", "local", "external", "ray"])
def world(request, kit, tmp_path_factory):
    """Published, and every server live."""
    if request.param == "local":
        world = request.getfixturevalue("local")
    else:
        ray = request.getfixturevalue("ray_nodes") if request.param == "ray" else None
        logs = tmp_path_factory.mktemp("logs")
        world = kit.World(request.param, logs, "" if ray is None else ray.address)
    world.heal()
    yield world
    if request.param != "local":
        world.close()


def submit(server, request, prefix=None):
    """The queue on which the one answer comes."""
    done: queue.Queue = queue.Queue()
    server.submit(request, prefix, done.put)
    return done


def run(kit, server, request):
    result = submit(server, request).get(timeout=kit.PATIENCE_S)
    server.release(request.session)
    return result


def test_turn_is_what_the_engine_computes_under_the_published_version(world, kit):
    request = kit.ask("a", range(1, 20), max_new_tokens=9)
    turn = run(kit, world.decode[0], request)
    assert world.is_clean(request, turn) and len(turn.tokens) == 9
    assert turn.versions.tolist() == [world.version] * 9
    assert turn.logprobs.tolist() == pytest.approx([world.engine.logprob(t) for t in turn.tokens])
    assert (turn.finish, turn.server, turn.pool) == (FinishReason.LENGTH, "decode.0", "decode")


def test_prefix_of_a_prefill_server_and_a_live_history_are_used(world, kit):
    router = world.router(prefill=[world.prefill])
    first = kit.ask("b", range(1, 30))

    async def episode():
        one = await router.generate(first)
        context = [*range(1, 30), *one.tokens.tolist(), 40, 41]
        second = kit.ask("b", context, turn=1)
        server = next(s for s in world.decode if s.name == one.server)
        live = server.live_tokens("b#0", world.version)
        fits = server.live_tokens("b#0", world.version, np.array([*range(1, 20), 77, 78]))
        return one, second, await router.generate(second), live, fits, server

    one, second, two, live, fits, server = kit.together(episode())[0]
    assert world.is_clean(first, one) and world.is_clean(second, two)
    assert router.stats()["prefilled"] == 1 and one.times_s["prefill"] > 0
    assert live == 34 and fits == 19 and two.cached_prompt == 34 and two.server == one.server
    router.release("b#0")
    kit.until(lambda: server.live_tokens("b#0", world.version) == 0)


def test_a_server_that_decodes_gets_the_prefill_role_and_is_asked_for_prefixes(world, kit):
    router = Router(world.decode, [], NO_TAGS, balance=Balance())
    before = [server.stats()["sent_tokens"] for server in world.decode]
    requests = [kit.ask(f"role{i}", range(1, 40)) for i in range(2)]

    async def play():
        yield_s, turns = 0.05, [await router.generate(requests[0])]
        while (
            router.stats()["role_moves"] == 0
        ):  # a role without a server gets one at the first look
            turns.append(await router.generate(kit.ask("look")))
            await asyncio.sleep(yield_s)
        return turns[0], await router.generate(requests[1])

    turns = kit.together(play())[0]
    assert all(world.is_clean(*pair) for pair in zip(requests, turns, strict=True))
    assert router.stats()["prefilled"] == 1 and turns[1].times_s["prefill"] > 0
    computed, decoded = router._roles.prefill[0], router._roles.decode[0]
    sent = {s.name: s.stats()["sent_tokens"] - n for s, n in zip(world.decode, before, strict=True)}
    assert turns[1].server == decoded.name and sent == {computed.name: 38, decoded.name: 0}
    for session in ("role0#0", "role1#0", "look#0"):
        router.release(session)


def test_a_line_before_a_server_and_what_its_steps_take_are_seen(world, kit):
    server, seen = world.decode[0], []

    class Looks:
        """In the place of an Affinity: what it is told."""

        moves, assigned = 0, {}

        def turn(self, tag, num_computed, num_sampled):
            seen.append((tag, num_computed, num_sampled))
            return self

        def look(self, prices, running):
            seen.append(prices)
            return self

    done = [submit(server, kit.ask(f"line{i}", max_new_tokens=56)) for i in range(9)]  # of 4 slots
    kit.until(lambda: server.queue_s("decode") > 0.05)
    assert server.queue_s("prefill") == 0
    for i, turn in enumerate(done):
        assert len(turn.get(timeout=kit.PATIENCE_S).tokens) == 56
        server.release(f"line{i}#0")
    kit.until(lambda: server.queue_s("decode") == 0)
    router = Router([server], [], NO_TAGS, affinity=Looks())

    async def play():
        while not any(isinstance(told, dict) for told in seen):
            await router.generate(kit.ask("priced", range(30), max_new_tokens=20, tag="t"))
            router.release("priced#0")

    kit.together(play())
    price = next(told for told in seen if isinstance(told, dict))[server.hardware]
    assert price.num == 1 and price.token_s is not None  # a fake engine computes in no time
    assert price.step_s >= 0.5 * kit.BLOCK_S / kit.ENGINE.steps_per_block
    assert seen[0] == ("t", 29, 20)


def test_abort_ends_a_turn_with_what_was_sampled(world, kit):
    server, request = world.decode[0], kit.ask("c", max_new_tokens=60)
    blocks = server.stats()["blocks"]
    done = submit(server, request)
    kit.until(lambda: server.stats()["blocks"] > blocks + 1)
    server.abort("c", "test")
    turn = done.get(timeout=kit.PATIENCE_S)
    assert turn.finish is FinishReason.ABORT and 0 < len(turn.tokens) < 60
    assert world.is_clean(request, turn)
    server.release("c#0")


def test_a_turn_is_told_while_it_runs(world, kit):
    pieces, at = [], []
    request = kit.ask("told", range(1, 20), max_new_tokens=12, likely=True, scores=True)
    tell = lambda piece: pieces.append(piece) or at.append(time.monotonic())

    async def run():
        turn = await world.router([world.decode[0]]).generate(request, tell)
        return turn, time.monotonic()

    (turn, end_s) = kit.together(run())[0]
    world.decode[0].release(request.session)
    assert world.is_clean(request, turn)
    scores, *blocks = pieces
    assert scores.tokens.tolist() == list(range(2, 20)) and scores.version == world.version
    assert scores.ranks.tolist() == list(range(3, 21))
    assert np.concatenate([p.tokens for p in blocks]).tolist() == turn.tokens.tolist()
    assert np.concatenate([p.logprobs for p in blocks]).tolist() == turn.logprobs.tolist()
    assert np.concatenate([p.likely[0] for p in blocks])[:, 0].tolist() == turn.tokens.tolist()
    assert len(blocks) == 3 and end_s - at[1] > kit.BLOCK_S  # while it ran, and not with its end


def test_nothing_is_told_after_a_fence(world, kit):
    if world.backend == "inproc":
        pytest.skip("a fence is a command there; the block under way may still be told")
    pieces, server = [], world.decode[0]
    done: queue.Queue = queue.Queue()
    ask = kit.ask("fenced", range(1, 20), max_new_tokens=40)
    server.submit(ask, None, done.put, pieces.append)
    kit.until(lambda: pieces)
    server.fence("told to")
    num = len(pieces)
    assert isinstance(done.get(timeout=kit.PATIENCE_S), TurnError)
    time.sleep(4 * kit.BLOCK_S)
    assert len(pieces) == num
    world.heal()


def test_http_streams_what_it_says_at_once(world, kit):
    """Over servers of another process as over one of its own: alternatives, scored prompts, and a client that goes."""
    pytest.importorskip("fastapi"), pytest.importorskip("uvicorn")
    from rl_jax.http.api import Api
    from rl_jax.http.asks import Served
    from rl_jax.testing.http_world import LIMITS
    from rl_jax.testing.http_world import World as HttpWorld

    served = Served("fake", ChatRenderer(ByteTokenizer()), kit.ENGINE.context, 97, 2, LIMITS)
    api = Api(served, world.router(), world.decode, slots=2 * kit.ENGINE.slots)
    planes = HttpWorld(api.sampler, world.decode, api=api)
    try:
        ask = {"prompt": list(range(9, 30)), "max_tokens": 10, "n": 3, "seed": 2, "logprobs": 2,
               "return_token_ids": True, "ignore_eos": True}  # fmt: skip
        whole = planes.post("/v1/completions", ask).body["choices"]
        parts = [{"text": "", "token_ids": [], "values": [], "top": []} for _ in whole]
        events = planes.events("/v1/completions", ask)
        for choice in (c for event in events for c in event["choices"]):
            part, told = parts[choice["index"]], choice["logprobs"]
            part["text"] += choice["text"]
            part["token_ids"] += choice.get("token_ids", [])
            part["values"] += told["token_logprobs"] if told else []
            part["top"] += told["top_logprobs"] if told else []
        assert len(events) >= 9  # blocks of 4
        for part, choice in zip(parts, whole):
            logprobs = choice["logprobs"]
            want = choice["text"], choice["token_ids"], *logprobs.values()
            assert (part["text"], part["token_ids"]) == want[:2] and len(part["top"][0]) == 2
            assert part["values"] == logprobs["token_logprobs"]
            assert part["top"] == logprobs["top_logprobs"]
        told = planes.post("/v1/completions", {**ask, "prompt_logprobs": 1}).body["choices"][0]
        assert len(told["prompt_logprobs"]) == 21 and told["prompt_logprobs"][5]["14"]["rank"] == 15
        assert planes.get("/metrics").status == 200
        sock = planes.open("/v1/completions", {**ask, "max_tokens": 40, "stream": True})
        kit.until(lambda: sum(s.stats()["running"] for s in world.decode) == 3)
        sock.close()
        kit.until(lambda: sum(s.stats()["running"] for s in world.decode) == 0)
    finally:
        planes.stop()


def test_errors_are_the_same(world, kit):
    server = world.decode[0]
    for request, kind, retryable in (
        (kit.ask("d", range(70)), "context", False),
        (kit.ask("e", stop=("\ud835",)), "unsupported", False),
        (kit.ask("f", max_new_tokens=60, deadline_s=0.1), "deadline", True),
    ):
        error = run(kit, server, request)
        assert isinstance(error, TurnError)
        assert (error.kind, error.server, error.retryable) == (kind, "decode.0", retryable)


def test_request_that_waits_and_many_at_once_are_all_answered_once(world, kit):
    router = world.router(prefill=[world.prefill])
    requests = [kit.ask(f"many{i}", range(1, 4 + i)) for i in range(24)]
    turns = kit.together(*[router.generate(request) for request in requests])
    assert all(world.is_clean(*pair) for pair in zip(requests, turns, strict=True))
    assert {turn.server for turn in turns} == {"decode.0", "decode.1"}
    for request in requests:
        router.release(request.session)


def test_commit_between_blocks_gives_each_token_its_version(world, kit):
    server, before = world.decode[0], world.version
    blocks = server.stats()["blocks"]
    done = submit(server, kit.ask("g", max_new_tokens=60))
    kit.until(lambda: server.stats()["blocks"] > blocks + 1)
    assert world.publish().state == "PUBLISHED"
    turn = done.get(timeout=kit.PATIENCE_S)
    assert [span.version for span in turn.spans] == [before, world.version]
    assert [turn.spans[0].start, turn.spans[-1].end] == [0, 60]
    assert {s.version for s in world.servers} == {world.version}
    server.release("g#0")


def test_commit_is_idempotent_and_knows_what_is_staged(world, kit):
    server = world.decode[0]
    staged = world.sync._last
    assert staged.state == "PUBLISHED" and staged.acked == ("prefill.0", "decode.0", "decode.1")
    sync_id, swaps = f"v{world.version}.{world.sync._attempts}", server.stats()["swaps"]
    ack = server.commit(sync_id, "recompute", kit.PATIENCE_S)
    assert (ack.server, ack.version) == ("decode.0", world.version)
    assert server.stats()["swaps"] == swaps
    with pytest.raises(KeyError, match="nothing is staged under sync 'other'"):
        server.commit("other", "recompute", kit.PATIENCE_S)
    with pytest.raises(KeyError, match="nothing is staged under sync 'other'"):
        server.digest("other")


def test_sync_that_brought_other_bits_ends_aborted(world, kit):
    good = world.sync._transport

    class Lossy:
        def send(self, params, names, targets):
            sent = good.send(params, names, targets)
            return {t: {n: x + 1 for n, x in arrays.items()} for t, arrays in sent.items()}

    world.sync._transport = Lossy()
    before = world.version
    result = world.publish()
    world.sync._transport, world.version = good, before
    assert result.state == "ABORTED" and "digest differs for parameter offset" in result.detail
    request = kit.ask("h")
    turn = run(kit, world.decode[0], request)
    assert turn.versions.tolist() == [before] * 6 and world.is_clean(request, turn)


def test_fence_fails_what_is_under_way_and_a_commit_lifts_it(world, kit):
    server = world.decode[1]
    blocks = server.stats()["blocks"]
    done = submit(server, kit.ask("i", max_new_tokens=60))
    kit.until(lambda: server.stats()["blocks"] > blocks)
    server.fence("a test")
    for error in (done.get(timeout=kit.PATIENCE_S), run(kit, server, kit.ask("j"))):
        assert isinstance(error, TurnError) and error.retryable and "a test" in error.detail
    assert server.fenced == "a test"
    assert world.router().capacity() == {"decode": 4}
    assert world.publish().state == "PUBLISHED"
    assert server.fenced is None and isinstance(run(kit, server, kit.ask("k")), Turn)
    with pytest.raises(queue.Empty):
        done.get(timeout=0.2)  # and no second answer comes


def test_progress_and_counters_rise_and_an_idle_server_says_so(world, kit):
    server = world.decode[0]
    kit.until(lambda: server.progress().is_idle)
    done, tokens = server.progress().num_done, server.stats()["decode_tokens"]
    run(kit, server, kit.ask("l", max_new_tokens=8))
    assert server.stats()["decode_tokens"] == tokens + 8
    kit.until(lambda: server.progress().num_done > done)
    progress = server.progress()
    assert not progress.is_compiling and isinstance(progress.doing, str)


def test_close_of_a_turn_that_nobody_waits_for_any_more_leaves_the_others(world, kit):
    router = world.router()

    async def given_up():
        await router.generate(kit.ask("m", max_new_tokens=60, deadline_s=0.15))

    request = kit.ask("n", max_new_tokens=20)
    start = time.monotonic()
    error, turn = kit.together(given_up(), router.generate(request))
    assert isinstance(error, TurnError) and error.kind == "deadline"
    assert world.is_clean(request, turn) and time.monotonic() - start < 20


def test_dead_server_is_fenced_started_again_and_serves_after_the_next_sync(world, kit):
    """As a thread a server cannot be killed; what its engine dies of is told in test_decode_server."""
    if world.backend == "inproc":
        pytest.skip("a thread has no process that could die alone")
    lost, other = world.decode
    blocks, before = lost.stats()["blocks"], world.pid(lost)
    done = submit(lost, kit.ask("o", max_new_tokens=60))
    kit.until(lambda: lost.stats()["blocks"] > blocks)
    start = time.monotonic()
    os.kill(before, signal.SIGKILL)
    error = done.get(timeout=kit.PATIENCE_S)
    assert isinstance(error, TurnError) and error.retryable and error.server == "decode.0"
    assert time.monotonic() - start < kit.LEASE_S + 3 and lost.fenced is not None
    request = kit.ask("p")
    (turn,) = kit.together(world.router().generate(request))
    assert turn.server == "decode.1" and world.is_clean(request, turn)
    lost.wait_ready(kit.PATIENCE_S)
    assert world.pid(lost) != before and lost.fenced is not None, "it came back without weights"
    assert world.publish().state == "PUBLISHED" and lost.fenced is None
    turn = run(kit, lost, kit.ask("q"))
    assert turn.versions.tolist() == [world.version] * 6
