"""Router, prefill server and decode server round real engines: how often KV is computed, and the bits."""

import asyncio
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rl_jax.engine import JaxEngine
from rl_jax.mesh import SERVE_RULES, make_mesh
from rl_jax.serve import DecodeServer, PrefillServer, Router
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
    weights = {v: {n: x * 4 for n, x in init(jax.random.key(v)).items()} for v in range(3)}

    def publish(version, kv="recompute"):
        for server in servers:
            placed = {
                n: jax.device_put(x, server.param_shardings[n])
                for n, x in weights[version % 3].items()
            }
            server.stage(f"v{version}", version, 0, placed)
            server.commit(f"v{version}", kv, 60.0)

    prefill, decode = servers
    publish(0)
    decode.wait_ready(120)
    router = Router([decode], [prefill], SimpleNamespace(pools_for=lambda tag: ()))
    yield SimpleNamespace(publish=publish, router=router, prefill=prefill, decode=decode)
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


def test_after_a_swap_the_bits_are_those_of_a_cold_server(world, kit):
    """Lesson L1 with a real model, five swaps in a row: 0 ulp against a session that never saw other weights."""
    for version in range(2, 7):
        swap = lambda turn, v=version: world.publish(v) if turn == 1 else None
        warm, context = asyncio.run(episode(world, kit, f"warm{version}", 3, after=swap))
        length = len(context) - 6 - len(warm[2].tokens)
        request = kit.request(f"cold{version}", context[:length], turn=2, max_new_tokens=3, seed=2)
        cold = asyncio.run(world.router.generate(request))
        world.router.release(f"cold{version}#0")
        assert cold.versions.tolist() == warm[2].versions.tolist() == [version] * 3
        assert cold.tokens.tolist() == warm[2].tokens.tolist()
        assert cold.logprobs.tobytes() == warm[2].logprobs.tobytes()


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
