"""Every family against transformers, by tiny random models (make_family_fixtures.py), and each feature by itself."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.learner.attention import plain_attention
from rl_jax.models.model import Model
from rl_jax.settings import RopeSettings
from tests.models.families import FAMILIES, FOLDER, YARN, family, model_of, params_of


def logits_of(model: Model, params, ids) -> jax.Array:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    attend = plain_attention(model.settings, positions, jnp.ones_like(ids))
    return model.logits(params, model.hidden(params, ids, positions, attend))


def difference(name: str, settings) -> float:
    model, want = model_of(settings), family(name)
    params = {n: jnp.asarray(w) for n, w in params_of(name, model).items()}
    # Not jitted: the models share most operations, and compiling each whole one takes longer than running it.
    return float(np.abs(logits_of(model, params, jnp.asarray(want.ids)) - want.logits).max())


def test_there_is_a_file_for_each_family_and_they_are_small():
    sizes = {path.stem: path.stat().st_size for path in FOLDER.glob("*.npz")}
    assert sizes.keys() == FAMILIES.keys()
    assert max(sizes.values()) < 300_000 and sum(sizes.values()) < 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name):
    """Of logits of std 2 to 4."""
    found = difference(name, FAMILIES[name])
    print(f"{name}: {found:.1e}")
    assert found < 1e-4


NONE = RopeSettings()
OFF = [
    ("llama2", {"norm_eps": 1e-6}),
    ("llama3", {"rope": NONE}),
    ("llama3", {"rope": RopeSettings("linear", 8.0)}),
    ("llama3", {"rope": RopeSettings("llama3", 8.0, 64, low_freq_factor=2.0)}),
    ("llama3", {"rope": RopeSettings("llama3", 8.0, 64, high_freq_factor=6.0)}),
    ("smollm2", {"rope_theta": 500.0}),
    ("mistral", {"window": 0}),
    ("mistral", {"window": 8}),
    ("mistral", {"full_every": 2}),
    ("gemma2", {"attention_softcap": 0.0}),
    ("gemma2", {"logit_softcap": 0.0}),
    ("gemma2", {"attention_scale": 0.0}),
    ("gemma2", {"full_every": 0}),
    ("gemma2", {"full_every": 3}),
    ("gemma2", {"activation": "silu"}),
    ("gemma2", {"scale_embed": False}),
    ("gemma2", {"norm_offset": False}),
    ("gemma2", {"post_norms": False}),
    ("gemma3", {"rope_theta_local": 0.0}),
    ("gemma3", {"rope": NONE}),
    ("gemma3", {"window": 0, "full_every": 0, "rope_theta_local": 0.0}),
    ("gemma3", {"qk_norm": False}),
    ("qwen3", {"qk_norm": False}),
    ("qwen2", {"qkv_bias": False}),
    ("linear", {"rope": NONE}),
    ("yarn", {"rope": NONE}),
    ("yarn", {"rope": replace(YARN, attention_factor=1.0)}),
    ("yarn", {"rope": replace(YARN, beta_fast=32.0)}),
    ("yarn", {"rope": replace(YARN, beta_slow=0.5)}),
    ("yarn", {"rope": RopeSettings("linear", 4.0)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"), OFF, ids=[f"{name}-{'-'.join(changes)}" for name, changes in OFF]
)
def test_without_a_feature_the_logits_are_others(name, changes):
    assert difference(name, replace(FAMILIES[name], **changes)) > 1e-2
