"""What clients of a served model ask for beyond rollout: scores of their own tokens, stops held off; and that nobody
else runs another program for it."""

import jax
import numpy as np
import pytest

from rl_jax.engine import JaxEngine
from rl_jax.engine.chunks import Piece, pack
from rl_jax.mesh import SERVE_RULES, make_mesh
from rl_jax.serve.decode_server import fetched
from tests.engine.conftest import SETTINGS

pytestmark = pytest.mark.slow(seconds=3)
A = 4  # alternatives
CLOSE = {"atol": 1e-5, "rtol": 2e-6}  # a log-prob of -30 has fewer digits behind the point


@pytest.fixture(scope="module")
def asked(tiny):
    mesh = make_mesh({}, jax.devices()[:1])
    return JaxEngine(tiny[0], mesh, SERVE_RULES, SETTINGS, "test", likely=A)


def test_scores_are_those_of_one_forward(asked, params, kit, rng):
    """Two prompts in one chunk, one of them behind a chunk of its own; their KV is append's."""
    first, second = (rng.integers(8, 264, n).astype(np.int32) for n in (3, 40))
    slots, state = [2, 5], asked.init_state()
    got = {2: [], 5: []}
    for of in ([(5, second, 0, 17)], [(2, first, 0, 2), (5, second, 17, 39)]):
        pieces = [Piece(tokens[start:end], start) for _, tokens, start, end in of]
        chunk = pack(pieces, asked.settings.chunk_sizes[-1:])
        targets = np.zeros_like(chunk.tokens)
        told = np.concatenate([tokens[start + 1 : end + 1] for _, tokens, start, end in of])
        targets[: len(told)] = told
        tables = kit.tables_of(asked, [slot for slot, *_ in of])
        state, scores = asked.score(params, state, tables, chunk, targets)
        at = 0
        for slot, _, start, end in of:
            got[slot].append([np.asarray(x)[at : at + end - start] for x in scores])
            at += end - start
    for slot, tokens in zip(slots, (first, second)):
        logprobs, ranks, nan, ids, likely = map(np.concatenate, zip(*got[slot]))
        whole = []  # [64, V]
        keep = lambda logp, whole=whole: whole.append(logp) or logp
        want = kit.forward(params, tokens[:1], tokens[1:], filter=keep)
        np.testing.assert_allclose(logprobs, want, **CLOSE)
        assert not nan.any()
        for i, (there, token) in enumerate(zip(whole[0], tokens[1:])):
            np.testing.assert_allclose(likely[i], np.sort(there)[: -A - 1 : -1], **CLOSE)
            np.testing.assert_allclose(likely[i], there[ids[i]], **CLOSE)
            assert ranks[i] == 1 + (there > there[token]).sum()
    appended = kit.append_all(asked, params, asked.init_state(), [5], [second.tolist()])
    for a, b in zip(
        jax.tree.leaves(kit.kv_of(asked, state, 5, 39)),
        jax.tree.leaves(kit.kv_of(asked, appended, 5, 39)),
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_stop_that_is_held_off_is_not_sampled_before_its_time(asked, params, kit, rng):
    context = rng.integers(8, 264, 9).tolist()
    free = kit.sample_one(asked, params, context, seed=1, temperature=0.0)
    stop = free.tokens[0]
    slots, tables = np.array([0, 3], np.int32), kit.tables_of(asked, range(SETTINGS.slots))
    runs = []
    for held in (None, np.array([4, 0, 0, 0, 0, 0], np.int32)):
        contexts = [context, context]
        state = kit.append_all(asked, params, asked.init_state(), [0, 3], contexts)
        armed = kit.sampling(contexts, temperature=[0.0, 1.0], seed=1, stops=(stop,))
        state = asked.arm(state, slots, armed)
        runs.append(asked.generate(params, state, tables, held=held)[1])
    plain, held = map(fetched, runs)
    assert plain.valid[0].tolist() == [True, False, False, False] and plain.tokens[0, 0] == stop
    assert held.valid[0].all() and stop not in held.tokens[0] and not held.finish[0]
    # Under the distribution that is trained, and under the one without the stop token.
    want = kit.forward(params, context, held.tokens[0])
    np.testing.assert_allclose(held.logprobs[0], want, **CLOSE)
    without = kit.forward(params, context, held.tokens[0], filter=lambda logp: _without(logp, stop))
    np.testing.assert_allclose(held.sampled_logprobs[0], without, **CLOSE)
    assert plain.tokens[3].tolist() == held.tokens[3].tolist()  # the neighbour's are as they were
    np.testing.assert_allclose(plain.logprobs[3], held.logprobs[3], atol=1e-5)


def _without(logp, stop):
    cut = logp.copy()
    cut[:, stop] = -np.inf
    return cut - np.log(np.exp(cut).sum(axis=1, keepdims=True))


def test_who_asks_for_nothing_runs_the_same_programs(asked, engine):
    """As they are lowered, program by program, beside a server that cannot even be asked."""
    plain, more = dict(engine.lower()), dict(asked.lower())
    assert {name: p.as_text() for name, p in more.items() if name in plain} == {
        name: p.as_text() for name, p in plain.items()
    }
    assert {name.removeprefix("test ") for name in set(more) - set(plain)} == {
        "score", "generate_asked",
    }  # fmt: skip
