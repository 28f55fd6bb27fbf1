"""A tiny engine, shared by all tests of the folder, and the few steps by which tests drive one."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.engine import JaxEngine
from rl_jax.engine.chunks import Piece, pack
from rl_jax.engine.state import FINISH_REASONS
from rl_jax.mesh import SERVE_RULES, make_mesh
from rl_jax.models.attention import attention, causal_segment_mask
from rl_jax.settings import EngineSettings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.types import SlotSampling

SETTINGS = EngineSettings(
    slots=6,
    context=64,
    page_size=16,
    steps_per_block=4,
    chunk_sizes=(16, 64),
    chunk_requests=4,
    num_stop_tokens=3,
)


@dataclass
class Result:
    """What one slot sampled."""

    tokens: list[int]
    logprobs: list[float]
    sampled_logprobs: list[float]
    finish: object = None
    is_nan: bool = False

    def assert_same(self, other: "Result") -> None:
        """The same tokens. A matrix product rounds by the rows beside it on some processors, so not the same bits."""
        assert self.tokens == other.tokens
        np.testing.assert_allclose(self.logprobs, other.logprobs, atol=1e-5)


def make_engine(model, *, axes=None, devices=1, **changes) -> JaxEngine:
    mesh = make_mesh(axes or {}, jax.devices()[:devices])
    return JaxEngine(model, mesh, SERVE_RULES, replace(SETTINGS, **changes), "test")


def place(engine: JaxEngine, params):
    """As a server holds them."""
    return engine.pack({n: jax.device_put(x, engine.param_shardings[n]) for n, x in params.items()})


def sampling(contexts, *, num_stop=3, epoch=0, **fields) -> SlotSampling:
    """Of slots about to generate after these contexts. fields: a value for all, or one per context."""
    R = len(contexts)
    defaults = {
        "seed": 0, "token_index": 0, "max_new_tokens": 1000, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "stops": (),
    }  # fmt: skip
    fields = defaults | fields
    stops = fields.pop("stops")
    dtypes = {"seed": np.uint64, "temperature": np.float32, "top_p": np.float32}
    arrays = {
        name: np.broadcast_to(np.array(value, dtypes.get(name, np.int32)), (R,)).copy()
        for name, value in fields.items()
    }
    stop_ids = np.full((R, num_stop), -1, np.int32)
    stop_ids[:, : len(stops)] = stops
    return SlotSampling(
        last_token=np.array([c[-1] for c in contexts], np.int32),
        context_length=np.array([len(c) for c in contexts], np.int32),
        stop_token_ids=stop_ids,
        epoch=np.full(R, epoch, np.int32),
        **arrays,
    )


def tables_of(engine, slots):
    """Pages of each slot, as if a slot's were always its own, in an order that is not theirs in memory."""
    N = engine.settings.table_pages
    own = np.random.default_rng(7).permutation(engine.spec.num_pages)[: engine.settings.slots * N]
    return own.reshape(-1, N)[np.asarray(slots, int)].astype(np.int32)


def append_all(engine, params, state, slots, contexts, starts=None):
    """KV of contexts[r][starts[r]:-1] to the slots, chunk by chunk, one request after the other."""
    for r, context in enumerate(contexts):
        start = 0 if starts is None else starts[r]
        largest = engine.settings.chunk_sizes[-1]
        for at in range(start, len(context) - 1, largest):
            piece = Piece(np.array(context[at : min(at + largest, len(context) - 1)], np.int32), at)
            chunk = pack([piece], engine.settings.chunk_sizes)
            state = engine.append(params, state, tables_of(engine, [slots[r]]), chunk)
    return state


def run_blocks(engine, params, state, slots, num_blocks):
    """(state, Result per slot) of so many blocks."""
    results = {slot: Result([], [], []) for slot in slots}
    tables = tables_of(engine, range(engine.settings.slots))
    for _ in range(num_blocks):
        state, block = engine.generate(params, state, tables)
        for slot, result in results.items():
            valid = np.asarray(block.valid)[slot]
            result.tokens += np.asarray(block.tokens)[slot][valid].tolist()
            result.logprobs += np.asarray(block.logprobs)[slot][valid].tolist()
            result.sampled_logprobs += np.asarray(block.sampled_logprobs)[slot][valid].tolist()
            code = int(np.asarray(block.finish)[slot])
            result.finish = FINISH_REASONS[code] if code else result.finish
            result.is_nan |= bool(np.asarray(block.nan)[slot])
    return state, results


def sample_one(engine, params, context, *, slot=0, num_blocks=2, **fields) -> Result:
    """What a fresh slot samples after the context, alone in its engine."""
    state = append_all(engine, params, engine.init_state(), [slot], [context])
    state = engine.arm(state, np.array([slot], np.int32), sampling([context], **fields))
    return run_blocks(engine, params, state, [slot], num_blocks)[1][slot]


def kv_of(engine, state, slot, num_tokens):
    """[layer][k, v]: f32[num_tokens, K, Dh] of a slot's context."""
    pages = tables_of(engine, [slot])[0, : engine.spec.pages_of(num_tokens)]
    flat = lambda x: np.asarray(x, np.float32).reshape(-1, *x.shape[2:])[:num_tokens]
    return jax.tree.map(flat, engine.extract(state, pages))


@pytest.fixture(scope="session")
def kit(tiny):
    """The helpers above, and `forward`: log-softmax of logits / T at each next token, from one whole forward."""
    model = tiny[0].packed

    @jax.jit
    def log_probs(params, tokens, temperature):
        positions = jnp.arange(tokens.shape[1])[None]
        mask = causal_segment_mask(positions, positions, positions * 0, positions * 0)
        hidden = model.hidden(
            params, tokens, positions, lambda _, q, k, v: attention(q, k, v, mask)
        )
        return jax.nn.log_softmax(model.logits(params, hidden) / temperature)[0]

    def forward(params, context, tokens, temperature=1.0, filter=lambda logp: logp):
        whole = np.array([*context, *tokens], np.int32)
        padded = np.zeros(64, np.int32)  # one shape, one compile
        padded[: len(whole)] = whole
        logp = filter(np.asarray(log_probs(params, padded[None], temperature)))
        return logp[np.arange(len(context) - 1, len(whole) - 1), tokens]

    return SimpleNamespace(
        make_engine=make_engine,
        place=place,
        sampling=sampling,
        append_all=append_all,
        tables_of=tables_of,
        kv_of=kv_of,
        run_blocks=run_blocks,
        sample_one=sample_one,
        forward=forward,
        SETTINGS=SETTINGS,
    )


@pytest.fixture(scope="session")
def tiny():
    """(Model, Params); a wide embedding scale makes the distribution far from uniform."""
    model, params = tiny_model(seed=1)
    return model, {n: x * 8 if n == "embed" else x for n, x in params.items()}


@pytest.fixture(scope="session")
def engine(tiny):
    return make_engine(tiny[0])


@pytest.fixture(scope="session")
def params(tiny, engine):
    return place(engine, tiny[1])


@pytest.fixture
def rng():
    return np.random.default_rng(0)
