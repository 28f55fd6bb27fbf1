"""The model of the tests: two layers, 32 wide; every optional part can be switched on."""

from dataclasses import replace
from typing import Any

import jax

from rl_jax.models.decoder import build_model
from rl_jax.models.model import Model, Params
from rl_jax.settings import ModelSettings

TINY = ModelSettings(
    num_layers=2, embed_size=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64
)
# What Gemma models have beyond that, all at once: a window on every second layer, soft caps, norms behind.
GEMMA = {
    "num_layers": 3, "window": 7, "full_every": 2, "rope_theta_local": 100.0, "attention_scale": 0.5,
    "attention_softcap": 2.0, "logit_softcap": 3.0, "activation": "gelu_tanh", "scale_embed": True,
    "norm_offset": True, "post_norms": True, "qk_norm": True,
}  # fmt: skip
TINY_VOCAB = 264  # the byte tokenizer's: 8 specials and 256 bytes


def tiny_settings(**changes: Any) -> ModelSettings:
    """TINY with some fields changed."""
    return replace(TINY, **changes)


def tiny_model(seed: int = 0, vocab_size: int = TINY_VOCAB, **changes: Any) -> tuple[Model, Params]:
    """A tiny model and fresh params on the default device; a fixture may keep both."""
    model = build_model(tiny_settings(**changes), vocab_size)
    return model, jax.jit(model.init)(jax.random.key(seed))
