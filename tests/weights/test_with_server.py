"""WeightSync with a real DecodeServer: it samples from the trained weights, under the published version."""

import gc
import queue
from collections import Counter

import jax
import numpy as np
import pytest

from rl_jax.engine.engine import JaxEngine
from rl_jax.mesh import SERVE_RULES, TRAIN_RULES, make_mesh, shardings
from rl_jax.models.attention import attention
from rl_jax.serve.decode_server import DecodeServer
from rl_jax.settings import EngineSettings, ServeSettings, WeightSettings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.types import TurnRequest
from rl_jax.weights.packed_copy import PackedCopy
from rl_jax.weights.plan import SyncPlan
from rl_jax.weights.sync import WeightSync

ENGINE = EngineSettings(slots=4, context=64, steps_per_block=4, chunk_sizes=(32,), chunk_requests=4)
SETTINGS = WeightSettings(deadline_s=60.0, bucket_bytes=20_000)


@pytest.fixture(scope="module")
def world():
    """A learner's params on fsdp 2, a decode server on another device, and the sync between them."""
    model, params = tiny_model()
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    places = shardings(model.logical_axes, TRAIN_RULES, mesh)
    engine = JaxEngine(model, make_mesh({}, jax.devices()[4:5]), SERVE_RULES, ENGINE, "decode.0")
    server = DecodeServer("decode.0", "decode", engine, ServeSettings())
    server.start()
    server.wait_ready(120)
    plan = SyncPlan.build(
        model.abstract, model.logical_axes, mesh, places, [server], engine.dtype, SETTINGS
    )
    sync = WeightSync(plan, [server], SETTINGS)
    yield model, params, places, server, sync
    sync.close()
    server.close()


def sample(server, uid: str) -> tuple[list[int], np.ndarray, list[int]]:
    """(tokens, logprobs, versions) of a greedy turn on a fixed prompt."""
    request = TurnRequest(
        uid=uid, attempt=0, turn=0, tokens=np.arange(20, 30, dtype=np.int32), temperature=0.0, top_p=1.0, top_k=0,
        max_new_tokens=8, stop_token_ids=(), stop=(), seed=7, tag="",
    )  # fmt: skip
    done: queue.Queue = queue.Queue()
    server.submit(request, None, done.put)
    turn = done.get(timeout=60)
    if isinstance(turn, Exception):
        raise turn
    server.release(request.session)
    return turn.tokens.tolist(), turn.logprobs, turn.versions.tolist()


def greedy_ref(model, params) -> list[int]:
    """The same turn by whole forward passes."""
    tokens = list(range(20, 30))
    mask = np.tril(np.ones((64, 64), bool))[None]

    @jax.jit
    def logits(padded):
        hidden = model.hidden(
            params, padded[None], np.arange(64)[None], lambda _, q, k, v: attention(q, k, v, mask)
        )
        return model.logits(params, hidden)[0]

    for _ in range(8):
        padded = np.zeros(64, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(np.argmax(np.asarray(logits(padded))[len(tokens) - 1])))
    return tokens[10:]


@pytest.mark.slow
def test_server_samples_from_the_published_weights_and_keeps_them_when_a_sync_aborts(world):
    model, first, places, server, sync = world
    second = jax.jit(model.init)(jax.random.key(1))
    placed = {v: jax.device_put(p, places) for v, p in enumerate((first, second))}
    assert sync.publish(placed[0], 0).state == "PUBLISHED"
    tokens, logprobs, versions = sample(server, "a")
    assert (tokens, versions) == (greedy_ref(model, first), [0] * 8)

    class Lossy(PackedCopy):
        def send(self, params, names, targets):
            sent = super().send(params, names, targets)
            return {t: {n: x * 1.001 for n, x in arrays.items()} for t, arrays in sent.items()}

    good, sync._transport = sync._transport, Lossy(sync.plan)
    result = sync.publish(placed[1], 1)
    assert (result.state, server.version, server.fenced) == ("ABORTED", 0, None)
    again = sample(server, "b")
    assert again[0] == tokens
    assert np.array_equal(again[1], logprobs)

    sync._transport = good
    result = sync.publish(placed[1], 1)
    assert (result.state, result.acked) == ("PUBLISHED", ("decode.0",))
    assert result.pause_s < 1.0
    assert server._staged._retired == {}  # the old weights' memory is free when publish returns
    tokens, _, versions = sample(server, "c")
    assert (tokens, versions) == (greedy_ref(model, second), [1] * 8)


def device_bytes() -> Counter[int]:
    """Bytes of live arrays by device id; each buffer once, whatever arrays share it."""
    seen, held = set(), Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffer = (shard.device.id, shard.data.unsafe_buffer_pointer())
            if shard.data.nbytes and buffer not in seen:
                seen.add(buffer)
                held[shard.device.id] += shard.data.nbytes
    return held


@pytest.mark.slow
def test_a_sync_holds_one_more_copy_and_few_buckets_and_leaves_every_device_as_it_was(world):
    model, _, places, server, sync = world
    trained = [
        jax.device_put(jax.jit(model.init)(jax.random.key(seed)), places) for seed in range(3)
    ]
    number = sync.version + 1
    assert sync.publish(trained[0], number).state == "PUBLISHED"
    before, peak = settled(), Counter()

    class Watched(PackedCopy):
        """Counts while a bucket's flat buffers are at both ends, and its arrays at the target."""

        def _unpack(self, target, names, arrived):
            arrays = super()._unpack(target, names, arrived)
            jax.block_until_ready(arrays)
            for device, num in device_bytes().items():
                peak[device] = max(peak[device], num)
            return arrays

    largest = max(bucket.num_bytes for bucket in sync.plan.buckets)
    good, sync._transport = sync._transport, Watched(sync.plan)
    try:
        for i in (1, 2):
            assert sync.publish(trained[i], number + i).state == "PUBLISHED"
            # What other tests left in this process may go meanwhile, or be a constant more.
            assert max((settled() - before).values(), default=0) < largest / 10
    finally:
        sync._transport = good
    copy = sync.plan.targets[server.name].num_bytes
    assert 3 * largest < copy  # else a sync that holds everything twice would pass
    (serving,) = (device.id for device in server.mesh.devices.flat)
    more = {device: peak[device] - num for device, num in before.items()}
    assert copy < more.pop(serving) <= copy + 1.1 * largest
    assert 0 < max(more.values()) <= 1.1 * largest


def settled() -> Counter[int]:
    gc.collect()
    return device_bytes()
