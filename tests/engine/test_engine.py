"""The engine against one whole forward, and against itself in other places, company and order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.packed_attention import packed_attention_ref
from rl_jax.engine import engine as engine_module
from rl_jax.engine import programs
from rl_jax.engine.chunks import Piece, fresh_chunk, is_fresh, pack, padding_chunk
from rl_jax.lowering import LoweringError
from rl_jax.types import FinishReason
from tests.engine.conftest import SETTINGS


def context_of(rng, n):
    return rng.integers(8, 264, n).tolist()


def test_prefill_and_decode_equal_one_forward(engine, params, kit, rng):
    """As between two servers: pages computed in one cache go to other pages of another one."""
    contexts = [context_of(rng, n) for n in (2, 17, 30)]
    pieces = [Piece(np.array(c[:-1], np.int32), 0) for c in contexts]
    chunk = pack(pieces, engine.settings.chunk_sizes)
    made = engine.append(params, engine.init_state(), kit.tables_of(engine, [1, 5, 3]), chunk)
    slots = np.array([4, 0, 2], np.int32)
    state = engine.arm(engine.init_state(), slots, kit.sampling(contexts, seed=[1, 2, 3]))
    for source, slot, context in zip([1, 5, 3], slots, contexts):
        num = engine.spec.pages_of(len(context) - 1)
        kv = engine.extract(made, kit.tables_of(engine, [source])[0, :num])
        state = engine.insert(state, kv, kit.tables_of(engine, [slot])[0, :num])
    _, results = kit.run_blocks(engine, params, state, slots.tolist(), 3)
    for context, slot in zip(contexts, slots.tolist()):
        got = results[slot]
        assert len(got.tokens) == 12
        want = kit.forward(params, context, got.tokens)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-5)


def test_turns_appended_in_place_equal_one_forward(engine, params, kit, rng):
    context, start, state = context_of(rng, 9), 0, engine.init_state()
    for turn in range(4):
        state = kit.append_all(engine, params, state, [3], [context], [start])
        armed = kit.sampling([context], seed=turn, max_new_tokens=5)
        state = engine.arm(state, np.array([3], np.int32), armed)
        state, results = kit.run_blocks(engine, params, state, [3], 2)
        got = results[3]
        assert (len(got.tokens), got.finish) == (5, FinishReason.LENGTH)
        want = kit.forward(params, context, got.tokens)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-5)
        start = (
            len(context) + 4
        )  # the last sampled token's KV is not there: the next append starts with it
        context = context + got.tokens + context_of(rng, 6)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_result_is_the_same_in_every_slot_and_company(engine, params, kit, rng, temperature):
    context = context_of(rng, 21)
    alone = kit.sample_one(engine, params, context, seed=2**63 + 5, temperature=temperature)
    for slot, num_others in ((5, 3), (2, 5)):
        others = [context_of(rng, int(n)) for n in rng.integers(1, 40, num_others)]
        slots = np.array([slot, *[s for s in range(6) if s != slot][:num_others]], np.int32)
        contexts = [context, *others]
        state = kit.append_all(engine, params, engine.init_state(), slots[1:], others)
        # The request's own tokens come in odd pieces, packed behind a neighbour's.
        for start, end in ((0, 1), (1, 12), (12, 20)):
            pieces = [Piece(np.array(others[0][:1], np.int32), 0)]
            pieces.append(Piece(np.array(context[start:end], np.int32), start))
            chunk = pack(pieces, engine.settings.chunk_sizes)
            state = engine.append(params, state, kit.tables_of(engine, slots[[1, 0]]), chunk)
        armed = kit.sampling(
            contexts,
            seed=[2**63 + 5, *range(num_others)],
            temperature=[temperature, *[1.0] * num_others],
            top_p=[1.0, *[0.7] * num_others],
        )
        state = engine.arm(state, slots, armed)
        _, results = kit.run_blocks(engine, params, state, [slot], 2)
        results[slot].assert_same(alone)


@pytest.mark.slow
@pytest.mark.bits
def test_result_does_not_depend_on_block_size(tiny, engine, params, kit, rng):
    context = context_of(rng, 10)
    want = kit.sample_one(engine, params, context, seed=7, num_blocks=3)
    for steps in (1, 6):
        other = kit.make_engine(tiny[0], steps_per_block=steps)
        got = kit.sample_one(other, params, context, seed=7, num_blocks=12 // steps)
        got.assert_same(want)


def test_whole_chunked_and_appended_contexts_have_the_same_kv(engine, params, rng, kit):
    context = np.array(context_of(rng, 50), np.int32)
    sizes, tables = engine.settings.chunk_sizes, kit.tables_of(engine, [5])
    whole = engine.append(params, engine.init_state(), tables, pack([Piece(context, 0)], sizes))
    want = kit.kv_of(engine, whole, 5, 50)
    state = engine.init_state()
    state = engine.append(params, state, tables, pack([Piece(context[:13], 0)], (16,)))
    other = Piece(np.array(context_of(rng, 9), np.int32), 0)
    chunk = pack([other, Piece(context[13:], 13)], (64,))
    state = engine.append(params, state, kit.tables_of(engine, [2, 5]), chunk)
    for got, right in zip(jax.tree.leaves(kit.kv_of(engine, state, 5, 50)), jax.tree.leaves(want)):
        np.testing.assert_allclose(got, right, atol=1e-5)


@pytest.mark.bits
def test_stopped_and_moved_slot_goes_on_as_if_never_stopped(engine, params, kit, rng):
    context, neighbour = context_of(rng, 12), context_of(rng, 5)
    whole = kit.sample_one(engine, params, context, seed=9, num_blocks=4)
    state = kit.append_all(engine, params, engine.init_state(), [1, 2], [context, neighbour])
    armed = kit.sampling([context, neighbour], seed=[9, 1])
    state = engine.arm(state, np.array([1, 2], np.int32), armed)
    state, results = kit.run_blocks(engine, params, state, [1], 2)
    first = results[1]
    state = engine.free(state, np.array([1], np.int32))
    # The neighbour goes on: the stopped slot neither advances nor loses its KV.
    state, results = kit.run_blocks(engine, params, state, [1, 2], 1)
    assert results[1].tokens == [] and len(results[2].tokens) == 4
    resumed = context + first.tokens
    num = engine.spec.pages_of(len(resumed) - 1)
    moved = engine.extract(state, kit.tables_of(engine, [1])[0, :num])
    for slot, kv in ((1, None), (4, moved)):
        if kv is not None:
            state = engine.insert(state, kv, kit.tables_of(engine, [slot])[0, :num])
        armed = kit.sampling([resumed], seed=9, token_index=8)
        state = engine.arm(state, np.array([slot], np.int32), armed)
        state, results = kit.run_blocks(engine, params, state, [slot], 2)
        assert first.tokens + results[slot].tokens == whole.tokens
        assert first.logprobs + results[slot].logprobs == whole.logprobs
        state = engine.free(state, np.array([slot], np.int32))


@pytest.mark.bits
def test_slots_that_share_pages_sample_as_if_alone(engine, params, kit, rng):
    """Samples of one prompt of 37 tokens: two whole pages are everybody's, what is left of the third is copied."""
    prompt = context_of(rng, 38)
    alone = [kit.sample_one(engine, params, prompt, seed=i, num_blocks=3) for i in range(3)]
    tables = np.full((6, 4), -1, np.int32)
    tables[1] = 3, 17, 8, 2
    tables[4], tables[5] = (3, 17, 9, 10), (3, 17, 20, 21)
    chunk = pack([Piece(np.array(prompt[:-1], np.int32), 0)], engine.settings.chunk_sizes)
    state = engine.append(params, engine.init_state(), tables[1:2], chunk)
    state = engine.copy(state, np.array([8, 8], np.int32), np.array([9, 20], np.int32))
    armed = kit.sampling([prompt] * 3, seed=[0, 1, 2])
    state = engine.arm(state, np.array([1, 4, 5], np.int32), armed)
    found = {slot: [] for slot in (1, 4, 5)}
    for _ in range(3):
        state, block = engine.generate(params, state, tables)
        for slot, tokens in found.items():
            tokens += np.asarray(block.tokens)[slot].tolist()
    assert list(found.values()) == [one.tokens for one in alone]


def test_a_page_given_on_with_values_that_are_not_finite_harms_nobody(engine, params, kit, rng):
    context = context_of(rng, 21)
    want = kit.sample_one(engine, params, context, seed=5)
    state = engine.init_state()
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine.extract(state, np.arange(4)))
    for page in range(0, engine.spec.num_pages, 4):
        state = engine.insert(state, bad, np.arange(page, page + 4))
    state = kit.append_all(engine, params, state, [0], [context])
    state = engine.arm(state, np.array([0], np.int32), kit.sampling([context], seed=5))
    kit.run_blocks(engine, params, state, [0], 2)[1][0].assert_same(want)


def test_finish_reasons_and_what_wins(engine, params, kit, rng):
    context = context_of(rng, 20)
    tokens = kit.sample_one(engine, params, context, seed=4).tokens
    third = tokens.index(tokens[2])  # the first place of the third token

    def finish(**fields):
        result = kit.sample_one(engine, params, context, seed=4, num_blocks=2, **fields)
        return len(result.tokens), result.finish

    assert finish(stops=(tokens[2],)) == (third + 1, FinishReason.EOS)
    assert finish(stops=(3, tokens[2])) == (third + 1, FinishReason.STOP)
    assert finish(max_new_tokens=1) == (1, FinishReason.LENGTH)
    assert finish(max_new_tokens=third + 1, stops=(tokens[2],)) == (third + 1, FinishReason.EOS)
    assert finish(max_new_tokens=8) == (8, FinishReason.LENGTH)
    assert finish() == (8, None)


def test_context_is_filled_to_its_last_token(engine, params, kit, rng):
    context = context_of(rng, 61)
    result = kit.sample_one(engine, params, context, seed=4, num_blocks=1)
    assert (len(result.tokens), result.finish) == (3, FinishReason.CONTEXT)
    np.testing.assert_allclose(
        result.logprobs, kit.forward(params, context, result.tokens), atol=1e-5
    )
    result = kit.sample_one(engine, params, context[:60] + [9, 9, 9], num_blocks=1)
    assert (len(result.tokens), result.finish) == (1, FinishReason.CONTEXT)
    result = kit.sample_one(engine, params, context, num_blocks=1, max_new_tokens=3)
    assert (len(result.tokens), result.finish) == (3, FinishReason.LENGTH)


def test_context_of_one_token_needs_no_kv(engine, params, kit):
    result = kit.sample_one(engine, params, [11], slot=3, seed=2, num_blocks=1)
    np.testing.assert_allclose(result.logprobs, kit.forward(params, [11], result.tokens), atol=1e-5)


def test_transformed_sampling_keeps_the_trained_logprob(engine, params, kit, rng):
    """Lesson L7: temperature 0.7 and top-p 0.8; the trainer's log-prob has the temperature and no filter."""
    context = context_of(rng, 15)
    got = kit.sample_one(engine, params, context, seed=1, temperature=0.7, top_p=0.8, num_blocks=3)
    want = kit.forward(params, context, got.tokens, temperature=0.7)
    np.testing.assert_allclose(got.logprobs, want, atol=1e-5)

    def nucleus(logp):
        order = np.argsort(-logp, axis=-1, kind="stable")
        mass = np.cumsum(np.take_along_axis(np.exp(logp), order, -1), -1)
        keep = np.concatenate([np.ones_like(mass[:, :1], bool), mass[:, :-1] < 0.8], -1)
        kept = np.zeros_like(keep)
        np.put_along_axis(kept, order, keep, -1)
        total = np.where(kept, np.exp(logp), 0).sum(-1, keepdims=True)
        return np.where(kept, logp - np.log(total), -np.inf)

    want = kit.forward(params, context, got.tokens, temperature=0.7, filter=nucleus)
    np.testing.assert_allclose(got.sampled_logprobs, want, atol=1e-5)


def test_nan_weights_end_the_turn_as_an_error_without_tokens(engine, params, kit):
    bad = {n: x * np.float32("nan") if n == "final_norm.scale" else x for n, x in params.items()}
    result = kit.sample_one(engine, bad, [9, 10, 11], num_blocks=1)
    assert (result.tokens, result.finish, result.is_nan) == ([], FinishReason.ERROR, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        {"tensor": 2},
        pytest.param({"data": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_sharded_equals_unsharded(tiny, engine, params, kit, rng, axes):
    model, host = tiny
    context = context_of(rng, 25)
    want = kit.sample_one(engine, params, context, seed=3, slot=5, num_blocks=2)
    num_devices = int(np.prod(list(axes.values())))
    sharded = kit.make_engine(model, axes=axes, devices=num_devices)
    placed = kit.place(sharded, host)
    got = kit.sample_one(sharded, placed, context, seed=3, slot=5, num_blocks=2)
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    state = kit.append_all(sharded, placed, sharded.init_state(), [2], [context])
    kv = sharded.extract(state, kit.tables_of(sharded, [2])[0, :2])
    state = sharded.insert(sharded.init_state(), kv, kit.tables_of(sharded, [5])[0, :2])
    state = sharded.arm(state, np.array([5], np.int32), kit.sampling([context], seed=3))
    _, results = kit.run_blocks(sharded, placed, state, [5], 2)
    np.testing.assert_allclose(results[5].logprobs, want.logprobs, atol=1e-4)


def test_jit_equals_no_jit(engine, params, rng):
    context = np.array(context_of(rng, 10), np.int32)
    chunk = pack([Piece(context, 0)], (16,))
    tables = np.full((4, 4), -1, np.int32)
    tables[0] = 9, 3, 11, 20
    state = engine.append(params, engine.init_state(), tables[:1], chunk)
    args = [jnp.array(a) for a in (*engine._chunk_args(chunk), tables)]
    kv = programs.extend(engine.served, params, engine.init_state().kv, *args, visible=4, tile=16)
    for pair, want in zip(kv, state.kv):
        for got, jitted in zip(pair, want):
            np.testing.assert_allclose(got, jitted, atol=1e-5)


@pytest.mark.slow
def test_after_warmup_nothing_compiles_and_the_state_is_updated_in_place(tiny, kit, rng):
    engine = kit.make_engine(tiny[0], slots=4)
    params = engine.zero_params()
    num_programs = engine.warmup(params)
    # two chunk sizes; extract and insert of one number of pages, copy; arm, disarm, generate
    assert num_programs == 2 + 3 + 3
    verbs = ("extend", "generate", "arm", "disarm", "read_pages", "write_pages", "copy_pages")
    caches = [getattr(engine, f"_{verb}") for verb in verbs]
    sizes = [f._cache_size() for f in caches]
    kit.sample_one(engine, params, context_of(rng, 40), num_blocks=1)
    state = engine.init_state()
    kv = engine.extract(state, np.arange(3))
    state = engine.insert(state, kv, np.arange(3))
    engine.copy(state, np.arange(6), np.arange(6) + 6)
    assert [f._cache_size() for f in caches] == sizes
    tables = kit.tables_of(engine, range(4))
    stats = engine._generate.lower(params, engine.init_state(), tables).compile().memory_analysis()
    assert stats.alias_size_in_bytes >= engine.spec.num_bytes  # the donated cache is the new one


@pytest.mark.slow
def test_short_histories_are_read_in_short_tables(tiny, params, kit, rng):
    engine = kit.make_engine(tiny[0], context=300)
    assert engine.visible_buckets == engine.step_buckets == (16, 19)
    context, long = context_of(rng, 60), context_of(rng, 290)
    want = kit.sample_one(kit.make_engine(tiny[0]), params, context[:50], num_blocks=1)
    state = kit.append_all(engine, params, engine.init_state(), [2], [context[:50]])
    state = engine.arm(state, np.array([2], np.int32), kit.sampling([context[:50]]))
    tables = np.full((6, 19), -1, np.int32)
    tables[2] = kit.tables_of(engine, [2])
    for width in (5, 17):
        again = jax.tree.map(jnp.copy, state)
        _, block = engine.generate(params, again, np.where(np.arange(19) < width, tables, -1))
        assert np.asarray(block.tokens)[2].tolist() == want.tokens
    assert engine._generate._cache_size() == 2
    state = kit.append_all(engine, params, engine.init_state(), [1], [long])
    state = engine.arm(state, np.array([1], np.int32), kit.sampling([long]))
    _, results = kit.run_blocks(engine, params, state, [1], 2)
    assert len(results[1].tokens) == 8


@pytest.mark.slow
def test_a_block_holds_no_second_cache(tiny, kit):
    engine = kit.make_engine(tiny[0], context=4096, steps_per_block=1)
    shapes = jax.eval_shape(lambda: (engine.zero_params(), engine.init_state()))
    tables = np.zeros((6, engine.settings.table_pages), np.int32)
    stats = engine._generate.lower(*shapes, tables).compile().memory_analysis()
    assert stats.alias_size_in_bytes >= engine.spec.num_bytes
    one_layer = (
        engine.spec.num_bytes / 2
    )  # the plain form gathers the histories of one layer at a time
    assert stats.temp_size_in_bytes < 2 * one_layer + 1e6


def test_padded_requests_write_nothing(engine, params, kit, rng):
    state = kit.append_all(engine, params, engine.init_state(), [0], [context_of(rng, 30)])
    before = jax.tree.map(np.array, state.kv)
    chunk = pack([Piece(np.array([5, 6], np.int32), 0)], engine.settings.chunk_sizes)
    tables = kit.tables_of(engine, [3])
    state = engine.append(params, state, tables, chunk)
    for pair, old in zip(state.kv, before):
        for new, was in zip(pair, old):
            changed = np.argwhere((np.asarray(new) != was).any(axis=(2, 3)))
            assert changed.tolist() == [[tables[0, 0], 0], [tables[0, 0], 1]]


def test_chunk_over_the_context_is_refused(engine, params, kit):
    chunk = pack([Piece(np.array([5], np.int32), 64)], (16,))
    with pytest.raises(ValueError, match="position 64 but engine.context=64"):
        engine.append(params, engine.init_state(), kit.tables_of(engine, [0]), chunk)


@pytest.fixture
def packing_engine(tiny, kit, monkeypatch):
    """An engine with a kernel for fresh chunks (its reference, which runs here), and what that was called for."""
    calls = []

    def of_chunk(segment, most):
        assert most == SETTINGS.chunk_requests
        ids = segment[None] + 1

        def attend(layer, q, k, v):
            calls.append(layer)
            return packed_attention_ref(q, k, v, ids)

        return attend

    monkeypatch.setattr(engine_module, "choose_chunk_attention", lambda *a: of_chunk)
    return kit.make_engine(tiny[0]), calls


def test_fresh_chunks_have_the_same_kv_from_a_kernel_over_the_chunk(
    packing_engine, engine, params, kit, rng
):
    packing, calls = packing_engine
    pieces = [Piece(np.array(context_of(rng, n), np.int32), 0) for n in (17, 1, 30)]
    chunk = pack(pieces, engine.settings.chunk_sizes)
    tables = kit.tables_of(engine, [4, 0, 2])
    found = [e.append(params, e.init_state(), tables, chunk).kv for e in (packing, engine)]
    assert sorted(set(calls)) == [0, 1]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_chunk_with_a_request_that_goes_on_reads_the_cache(
    packing_engine, engine, params, kit, rng
):
    packing, calls = packing_engine
    long, short = context_of(rng, 40), np.array(context_of(rng, 9), np.int32)
    pieces = [Piece(np.array(long[20:39], np.int32), 20), Piece(short, 0)]
    assert not is_fresh(pack(pieces, (64,))) and is_fresh(pack(pieces[1:], (64,)))
    found = []
    for e in (packing, engine):
        state = kit.append_all(e, params, e.init_state(), [1], [long[:21]])
        calls.clear()
        found.append(e.append(params, state, kit.tables_of(e, [1, 0]), pack(pieces, (64,))).kv)
        assert not calls
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_warmup_compiles_the_programs_of_fresh_chunks_too(packing_engine, params, kit, rng):
    packing, _ = packing_engine
    # as without: two chunk sizes in their two forms
    assert packing.warmup(packing.zero_params()) == 4 + 3 + 3
    assert packing.warmup(packing.zero_params(), decode=False) == 4 + 3
    num = packing._extend._cache_size()
    for n, size in ((5, 16), (40, 64)):
        chunk = pack([Piece(np.array(context_of(rng, n), np.int32), 0)], (size,))
        packing.append(params, packing.init_state(), kit.tables_of(packing, [1]), chunk)
    assert packing._extend._cache_size() == num


@pytest.mark.parametrize(("size", "visible", "length"), [(16, 256, 16), (64, 20, 20), (64, 64, 64)])
def test_fresh_padding_reaches_as_far_as_a_chunk_can(size, visible, length):
    chunk = fresh_chunk(size, 4, visible)
    assert is_fresh(chunk) and chunk.lengths.tolist() == [length, 0, 0, 0]
    assert chunk.position[chunk.segment == 0].tolist() == list(range(length))


@pytest.mark.slow
def test_programs_lowered_from_shapes_are_those_that_a_server_runs(engine, params, kit):
    live = len(jax.live_arrays())
    decode, prefill = dict(engine.lower()), dict(engine.lower(decode=False))
    assert len(jax.live_arrays()) == live
    shared = {f"test {verb}" for verb in ("append", "extract", "insert", "copy")}
    assert shared | {"test arm", "test free", "test generate"} < {*decode}
    assert shared < {*prefill} and "test generate" not in prefill
    state = engine.init_state()
    tables = np.zeros((6, 4), np.int32)
    generate = engine._generate.lower(params, state, tables)
    assert decode["test generate"].as_text() == generate.as_text()
    free = engine._disarm.lower(state.slots, np.zeros(6, np.int32))
    assert decode["test free"].as_text() == free.as_text()
    chunk = padding_chunk(64, 4, 64)
    arguments = (*engine._chunk_args(chunk), np.zeros((4, 4), np.int32))
    append = engine._extend.lower(params, state.kv, *arguments, visible=4, **engine._how(chunk))
    assert decode["test append"].as_text() == append.as_text()


def test_model_that_does_not_divide_is_told_with_the_program(tiny, kit):
    engine = kit.make_engine(tiny[0], axes={"tensor": 8}, devices=8)  # 4 query heads, 2 kv heads
    with pytest.raises(LoweringError, match="^test weights cannot be traced: IndivisibleError: "):
        list(engine.lower())
