"""Makes tests/data/families/*.npz: a tiny random model of every family, and what transformers computes with it.

Of a family: its config.json as transformers writes it, its weights under their Hugging Face names, ids of two sequences
longer than any window, and their logits, all float32. Weights are drawn so that every feature changes the logits: no
norm is 1, no bias 0, scores are spread and soft caps low.
Run, in an environment of its own (made with Python 3.12, torch 2.14.1 on CPU, transformers 5.24.0):
    pip install torch transformers && python tests/models/make_family_fixtures.py
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

OUT = Path(__file__).resolve().parents[1] / "data" / "families"
VOCAB, LENGTH, WINDOW = 64, 25, 7

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
GEMMA = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 3,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(theta: float, kind: str = "default", **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


# name -> (class, config). Frequencies are theta ** (-i / 4): with 25 positions, theta 500 makes the slowest count.
FAMILIES = {
    "llama2": (LlamaForCausalLM, LlamaConfig, {
        "num_key_value_heads": 4, "rms_norm_eps": 1e-2, "tie_word_embeddings": False, **rope(500.0)}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {
        "tie_word_embeddings": False,
        **rope(500.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64)}),
    "smollm2": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, **rope(1000.0)}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {
        "tie_word_embeddings": False, "use_sliding_window": False, **rope(500.0)}),
    "qwen2_5": (Qwen2ForCausalLM, Qwen2Config, {
        "tie_word_embeddings": True, "num_key_value_heads": 1, "use_sliding_window": False, **rope(1000.0)}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {
        "tie_word_embeddings": False, "head_dim": 16, "use_sliding_window": False, **rope(500.0)}),
    "mistral": (MistralForCausalLM, MistralConfig, {
        "tie_word_embeddings": False, "sliding_window": WINDOW, **rope(500.0)}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {
        **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0,
        "layer_types": [SLIDING, FULL] * 2, **rope(500.0)}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {
        **GEMMA, "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 2000.0, "factor": 4.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0}}}),
    "linear": (LlamaForCausalLM, LlamaConfig, {
        "tie_word_embeddings": False, **rope(500.0, "linear", factor=2.5)}),
    "yarn": (Qwen2ForCausalLM, Qwen2Config, {
        "tie_word_embeddings": False, "use_sliding_window": False, "head_dim": 16,
        "max_position_embeddings": 1024,
        **rope(100.0, "yarn", factor=4.0, original_max_position_embeddings=256, beta_fast=8.0)}),
}  # fmt: skip


def drawn(
    name: str, shape: tuple[int, ...], is_gemma: bool, rng: np.random.Generator
) -> np.ndarray:
    """A weight at which each feature of the model counts."""
    values = rng.normal(size=shape)
    if "norm" in name:
        return 0.4 * values + (0.0 if is_gemma else 1.0)
    if name.endswith("bias"):
        return 0.5 * values
    if "embed" in name or "lm_head" in name:
        return 0.5 * values
    return values * shape[1] ** -0.5


def make(name: str) -> dict[str, np.ndarray]:
    """The arrays of one file."""
    model_class, config_class, changes = FAMILIES[name]
    config = config_class(**{**SIZES, **changes})
    model = model_class(config).eval()
    rng = np.random.default_rng(list(name.encode()))
    is_gemma = name.startswith("gemma")
    weights = {
        n: drawn(n, tuple(w.shape), is_gemma, rng).astype(np.float32)
        for n, w in model.state_dict().items()
    }
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
    model.tie_weights()
    ids = rng.integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids).long(), use_cache=False).logits
    told = json.loads(config.to_json_string(use_diff=False))
    told["architectures"] = [model_class.__name__]
    arrays = {f"weights/{n}": w for n, w in weights.items()}
    config_json = np.array(json.dumps(told, sort_keys=True))
    return {**arrays, "config.json": config_json, "ids": ids, "logits": logits.numpy()}


if __name__ == "__main__":
    os.makedirs(OUT, exist_ok=True)
    for family in FAMILIES:
        np.savez_compressed(OUT / f"{family}.npz", **make(family))
