"""The adapter under google-jetstream's own contract: prefill, device_put, insert, generate, process_result_tokens."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rl_jax.engine import JaxEngine
from rl_jax.mesh import SERVE_RULES, make_mesh
from rl_jax.serve import DecodeServer
from rl_jax.settings import EngineSettings, ServeSettings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.tokens.byte import ByteTokenizer

has_jetstream = importlib.util.find_spec("jetstream") is not None
needs_jetstream = pytest.mark.skipif(
    not has_jetstream, reason="needs the extra jetstream (3 GB with TensorFlow)"
)
SETTINGS = EngineSettings(
    slots=3, context=64, page_size=16, steps_per_block=1, chunk_sizes=(16, 32), chunk_requests=2
)
PROMPTS = [np.arange(20, 20 + n, dtype=np.int32) % 250 + 8 for n in (1, 5, 17, 31, 30)]
BOS = 3


def engine_on(device: int, model, **changes) -> JaxEngine:
    mesh = make_mesh({}, jax.devices()[device : device + 1])
    return JaxEngine(model, mesh, SERVE_RULES, replace(SETTINGS, **changes), f"engine.{device}")


@pytest.fixture(scope="module")
def world():
    """Two adapters on two devices, and what a DecodeServer says to a context, greedily."""
    from rl_jax.serve.jetstream import JetStreamEngine, JetStreamTokenizer

    model, params = tiny_model()
    params = {name: 4 * x for name, x in params.items()}
    tokenizer = JetStreamTokenizer(ByteTokenizer(), BOS)
    engines = [engine_on(device, model) for device in (0, 1)]
    placed = lambda engine: {
        n: jax.device_put(x, engine.param_shardings[n]) for n, x in params.items()
    }
    adapters = [JetStreamEngine(e, lambda e=e: placed(e), tokenizer) for e in engines]
    server = DecodeServer(
        "decode.0", "decode", engine_on(0, model, steps_per_block=4), ServeSettings()
    )
    server.start()
    server.stage("first", 0, 0, placed(server.engine))
    server.commit("first", "keep", 60.0)
    server.wait_ready(120)
    yield SimpleNamespace(adapters=adapters, tokenizer=tokenizer, server=server)
    server.close()


def orchestrate(prefill, generate, prompts, max_tokens: int) -> list[list[int]]:
    """As the threads of JetStream's Driver do, one after the other; more prompts than slots."""
    from jetstream.engine import token_utils

    tokenizer = prefill.build_tokenizer(prefill.get_tokenizer())
    prefill_params, params = prefill.load_params(), generate.load_params()
    state, free, live = (
        generate.init_decode_state(),
        list(range(generate.max_concurrent_decodes)),
        {},
    )
    out, left = [[] for _ in prompts], list(enumerate(prompts))
    while left or live:
        while left and free:
            i, prompt = left.pop(0)
            padded, true_length = token_utils.pad_tokens(
                prompt, tokenizer.bos_id, tokenizer.pad_id,
                max_prefill_length=prefill.max_prefill_length,
            )  # fmt: skip
            prefix = prefill.prefill(
                params=prefill_params, padded_tokens=padded, true_length=true_length
            )
            prefix = jax.device_put(prefix, generate.get_prefix_destination_sharding())
            state = generate.insert(prefix, state, slot=(slot := free.pop()))
            for leaf in jax.tree.leaves(prefix):
                leaf.delete()
            live[slot] = i, np.zeros(generate.samples_per_slot, bool)
        state, result = generate.generate(params, state)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        for slot, (i, complete) in list(live.items()):
            (sample,), complete = token_utils.process_result_tokens(
                tokenizer, slot, max_tokens, result, complete, is_client_side_tokenization=True
            )
            out[i] += sample.token_ids
            live[slot] = i, complete
            if complete.all():
                del live[slot]
                free.append(slot)
    return out


def served(world, kit, context, max_tokens: int) -> list[int]:
    """What our own server says, without the stop id that JetStream does not hand out."""
    stops = tuple(world.tokenizer.stop_tokens)
    uid = f"s{len(context)}.{max_tokens}.{np.random.default_rng().integers(1 << 60)}"
    fields = {"temperature": 0.0, "max_new_tokens": max_tokens, "stop_token_ids": stops}
    done = []
    world.server.submit(kit.request(uid, context, **fields), None, done.append)
    kit.until(lambda: done)
    world.server.release(f"{uid}#0")
    tokens = done[0].tokens.tolist()
    return tokens[:-1] if tokens[-1] in stops else tokens


@needs_jetstream
@pytest.mark.slow
@pytest.mark.parametrize("places", [(0, 0), (0, 1)], ids=["interleaved", "disaggregated"])
def test_greedy_tokens_are_our_servers(world, kit, places):
    prefill, generate = (world.adapters[i] for i in places)
    for max_tokens in (1, 9):
        out = orchestrate(prefill, generate, PROMPTS, max_tokens)
        expected = [served(world, kit, [BOS, *p.tolist()], max_tokens) for p in PROMPTS]
        assert out == expected
    assert len({tuple(tokens) for tokens in out}) > 2, "the model says different things"


@needs_jetstream
@pytest.mark.slow
def test_a_slot_ends_at_the_full_context(world, kit):
    out = orchestrate(*world.adapters, PROMPTS[3:], 1000)
    assert out == [served(world, kit, [BOS, *p.tolist()], 1000) for p in PROMPTS[3:]]


@needs_jetstream
@pytest.mark.slow
def test_prefill_goes_on_behind_an_existing_prefix(world):
    adapter, params = world.adapters[0], world.adapters[0].load_params()
    prefill = lambda tokens, before=None: adapter.prefill(
        params=params, existing_prefix=before, padded_tokens=tokens, true_length=len(tokens)
    )
    tokens = np.arange(40, 70, dtype=np.int32)
    made = []
    for prefix in (prefill(tokens), prefill(tokens[19:], prefill(tokens[:19]))):
        assert np.asarray(prefix.end).tolist() == [69, 30]
        state = adapter.insert(prefix, adapter.init_decode_state(), slot=1)
        made.append([])
        for _ in range(8):
            state, result = adapter.generate(params, state)
            made[-1].append(int(result.get_result_at_slot(1).tokens[0, 0]))
    assert made[0] == made[1]


@needs_jetstream
@pytest.mark.slow
def test_settings_that_do_not_suit_jetstream_are_refused(world):
    from rl_jax.serve.jetstream import JetStreamEngine

    for changes, match in (
        ({"steps_per_block": 4}, "engine.steps_per_block=4; .* with 1 only"),
        ({"num_pages": 5}, "engine.num_pages=5 are fewer than the 12 of all slots"),
        ({"context": 16}, "engine.context=16; .* must be 17 at least"),
    ):
        engine = SimpleNamespace(settings=replace(SETTINGS, **changes))
        with pytest.raises(ValueError, match=match):
            JetStreamEngine(engine, dict, world.tokenizer)
    with pytest.raises(ValueError, match="a prompt of 64 tokens; engine.context=64 takes 1 to 63"):
        adapter = world.adapters[0]
        adapter.prefill(params=None, padded_tokens=np.zeros(64, np.int32), true_length=64)


@pytest.mark.skipif(has_jetstream, reason="google-jetstream is installed")
def test_without_the_extra_the_import_says_what_to_install():
    with pytest.raises(ImportError, match=r"install the extra: pip install 'rl_jax\[jetstream\]'"):
        importlib.import_module("rl_jax.serve.jetstream")
