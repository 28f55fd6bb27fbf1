"""The real servers and router on a virtual clock: what they take is what the costs say."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rl_jax.clock import now_s
from rl_jax.mesh import MeshPlan
from rl_jax.settings import EngineSettings, MeshSettings, PoolSettings, ServeSettings
from rl_jax.simulate import clock
from rl_jax.simulate.costs import H20, H800, QWEN3_8B, Costs
from rl_jax.simulate.servers import Servers
from rl_jax.types import FinishReason, TurnError, TurnRequest

ENGINE = EngineSettings(
    slots=8, context=4096, steps_per_block=16, chunk_sizes=(512, 2048), chunk_requests=8
)
SERVE = ServeSettings(progress_timeout_s=1e6)


def pools(*pools, serve=SERVE, engine=ENGINE):
    plan = MeshPlan.from_settings(MeshSettings(pools=(*pools, PoolSettings("train", "train"))))
    return Servers(plan, QWEN3_8B, engine, serve)


def request(uid="a", num=1001, answer=32, turn=0, **fields):
    tokens = np.arange(num, dtype=np.int32) + 7 * sum(map(ord, uid))
    defaults = {
        "attempt": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": answer, "stop_token_ids": (),
        "stop": (), "seed": 0, "tag": "", "deadline_s": 1000.0,
    }  # fmt: skip
    return TurnRequest(uid=uid, turn=turn, tokens=tokens, **(defaults | fields))


def test_a_turn_takes_what_its_chunk_and_its_blocks_cost():
    async def main():
        servers = pools(PoolSettings("a", "decode", hardware="H800"))
        turn = await servers.router.generate(request())
        servers.close()
        return turn, now_s() - clock.START_S

    turn, end_s = clock.run(main())
    costs = Costs(H800, QWEN3_8B)
    prefill_s = costs.chunk_s(1000, 1000 * 1001 // 2, 1000)
    block_s = [costs.decode_s(16, 1, 1001 + 8 + 16 * i) for i in range(2)]
    assert end_s == pytest.approx(prefill_s + sum(block_s), rel=1e-6)
    assert (len(turn.tokens), turn.finish) == (32, FinishReason.LENGTH)
    # As on a device, where a chunk is dispatched and nothing waits for it: its time is seen behind the first block.
    assert turn.times_s["decode"] == pytest.approx(end_s)
    assert turn.times_s["first_token"] == pytest.approx(prefill_s + block_s[0])
    # By hand: 1,000 tokens x 2 x 6.95 G weights and half a million pairs x 590 k, at 0.54 of 989 TFLOP/s; 15.1 GB of
    # weights at 0.55 of 3.35 TB/s.
    assert prefill_s == pytest.approx((13.9e12 + 0.295e12) / (0.5414 * 989e12), rel=1e-3)
    assert block_s[0] / 16 == pytest.approx(15.29e9 / (0.5497 * 3.35e12), rel=1e-3)


def test_an_h20_computes_slower_and_reads_faster():
    h800, h20 = Costs(H800, QWEN3_8B), Costs(H20, QWEN3_8B)
    assert h20.chunk_s(4096, 0, 0) / h800.chunk_s(4096, 0, 0) == pytest.approx(989 / 148)
    assert h20.decode_s(1, 1, 0) / h800.decode_s(1, 1, 0) == pytest.approx(3.35 / 4.0)
    assert h20.decode_s(1, 64, 0) > h20.decode_s(
        1, 1, 0
    )  # many slots are bound by operations there
    assert h800.decode_s(1, 64, 0) == h800.decode_s(1, 1, 0)
    # (0.9 * 80 GB - 15.1 GB) / 147,456 bytes a token
    assert h800.num_pages(64) * 64 == pytest.approx(385_600, rel=1e-3)


def test_requests_of_one_server_share_blocks_and_those_of_two_do_not_wait_for_each_other():
    async def main(num_servers):
        pool = PoolSettings("a", "decode", num_servers, num_servers, hardware="H800")
        servers = pools(pool)
        turns = [request(uid, num=2, answer=160) for uid in "abcd"]
        got = await asyncio.gather(*map(servers.router.generate, turns))
        servers.close()
        return now_s() - clock.START_S, {turn.server for turn in got}

    (one_s, one), (two_s, two) = (clock.run(main(num)) for num in (1, 2))
    assert one == {"a.0"} and two == {"a.0", "a.1"}
    alone_s = Costs(H800, QWEN3_8B).decode_s(160, 1, 0)
    assert alone_s < two_s <= one_s < 1.2 * alone_s


def test_a_session_finds_its_history_and_a_commit_between_two_blocks_is_seen_in_its_tokens():
    async def main():
        servers = pools(PoolSettings("a", "decode", hardware="H20"))
        (server,), router = servers.decode, servers.router
        first = await router.generate(request(num=1000))
        context = np.concatenate(
            [request(num=1000).tokens, first.tokens, np.array([5] * 10, np.int32)]
        )
        task = asyncio.create_task(
            router.generate(replace(request(turn=1, answer=64), tokens=context))
        )
        await asyncio.sleep(2.5 * Costs(H20, QWEN3_8B).decode_s(16, 1, 0))
        servers.commit(1, "keep")
        assert server.version == 1
        second = await task
        servers.close()
        return second, server.stats()

    turn, stats = clock.run(main())
    assert turn.cached_prompt >= 1000 and stats["prefill_tokens"] == 999
    assert [(span.version, span.end - span.start) for span in turn.spans] in (
        [(0, 32), (1, 32)],
        [(0, 48), (1, 16)],
    )


def test_prefill_servers_hand_prefixes_over_in_the_time_of_their_bytes():
    async def main():
        prefill = PoolSettings("p", "prefill", hardware="H800")
        servers = pools(prefill, PoolSettings("d", "decode", hardware="H20"))
        turn = await servers.router.generate(request())
        engines = servers.prefill[0].engine, servers.decode[0].engine
        servers.close()
        return turn, *(engine.num_tokens for engine in engines)

    turn, prefill, decode = clock.run(main())
    assert (prefill["prefill"], decode["prefill"], decode["decode"]) == (1000, 0, 32)
    seconds = 1024 * QWEN3_8B.kv_token_bytes / 50e9
    assert turn.times_s["transfer"] == pytest.approx(seconds)


def test_deadlines_are_virtual_and_a_server_that_dies_fails_what_it_holds():
    async def main():
        servers = pools(PoolSettings("a", "decode", hardware="H800"))
        (server,), start_s = servers.decode, now_s()
        with pytest.raises(TurnError) as late:
            await servers.router.generate(request(answer=3000, deadline_s=5.0))
        assert late.value.kind == "deadline" and now_s() - start_s == pytest.approx(5.0, abs=0.2)
        server.engine.generate = None
        with pytest.raises(TurnError) as dead:
            await servers.router.generate(request("b"))
        assert dead.value.kind == "engine" and "NoneType" in server.fenced
        servers.close()

    clock.run(main())


def test_what_is_no_virtual_loop_or_no_hardware_is_refused():
    async def main():
        pools(PoolSettings("a", "decode", hardware="H800"))

    with pytest.raises(RuntimeError, match="VirtualLoop"):
        asyncio.run(main())

    async def unknown():
        pools(PoolSettings("a", "decode", hardware="tin"))

    with pytest.raises(ValueError, match="pool a: hardware='tin' is unknown; use one of H800, H20"):
        clock.run(unknown())
