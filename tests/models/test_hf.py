"""Weights of Hugging Face directories: round trips byte for byte, onto any sharding; what does not fit is listed."""

import json
import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from rl_jax.learner.attention import plain_attention
from rl_jax.mesh import TRAIN_RULES, make_mesh, merge_rules, shardings
from rl_jax.models import hf, hf_config
from rl_jax.models.decoder import build_model
from rl_jax.models.hf_files import INDEX, SINGLE, SUMS, WeightsError, check_digests
from rl_jax.models.value import value_model
from rl_jax.settings import ModelSettings
from rl_jax.testing.tiny_model import tiny_model
from tests.models.numpy_reader import NumpyModel

VOCAB = 300  # rows: more than the tokenizer has
GEMMA = {
    "norm_offset": True, "post_norms": True, "scale_embed": True, "activation": "gelu_tanh", "window": 4,
    "full_every": 2, "max_context": 64,
}  # fmt: skip
FAMILIES = {
    "llama": {"tie_embeddings": False},
    "tied": {},
    "qwen2": {"qkv_bias": True, "tie_embeddings": False, "num_kv_heads": 1},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "mistral": {"window": 4},
    "gemma2": {**GEMMA, "attention_softcap": 2.0, "logit_softcap": 8.0, "attention_scale": 0.25},
    "gemma3": {**GEMMA, "qk_norm": True, "rope_theta_local": 1e3},
}


def make(name, dtype=jnp.float32):
    """(model, params) of a family; biases and norms moved from where they start."""
    model, params = tiny_model(vocab_size=VOCAB, **FAMILIES[name])
    rng = np.random.default_rng(1)
    return model, {
        n: jnp.asarray(p + 0.1 * rng.normal(size=p.shape), dtype) for n, p in params.items()
    }


def saved(directory, name, dtype=jnp.float32, **options):
    model, params = make(name, dtype)
    options = {"vocab_size": VOCAB, "copy_from": None} | options
    hf.save(directory, params, model.settings, **options)
    return model, params


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A directory of a tied model in one file, and what is in it."""
    directory = tmp_path_factory.mktemp("tied")
    return directory, *saved(directory, "tied", jnp.bfloat16)


@pytest.fixture
def copy(tied, tmp_path):
    """The same, to damage; without its digests."""
    shutil.copytree(tied[0], tmp_path / "copy")
    (tmp_path / "copy" / SUMS).unlink()
    return tmp_path / "copy"


def one_device(model):
    return dict.fromkeys(model.abstract, SingleDeviceSharding(jax.devices()[0]))


def load(directory, dtype=None):
    settings = hf_config.settings_of(hf_config.read(directory), ModelSettings())
    model = build_model(settings, settings.vocab_size)
    return model, hf.load(directory, model, one_device(model), dtype)


def raw(array):
    return np.asarray(array).view(np.uint8).tobytes()


def tensors_of(directory):
    return {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_params_come_back_byte_for_byte_in_bfloat16(name, tmp_path):
    model, params = saved(tmp_path, name, jnp.bfloat16)
    read, back = load(tmp_path, jnp.bfloat16)
    assert read.settings == replace(model.settings, vocab_size=VOCAB)
    assert back.keys() == params.keys()
    assert all(raw(back[n]) == raw(params[n]) for n in params)


def test_directory_comes_back_byte_for_byte(tied, tmp_path):
    directory, model, _ = tied
    _, params = load(directory, jnp.bfloat16)
    hf.save(tmp_path, params, model.settings, vocab_size=VOCAB, copy_from=directory)
    assert (tmp_path / SINGLE).read_bytes() == (directory / SINGLE).read_bytes()
    assert (tmp_path / SUMS).read_bytes() == (directory / SUMS).read_bytes()


def test_shards_and_their_index_hold_the_same(tied, tmp_path):
    _, params = saved(tmp_path, "tied", jnp.bfloat16, max_shard_bytes=20_000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    whole = tensors_of(tied[0])
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in whole.values())
    assert all(raw(a) == raw(whole[n]) for n, a in tensors_of(tmp_path).items())
    sizes = [sum(a.nbytes for a in load_file(tmp_path / f).values()) for f in files]
    assert max(sizes[1:]) <= 20_000, "only the embedding, which is larger, has one for itself"
    assert all(raw(a) == raw(params[n]) for n, a in load(tmp_path, jnp.bfloat16)[1].items())


@pytest.mark.slow
def test_tied_model_has_no_head_and_no_entry_for_one(tied, tmp_path):
    assert "lm_head.weight" not in tensors_of(tied[0])
    saved(tmp_path, "llama", max_shard_bytes=20_000)
    assert "lm_head.weight" in json.loads((tmp_path / INDEX).read_text())["weight_map"]
    saved(tmp_path / "tied", "tied", max_shard_bytes=20_000)
    assert "lm_head.weight" not in (tmp_path / "tied" / INDEX).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_an_independent_reader(name, tmp_path):
    model, params = saved(tmp_path, name)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 12)
    positions, segments = np.arange(12)[None], jnp.ones((1, 12), int)
    attend = plain_attention(model.settings, positions, segments)
    forward = jax.jit(lambda p: model.logits(p, model.hidden(p, tokens[None], positions, attend)))
    np.testing.assert_allclose(forward(params)[0], NumpyModel(tmp_path).logits(tokens), atol=1e-4)


def test_values_are_rounded_to_the_dtype_asked_for(tmp_path):
    _, params = saved(tmp_path, "tied")
    _, back = load(tmp_path, jnp.bfloat16)
    assert all(raw(back[n]) == raw(p.astype(jnp.bfloat16)) for n, p in params.items())


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}])
def test_each_device_gets_its_slice(axes, tmp_path):
    model, params = saved(tmp_path, "qwen2" if axes.get("tensor", 1) == 1 else "llama")
    mesh = make_mesh(axes, jax.devices()[: np.prod(list(axes.values()))])
    rules = merge_rules(TRAIN_RULES, {"head_dim": "context"})
    placed = shardings(model.logical_axes, rules, mesh)
    back = hf.load(tmp_path, model, placed)
    for name, array in back.items():
        assert array.sharding == placed[name]
        np.testing.assert_array_equal(array, params[name])


def test_heads_may_be_split_inside(tmp_path):
    model, params = saved(tmp_path, "llama")
    mesh = make_mesh({"tensor": 2, "context": 2}, jax.devices()[:4])
    rules = {"heads": "tensor", "head_dim": "context"}
    back = hf.load(tmp_path, model, shardings(model.logical_axes, rules, mesh))
    assert all(np.array_equal(back[n], params[n]) for n in params)


def test_only_the_slices_of_a_device_are_read(tied, monkeypatch):
    directory, model, params = tied
    read, sizes = hf.Weights.read, []

    def counted(weights, name, index=()):
        found = read(weights, name, index)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(hf.Weights, "read", counted)
    mesh = make_mesh({"tensor": 2, "data": 2}, jax.devices()[:4])
    hf.load(directory, model, shardings(model.logical_axes, {"vocab": "tensor"}, mesh), jnp.bfloat16)  # fmt: skip
    assert sum(sizes) == sum(p.nbytes for p in params.values()), "each slice once, not per replica"
    assert max(sizes) == params["embed"].nbytes // 2


def test_arrays_do_not_share_memory_with_the_file(copy):
    _, params = load(copy, jnp.bfloat16)
    before = {n: raw(p) for n, p in params.items()}
    with (copy / SINGLE).open("r+b") as file:
        file.write(b"\0" * (copy / SINGLE).stat().st_size)
    assert all(raw(p) == before[n] for n, p in params.items())


# --- what stands beside weights, and odd but right directories ------------------------------------


def test_text_files_go_along_byte_for_byte(tied, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tied[0], source)
    texts = {"tokenizer.json": b'{"a": 1}\r\n', "tokenizer_config.json": b"{ }", "chat_template.jinja": b"{{ x }}",
             "generation_config.json": b'{"eos_token_id": [1, 2]}'}  # fmt: skip
    for name, text in texts.items():
        (source / name).write_bytes(text)
    (source / "pytorch_model.bin").write_bytes(b"no")
    target = tmp_path / "target"
    hf.save(target, tied[2], tied[1].settings, vocab_size=VOCAB, copy_from=source)
    assert {n: (target / n).read_bytes() for n in texts} == texts
    assert not (target / "pytorch_model.bin").exists()
    assert check_digests(target, [p.name for p in target.iterdir() if p.name != SUMS])


def rewrite(directory, change):
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def test_head_that_is_the_embedding_is_accepted(copy, tied):
    rewrite(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    _, params = load(copy, jnp.bfloat16)
    assert params.keys() == tied[2].keys()


def test_trunk_of_a_reward_model_is_read_from_a_directory_with_a_head(tmp_path):
    model, params = saved(tmp_path, "qwen2")
    assert not model.settings.tie_embeddings
    trunk = value_model(build_model, model.settings, model.vocab_size).trunk
    found = hf.load(tmp_path, trunk, one_device(trunk), skips_head=True)
    assert found.keys() == params.keys() - {"unembed"}
    assert all(raw(found[name]) == raw(params[name]) for name in found)


def test_text_model_of_a_model_for_images_is_found(copy, tied):
    for prefix in ("language_model.", "model.language_model."):
        tensors = {}
        for name, array in tensors_of(tied[0]).items():
            plain = name.removeprefix("model.") if prefix.startswith("model.") else name
            tensors[prefix + plain] = array
        tensors["vision_tower.patch.weight"] = np.zeros(3, np.float32)
        tensors["multi_modal_projector.norm.weight"] = np.zeros(3, np.float32)
        save_file(tensors, copy / SINGLE)
        assert raw(load(copy, jnp.bfloat16)[1]["embed"]) == raw(tied[2]["embed"])


def test_buffers_of_old_files_are_passed_over(copy):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(copy, lambda t: t.update({name: np.zeros(4, np.float32)}))
    load(copy)


# --- what does not fit ----------------------------------------------------------------------------

EMBED, Q = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def changed(tensors, name, value):
    tensors[name] = value


FAULTS = [
    (lambda t: t.pop(Q), f"1 missing ({Q})"),
    (lambda t: [t.pop(n) for n in list(t) if "mlp" in n], "6 missing (model.layers.0.mlp.down_proj.weight,"),
    (lambda t: changed(t, "model.layers.9.extra.weight", np.zeros(1, np.int8)), "1 unexpected (model.layers.9.extra"),
    (lambda t: changed(t, Q, t[Q][:-1].copy()), f"1 of another shape ({Q} [31, 32], not [32, 32])"),
    (lambda t: changed(t, EMBED, t[EMBED][:-1].copy()), f"1 of another shape ({EMBED} [299, 32], not [300, 32])"),
    (lambda t: changed(t, Q, np.zeros((32, 32), np.int8)), f"1 of a dtype that is none of F32, F16, BF16 ({Q} I8)"),
    (lambda t: changed(t, "lm_head.weight", t[EMBED] + 1), "lm_head.weight differs from model.embed_tokens.weight"),
]  # fmt: skip


@pytest.mark.parametrize("change, text", FAULTS, ids=[text for _, text in FAULTS])
def test_weights_that_do_not_fit_are_listed_in_one_line(copy, change, text):
    rewrite(copy, change)
    with pytest.raises(WeightsError) as error:
        load(copy)
    assert text in str(error.value) and "\n" not in str(error.value)
    assert str(copy) in str(error.value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(copy, tied, dtype, value):
    place = (31, 2)
    for name in (EMBED, Q):
        array = np.array(tensors_of(tied[0])[name].astype(np.float32))
        array[place] = value
        rewrite(copy, partial(changed, name=name, value=array.astype(dtype)))
        with pytest.raises(WeightsError) as error:
            load(copy)
        told = f"{copy / SINGLE}: {name} has {value} at [31, 2], where weights must be finite"
        assert str(error.value).startswith(told)
        shutil.copyfile(tied[0] / SINGLE, copy / SINGLE)
    rewrite(copy, lambda t: changed(t, Q, np.full((32, 32), 1e5, np.float32)))
    load(copy)
    with pytest.raises(WeightsError, match="in float16: .* has inf at"):
        load(copy, jnp.float16)


def test_many_names_are_listed_and_the_rest_is_counted(copy):
    extra = {f"extra.{i:02d}": np.zeros(1, np.float32) for i in range(23)}
    rewrite(copy, lambda t: t.update(extra))
    with pytest.raises(WeightsError) as error:
        load(copy)
    listed = ", ".join(sorted(extra)[:20])
    assert f"23 unexpected ({listed} and 3 more)" in str(error.value)
    assert str(error.value).endswith("fetch all of one model again")


def cut(directory):
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[:-10])


def to_pickle(directory):
    (directory / SINGLE).rename(directory / "pytorch_model.bin")


def index(directory, value):
    (directory / INDEX).write_text(value if isinstance(value, str) else json.dumps(value))


BROKEN = [
    (cut, "model.safetensors cannot be read"),
    (lambda d: (d / SINGLE).write_bytes(b""), "it is cut short: 0 bytes, of 8 by its header; fetch it again"),
    (to_pickle, "but pytorch_model.bin, a pickle, which is not read; save it as safetensors"),
    (lambda d: (d / SINGLE).unlink(), "no model.safetensors.index.json; fetch its *.safetensors"),
    (lambda d: index(d, {"weight_map": {"a": "x.safetensors"}}), "lacks 1 of 1 shards: x.safetensors; fetch them"),
    (lambda d: index(d, {"weight_map": {"a": SINGLE}}), "lists 1 tensors that are not in their file, first a in"),
    (lambda d: index(d, {"weight_map": {"a": "../x.safetensors"}}), "no weight_map from tensors to files beside it"),
    (lambda d: index(d, "{"), "model.safetensors.index.json cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize("damage, text", BROKEN, ids=[text for _, text in BROKEN])
def test_broken_files_are_told_in_one_line(copy, damage, text):
    damage(copy)
    with pytest.raises(WeightsError) as error:
        load(copy)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_flipped_bit_is_found_by_the_digests(tied, tmp_path):
    directory = tmp_path / "flipped"
    shutil.copytree(tied[0], directory)
    with (directory / SINGLE).open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)
        file.seek(-5, 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightsError, match="does not match its line of SHA256SUMS"):
        load(directory)
    (directory / SUMS).write_text("")
    with pytest.raises(WeightsError, match="has no line for model.safetensors"):
        load(directory)
    (directory / SUMS).unlink()
    load(directory)
