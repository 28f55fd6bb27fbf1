"""The HTTP planes over a DecodeServer with a FakeEngine, and over a scripted FakeSampler; see testing/http_world.py."""

from importlib.util import find_spec

import pytest

from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.tokens import ByteTokenizer

# The HTTP interface is an extra: without it there is nothing here.
if not all(map(find_spec, ("fastapi", "uvicorn"))):
    collect_ignore_glob = ["test_*.py"]
else:
    from rl_jax.testing.http_world import (
        ENGINE,
        PATIENCE_S,
        World,
        close,
        make_world,
        until,
    )


@pytest.fixture(scope="session")
def shared_world():
    world = make_world()
    yield world
    close(world)


@pytest.fixture
def world(shared_world):
    """The one that tests share; each leaves it as it was."""
    yield shared_world
    shared_world.pace.block_s = 0.0
    until(shared_world.is_still, "the server to be idle")


@pytest.fixture
def own_world():
    """`own_world(**of World)`: one for a test that ends it, or changes its weights."""
    made = []

    def make(**named):
        made.append(make_world(**named))
        return made[-1]

    yield make
    for world in made:
        close(world)


@pytest.fixture(scope="session")
def scripted():
    """Planes over a FakeSampler; `scripted.say(text)` is what it will say."""
    sampler = FakeSampler(context=ENGINE.context)
    world = World(sampler)
    tokenizer = ByteTokenizer()

    def say(text, end=True):
        tokens = [*tokenizer.encode(text), *([tokenizer.end] if end else [])]
        sampler.script = lambda request: tokens

    world.say = say
    yield world
    world.stop()


def openai_client(world):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(
        base_url=f"{world.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    )


@pytest.fixture
def client(world):
    with openai_client(world) as client:
        yield client


@pytest.fixture
def scripted_client(scripted):
    with openai_client(scripted) as client:
        yield client
