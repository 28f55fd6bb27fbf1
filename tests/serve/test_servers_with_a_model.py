"""Router, prefill server and decode server round real engines: how often KV is computed, and the bits."""

import asyncio
import gc
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rl_jax.engine import JaxEngine
from rl_jax.mesh import SERVE_RULES, make_mesh
from rl_jax.serve import DecodeServer, PrefillServer, Router
from rl_jax.serve.balance import Balance, Band
from rl_jax.serve.commands import Commit
from rl_jax.settings import EngineSettings, ServeSettings
from rl_jax.testing.tiny_model import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.bits]

SETTINGS = EngineSettings(slots=4, context=128, page_size=16, chunk_sizes=(64,), chunk_requests=4)


@pytest.fixture(scope="module")
def world():
    """One prefill and one decode server on two devices, and a way to publish seeded weights to them."""
    model, _ = tiny_model()
    serve, servers = ServeSettings(), []
    for device, kind in enumerate((PrefillServer, DecodeServer)):
        mesh = make_mesh({}, jax.devices()[device : device + 1])
        name = f"{kind.kind}.0"
        engine = JaxEngine(model, mesh, SERVE_RULES, SETTINGS, name)
        servers.append(kind(name, kind.kind, engine, serve))
        servers[-1].start()
    init = jax.jit(model.init)
    weights = {v: init(jax.random.key(v)) for v in range(3)}

    def publish(version, kv="recompute", scale=4, to=servers):
        """scale: of the weights. At 4 a token depends on much of its context, and log-probs hold fewer digits."""
        for server in to:
            given = {n: x * scale for n, x in weights[version % 3].items()}
            placed = {n: jax.device_put(x, server.param_shardings[n]) for n, x in given.items()}
            server.stage(f"v{version}", version, 0, placed)
            server.commit(f"v{version}", kv, 60.0)

    prefill, decode = servers
    publish(0)
    decode.wait_ready(120)
    router = Router([decode], [prefill], SimpleNamespace(pools_for=lambda tag: ()))
    parts = {"publish": publish, "router": router, "prefill": prefill, "decode": decode}
    yield SimpleNamespace(weights=lambda version: weights[version % 3], **parts)
    for server in servers:
        server.close()


async def episode(world, kit, uid, num_turns, seed=0, after=lambda turn: None):
    """Turns of up to 3 tokens, 6 observed tokens between them."""
    rng = np.random.default_rng(seed)
    context, turns = rng.integers(8, 264, 20).tolist(), []
    for turn in range(num_turns):
        request = kit.request(uid, context, turn, max_new_tokens=3, seed=seed * 100 + turn)
        turns.append(await world.router.generate(request))
        context = [*context, *turns[-1].tokens.tolist(), *rng.integers(8, 264, 6).tolist()]
        await asyncio.to_thread(after, turn)
    world.router.release(f"{uid}#0")
    return turns, context


def counters(world):
    names = ("append_tokens", "decode_tokens", "recompute_tokens", "prefill_tokens")
    decode, prefill = world.decode.stats(), world.prefill.stats()
    return {n: decode[n] + prefill.get(n, 0) for n in names}


def computed(world, before):
    return {n: int(value - before[n]) for n, value in counters(world).items()}


def test_ten_turns_compute_each_tokens_kv_once_per_version(world, kit):
    before = counters(world)
    turns, context = asyncio.run(episode(world, kit, "once", 10))
    made = computed(world, before)
    assert made["prefill_tokens"] == 19 and made["recompute_tokens"] == 0
    assert sum(made.values()) == len(context) - 6 - 1  # all but the last sampled token
    assert [t.cached_prompt for t in turns[1:]] == [20 + 9 * i + 2 for i in range(9)]
    assert {t.spans for t in turns} == {turns[0].spans}

    # One swap after turn 4: what was there then is computed once more, under the new version, and nothing else.
    before = counters(world)
    swap = lambda turn: world.publish(1) if turn == 4 else None
    turns, context = asyncio.run(episode(world, kit, "twice", 10, seed=1, after=swap))
    made = computed(world, before)
    at_swap = 20 + 4 * 9 + 3 - 1
    assert sum(made.values()) == len(context) - 6 - 1 + at_swap
    assert {int(t.versions[0]) for t in turns[:5]} == {0}
    assert {int(t.versions[0]) for t in turns[5:]} == {1}


def served_cold(world, kit, version, context, **fields):
    """The turn of a server that never had other weights nor saw another request."""
    cold = DecodeServer("cold", "decode", world.decode.engine, ServeSettings())
    cold.start()
    try:
        world.publish(version, to=[cold])
        cold.wait_ready(120)
        router = Router([cold], [], SimpleNamespace(pools_for=lambda tag: ()))
        return asyncio.run(router.generate(kit.request("cold", context, **fields)))
    finally:
        cold.close()


def test_after_a_swap_the_bits_are_those_of_a_cold_server(world, kit):
    """Lesson L1 with a real model, five swaps in a row: 0 ulp against a server that never had other weights."""
    for version in range(2, 7):
        swap = lambda turn, v=version: world.publish(v) if turn == 1 else None
        warm, context = asyncio.run(episode(world, kit, f"warm{version}", 3, after=swap))
        length = len(context) - 6 - len(warm[2].tokens)
        cold = served_cold(world, kit, version, context[:length], max_new_tokens=3, seed=2)
        assert cold.versions.tolist() == warm[2].versions.tolist() == [version] * 3
        assert cold.tokens.tolist() == warm[2].tokens.tolist()
        assert cold.logprobs.tobytes() == warm[2].logprobs.tobytes()


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_turn_goes_on_after_a_swap_as_a_cold_server_does(world, kit, kv):
    """Swapped between its second and third block of 4 tokens: 0 ulp under `recompute`, other log-probs under `keep`."""
    server, (before, after) = world.decode, (60, 61) if kv == "recompute" else (63, 64)
    world.publish(before)
    given = {
        n: jax.device_put(4 * x, server.param_shardings[n]) for n, x in world.weights(after).items()
    }
    server.stage(f"within.{kv}", after, 0, given)
    inner, calls = server.engine.generate, []

    def generate(*args):
        calls.append(len(calls))
        if len(calls) == 2:  # obeyed once this block is done
            server._loop.put(Commit(f"within.{kv}", kv))
        return inner(*args)

    context = np.random.default_rng(4).integers(8, 264, 37).tolist()
    sampling = {"seed": 11, "temperature": 1.0}
    local = Router([server], [], SimpleNamespace(pools_for=lambda tag: ()))
    server.engine.generate = generate
    try:
        turn = asyncio.run(
            local.generate(kit.request(f"within.{kv}", context, max_new_tokens=14, **sampling))
        )
    finally:
        server.engine.generate = inner
    world.publish(after, to=[world.prefill])
    local.release(f"within.{kv}#0")
    assert turn.versions.tolist() == [before] * 8 + [after] * 6
    assert turn.context_mixed.tolist() == [False] * 8 + [kv == "keep"] * 6
    first = served_cold(world, kit, before, context, max_new_tokens=8, **sampling)
    assert turn.tokens[:8].tolist() == first.tokens.tolist()
    assert turn.logprobs[:8].tobytes() == first.logprobs.tobytes()
    longer = [*context, *turn.tokens[:8].tolist()]
    rest = served_cold(world, kit, after, longer, max_new_tokens=6, token_index=8, **sampling)
    if kv == "recompute":
        assert turn.tokens[8:].tolist() == rest.tokens.tolist()
        assert turn.logprobs[8:].tobytes() == rest.logprobs.tobytes()
    else:
        assert abs(turn.logprobs[8] - rest.logprobs[0]) > 1e-3


def test_company_and_path_change_no_bit(world, kit):
    world.publish(9)
    alone, _ = asyncio.run(episode(world, kit, "alone", 4, seed=3))
    local = Router([world.decode], [], SimpleNamespace(pools_for=lambda tag: ()))

    async def crowd(router):
        there = SimpleNamespace(router=router)
        others = [episode(there, kit, f"o{i}", 4, seed=10 + i) for i in range(6)]
        return (
            await asyncio.gather(*others[:3], episode(there, kit, "in", 4, seed=3), *others[3:])
        )[3]

    for router in (world.router, local):
        turns, _ = asyncio.run(crowd(router))
        for turn, want in zip(turns, alone):
            assert turn.tokens.tolist() == want.tokens.tolist()
            assert turn.logprobs.tobytes() == want.logprobs.tobytes()


@pytest.fixture(scope="module")
def tight(world):
    """A decode server of the same weights with pages for a third of its slots, on the device of the other one."""
    mesh = make_mesh({}, jax.devices()[1:2])
    settings = replace(SETTINGS, num_pages=11, steps_per_block=2, chunk_sizes=(16,))
    model, _ = tiny_model()
    engine = JaxEngine(model, mesh, SERVE_RULES, settings, "tight")
    server = DecodeServer("tight", "decode", engine, ServeSettings())
    server.start()
    yield server
    server.close()


def test_preempted_aborted_shared_and_chunked_turns_are_those_of_an_idle_server(world, tight, kit):
    """Greedy tokens equal and log-probs to 1e-5, on a server that has room for one long history and a little."""
    world.publish(11, scale=1)
    world.publish(11, scale=1, to=[tight])
    tight.wait_ready(120)
    rng = np.random.default_rng(1)
    trunk = rng.integers(8, 264, 40).tolist()
    contexts = [trunk + rng.integers(8, 264, n).tolist() for n in (3, 21, 3, 30, 0, 14)]

    async def turns(router, stop_one):
        ask = lambda i, context, **more: router.generate(
            kit.request(f"{stop_one}{i}", context, temperature=0.0, max_new_tokens=40, **more)
        )
        asked = [asyncio.ensure_future(ask(i, context)) for i, context in enumerate(contexts)]
        if stop_one:
            await asyncio.sleep(0.02)
            router.abort(f"{stop_one}1", "test")
        made = list(await asyncio.gather(*asked))
        if stop_one:  # and goes on where it was
            first, done = made[1], len(made[1].tokens)
            if done < 40:
                longer = [*contexts[1], *first.tokens.tolist()]
                rest = await ask(1, longer, token_index=done, turn=1)
                made[1] = replace(
                    first,
                    tokens=np.concatenate([first.tokens, rest.tokens[: 40 - done]]),
                    logprobs=np.concatenate([first.logprobs, rest.logprobs[: 40 - done]]),
                )
        return made

    alone = [
        asyncio.run(
            world.router.generate(
                kit.request(f"idle{i}", context, temperature=0.0, max_new_tokens=40)
            )
        )
        for i, context in enumerate(contexts)
    ]
    local = Router([tight], [], SimpleNamespace(pools_for=lambda tag: ()))
    split = Router([tight], [world.prefill], SimpleNamespace(pools_for=lambda tag: ()))
    for name, router in (("", local), ("split", split), ("stop", local)):
        for got, want in zip(asyncio.run(turns(router, name)), alone, strict=True):
            assert got.tokens.tolist() == want.tokens.tolist()
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
    assert tight.stats()["preempted"] > 0 and tight.stats()["cached_tokens"] > 0


def test_what_the_prefill_server_found_is_what_a_cold_one_computes(world, kit):
    """Greedy tokens equal, log-probs to 1e-5: a shared header cut within a page, later turns, and all of it."""
    rng = np.random.default_rng(5)
    draw = lambda n: rng.integers(8, 264, n).tolist()
    header = draw(37)  # two pages of 16 and a part
    first = header + draw(30)
    contexts = [header + draw(9), first, first + draw(21), header + draw(50), first]

    def served(version, uid, context):
        """The turn, and tokens that the prefill server (found, computed) for it."""
        before = world.prefill.stats()
        request = kit.request(uid, context, temperature=0.0, max_new_tokens=12)
        turn = asyncio.run(world.router.generate(request))
        world.router.release(f"{uid}#0")
        after = world.prefill.stats()
        assert set(turn.versions.tolist()) == {version}
        got = tuple(after[n] - before[n] for n in ("found_tokens", "prefill_tokens"))
        assert sum(got) == len(context) - 1
        return turn, got

    world.publish(12, scale=1)
    warm = [served(12, f"warm{i}", context) for i, context in enumerate(contexts)]
    assert [found for _, (found, _) in warm] == [0, 37, 66, 37, 66]
    for i, (context, (turn, _)) in enumerate(zip(contexts, warm)):
        world.publish(
            15 + 3 * i, scale=1
        )  # the same weights, and nothing of an older version is found
        cold, (found, computed) = served(15 + 3 * i, f"cold{i}", context)
        assert (found, computed) == (0, len(context) - 1)
        assert cold.tokens.tolist() == turn.tokens.tolist()
        np.testing.assert_allclose(cold.logprobs, turn.logprobs, atol=1e-5)


def test_a_prefix_from_a_decode_server_is_that_of_a_prefill_server(world, tight, kit):
    """Greedy tokens equal, log-probs to 1e-5: whole contexts, a shared part, and a suffix of 30. `tight` computes in
    chunks of 16 tokens, the prefill server of 64.
    """
    rng, pools = np.random.default_rng(9), SimpleNamespace(pools_for=lambda tag: ())
    draw = lambda n: rng.integers(8, 264, n).tolist()
    header, observed = draw(37), [draw(30) for _ in range(4)]
    contexts = [header + draw(n) for n in (9, 30, 3)] + [draw(90)]

    def publish(version):  # the same weights each time; nothing of an older version is found
        world.publish(version, scale=1)
        world.publish(version, scale=1, to=[tight])
        tight.wait_ready(120)

    def played(router, name):
        made = []
        for i, context in enumerate(contexts):
            for turn in range(2):
                ask = kit.request(f"{name}{i}", context, turn, temperature=0.0, max_new_tokens=4)
                made.append(asyncio.run(router.generate(ask)))
                context = [*context, *made[-1].tokens.tolist(), *observed[i]][:120]
            router.release(f"{name}{i}#0")
        return made, router.stats()

    settings = world.decode.engine.settings
    world.decode.engine.settings = replace(settings, append_limit=16)
    try:
        publish(39)
        want, by_prefill = played(Router([world.decode], [world.prefill], pools), "prefill")
        publish(42)
        before = tight.stats()
        never = Balance(Band(least_s=1e9))
        got, by_decode = played(Router([world.decode], [tight], pools, balance=never), "dual")
    finally:
        world.decode.engine.settings = settings
    after = tight.stats()
    assert by_decode["prefilled"] == by_prefill["prefilled"] == 8
    assert by_decode["prefilled_suffixes"] == by_prefill["prefilled_suffixes"] == 4
    assert (
        after["sent_tokens"] > before["sent_tokens"]
        and after["found_tokens"] > before["found_tokens"]
    )
    assert after["decode_tokens"] == before["decode_tokens"]
    for one, other in zip(got, want, strict=True):
        assert one.server == other.server == "decode.0" and one.cached_prompt == other.cached_prompt
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_a_suffix_from_the_prefill_server_is_the_one_appended_in_place(world, kit):
    """Greedy tokens equal and log-probs to 1e-5, suffixes of 30 behind histories of other lengths."""
    world.publish(33, scale=1)
    local = Router([world.decode], [], SimpleNamespace(pools_for=lambda tag: ()))

    async def played(router, uid):
        rng, turns = np.random.default_rng(8), []
        context = rng.integers(8, 264, 21).tolist()
        for turn in range(3):
            ask = kit.request(uid, context, turn, temperature=0.0, max_new_tokens=7)
            turns.append(await router.generate(ask))
            context = [*context, *turns[-1].tokens.tolist(), *rng.integers(8, 264, 30).tolist()]
        router.release(f"{uid}#0")
        return turns

    want = asyncio.run(played(local, "appended"))
    world.publish(36, scale=1)  # the same weights, and nothing to be found
    before = world.decode.stats()["received_tokens"]
    limit = world.decode.engine.settings
    world.decode.engine.settings = replace(limit, append_limit=29)
    try:
        turns = asyncio.run(played(world.router, "moved"))
    finally:
        world.decode.engine.settings = limit
    assert world.router.stats()["prefilled_suffixes"] == 2
    # From a page's begin on: where 27 tokens are there, from 16; where 64 are, from 64.
    received = world.decode.stats()["received_tokens"] - before
    assert received == 20 + (58 - 1 - 16) + (95 - 1 - 64)
    for got, expected in zip(turns, want, strict=True):
        assert got.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)


def greedy(kit, router, prompts, name):
    """A turn of 4 tokens for each prompt, 8 at a time."""

    async def turns():
        room = asyncio.Semaphore(8)

        async def ask(i, prompt):
            async with room:
                turn = await router.generate(
                    kit.request(f"{name}{i}", prompt, temperature=0.0, max_new_tokens=4)
                )
                router.release(f"{name}{i}#0")
                return turn

        return await asyncio.gather(*(ask(i, prompt) for i, prompt in enumerate(prompts)))

    return asyncio.run(turns())


def test_64_prompts_are_answered_alike_by_one_mesh_two_and_a_split_one(world, kit):
    """Greedy tokens equal and log-probs to 1e-5: colocated, prefill and decode apart, and tensor-parallel."""
    world.publish(50, scale=1)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, 264, rng.integers(1, 100)).tolist() for _ in range(64)]
    anyone = SimpleNamespace(pools_for=lambda tag: ())
    mesh = make_mesh({"tensor": 2}, jax.devices()[2:4])
    model, _ = tiny_model()
    engine = JaxEngine(model, mesh, SERVE_RULES, SETTINGS, "wide")
    wide = DecodeServer("wide", "decode", engine, ServeSettings())
    wide.start()
    try:
        world.publish(50, scale=1, to=[wide])
        wide.wait_ready(120)
        alone = greedy(kit, Router([world.decode], [], anyone), prompts, "one")
        moved = world.prefill.stats()["sent_tokens"]
        for name, decode in (("split", world.decode), ("wide", wide)):
            found = greedy(kit, Router([decode], [world.prefill], anyone), prompts, name)
            for got, want in zip(found, alone, strict=True):
                assert got.tokens.tolist() == want.tokens.tolist()
                np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
        assert world.prefill.stats()["sent_tokens"] > moved
        assert wide.stats()["received_tokens"] > 0
    finally:
        wide.close()


def held():
    """What a process must not gather: device arrays and their bytes, threads, files."""
    gc.collect()
    arrays = jax.live_arrays()
    num_files = len(os.listdir("/proc/self/fd"))
    return len(arrays), sum(x.nbytes for x in arrays), threading.active_count(), num_files


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="files are counted in /proc")
def test_turns_and_swaps_leave_nothing_behind(world, kit):
    """Lessons L25 and L26: five publishes and 60 episodes later the devices hold what they held."""
    play = lambda name: asyncio.run(episode(world, kit, name, 3))
    for version in (51, 52):
        world.publish(version)
        play(f"warm{version}")
    before = held()
    for version in range(53, 58):
        world.publish(version, kv="keep" if version % 2 else "recompute")
        for i in range(12):
            play(f"left{version}.{i}")
    after = held()
    assert after[0] <= before[0] and after[1] <= before[1]
    assert after[2] <= before[2] and after[3] <= before[3]
