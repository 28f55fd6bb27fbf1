"""The tiny models of tests/data/families (see make_family_fixtures.py): as settings, as Params, and by file."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from rl_jax.models.decoder import build_model
from rl_jax.models.model import Model
from rl_jax.settings import ModelSettings, RopeSettings

FOLDER = Path(__file__).resolve().parents[1] / "data" / "families"
WINDOW = 7

SMALL = ModelSettings(
    vocab_size=64,
    num_layers=2,
    embed_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    rope_theta=500.0,
    tie_embeddings=False,
    max_context=128,
)
GEMMA = replace(
    SMALL,
    num_layers=4,
    tie_embeddings=True,
    activation="gelu_tanh",
    scale_embed=True,
    norm_offset=True,
    post_norms=True,
    window=WINDOW,
    attention_scale=3**-0.5,
)
YARN = RopeSettings("yarn", 4.0, 256, beta_fast=8.0)
FAMILIES = {
    "llama2": replace(SMALL, num_kv_heads=4, norm_eps=1e-2),
    "llama3": replace(SMALL, rope=RopeSettings("llama3", 8.0, 64)),
    "smollm2": replace(SMALL, tie_embeddings=True, rope_theta=1000.0),
    "qwen2": replace(SMALL, qkv_bias=True),
    "qwen2_5": replace(
        SMALL, qkv_bias=True, num_kv_heads=1, tie_embeddings=True, rope_theta=1000.0
    ),
    "qwen3": replace(SMALL, qk_norm=True, head_dim=16),
    "mistral": replace(SMALL, window=WINDOW),
    "gemma2": replace(GEMMA, full_every=2, attention_softcap=2.0, logit_softcap=8.0),
    "gemma3": replace(
        GEMMA,
        full_every=3,
        qk_norm=True,
        rope_theta=2000.0,
        rope=RopeSettings("linear", 4.0),
        rope_theta_local=100.0,
    ),
    "linear": replace(SMALL, rope=RopeSettings("linear", 2.5)),
    "yarn": replace(
        SMALL, qkv_bias=True, rope_theta=100.0, head_dim=16, rope=YARN, max_context=1024
    ),
}


@dataclass(frozen=True)
class Family:
    config: str  # config.json
    weights: dict[str, np.ndarray]  # by their Hugging Face names
    ids: np.ndarray  # i32[2, T]
    logits: np.ndarray  # f32[2, T, V]


@cache
def family(name: str) -> Family:
    with np.load(FOLDER / f"{name}.npz") as file:
        weights = {n.removeprefix("weights/"): file[n] for n in file if n.startswith("weights/")}
        return Family(str(file["config.json"]), weights, file["ids"], file["logits"])


@cache
def model_of(settings: ModelSettings) -> Model:
    return build_model(settings, settings.vocab_size)


def params_of(name: str, model: Model) -> dict[str, np.ndarray]:
    """The family's weights under our names."""
    weights = family(name).weights
    return {n: _ours(n, a.shape, weights) for n, a in model.abstract.items()}


NAMES = {
    "embed": "model.embed_tokens", "unembed": "lm_head", "final_norm.scale": "model.norm",
    "attention_norm.scale": "input_layernorm", "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
    "attention.query_norm.scale": "self_attn.q_norm", "attention.key_norm.scale": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    "attention_post_norm.scale": "post_attention_layernorm", "mlp_post_norm.scale": "post_feedforward_layernorm",
}  # fmt: skip


def _ours(name: str, shape: tuple[int, ...], weights: dict[str, np.ndarray]) -> np.ndarray:
    layer, rest = "", name
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        layer = f"model.layers.{number}."
    if rest == "mlp_norm.scale":
        has_post = f"{layer}pre_feedforward_layernorm.weight" in weights
        theirs = "pre_feedforward_layernorm" if has_post else "post_attention_layernorm"
    else:
        theirs = NAMES[rest.removesuffix("_bias")]
    if rest.endswith("_bias"):
        return weights[f"{layer}{theirs}.bias"].reshape(shape)
    array = weights[f"{layer}{theirs}.weight"]
    return (array if rest == "embed" or array.ndim == 1 else array.T).reshape(shape)
