"""A model with windows, soft caps and norms behind: chunks, appended turns and steps are what training rows are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.engine.chunks import Piece, pack
from rl_jax.learner.rows import Rows
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.settings import LearnerSettings
from rl_jax.testing.tiny_model import GEMMA, tiny_model
from rl_jax.types import FinishReason

T, MOST = 64, 16  # tokens of a training row, of which this many are scored
LEARNER = LearnerSettings(row_tokens=T, microbatch_rows=1, logprob_chunk=MOST)


@pytest.fixture(scope="module")
def gemma():
    """(Model, Params) whose every weight counts, and whose logits reach their cap."""
    model, params = tiny_model(seed=1, **GEMMA)
    rng = np.random.default_rng(2)
    params = {n: p + 0.2 * rng.normal(size=p.shape).astype("f4") for n, p in params.items()}
    return model, params


@pytest.fixture(scope="module")
def engine(gemma, kit):
    return kit.make_engine(gemma[0])


@pytest.fixture(scope="module")
def params(gemma, engine, kit):
    return kit.place(engine, gemma[1])


@pytest.fixture(scope="module")
def trained(gemma):
    """(context, tokens sampled after it, temperature) -> their log-probs in a training row, behind another sequence."""
    model, params = gemma
    rows = Rows(model, make_mesh({}, jax.devices()[:1]), TRAIN_RULES, LEARNER, max_rows=1)
    run = {t: jax.jit(rows.log_probs(t)) for t in (1.0, 0.7)}

    def score(context, tokens, temperature=1.0):
        whole = [*context, *tokens]
        other = min(5, T - len(whole))
        end = other + len(whole)
        columns = np.arange(end - len(tokens), end)
        lay = lambda values, at: np.zeros((1, T), np.int32) + np.pad(values, (at, T - at - len(values)))  # fmt: skip
        slots = np.pad(columns, (0, MOST - len(columns)))[None].astype(np.int32)
        micro = {
            "tokens": lay(whole, other),
            "positions": lay(np.arange(other), 0) + lay(np.arange(len(whole)), other),
            "sample_ids": lay([1] * other, 0) + lay([2] * len(whole), other),
            "target_index": slots,
            "target_tokens": np.pad(tokens, (0, MOST - len(tokens)))[None].astype(np.int32),
            "target_mask": slots > 0,
            "num_chunks": np.int32(1),
        }
        logprobs, _ = run[temperature](params, jax.tree.map(jnp.asarray, micro))
        return np.asarray(logprobs)[0, : len(tokens)]

    return score


def context_of(rng, n):
    return rng.integers(8, 264, n).tolist()


@pytest.mark.slow
def test_prefill_and_decode_are_the_training_row(engine, params, kit, trained, rng):
    """At lag 0 the sampler's log-probs are the learner's, at the temperature of sampling."""
    contexts = [context_of(rng, n) for n in (2, 17, 30)]
    pieces = [Piece(np.array(c[:-1], np.int32), 0) for c in contexts]
    slots = np.array([4, 0, 2], np.int32)
    chunk = pack(pieces, engine.settings.chunk_sizes)
    state = engine.append(params, engine.init_state(), kit.tables_of(engine, slots), chunk)
    armed = kit.sampling(contexts, seed=[1, 2, 3], temperature=[1.0, 0.7, 1.0])
    state = engine.arm(state, slots, armed)
    _, results = kit.run_blocks(engine, params, state, slots.tolist(), 3)
    for context, slot, temperature in zip(contexts, slots.tolist(), (1.0, 0.7, 1.0), strict=True):
        got = results[slot]
        assert len(got.tokens) == 12
        want = trained(context, got.tokens, temperature)
        np.testing.assert_allclose(got.logprobs, want, atol=1e-5)


def test_turns_appended_in_place_are_the_training_row(engine, params, kit, trained, rng):
    """Contexts many windows long, whose suffixes begin within a window of what came before."""
    context, start, state = context_of(rng, 9), 0, engine.init_state()
    for turn in range(4):
        state = kit.append_all(engine, params, state, [3], [context], [start])
        armed = kit.sampling([context], seed=turn, max_new_tokens=5)
        state = engine.arm(state, np.array([3], np.int32), armed)
        state, results = kit.run_blocks(engine, params, state, [3], 2)
        got = results[3]
        assert (len(got.tokens), got.finish) == (5, FinishReason.LENGTH)
        np.testing.assert_allclose(got.logprobs, trained(context, got.tokens), atol=1e-5)
        start = len(context) + 4
        context = context + got.tokens + context_of(rng, 6)


def test_kv_is_the_same_however_a_context_is_cut(engine, params, kit, rng):
    context = np.array(context_of(rng, 50), np.int32)
    sizes, table = engine.settings.chunk_sizes, kit.tables_of(engine, [5])
    whole = engine.append(params, engine.init_state(), table, pack([Piece(context, 0)], sizes))
    state = engine.init_state()
    for start, end in ((0, 3), (3, 20), (20, 21), (21, 50)):  # across borders of tiles and windows
        chunk = pack([Piece(context[start:end], start)], sizes)
        state = engine.append(params, state, table, chunk)
    found = [jax.tree.leaves(kit.kv_of(engine, made, 5, 50)) for made in (whole, state)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_sharded_equals_unsharded(gemma, engine, params, kit, rng):
    context = context_of(rng, 25)
    want = kit.sample_one(engine, params, context, seed=3, slot=5)
    sharded = kit.make_engine(gemma[0], axes={"tensor": 2}, devices=2)
    got = kit.sample_one(sharded, kit.place(sharded, gemma[1]), context, seed=3, slot=5)
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
