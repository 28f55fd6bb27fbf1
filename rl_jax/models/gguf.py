"""GGUF files: their metadata as a config.json, their tensors dequantised under Hugging Face names.

Owns: ARCHITECTURES and TENSORS. Tensors are float32, of their own memory, one at a time. What llama.cpp's converter
changed is undone: the rows of q and k of arch "llama" that it permuted for its rope, and the 1 that it added to the
norms of Gemma. A file without output.weight has tied embeddings. The factors of Llama 3's rope scaling, which it keeps
as a tensor and not as the four numbers they came from, are recognised, or refused.
Life: `GGUF(path)` reads all metadata (seconds: the library walks each token in Python) and refuses what cannot run;
`config`, then `tensors(model)`. Must not: write files (tools/), or rebuild a tokenizer (gguf_tokens.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_jax.models import hf
from rl_jax.models.hf_config import FAMILIES
from rl_jax.models.hf_files import WeightsError, some
from rl_jax.models.hf_keys import written_rope
from rl_jax.models.model import Model
from rl_jax.models.rope import scaled
from rl_jax.settings import RopeSettings

ARCHITECTURES = {  # general.architecture -> model_type
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Below "blk.N." there and "model.layers.N." in a Hugging Face directory.
TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
GEMMA_TENSORS = {
    **TENSORS,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
ROPE_FREQS = "rope_freqs.weight"
LLAMA3 = RopeSettings("llama3", original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, whose scores have another scale
TOKENIZER = "tokenizer."


class GGUF:
    """An open file. Raises: WeightsError, one line, for what cannot be read or run."""

    def __init__(self, path: Path | str):
        import gguf  # 0.4 s, and only a conversion needs it

        self.path = Path(path)

        class Reader(gguf.GGUFReader):
            def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
                _check_size(len(self.data), start_offs, fields)
                super()._build_tensors(start_offs, fields)

        try:
            reader = Reader(self.path)
        except _TooShort as error:
            raise self._error(f"{error}; fetch it again") from None
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise WeightsError(
                f"{self.path} cannot be read ({error}): it is cut short or no GGUF file; fetch it again"
            ) from None
        self._dequantize = gguf.dequantize
        self._fields, self._tensors = reader.fields, {t.name: t for t in reader.tensors}
        self.arch = self.metadata("general.architecture", "none")
        if self.arch not in ARCHITECTURES:
            raise self._error(f"architecture {self.arch!r} is not one of {', '.join(ARCHITECTURES)}")  # fmt: skip
        if self.metadata("split.count", 1) > 1:
            raise self._error("it is one of several parts; merge them first (llama-gguf-split --merge)")  # fmt: skip
        if experts := self._own("expert_count", 0):
            raise self._error(f"{experts} experts: mixtures of experts do not run here")
        self._check_types()

    def metadata(self, key: str, default: Any = None) -> Any:
        """A value by its whole key."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def tokenizer(self) -> dict[str, Any]:
        """All metadata of the tokenizer, by its keys without "tokenizer."."""
        keys = [k for k in self._fields if k.startswith(TOKENIZER)]
        return {k.removeprefix(TOKENIZER): self.metadata(k) for k in keys}

    def config(self) -> dict[str, Any]:
        """The config.json that this file would have come from."""
        name = ARCHITECTURES[self.arch]
        heads, size = self._count("attention.head_count"), self._count("embedding_length")
        head_dim = self._own("attention.key_length", size // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._own(key, head_dim) != head_dim:
                raise self._error(
                    f"{key}={self._own(key)} is not the head's size, {head_dim}; such heads do not run here"
                )
        config: dict[str, Any] = {
            "architectures": [FAMILIES[name].architecture],
            "model_type": name,
            "vocab_size": int(self._shape("token_embd.weight")[0]),
            "hidden_size": size,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._own("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": _decimal(self._need("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": self._count("context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_scaling": self._rope_scaling(head_dim),
        }
        base = self._own("rope.freq_base")
        config["rope_theta"] = FAMILIES[name].defaults["rope_theta"] if base is None else _decimal(base)  # fmt: skip
        for key, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            if (token := self.metadata(f"tokenizer.ggml.{field}_token_id")) is not None:
                config[f"{key}_token_id"] = token
        more = self._gemma(heads, head_dim, size) if self.is_gemma else {"hidden_act": "silu"}
        return config | more

    @property
    def is_gemma(self) -> bool:
        return FAMILIES[ARCHITECTURES[self.arch]].is_gemma

    def check(self, model: Model) -> dict[str, str]:
        """Hugging Face name -> the file's, if names and shapes are the model's. Raises: WeightsError listing others."""
        names = {self._hf_name(n): n for n in self._tensors if n != ROPE_FREQS}
        wanted = {name: shape for name, (_, shape) in hf.specs(model).items()}
        hf.check_tensors(self.path, wanted, {h: self._shape(n) for h, n in names.items()}, {})
        return {name: names[name] for name in wanted}

    def tensors(self, model: Model) -> Iterator[tuple[str, np.ndarray]]:
        """(Hugging Face name, float32) of each weight of the model, in the order of hf.specs. Raises: WeightsError."""
        heads, kv_heads = model.settings.num_heads, model.settings.num_kv_heads
        for hf_name, name in self.check(model).items():
            array = self._array(name)
            if self.arch == "llama" and ".attn_q." in name:
                array = _unpermuted(array, heads)
            elif self.arch == "llama" and ".attn_k." in name:
                array = _unpermuted(array, kv_heads)
            elif self.is_gemma and name.endswith("norm.weight"):
                array = array - np.float32(1)
            yield hf_name, array

    # --- what it is made of ---

    def _hf_name(self, name: str) -> str:
        if name in TOP:
            return TOP[name]
        _, number, rest = name.split(".", 2) if name.startswith("blk.") else ("", "", "")
        table = GEMMA_TENSORS if self.is_gemma else TENSORS
        return f"model.layers.{number}.{table[rest]}" if rest in table else name

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise self._error(f"there is no tensor {name}; fetch it again")
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def _array(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        mapped = tensor.data
        # Read, not mapped: pages of a mapped file count as ours until the system wants them back.
        data = np.fromfile(self.path, mapped.dtype, mapped.size, offset=int(tensor.data_offset))
        array = self._dequantize(data.reshape(mapped.shape), tensor.tensor_type)
        return np.asarray(array, np.float32).reshape(self._shape(name))

    def _check_types(self) -> None:
        """That one row of each type of number can be dequantised."""
        for kind, tensor in {t.tensor_type: t for t in self._tensors.values()}.items():
            try:
                self._dequantize(tensor.data[:1], kind)
            except (
                Exception
            ) as error:  # the boundary to the library: it knows some types by name only
                raise self._error(
                    f"{tensor.name} is of type {kind.name}, which gguf cannot dequantise ({error}); take a file with"
                    " another quantisation"
                ) from None

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        kind = self._own("rope.scaling.type", "none")
        if ROPE_FREQS in self._tensors:
            return self._llama3(head_dim)
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise self._error(f"rope.scaling.type={kind} is not known; none, linear and yarn are")
        scaling = {"rope_type": kind, "factor": _decimal(self._need("rope.scaling.factor"))}
        if kind == "yarn":
            original = self._count("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
            for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
                if (value := self._own(f"rope.scaling.{key}")) is not None:
                    scaling[name] = _decimal(value)
            for key in (
                "attn_factor",
                "yarn_attn_factor",
                "yarn_ext_factor",
                "yarn_log_multiplier",
            ):
                if self._own(f"rope.scaling.{key}") not in (None, 1.0):
                    raise self._error(f"rope.scaling.{key} of yarn is not known here")
        return scaling

    def _llama3(self, head_dim: int) -> dict[str, Any] | None:
        """The scaling that the file's factors came from."""
        factors = self._array(ROPE_FREQS)
        if np.all(factors == 1):
            return None
        rope = replace(LLAMA3, factor=_decimal(factors.max()))
        theta = self._own("rope.freq_base", 10_000.0)
        frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
        stretched, _ = scaled(frequencies, theta, rope)
        if factors.shape != (head_dim // 2,) or not np.allclose(
            factors, frequencies / np.asarray(stretched), rtol=1e-3
        ):
            raise self._error(
                f"{ROPE_FREQS} is not the scaling of Llama 3 with its usual numbers, the only one that is recognised"
            )
        return written_rope(rope)

    def _gemma(self, heads: int, head_dim: int, size: int) -> dict[str, Any]:
        by_width = self._count("block_count") == SCALED_BY_WIDTH[self.arch]
        config = {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": size // heads if by_width else head_dim,
            "sliding_window": self._own("attention.sliding_window"),
            "final_logit_softcapping": self._own("final_logit_softcapping"),
            "attn_logit_softcapping": self._own("attn_logit_softcapping"),
        }
        pattern = self._own("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            config["layer_types"] = [
                "sliding_attention" if p else "full_attention" for p in pattern
            ]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
        if (local := self._own("rope.freq_base_swa")) is not None:
            config["rope_local_base_freq"] = _decimal(local)
        return config

    def _own(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own metadata."""
        return self.metadata(f"{self.arch}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._own(key)
        if value is None:
            raise self._error(f"there is no {self.arch}.{key}; fetch it again")
        return value

    def _count(self, key: str) -> int:
        value = self._need(key)
        if not isinstance(value, int):
            raise self._error(f"{self.arch}.{key}={value}: one number for all layers is known")
        return value

    def _error(self, text: str) -> WeightsError:
        return WeightsError(f"{self.path}: {text}")


class _TooShort(Exception):
    """Tensors that a file lists are not in it."""


def _check_size(size: int, start: int, infos: Sequence[Any]) -> None:
    """That the file has the bytes of every tensor that it lists. infos: the library's fields. Raises: _TooShort."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    absent, needed = [], size
    for _, name, _, dims, kind, offset in (info.parts for info in infos):
        items, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
        end = start + int(offset[0]) + math.prod(map(int, dims)) * num_bytes // items
        needed = max(needed, end)
        if end > size:
            absent.append(bytes(name).decode("utf-8", "replace"))
    if absent:
        raise _TooShort(
            f"it is cut short: {size:,} bytes, of {needed:,} by its header, and {len(absent)} of {len(infos)} tensors"
            f" are not whole ({some(absent)})"
        )


def _unpermuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order of half rotation; llama.cpp's rope turns neighbours."""
    return array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _decimal(value: float) -> float:
    """A float32's shortest decimal: 1e-05 and not 9.99999974e-06."""
    return float(str(np.float32(value)))
