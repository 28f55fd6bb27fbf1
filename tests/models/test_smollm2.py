"""SmolLM2-135M-Instruct, converted from its GGUF file: against transformers, which read that file itself.

Runs where the model is (smollm2.py).
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tokenizers import Tokenizer

from rl_jax.launch import resolve
from rl_jax.learner.attention import plain_attention
from rl_jax.models import hf, hf_config
from rl_jax.models.decoder import build_model
from rl_jax.settings import ModelSettings
from rl_jax.tokens.load import load_tokenizer, make_renderer
from rl_jax.types import Message
from tests.data.make_smollm2_logits import NUM_NEW, PROMPT, TEXT
from tests.models.numpy_reader import NumpyModel
from tests.models.smollm2 import DIRECTORY, needs_smollm2

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = np.load(ROOT / "tests" / "data" / "smollm2_logits.npz")

pytestmark = [
    pytest.mark.slow,
    needs_smollm2,
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded():
    settings = hf_config.settings_of(hf_config.read(DIRECTORY), ModelSettings())
    model = build_model(settings, settings.vocab_size)
    place = SingleDeviceSharding(jax.devices()[0])
    return model, hf.load(DIRECTORY, model, dict.fromkeys(model.abstract, place))


@pytest.fixture(scope="module")
def forward(loaded):
    """tokens [T] -> logits [T, V], T at most 64: one program."""
    model, params = loaded
    length = 64
    positions, segments = jnp.arange(length)[None], jnp.ones((1, length), jnp.int32)
    attend = plain_attention(model.settings, positions, segments)
    run = jax.jit(lambda p, t: model.logits(p, model.hidden(p, t, positions, attend))[0])

    def logits(tokens):
        row = np.zeros((1, length), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(run(params, row))[: len(tokens)]

    return logits


def test_ids_of_a_text_are_those_of_transformers(tokenizer):
    assert tokenizer.encode(TEXT, add_special_tokens=False).ids == FIXTURE["text_ids"].tolist()
    assert tokenizer.decode(FIXTURE["text_ids"], skip_special_tokens=False) == TEXT


def test_logits_are_those_of_transformers(forward):
    found = np.take_along_axis(forward(FIXTURE["tokens"]), FIXTURE["ids"], axis=1)
    # 30 layers of float32 sums in another order: 1.3e-4 measured, of logits up to 30
    np.testing.assert_allclose(found, FIXTURE["logits"], atol=2e-4)


def test_plain_numpy_reads_the_same_model():
    logits = NumpyModel(DIRECTORY, np.float32).logits(FIXTURE["tokens"])
    found = np.take_along_axis(logits, FIXTURE["ids"], axis=1)
    np.testing.assert_allclose(found, FIXTURE["logits"], atol=2e-4)


def test_capital_of_france_is_paris(forward, tokenizer):
    tokens = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    assert tokens == FIXTURE["tokens"].tolist()
    for _ in range(NUM_NEW):
        tokens.append(int(forward(tokens)[-1].argmax()))
    new = tokens[-NUM_NEW:]
    assert new == FIXTURE["greedy"].tolist()
    assert tokenizer.decode(new).startswith(" Paris")


def test_chat_form_of_the_question_is_answered(forward):
    """The directory's own template and end of turn, as a run renders and reads them."""
    renderer = make_renderer(load_tokenizer(str(DIRECTORY), resolve), "auto", resolve)
    question = [Message("user", "What is the capital of France?")]
    tokens = renderer.first(question).tolist()
    text = renderer.tokenizer.decode(tokens)
    assert text.startswith("<|im_start|>system\n") and text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    said = []
    while not renderer.is_closed(np.array(said, np.int32)):
        said.append(int(forward([*tokens, *said])[-1].argmax()))
    assert "The capital of France is Paris" in renderer.parse(np.array(said, np.int32)).text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_load_holds_little_beside_the_arrays(loaded):
    """Peak resident memory of a load, in a process of its own, is the arrays and at most the largest of them again."""
    model, params = loaded
    arrays = sum(p.nbytes for p in params.values())
    code = f"""
import jax
from jax.sharding import SingleDeviceSharding
from pathlib import Path
from rl_jax.models import hf, hf_config
from rl_jax.models.decoder import build_model
from rl_jax.settings import ModelSettings
settings = hf_config.settings_of(hf_config.read({str(DIRECTORY)!r}), ModelSettings())
model = build_model(settings, settings.vocab_size)
place = SingleDeviceSharding(jax.devices()[0])
jax.numpy.zeros(3).block_until_ready()
resident = lambda name: int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024
before = resident("VmRSS")
params = hf.load({str(DIRECTORY)!r}, model, dict.fromkeys(model.abstract, place))
print(resident("VmHWM") - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < arrays + max(p.nbytes for p in params.values())
