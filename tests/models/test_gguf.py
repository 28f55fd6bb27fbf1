"""GGUF files: what the converter changed is undone, every number comes back, tokenizers give their models' ids."""

import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from rl_jax.models import hf, hf_config
from rl_jax.models.decoder import build_model
from rl_jax.models.gguf import GGUF
from rl_jax.models.gguf_tokens import PRE, build_tokenizer, write_tokenizer
from rl_jax.models.hf_files import WeightsError
from rl_jax.settings import ModelSettings
from rl_jax.testing.tiny_model import tiny_model
from tests.models.gguf_file import BPE, BPE_TOKENS, TEMPLATE, llama3_factors, write_gguf

SIZES = {"embed_size": 64, "head_dim": 16, "mlp_size": 96, "vocab_size": 300, "max_context": 256}
MODELS = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"qk_norm": True},
    "gemma3": {"qk_norm": True, "norm_offset": True, "post_norms": True, "scale_embed": True, "window": 8,
               "full_every": 2, "rope_theta": 1e6, "rope_theta_local": 1e4, "activation": "gelu_tanh"},
    "gemma2": {"norm_offset": True, "post_norms": True, "scale_embed": True, "window": 8, "full_every": 2,
               "activation": "gelu_tanh", "attention_softcap": 50.0, "logit_softcap": 30.0},
}  # fmt: skip
GEMMA = {
    "gemma3": {"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": 2},
    "gemma2": {"gemma2.attention.sliding_window": 8, "gemma2.attn_logit_softcapping": 50.0,
               "gemma2.final_logit_softcapping": 30.0},
}  # fmt: skip


def model_of(arch):
    """(model, config.json, tensors under Hugging Face names), random."""
    sizes = dict(SIZES)
    vocab = sizes.pop("vocab_size")
    model, params = tiny_model(vocab_size=vocab, **sizes, **MODELS[arch])
    rng = np.random.default_rng(2)
    params = {n: jnp.asarray(p + 0.1 * rng.normal(size=p.shape), jnp.float32) for n, p in params.items()}  # fmt: skip
    return model, hf_config.config_of(model.settings, vocab), dict(hf.outgoing(model, params))


@pytest.fixture(scope="module")
def llama():
    return model_of("llama")


def opened(path):
    file = GGUF(path)
    settings = hf_config.settings_of(file.config(), ModelSettings())
    return file, build_model(settings, settings.vocab_size)


@pytest.mark.parametrize("arch", MODELS)
def test_model_comes_back(arch, tmp_path):
    model, config, tensors = model_of(arch)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, arch=arch, more=GEMMA.get(arch))
    file, read = opened(path)
    ours, theirs = hf_config.settings_of(config, ModelSettings()), read.settings
    assert theirs == ours
    found = dict(file.tensors(read))
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        if file.is_gemma and name.endswith("norm.weight"):  # 1 was added and taken away
            np.testing.assert_allclose(found[name], array, atol=2e-7)
        else:
            np.testing.assert_array_equal(found[name], array)


def test_quantised_tensors_are_what_the_library_dequantises(llama, tmp_path):
    _, config, tensors = llama
    matrices = [n for n, a in tensors.items() if a.ndim == 2]
    some = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.F16, Kind.BF16)
    kinds = {name: some[i % len(some)] for i, name in enumerate(matrices)}
    file, model = opened(write_gguf(tmp_path / "m.gguf", config, tensors, kinds=kinds))
    for name, array in file.tensors(model):
        if name in kinds and "q_proj" not in name and "k_proj" not in name:
            rounded = gguf.dequantize(gguf.quantize(tensors[name], kinds[name]), kinds[name])
            np.testing.assert_array_equal(array, rounded)
            assert array.dtype == np.float32 and np.abs(array - tensors[name]).max() > 0


@pytest.mark.parametrize("name", sorted(k.name for k in gguf.quants._type_traits))
def test_every_type_that_the_library_dequantises_is_read(llama, name, tmp_path):
    _, config, tensors = llama
    kind = Kind[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    config, rows = {**config, "hidden_size": 256, "vocab_size": 4}, 4
    data = np.random.default_rng(0).integers(0, 100, (rows, 256 // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    array = GGUF(tmp_path / "m.gguf")._array("token_embd.weight")
    assert array.shape == (4, 256) and array.dtype == np.float32


def test_rope_of_llama_3_is_recognised_by_its_factors(llama, tmp_path):
    _, config, tensors = llama
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_factors(scaling, 5e5, 16)
    assert factors[0] == 1 and factors[-1] == 32 and 1 < factors[4] < 32
    config = {**config, "rope_theta": 5e5}
    file, model = opened(write_gguf(tmp_path / "a.gguf", config, tensors, rope_freqs=factors))
    assert file.config()["rope_scaling"] == {"rope_type": "llama3", **scaling}
    assert dict(file.tensors(model)).keys() == tensors.keys()
    path = write_gguf(tmp_path / "b.gguf", config, tensors, rope_freqs=factors**2)
    with pytest.raises(WeightsError, match="is not the scaling of Llama 3 with its usual numbers"):
        opened(path)


@pytest.mark.parametrize(
    "more, expected",
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
         {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
          "llama.rope.scaling.original_context_length": 128},
         {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)  # fmt: skip
def test_rope_scaling_of_the_metadata(llama, more, expected, tmp_path):
    _, config, tensors = llama
    path = write_gguf(tmp_path / "m.gguf", config, tensors, more=more)
    assert GGUF(path).config()["rope_scaling"] == expected


FAULTS = [
    ({"arch": "falcon"}, "architecture 'falcon' is not one of llama, qwen2, qwen3, gemma2, gemma3"),
    ({"more": {"llama.expert_count": 8}}, "8 experts: mixtures of experts do not run here"),
    ({"more": {"split.count": 3}}, "it is one of several parts; merge them first"),
    ({"more": {"llama.rope.scaling.type": "longrope"}}, "rope.scaling.type=longrope is not known"),
    ({"drop": "model.layers.1.mlp.up_proj.weight"}, "1 missing (model.layers.1.mlp.up_proj.weight)"),
    ({"drop": "model.embed_tokens.weight"}, "there is no tensor token_embd.weight"),
]  # fmt: skip


@pytest.mark.parametrize("options, text", FAULTS, ids=[text for _, text in FAULTS])
def test_what_cannot_run_is_told_in_one_line(llama, options, text, tmp_path):
    _, config, tensors = llama
    options = dict(options)
    drop = options.pop("drop", None)
    tensors = {n: a for n, a in tensors.items() if n != drop}
    path = write_gguf(tmp_path / "m.gguf", config, tensors, **options)
    with pytest.raises(WeightsError) as error:
        file, model = opened(path)
        file.check(model)
    assert text in str(error.value) and "\n" not in str(error.value) and str(path) in str(error.value)  # fmt: skip


def test_file_that_is_cut_short_is_told(llama, tmp_path):
    _, config, tensors = llama
    data = write_gguf(tmp_path / "m.gguf", config, tensors).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-1000])
    with pytest.raises(WeightsError) as error:
        GGUF(tmp_path / "cut.gguf")
    path = tmp_path / "cut.gguf"
    assert str(error.value) == (
        f"{path}: it is cut short: {len(data) - 1000:,} bytes, of {len(data):,} by its header, and 2 of"
        f" {len(tensors)} tensors are not whole (blk.1.ffn_up.weight, blk.1.ffn_norm.weight); fetch it again"
    )
    for size in (3000, 10, 0):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(WeightsError, match="it is cut short or no GGUF file; fetch it again"):
            GGUF(tmp_path / "cut.gguf")


# --- tokenizers -----------------------------------------------------------------------------------


def bpe(**changes):
    return {f"ggml.{k}": v for k, v in {**BPE, **changes}.items() if v is not None}


def test_bytelevel_tokenizer_has_the_ids_of_its_metadata(tmp_path):
    metadata = bpe() | {"chat_template": TEMPLATE}
    write_tokenizer(tmp_path, metadata)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.id_to_token(i) for i in range(len(BPE_TOKENS))] == BPE_TOKENS
    text = "hello world\t123 é 🤖<|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:3] == ["hello", "Ġw", "o"] and encoded.tokens[-1] == "<|im_end|>"
    assert "123" not in encoded.tokens, "smollm cuts digits before merges apply"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE and config["eos_token"] == "<|im_end|>"
    assert config["add_bos_token"] is False and config["pad_token"] == "<|im_end|>"
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize(
    "pre, tokens",
    [
        ("gpt-2", ["123", "Ġ", "1", "e"]),
        ("llama-bpe", ["123", "Ġ", "1", "e"]),
        ("qwen2", ["1", "2", "3", "Ġ", "1", "e"]),
        ("smollm", ["1", "2", "3", "Ġ", "1", "e"]),
        ("default", ["123", "Ġ", "1", "e"]),
    ],
)
def test_pre_tokenizers_differ_in_digits(pre, tokens):
    assert build_tokenizer(bpe(pre=pre)).encode("123 1e", add_special_tokens=False).tokens == tokens


# What each cuts a text into, worked out by hand from the patterns in the models' own tokenizer.json.
TEXT = "I'LL don't 1234 naïveCamelCase\n\n  x=a.b(c); ok...\n"
PIECES = {  # joined by |
    "gpt-2": "I|'|LL| don|'t| 1234| naïveCamelCase|\n\n | x|=|a|.|b|(|c|);| ok|...|\n",
    "llama-bpe": "I|'LL| don|'t| |123|4| naïveCamelCase|\n\n| | x|=a|.b|(c|);| ok|...\n",
    "qwen2": "I|'LL| don|'t| |1|2|3|4| naïveCamelCase|\n\n| | x|=a|.b|(c|);| ok|...\n",
    "smollm": "I|'|LL| don|'t| |1|2|3|4| naïveCamelCase|\n\n | x|=|a|.|b|(|c|);| ok|...|\n",
    "tekken": "I|'LL| don|'t| |1|2|3|4| naïve|Camel|Case|\n\n| | x|=a|.b|(c|);| ok|...\n",
}


@pytest.mark.parametrize("pre", PIECES)
def test_pre_tokenizer_cuts_text(pre):
    cut = PRE[pre].build().pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in cut] == PIECES[pre].split("|")


def test_bos_goes_before_a_text_where_the_file_or_its_kind_says_so():
    first = lambda **changes: build_tokenizer(bpe(**changes)).encode("a").tokens[0]
    assert first(add_bos_token=True) == "<|im_start|>"
    assert first(add_bos_token=None) == "a"
    assert first(add_bos_token=None, pre="llama-bpe") == "<|im_start|>"
    both = build_tokenizer(bpe(add_bos_token=True, add_eos_token=True)).encode("a").tokens
    assert both == ["<|im_start|>", "a", "<|im_end|>"]


def test_rows_that_pad_the_embedding_are_no_tokens():
    padded = bpe(tokens=[*BPE_TOKENS, "[PAD1]", "[PAD2]"], token_type=[*BPE["token_type"], 5, 5])
    assert build_tokenizer(padded).get_vocab_size() == len(BPE_TOKENS)


def test_several_ids_end_a_turn(tmp_path):
    write_tokenizer(tmp_path, bpe(eos_token_id=0, eot_token_id=2))
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


SPM_TOKENS = [*"<unk> <s> </s> <0x0A> <0xC3> <0xA9> ▁ a b s < > ab ▁a ▁ab s> bb".split()]  # noqa: SIM905
SPM = {
    "ggml.model": "llama",
    "ggml.tokens": SPM_TOKENS,
    "ggml.token_type": [2, 3, 3, 6, 6, 6] + [1] * 11,
    "ggml.scores": [0.0] * 6 + [-10.0 - i for i in range(6)] + [-1.0, -0.5, -2.0, -3.0, -0.7],
    "ggml.bos_token_id": 1,
    "ggml.eos_token_id": 2,
    "ggml.unknown_token_id": 0,
}


def test_sentencepiece_joins_by_score():
    tokenizer = build_tokenizer(SPM)
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("abb").tokens == [
        "<s>",
        "▁a",
        "bb",
    ]  # -0.5, -0.7; then ▁ab (-2) is out of reach
    assert tokenizer.encode("bab b", add_special_tokens=False).tokens == ["▁", "b", "ab", "▁", "b"]
    assert tokenizer.encode("é\n", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>", "<0x0A>"]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("ab é\na").ids) == "ab é\na"


def test_sentencepiece_without_a_prefix_keeps_the_text():
    tokenizer = build_tokenizer({**SPM, "ggml.add_space_prefix": False, "ggml.add_bos_token": False})  # fmt: skip
    assert tokenizer.encode("ab").tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_no_merge_makes_a_control_token():
    merges = json.loads(build_tokenizer(SPM).to_str())["model"]["merges"]
    made = {"".join(pair) for pair in merges}
    assert made == {"ab", "▁a", "▁ab", "s>", "bb"}, "< and s> are tokens, and <s> is not what they make"  # fmt: skip


TOKEN_FAULTS = [
    (bpe(pre="gpt-4o"), "tokenizer.ggml.pre: the pre-tokenizer gpt-4o is not known; known are default, gpt-2"),
    (bpe(pre=None), "tokenizer.ggml.pre: the pre-tokenizer is missing"),
    (bpe(model="t5"), "tokenizer.ggml.model=t5: it is not one of gpt2, llama"),
    (bpe(merges=None), "tokenizer.ggml.merges: it is missing"),
    (bpe(merges=["h e", "q q q"]), "tokenizer.ggml.merges: 1 of 2 are not of two tokens"),
    (bpe(merges=["x y"]), "tokenizer.ggml.merges: 1 of 1 are not of two tokens, first ('x', 'y')"),
    (bpe(tokens=[]), "tokenizer.ggml.tokens: there are none"),
    (bpe(tokens=["a", "a"], token_type=[1, 1]), "tokenizer.ggml.tokens: two tokens are equal"),
    ({**SPM, "ggml.scores": None}, "tokenizer.ggml.scores: they are missing"),
]  # fmt: skip


@pytest.mark.parametrize("metadata, text", TOKEN_FAULTS, ids=[text for _, text in TOKEN_FAULTS])
def test_tokenizer_that_cannot_be_rebuilt_is_refused_in_one_line(metadata, text):
    with pytest.raises(WeightsError) as error:
        build_tokenizer(metadata)
    assert text in str(error.value) and "\n" not in str(error.value)
