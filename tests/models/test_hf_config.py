"""config.json <-> ModelSettings: the families as their makers publish them, and everything refused by name."""

import json
import math
from dataclasses import replace

import pytest

from rl_jax.models.hf_config import FAMILIES, config_of, exported, layer_types, read, settings_of
from rl_jax.models.hf_config import REFUSED as REFUSED_KEYS
from rl_jax.settings import ModelSettings, RopeSettings

BASE = ModelSettings(dtype="bfloat16", tokenizer="somewhere", source="somewhere")

SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SMALL}
QWEN2 = {"model_type": "qwen2", **SMALL}
GEMMA2 = {"model_type": "gemma2", **SMALL, "head_dim": 16}
GEMMA3 = {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "sliding_window": 8}

# As published (the keys that are read), and what they must become.
PUBLISHED = {
    "Llama-3.2-1B": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
         "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
         "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True, "hidden_act": "silu",
         "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        {"num_layers": 16, "head_dim": 64, "tie_embeddings": True, "rope_theta": 5e5, "max_context": 131072,
         "rope": RopeSettings("llama3", 32.0, 8192, 1.0, 4.0)},
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
         "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096,
         "tie_word_embeddings": False, "hidden_act": "silu"},
        {"head_dim": 128, "window": 4096, "full_every": 0, "tie_embeddings": False, "qkv_bias": False},
    ),
    "Qwen2.5-1.5B": (
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
         "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
         "max_position_embeddings": 131072, "rope_theta": 1000000.0, "sliding_window": 131072,
         "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": True, "hidden_act": "silu"},
        {"head_dim": 128, "window": 0, "qkv_bias": True, "qk_norm": False, "tie_embeddings": True},
    ),
    "Qwen3-0.6B": (
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
         "max_position_embeddings": 40960, "rope_theta": 1000000, "attention_bias": False, "sliding_window": None,
         "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": True, "rope_scaling": None},
        {"head_dim": 128, "qk_norm": True, "qkv_bias": False, "rope_theta": 1e6, "window": 0},
    ),
    "gemma-2-27b": (
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 4608, "intermediate_size": 36864,
         "num_hidden_layers": 46, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
         "query_pre_attn_scalar": 144, "sliding_window": 4096, "max_position_embeddings": 8192,
         "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-06},
        {"attention_scale": 1 / 12, "attention_softcap": 50.0, "logit_softcap": 30.0, "window": 4096, "full_every": 2,
         "norm_offset": True, "post_norms": True, "scale_embed": True, "tie_embeddings": True,
         "activation": "gelu_tanh", "rope_theta_local": 0.0},
    ),
    "gemma-3-4b, a text model beside a vision tower, most keys left to their defaults": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {},
         "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                         "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024}},
        {"vocab_size": 262208, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "window": 1024, "full_every": 6,
         "rope_theta": 1e6, "rope_theta_local": 1e4, "rope": RopeSettings("linear", 8.0), "qk_norm": True,
         "attention_scale": 0.0, "attention_softcap": 0.0, "logit_softcap": 0.0, "max_context": 131072},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_becomes_these_settings(name):
    config, expected = PUBLISHED[name]
    settings = settings_of(config, BASE)
    assert {key: getattr(settings, key) for key in expected} == expected
    kept = ("dtype", "param_dtype", "source", "tokenizer", "family")
    assert [getattr(settings, k) for k in kept] == [getattr(BASE, k) for k in kept]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_reads_back_as_the_same(name):
    settings = settings_of(PUBLISHED[name][0], BASE)
    written = json.loads(json.dumps(config_of(settings, settings.vocab_size)))
    assert settings_of(written, BASE) == settings


def test_rope_in_the_spelling_of_transformers_5_is_the_same():
    flat = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256}  # fmt: skip
    old = {k: v for k, v in flat.items() if k not in ("rope_theta", "rope_type")} | {
        "type": "llama3"
    }
    a = settings_of({**LLAMA, "rope_parameters": flat}, BASE)
    b = settings_of({**LLAMA, "rope_theta": 5e5, "rope_scaling": old}, BASE)
    assert a == b and a.rope.factor == 8.0 and a.rope_theta == 5e5


def test_rope_by_layer_type_of_gemma_3_is_the_same():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    by_type = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    new = {**GEMMA3, "rope_parameters": by_type, "layer_types": types}
    old = {**GEMMA3, "sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
           "rope_scaling": {"type": "linear", "factor": 8.0}}  # fmt: skip
    assert settings_of(new, BASE) == settings_of(old, BASE)
    assert layer_types(settings_of(new, BASE)) == types


def test_rope_that_is_scaled_alike_in_all_layers_has_no_local_base():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    both = {"full_attention": rope, "sliding_attention": dict(rope)}
    settings = settings_of({**GEMMA3, "rope_parameters": both}, BASE)
    assert (settings.rope_theta_local, settings.rope.factor) == (0.0, 2.0)


@pytest.mark.parametrize(
    "scaling, expected",
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, (4.0, 512, 2048)),
        ({"type": "yarn", "original_max_position_embeddings": 128}, (4.0, 128, 512)),  # 512 / 128
        ({"type": "yarn", "factor": 2.0}, (2.0, 512, 1024)),
    ],
)  # fmt: skip
def test_yarn_takes_what_is_absent_from_the_positions(scaling, expected):
    settings = settings_of({**LLAMA, "rope_scaling": scaling}, BASE)
    assert (settings.rope.factor, settings.rope.original_context, settings.max_context) == expected


def test_sliding_windows_of_qwen_apply_where_they_are_in_use():
    windowed = {**QWEN2, "use_sliding_window": True, "sliding_window": 8}
    assert settings_of({**windowed, "max_window_layers": 0}, BASE).window == 8
    assert settings_of({**windowed, "max_window_layers": 4}, BASE).window == 0
    assert settings_of({**QWEN2, "sliding_window": 8, "max_window_layers": 0}, BASE).window == 0


def test_models_of_our_own_find_their_family():
    small = ModelSettings(vocab_size=300)
    for changes, family in (
        ({}, "llama"),
        ({"qkv_bias": True, "tie_embeddings": False}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"window": 8}, "mistral"),
        ({"qk_norm": True, "window": 8, "full_every": 2}, "qwen3"),
    ):
        settings = replace(small, **changes)
        config = config_of(settings, 300)
        assert config["model_type"] == family
        back = settings_of(config, settings)
        assert replace(back, max_context=0) == settings


def test_model_that_no_family_has_is_refused_by_its_fields():
    for changes, text in (
        ({"qk_norm": True, "qkv_bias": True}, "as qwen3, the nearest, it would lose qkv_bias=True"),
        ({"attention_softcap": 5.0}, "as llama, the nearest, it would lose attention_softcap=5.0"),
        ({"window": 8, "full_every": 2}, "as mistral, the nearest, it would lose full_every=2"),
        (
            {"norm_offset": True},
            "as gemma2, the nearest, it would lose scale_embed=False, post_norms=False",
        ),
    ):
        with pytest.raises(ValueError, match="no Hugging Face family has this model") as error:
            config_of(ModelSettings(**changes), 300)
        assert text in str(error.value) and "\n" not in str(error.value)


def test_config_of_the_source_is_kept_where_it_says_the_same_model():
    source = {
        **LLAMA,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "dtype": "float32",
        "use_cache": True,
    }
    same = exported(settings_of(source, BASE), 100, "bfloat16", source)
    assert same == {**source, "dtype": "bfloat16"}
    other = exported(replace(settings_of(source, BASE), num_layers=2), 100, "bfloat16", source)
    assert (other["num_hidden_layers"], other["eos_token_id"], other["torch_dtype"]) == (
        2,
        [2, 3],
        "bfloat16",
    )
    assert "use_cache" not in other


REFUSED = [
    ({"hidden_size": 4}, "config.json has no model_type; known are llama, mistral, qwen2"),
    ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not a family that runs here; known are llama"),
    ({**LLAMA, "attention_bias": True}, "attention_bias=true means biases of all four attention projections"),
    ({**LLAMA, "mlp_bias": True}, "mlp_bias=true means biases in the MLP"),
    ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "means quantised weights"),
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act=\"gelu\" is not one of silu, swish"),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic' is not known"),
    ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope' is not known"),
    ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale=1.0 of yarn"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: rope turns whole heads here"),
    ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "which has no head over the vocabulary"),
    ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "of a llama: vocab_size is missing"),
    ({**LLAMA, "hidden_size": "64"}, "hidden_size=\"64\" must be a whole number above 0"),
    ({**QWEN2, "dual_chunk_attention_config": {"chunk_size": 1}}, "means dual chunk attention"),
    ({**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "in the order ffss"),
    ({**GEMMA2, "use_bidirectional_attention": True}, "means attention to later tokens"),
    ({**GEMMA3, "attn_logit_softcapping": 50.0}, "which no Gemma 3 applies"),
    ({**GEMMA3, "layer_types": ["full_attention"]}, "layer_types must be 4 times full_attention or sliding_attention"),
    ({"model_type": "gemma3"}, "gemma3 has no text_config"),
]  # fmt: skip


@pytest.mark.parametrize("config, text", REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_run_is_refused_in_one_line(config, text):
    with pytest.raises(ValueError) as error:
        settings_of(config, BASE)
    assert text in str(error.value) and "\n" not in str(error.value)


# Every key that is read, of every family, with what may stand below it.
ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 256},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
             "beta_slow": 1.0, "attention_factor": 1.0, "mscale": None, "mscale_all_dim": None, "truncate": True},
}  # fmt: skip
BY_TYPE = {"full_attention": {**ROPE["linear"], "rope_theta": 1e6},
           "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
ALL_KEYS = {
    **SMALL, "head_dim": 16, "architectures": ["AnyForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "rope_theta": 1e4, "sliding_window": 8,
    "use_sliding_window": True, "max_window_layers": 0, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None, **dict.fromkeys(REFUSED_KEYS),
}  # fmt: skip
BASES = [
    {"model_type": name, **ALL_KEYS, **more}
    for name in FAMILIES
    for more in ({"layer_types": None}, {"rope_scaling": ROPE["yarn"]}, {"rope_scaling": ROPE["llama3"]},
                 {"rope_parameters": ROPE["linear"]}, {"rope_parameters": BY_TYPE})
]  # fmt: skip
ODD = [None, True, False, 0, 1, -1, 2, 0.5, 10**400, float("inf"), float("-inf"), float("nan"), 1e308, 5e-324, "", "x",
       "false", "silu", "1", [], [None], [1], ["full_attention"], [["full_attention"]], {}, {"a": 1},
       {"full_attention": 5}, {"rope_type": ["yarn"]}, {"x\ny": "a\nb" * 99}]  # fmt: skip


def places(value, at=()):
    """The way to every value of a config, and into what lies below it."""
    if at:
        yield at
    for key in value if isinstance(value, dict) else ():
        yield from places(value[key], (*at, key))


def with_value(config, at, value):
    first, *rest = at
    below = with_value(config.get(first), rest, value) if rest else value
    return {**config, first: below}


def check_one_line_or_sound(config):
    try:
        found = settings_of(json.loads(json.dumps(config)), BASE)
    except ValueError as error:
        assert (
            str(error).startswith("config.json")
            and "\n" not in str(error)
            and len(str(error)) < 400
        )
        return False
    sizes = [found.vocab_size, found.num_layers, found.embed_size, found.num_heads, found.num_kv_heads,
             found.head_dim, found.mlp_size]  # fmt: skip
    assert all(isinstance(n, int) and 0 < n < 2**31 for n in sizes)
    assert 0 <= found.max_context < 2**31 and isinstance(found.tie_embeddings, bool)
    numbers = [found.rope_theta, found.rope_theta_local, found.norm_eps, found.attention_scale, found.logit_softcap,
               found.rope.factor, found.rope.attention_factor]  # fmt: skip
    assert all(isinstance(n, float) and math.isfinite(n) for n in numbers)
    return True


@pytest.mark.slow
def test_any_json_in_any_key_is_a_sound_model_or_one_line():
    num_sound = num_refused = 0
    for base in BASES:
        for at in places(base):
            for value in ODD:
                is_sound = check_one_line_or_sound(with_value(base, at, value))
                num_sound, num_refused = num_sound + is_sound, num_refused + (not is_sound)
    assert num_sound > 100 and num_refused > 1000


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"model_type": ["qwen3"]}, 'config.json: model_type ["qwen3"] is not a family'),
        ({"layer_types": 5}, "layer_types=5 must be a list of texts"),
        ({"layer_types": [["full_attention"]]}, 'layer_types=[["full_attention"]] must be a list of texts'),
        ({"architectures": [None]}, "architectures=[null] must be a list of texts"),
        ({"architectures": "Qwen"}, 'architectures="Qwen" must be a list of texts'),
        ({"hidden_act": ["silu"]}, 'hidden_act=["silu"] must be a text'),
        ({"rope_theta": float("inf")}, "rope_theta=Infinity must be a finite number above 0"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings="false" must be true or false'),
        ({"attention_bias": "false"}, 'attention_bias="false" must be true or false'),
        ({"rope_scaling": {**ROPE["yarn"], "attention_factor": "x"}}, 'rope_scaling.attention_factor="x" must be'),
        ({"rope_parameters": "x"}, 'rope_parameters="x" must be an object'),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be a whole number above 0, at most 10000"),
        ({"hidden_size": 2, "head_dim": None}, "hidden_size=2 is below num_attention_heads=4"),
    ],
)  # fmt: skip
def test_wrong_types_are_named_with_their_value(changes, text):
    with pytest.raises(ValueError) as error:
        settings_of({**QWEN2, "head_dim": 16, **changes}, BASE)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_read_names_what_is_wrong_with_the_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text('{"model_type": ')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    for name, text in (
        ("none", "is no directory; name a directory with config.json"),
        ("", "has no config.json"),
        ("model.gguf", "is a GGUF file; a model is a Hugging Face directory: python -m rl_jax.tools.convert"),
        ("cut", "cannot be read"),
        ("list", "holds a list, not an object"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            read(tmp_path / name)
