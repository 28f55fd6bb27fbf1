"""config.json of a Hugging Face directory <-> ModelSettings.

Owns: FAMILIES, which model types are known, what is true of each and which defaults its absent keys have (those of
transformers). Invariants: a key that changes what the model computes is either mapped or refused, never skipped; keys
that a family's class in transformers does not read are not read here either. What `config_of` writes, `settings_of`
reads back as the same settings: it is tried each time, and a difference is an error that names the fields.
Rope is written as `rope_theta` + `rope_scaling`, which every version of transformers reads.
Must not: import jax (a config is checked before that), or open anything but config.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rl_jax.models.features import form_of
from rl_jax.models.hf_keys import (
    CONFIG,
    FULL,
    MOST_LAYERS,
    SLIDING,
    Keys,
    read_ropes,
    read_windows,
    short,
    written_rope,
)
from rl_jax.settings import ModelSettings, RopeSettings

# hidden_act -> ModelSettings.activation; the exact gelu (erf) is not among ours
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
WRITTEN_ACTIVATION = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}

# Fields that a directory decides; the others stay the config's own.
ARCHITECTURE = (
    "vocab_size", "num_layers", "embed_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "rope_theta",
    "rope", "rope_theta_local", "norm_eps", "qk_norm", "qkv_bias", "tie_embeddings", "window", "full_every",
    "attention_scale", "attention_softcap", "logit_softcap", "activation", "scale_embed", "norm_offset", "post_norms",
)  # fmt: skip

# Keys that say what text is, not what the model computes; kept from a source when a model is exported.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Family:
    architecture: str  # the class that transformers builds
    features: Mapping[str, Any]  # fields of ModelSettings that are true of every such model
    defaults: Mapping[str, Any]  # of absent keys, as transformers has them
    is_gemma: bool = False
    windows: str = "none"  # none | all (every layer) | from (use_sliding_window) | types


_SILU = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}  # fmt: skip
_GEMMA = {"scale_embed": True, "norm_offset": True, "post_norms": True, "qkv_bias": False}
_GEMMA_DEFAULTS = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {"qk_norm": False, "qkv_bias": False},
        _SILU,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"qk_norm": False, "qkv_bias": False},
        {**_SILU, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"qk_norm": False, "qkv_bias": True},
        {**_SILU, "num_key_value_heads": 32, "sliding_window": 4096},
        windows="from",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"qk_norm": True, "qkv_bias": False},
        {**_SILU, "num_key_value_heads": 32, "sliding_window": 4096,
         "head_dim": 128},
        windows="from",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {"qk_norm": False, **_GEMMA},
        {**_GEMMA_DEFAULTS, "vocab_size": 256_000, "rope_theta": 10_000.0, "max_position_embeddings": 8192,
         "sliding_window_pattern": 2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        is_gemma=True,
        windows="types",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"qk_norm": True, **_GEMMA},
        {**_GEMMA_DEFAULTS, "vocab_size": 262_208, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
         "max_position_embeddings": 131_072, "sliding_window_pattern": 6},
        is_gemma=True,
        windows="types",
    ),
}  # fmt: skip

# Keys whose truth means a model that we would compute wrongly, and what they are.
REFUSED = {
    "attention_bias": "biases of all four attention projections (q, k and v alone are known: qwen2)",
    "mlp_bias": "biases in the MLP",
    "use_bidirectional_attention": "attention to later tokens",
    "dual_chunk_attention_config": "dual chunk attention",
    "quantization_config": "quantised weights; save them dequantised first",
}


def read(directory: Path | str) -> dict[str, Any]:
    """config.json of a directory. Raises: ValueError, one line, if there is none or it is no JSON object."""
    path = Path(directory)
    if path.is_file():
        kind = "a GGUF file" if path.suffix == ".gguf" else "a file"
        raise ValueError(
            f"{path} is {kind}; a model is a Hugging Face directory: python -m rl_jax.tools.convert {path} DIR"
        )
    file = path / CONFIG
    if not file.is_file():
        what = f"has no {CONFIG}" if path.is_dir() else "is no directory"
        raise ValueError(f"{path} {what}; name a directory with {CONFIG} and *.safetensors")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}; fetch it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not an object; fetch it again")
    return config


def settings_of(config: Mapping[str, Any], base: ModelSettings) -> ModelSettings:
    """base with the architecture of a config.json. Raises: ValueError, one line, for what we cannot run."""
    family, keys = _family(config)
    _refuse(keys)
    heads, layers = keys.count("num_attention_heads"), keys.count("num_hidden_layers", MOST_LAYERS)
    size = keys.count("hidden_size")
    head_dim = keys.values.get("head_dim")
    head_dim = size // heads if head_dim is None else keys.count("head_dim")
    if not head_dim:
        raise keys.error(f"hidden_size={size} is below num_attention_heads={heads}; fetch it again")
    no_kv = keys.values.get("num_key_value_heads") is None
    scale = keys.number("query_pre_attn_scalar") ** -0.5 if family.is_gemma else 0.0
    window, full_every = read_windows(keys, family.windows, layers)
    rope_theta, rope, local = read_ropes(keys, has_window=window > 0)
    context = 0
    if keys.values.get("max_position_embeddings") is not None:
        context = keys.count("max_position_embeddings")
    if rope.scaling == "yarn":  # a directory may extend the context by the scaling alone
        context = max(context, int(rope.factor * rope.original_context))
    found = replace(
        base,
        family="decoder",
        vocab_size=keys.count("vocab_size"),
        num_layers=layers,
        embed_size=size,
        num_heads=heads,
        num_kv_heads=heads if no_kv else keys.count("num_key_value_heads"),
        head_dim=head_dim,
        mlp_size=keys.count("intermediate_size"),
        rope_theta=rope_theta,
        rope=rope,
        rope_theta_local=local,
        norm_eps=keys.number("rms_norm_eps"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        window=window,
        full_every=full_every,
        attention_scale=scale,
        attention_softcap=keys.cap("attn_logit_softcapping"),
        logit_softcap=keys.cap("final_logit_softcapping"),
        activation=_activation(keys, family),
        max_context=context,
        **{**dict.fromkeys(("scale_embed", "norm_offset", "post_norms"), False), **family.features},
    )
    return canonical(found)


def config_of(settings: ModelSettings, vocab_size: int) -> dict[str, Any]:
    """The config.json of a model, of the family that has its features.

    Raises: ValueError naming the fields that none has.
    """
    s = canonical(replace(settings, vocab_size=vocab_size))
    name = _family_of(s)
    family = FAMILIES[name]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": vocab_size,
        "hidden_size": s.embed_size,
        "intermediate_size": s.mlp_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "hidden_activation" if family.is_gemma else "hidden_act": WRITTEN_ACTIVATION[s.activation],
        "rms_norm_eps": s.norm_eps,
        "tie_word_embeddings": s.tie_embeddings,
        "rope_theta": s.rope_theta,
        "rope_scaling": written_rope(s.rope),
    }
    if s.max_context:
        config["max_position_embeddings"] = s.max_context
    if family.is_gemma:
        config["query_pre_attn_scalar"] = _whole((s.attention_scale or s.head_dim**-0.5) ** -2)
        config["attn_logit_softcapping"] = s.attention_softcap or None
        config["final_logit_softcapping"] = s.logit_softcap or None
    if name == "gemma3_text":
        config["rope_local_base_freq"] = s.rope_theta_local or s.rope_theta
    if family.windows != "none":
        config["sliding_window"] = s.window or None
    if family.windows == "from":
        config["use_sliding_window"] = s.window > 0
        config["max_window_layers"] = 0 if s.window else s.num_layers
    if family.windows in ("from", "types"):
        config["layer_types"] = layer_types(s)
    _check_same(settings_of(config, s), s, name)
    return config


def exported(
    settings: ModelSettings, vocab_size: int, dtype: str, source: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The config.json to write: the source's own, where it says the same model, else a fresh one with its token ids.

    dtype: of the weights beside it.
    """
    config = config_of(settings, vocab_size)
    if source is not None:
        ours = canonical(replace(settings, vocab_size=vocab_size))
        try:
            is_same = "text_config" not in source and not _differing(
                settings_of(source, ours), ours
            )
        except ValueError:
            is_same = False
        text = source.get("text_config")
        text = text if isinstance(text, Mapping) else {}
        ids = {k: source.get(k, text.get(k)) for k in TOKEN_IDS if k in source or k in text}
        config = dict(source) if is_same else {**config, **ids}
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: dtype}


def layer_types(settings: ModelSettings) -> list[str]:
    """What each layer sees, in transformers' words."""
    return [SLIDING if form_of(settings, n).window else FULL for n in range(settings.num_layers)]


def canonical(settings: ModelSettings) -> ModelSettings:
    """The one form among settings that mean the same model."""
    s = settings
    types = layer_types(s)
    if SLIDING not in types:
        s = replace(s, window=0, full_every=0, rope_theta_local=0.0)
    elif FULL not in types:
        s = replace(s, full_every=0)
    if s.rope.scaling == "none":
        s = replace(s, rope=RopeSettings())
        if s.rope_theta_local == s.rope_theta:
            s = replace(s, rope_theta_local=0.0)
    if s.attention_scale == s.head_dim**-0.5:
        s = replace(s, attention_scale=0.0)
    return s


def _family(config: Mapping[str, Any]) -> tuple[Family, Keys]:
    name = config.get("model_type")
    known = ", ".join([*FAMILIES, "gemma3 (its text model)"])
    if name is None:
        raise ValueError(f"{CONFIG} has no model_type; known are {known}")
    given: Mapping[str, Any] = config
    if name == "gemma3":
        text, name = config.get("text_config"), "gemma3_text"
        if not isinstance(text, Mapping):
            raise ValueError(f"{CONFIG} of a gemma3 has no text_config; fetch it again")
        given = {**text, "quantization_config": config.get("quantization_config")}
    if not isinstance(name, str) or name not in FAMILIES:
        told = repr(name) if isinstance(name, str) else short(name)
        raise ValueError(
            f"{CONFIG}: model_type {told} is not a family that runs here; known are {known}"
        )
    family = FAMILIES[name]
    given = {k: v for k, v in given.items() if k not in ("dtype", "torch_dtype")}
    keys = Keys(name, {**family.defaults, **given})
    for head in Keys(name, config).texts("architectures") or ():
        if "Classification" in head or "QuestionAnswering" in head:
            raise keys.error(
                f"architectures has {head}, which has no head over the vocabulary; take a language model"
            )
    return family, keys


def _refuse(keys: Keys) -> None:
    for key, what in REFUSED.items():
        if keys.mapping(key) if key.endswith("_config") else keys.flag(key):
            raise keys.error(f"{key}={short(keys.values[key])} means {what}; this decoder has none")
    if keys.name == "gemma3_text" and keys.values.get("attn_logit_softcapping"):
        raise keys.error("attn_logit_softcapping is set, which no Gemma 3 applies; remove it")


def _activation(keys: Keys, family: Family) -> str:
    key = "hidden_activation" if family.is_gemma else "hidden_act"
    value = keys.text(key) or family.defaults[key]
    if value not in ACTIVATIONS:
        raise keys.error(f"{key}={short(value)} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


# --- the way back ---------------------------------------------------------------------------------


def _family_of(s: ModelSettings) -> str:
    """The family with the most of these features; `_check_same` tells what it lacks."""
    if s.norm_offset or s.post_norms or s.scale_embed:
        return "gemma3_text" if s.qk_norm else "gemma2"
    if s.qk_norm:
        return "qwen3"
    if s.qkv_bias:
        return "qwen2"
    return "mistral" if s.window else "llama"


def _differing(read_back: ModelSettings, settings: ModelSettings) -> list[str]:
    known = {f.name for f in fields(ModelSettings)}
    assert known.issuperset(ARCHITECTURE), "ARCHITECTURE names fields that there are not"
    return [n for n in ARCHITECTURE if not _alike(getattr(read_back, n), getattr(settings, n))]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-12 * max(abs(a), abs(b))  # a scale went through ** -2
    return a == b


def _check_same(read_back: ModelSettings, settings: ModelSettings, name: str) -> None:
    odd = _differing(read_back, settings)
    if odd:
        values = ", ".join(f"{n}={getattr(settings, n)}" for n in odd)
        raise ValueError(
            f"no Hugging Face family has this model: as {name}, the nearest, it would lose {values}; it cannot be"
            " exported"
        )


def _whole(value: float) -> int | float:
    nearest = round(value)
    return nearest if abs(value - nearest) < 1e-6 * value else value
