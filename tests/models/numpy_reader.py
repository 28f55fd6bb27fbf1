"""Logits of a Hugging Face directory in plain numpy, from config.json and safetensors; shares no code with rl_jax.

Written from the modelling files of transformers: llama, mistral, qwen2, qwen3, gemma2, gemma3_text. One sequence,
every position. Run by hand: python tests/models/numpy_reader.py DIR 504 3575 282 4649 314
"""

import json
import math
import sys
from pathlib import Path

import numpy as np


def read_safetensors(path):
    """(name, array) of each tensor, by the format's description: length of a JSON header, the header, bytes."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry["dtype"]]
        array = np.frombuffer(data, kind, (last - first) // int(kind[2]), start + first)
        if entry["dtype"] == "BF16":  # the upper half of a float32
            array = (array.astype(np.uint32) << 16).view(np.float32)
        yield name, array.reshape(entry["shape"])


class NumpyModel:
    """A model of a directory; dtype: of all arithmetic."""

    def __init__(self, directory, dtype=np.float64):
        directory = Path(directory)
        self.c = json.loads((directory / "config.json").read_text())
        self.gemma = self.c["model_type"].startswith("gemma")
        self.dtype = dtype
        self.w = {}
        for file in sorted(directory.glob("*.safetensors")):
            self.w |= {name: array.astype(dtype) for name, array in read_safetensors(file)}
        self.heads = self.c["num_attention_heads"]
        self.kv_heads = self.c.get("num_key_value_heads") or self.heads
        self.head_dim = self.c.get("head_dim") or self.c["hidden_size"] // self.heads
        self.eps = self.c.get("rms_norm_eps", 1e-6)

    def logits(self, tokens):
        """[T, V] of token ids [T]."""
        c, tokens = self.c, np.asarray(tokens)
        x = self.w["model.embed_tokens.weight"][tokens]
        if self.gemma:
            x = x * math.sqrt(c["hidden_size"])
        for layer in range(c["num_hidden_layers"]):
            x = self.layer(f"model.layers.{layer}.", layer, x)
        x = self.norm("model.norm.weight", x)
        tied = c.get("tie_word_embeddings", self.gemma)
        out = x @ self.w["model.embed_tokens.weight" if tied else "lm_head.weight"].T
        cap = c.get("final_logit_softcapping", 30.0 if c["model_type"] == "gemma2" else None)
        return cap * np.tanh(out / cap) if cap else out

    def layer(self, at, layer, x):
        h = self.attention(at + "self_attn.", layer, self.norm(at + "input_layernorm.weight", x))
        if not self.gemma:
            x = x + h
            return x + self.mlp(at, self.norm(at + "post_attention_layernorm.weight", x))
        x = x + self.norm(at + "post_attention_layernorm.weight", h)
        h = self.mlp(at, self.norm(at + "pre_feedforward_layernorm.weight", x))
        return x + self.norm(at + "post_feedforward_layernorm.weight", h)

    def attention(self, at, layer, x):
        num, size = len(x), self.head_dim
        q, k, v = (self.linear(f"{at}{n}_proj", x).reshape(num, -1, size) for n in "qkv")
        if f"{at}q_norm.weight" in self.w:
            q, k = self.norm(f"{at}q_norm.weight", q), self.norm(f"{at}k_norm.weight", k)
        window = self.window(layer)
        q, k = self.rope(q, window), self.rope(k, window)
        k, v = (np.repeat(a, self.heads // self.kv_heads, axis=1) for a in (k, v))
        scale = self.c.get("query_pre_attn_scalar", 256 if self.gemma else size) ** -0.5
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        if self.c["model_type"] == "gemma2" and (cap := self.c.get("attn_logit_softcapping", 50.0)):
            scores = cap * np.tanh(scores / cap)
        back = np.arange(num)[:, None] - np.arange(num)
        visible = (back >= 0) & ((back < window) if window else True)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        return self.linear(f"{at}o_proj", np.einsum("hqk,khd->qhd", weights, v).reshape(num, -1))

    def mlp(self, at, x):
        gate = self.linear(f"{at}mlp.gate_proj", x)
        key, default = (
            ("hidden_activation", "gelu_pytorch_tanh") if self.gemma else ("hidden_act", "silu")
        )
        name = self.c.get(key) or default
        if name == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            assert name == "gelu_pytorch_tanh", name
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return self.linear(f"{at}mlp.down_proj", gate * self.linear(f"{at}mlp.up_proj", x))

    def linear(self, name, x):
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def norm(self, name, x):
        scale = self.w[name] + 1 if self.gemma else self.w[name]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * scale

    def window(self, layer):
        """Tokens that a layer sees, its own included; 0 for all."""
        c, kind = self.c, self.c["model_type"]
        size = c.get("sliding_window") or 0
        if kind == "llama":
            return 0
        if kind == "mistral":
            return size
        if "layer_types" in c:
            return size if c["layer_types"][layer] == "sliding_attention" else 0
        if kind.startswith("qwen"):
            in_use = c.get("use_sliding_window") and layer >= c.get("max_window_layers", 28)
            return size if in_use else 0
        every = 2 if kind == "gemma2" else c.get("sliding_window_pattern", 6)
        return size if (layer + 1) % every else 0

    def rope(self, x, window):
        """x [T, heads, Dh], turned by its position."""
        params = self.c.get("rope_parameters") or self.c.get("rope_scaling") or {}
        kind = "sliding_attention" if window else "full_attention"
        is_local = self.c["model_type"] == "gemma3_text" and window
        default = 1e6 if self.c["model_type"] == "gemma3_text" else 1e4
        theta = self.c.get("rope_theta", default)
        if kind in params:
            params = params[kind]
        elif is_local:
            params, theta = {}, self.c.get("rope_local_base_freq", 1e4)
        frequency, factor = self.frequencies(params, params.get("rope_theta", theta))
        angle = np.arange(len(x))[:, None] * frequency
        cos, sin = (f(angle)[:, None].astype(self.dtype) * factor for f in (np.cos, np.sin))
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def frequencies(self, params, theta):
        """(angle of one position [Dh / 2], factor of cosines and sines)."""
        size = self.head_dim
        plain = theta ** -(np.arange(0, size, 2) / size)
        kind = params.get("rope_type", params.get("type", "default"))
        if kind == "default":
            return plain, 1.0
        factor = params["factor"]
        if kind == "linear":
            return plain / factor, 1.0
        original = params["original_max_position_embeddings"]
        if kind == "llama3":
            turns = original * plain / (2 * math.pi)
            low, high = params["low_freq_factor"], params["high_freq_factor"]
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            return plain * ((1 - smooth) / factor + smooth), 1.0
        assert kind == "yarn", kind
        dim = lambda turns: (
            size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )
        low = max(math.floor(dim(params.get("beta_fast") or 32)), 0)
        high = min(math.ceil(dim(params.get("beta_slow") or 1)), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (max(high - low, 0.001)), 0, 1)
        attention = params.get("attention_factor") or 0.1 * math.log(factor) + 1
        return plain * (1 - ramp) + plain / factor * ramp, attention


if __name__ == "__main__":
    for row in NumpyModel(sys.argv[1], np.float32).logits([int(t) for t in sys.argv[2:]]):
        top = np.argsort(-row)[:5]
        print([(int(i), round(float(row[i]), 3)) for i in top])
