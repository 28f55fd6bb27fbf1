"""What a pretrained model's files tell before there is a run directory."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_jax import launch
from rl_jax.build_roles import Setting
from rl_jax.config import ConfigError, parse
from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.models.hf_files import INDEX, SINGLE, Weights
from rl_jax.preflight import Opening, build_model
from rl_jax.preflight_model import check_weights, history_notes
from rl_jax.resume import Decision
from rl_jax.start import reads_source
from rl_jax.tokens.load import load_tokenizer
from rl_jax.types import Message
from tests.test_pretrained import make_directory, words
from tests.tokens.families import renderer_of

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_directory(tmp_path_factory.mktemp("model") / "whole")


@pytest.fixture
def shards(whole, tmp_path):
    """The model in three files and their index, free to be damaged."""
    directory = tmp_path / "model"
    shutil.copytree(whole, directory)
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    names, listed = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, directory / file)
        listed |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"weight_map": listed}))
    return directory


def setting_of(directory, tmp_path, mode="train", **changes):
    settings = parse(words(directory, **changes)).settings
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    meshes = build_meshes(plan)
    return Setting(settings, plan, meshes, tmp_path / "run", launch.resolve, print, mode)


def check(directory, tmp_path, reads_source=True, **changes):
    setting = setting_of(directory, tmp_path, **changes)
    size = load_tokenizer(setting.settings.model.tokenizer, launch.resolve).vocab_size
    check_weights(setting, build_model(setting.settings, launch.resolve, size), reads_source)


def index_of(directory):
    return json.loads((directory / INDEX).read_text())["weight_map"]


def rewrite(directory, name, change):
    """Change the tensors of the shard that has one."""
    path = directory / index_of(directory)[name]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    known = {n: f for n, f in index_of(directory).items() if f != path.name or n in tensors}
    (directory / INDEX).write_text(json.dumps({"weight_map": known}))


def cut(directory, keep):
    path = directory / index_of(directory)[Q]
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep > 0 else len(data) + keep])
    return len(data)


def append(directory):
    with (directory / index_of(directory)[Q]).open("ab") as file:
        file.write(b"12345")


FAULTS = {
    "cut": (lambda d: cut(d, -10), "FILE cannot be read: it is cut short: ", " by its header; fetch it again"),
    "cut in the header": (lambda d: cut(d, 50), "FILE cannot be read: it is cut short: 50 bytes, of ", " by its"),
    "cut before it": (lambda d: cut(d, 3), "FILE cannot be read: it is cut short: 3 bytes, of ", " by its header"),
    "too long": (append, "FILE cannot be read: it is longer than it says: ", "fetch it again"),
    "a page of a web site": (lambda d: (d / index_of(d)[Q]).write_bytes(b"<!DOCTYPE html>" * 9),
                             "FILE cannot be read: ", "it is no safetensors file: fetch it again"),
    "shard": (lambda d: (d / index_of(d)[Q]).unlink(), "lacks 1 of 3 shards: FILE; fetch them", ""),
    "index": (lambda d: (d / INDEX).write_text("{"), f"{INDEX} cannot be read", "fetch it again"),
    "missing": (lambda d: [rewrite(d, n, lambda t, n=n: t.pop(n)) for n in (Q, UP)],
                f"2 missing ({Q}, {UP})", "fetch all of one model again"),
    "unexpected": (lambda d: rewrite(d, Q, lambda t: t.update({f"x.{i:02d}": np.zeros(1) for i in range(23)})),
                   "23 unexpected (x.00 in FILE, x.01 in FILE, ", "x.19 in FILE and 3 more)"),
    "shape": (lambda d: rewrite(d, Q, lambda t: t.update({Q: t[Q][:-1].copy()})),
              f"1 of another shape ({Q} [31, 32], not [32, 32] in FILE)", ""),
    "dtype": (lambda d: rewrite(d, Q, lambda t: t.update({Q: t[Q].astype(np.int8)})),
              f"1 of a dtype that is none of F32, F16, BF16 ({Q} I8 in FILE)", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_checkpoint_is_one_line_from_its_headers(shards, tmp_path, fault):
    check(shards, tmp_path)
    file = index_of(shards)[Q]
    damage, *told = FAULTS[fault]
    damage(shards)
    with pytest.raises(ConfigError) as refused:
        check(shards, tmp_path)
    (line,) = refused.value.errors
    assert line.startswith(f"model.source={shards}: ") and "\n" not in line, line
    at = 0
    for words_ in told:
        at = line.index(words_.replace("FILE", file), at)
    check(
        shards, tmp_path, reads_source=False
    )  # a run that goes on from its checkpoint reads none of it


def test_lengths_of_a_file_that_is_cut_are_told(shards, tmp_path):
    size = cut(shards, -10)
    with pytest.raises(ConfigError) as refused:
        check(shards, tmp_path)
    assert (
        f"is cut short: {size - 10:,} bytes, of {size:,} by its header" in refused.value.errors[0]
    )


def test_every_role_with_a_checkpoint_is_checked_in_a_line_of_its_own(shards, whole, tmp_path):
    teacher = shutil.copytree(shards, tmp_path / "teacher")
    cut(teacher, -1)
    rewrite(shards, Q, lambda t: t.pop(Q))
    opd = {"algorithm.name": "opd", "teacher.checkpoint": teacher}
    with pytest.raises(ConfigError) as refused:
        check(shards, tmp_path, **opd)
    ours, theirs = refused.value.errors
    assert ours.startswith("model.source=") and "1 missing" in ours
    assert theirs.startswith(f"teacher.checkpoint={teacher}: ") and "is cut short" in theirs
    reference = {"algorithm.kl.coef": 0.1, "reference.checkpoint": teacher}
    with pytest.raises(ConfigError) as refused:
        check(whole, tmp_path, **reference)
    assert [line.split("=")[0] for line in refused.value.errors] == ["reference.checkpoint"]


def test_run_that_begins_from_a_checkpoint_does_not_read_its_source(whole, tmp_path):
    settings = setting_of(whole, tmp_path).settings
    fresh = Decision(tmp_path, "id", 0, None)
    resumed = Decision(tmp_path, "id", 1, tmp_path / "checkpoints" / "step_1")
    assert reads_source(settings, "train", fresh) and reads_source(settings, "eval", fresh)
    assert not reads_source(settings, "train", resumed)


def test_no_value_is_read(shards, tmp_path, monkeypatch):
    def read(self, name, index=()):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Weights, "read", read)
    check(shards, tmp_path)


@pytest.mark.slow
def test_headers_of_28_layers_in_28_shards_are_read_in_half_a_second(tmp_path):
    """As many tensors as a model of 7B has; how large each is makes no difference."""
    sizes = {"num_layers": 28, "embed_size": 64, "mlp_size": 128, "num_heads": 4, "head_dim": 16}
    directory = make_directory(tmp_path / "many", **sizes)
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    listed = {}
    for i in range(28):
        file = f"model-{i:05d}-of-00028.safetensors"
        of = [n for n in tensors if f"layers.{i}." in n or (i == 0 and "layers" not in n)]
        save_file({n: tensors[n] for n in of}, directory / file)
        listed |= dict.fromkeys(of, file)
    (directory / INDEX).write_text(json.dumps({"weight_map": listed}))
    setting = setting_of(directory, tmp_path)
    model = build_model(setting.settings, launch.resolve, 0)
    start = time.process_time()
    check_weights(setting, model, True)
    assert len(listed) == 28 * 11 + 2 and time.process_time() - start < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--dry_run"], []])
def test_job_is_refused_before_it_has_a_directory(shards, tmp_path, capsys, more):
    cut(shards, -10)
    code = launch.main([*words(shards), f"--run_dir={tmp_path / 'run'}", *more])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith(f"error: model.source={shards}: ")
    assert "is cut short" in line and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tokenizer_larger_than_the_embedding_is_refused_before_a_directory(tmp_path, capsys):
    """The directory's files are of different models: more tokens than rows."""
    directory = make_directory(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = 300
    (directory / "config.json").write_text(json.dumps(config))
    code = launch.main([*words(directory), f"--run_dir={tmp_path / 'run'}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and "model.vocab_size=300 is below the " in line and str(directory) in line
    assert "are of different models: fetch the directory again" in line
    assert not (tmp_path / "run").exists()


# --- histories -------------------------------------------------------------------------------------------------------

KEPT, TOOLS = Message("user", "2+2?"), ({"type": "function", "function": {"name": "calc"}},)


def notes(family, opening, played=MappingProxyType({}), **changes):
    settings = parse([f"--config={Path(__file__).parent / 'job_config.py'}"]).settings
    rollout = replace(settings.rollout, **changes)
    settings = replace(settings, rollout=rollout)
    return list(history_notes(settings, {"a": opening, "b": opening}, renderer_of(family), played))


@pytest.mark.parametrize(
    "family, tools, told",
    [
        ("qwen25", (), ""),
        ("qwen3", (), "drops the thoughts of earlier ones"),
        ("qwen3", TOOLS, ""),
        ("llama2", (), "shows another history than was seen"),
        ("mistral", (), ""),
        ("mistral", TOOLS, "shows another history than was seen"),
    ],
)
def test_one_note_says_that_a_template_shows_another_history(family, tools, told):
    opening = Opening((KEPT,), tools, 3)
    lines = notes(family, opening)
    assert len(lines) == bool(told)
    for line in lines:
        assert line.startswith(
            f"tag a, b: in later turns the chat template {told}; with rollout.history=keep the model"
        )
        assert line.endswith("set rollout.history=template to follow it")
    assert notes(family, opening, history="template") == []
    assert notes(family, replace(opening, max_turns=1)) == []  # nothing follows a turn


def test_an_episode_whose_history_was_rewritten_is_enough():
    lines = notes("qwen25", Opening((KEPT,), (), 3), {"b": True})
    assert len(lines) == 1 and lines[0].startswith("tag b: in later turns the chat template shows")


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--dry_run"], ["--config.metrics.progress=plain"]])
def test_a_job_says_what_its_template_does(whole, tmp_path, capsys, more):
    """In a dry run of an environment with a script, and before a run, whose weights are then refused."""
    directory = shutil.copytree(whole, tmp_path / "model")
    if "--dry_run" not in more:
        (directory / SINGLE).write_bytes(b"")
    echo = {"tasks.sources[0].env": "rl_jax.testing.envs:EchoEnv", "rollout.max_new_tokens": 24}
    code = launch.main([*words(directory, **echo), f"--run_dir={tmp_path / 'run'}", *more])
    out = capsys.readouterr().out
    assert code == (0 if "--dry_run" in more else 2)
    assert (
        out.count("in later turns the chat template drops the thoughts of earlier ones; with") == 1
    ), out
