"""Jobs on a pretrained model: a Hugging Face directory gives architecture, tokenizer, template and first weights."""

import json
import shutil

import numpy as np
import pytest

from rl_jax import launch
from rl_jax.config import ConfigError, parse
from rl_jax.metrics import read_metrics
from rl_jax.models import hf
from rl_jax.rollout.traces import read_traces
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.tokens.load import load_tokenizer
from tests.test_preemption import CONFIG
from tests.tokens import families

PADDING = 24  # rows of the embedding beyond the tokenizer's ids, as published models have
SIZES = ("num_layers", "embed_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size")


def make_directory(directory, family="qwen3", **changes):
    """A tiny random model with the tokenizer and template of a family."""
    families.write(directory, family)
    size = load_tokenizer(str(directory), launch.resolve).vocab_size + PADDING
    features = {
        "num_layers": 1,
        "embed_size": 32,
        "head_dim": 8,
        "mlp_size": 48,
        "qk_norm": True,
        "max_context": 1024,
    }
    model, params = tiny_model(3, size, **{**features, **changes})
    hf.save(directory, params, model.settings, vocab_size=size, copy_from=None)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_directory(tmp_path_factory.mktemp("model") / "tiny")


def words(directory, **changes):
    """The tests' job on a directory's model; its own sizes stand in the config file, so they are given back."""
    said = {
        "model.source": directory, "model.embed_size": 96, "model.head_dim": 24, "model.mlp_size": 256,
        "warm_start.steps": 0, "engine.context": 192, "engine.chunk_sizes": "(192,)", "learner.row_tokens": 192,
        "steps": 1, **changes,
    }  # fmt: skip
    return [CONFIG, *(f"--config.{key}={value}" for key, value in said.items())]


def run(run_dir, directory, *more, **changes):
    return launch.main([*words(directory, **changes), f"--run_dir={run_dir}", *more])


def test_a_directory_decides_the_architecture_and_the_tokenizer(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    model = parse(words("tiny")).settings.model
    assert (model.source, model.tokenizer) == (str(directory), str(directory))
    assert (model.num_layers, model.embed_size, model.qk_norm, model.tie_embeddings) == (
        1,
        32,
        True,
        True,
    )
    assert model.vocab_size % 8 == load_tokenizer(str(directory), launch.resolve).vocab_size % 8
    assert parse(words(directory, **{"model.tokenizer": "byte"})).settings.model.tokenizer == "byte"


@pytest.mark.parametrize(
    "change, line",
    [
        ({"model.num_layers": 7, "model.mlp_size": 9}, "model.num_layers=7 but model.source=DIR has 1; leave it out"),
        ({"model.mlp_size": 9}, "model.mlp_size=9 but model.source=DIR has 48; leave it out"),
        ({"model.source": "/nowhere"}, "model.source=/nowhere: /nowhere is no directory; name a directory"),
        ({"engine.context": 2048, "learner.row_tokens": 2048}, "engine.context=2048 is above model.max_context=1024"),
    ],
)  # fmt: skip
def test_what_a_directory_contradicts_is_one_line(directory, change, line):
    with pytest.raises(ConfigError) as raised:
        parse(words(directory, **change))
    assert any(e.startswith(line.replace("DIR", str(directory))) for e in raised.value.errors), (
        raised.value.errors
    )


def test_a_gguf_file_is_refused_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a GGUF file.*python -m rl_jax.tools.convert"):
        parse(words(tmp_path / "m.gguf"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, directory):
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert run(run_dir, directory, **{"steps": 2, "rollout.max_staleness": 0}) == 0
    return run_dir


@pytest.mark.slow
def test_a_run_begins_with_the_directorys_weights_and_sampler_and_trainer_agree(trained, directory):
    rows = [row for row in read_metrics(trained) if "policy/loss" in row]
    assert len(rows) == 2 and all(np.isfinite(row["policy/loss"]) for row in rows)
    assert all(row["mismatch/abs_max"] < 1e-4 for row in rows)
    assert json.loads((trained / "plan.json").read_text())["template_sha256"]


@pytest.mark.slow
def test_ids_of_a_padded_vocabulary_are_sampled_and_trained(trained, directory):
    """Published models have rows beyond the tokenizer's ids; an episode does not fail by sampling one."""
    size = load_tokenizer(str(directory), launch.resolve).vocab_size
    traces = [t for step in (1, 2) for t in read_traces(trained / f"rollouts/step_{step}/train")]
    assert all(t.failure is None for t in traces)
    sampled = np.concatenate([t.tokens[t.loss_mask] for t in traces])
    assert sampled.max() < size + PADDING
    tokenizer = load_tokenizer(str(directory), launch.resolve)
    assert tokenizer.decode([5, size + 1, size, 6]).count("\ufffd") >= 2


@pytest.mark.slow
def test_rollout_only_then_train_only(tmp_path, directory, capsys):
    assert run(tmp_path / "sampled", directory, "--mode=rollout_only") == 0
    replay = {"rollout.replay_dir": tmp_path / "sampled"}
    assert run(tmp_path / "learned", directory, "--mode=train_only", **replay) == 0
    (row,) = [row for row in read_metrics(tmp_path / "learned") if "policy/loss" in row]
    assert row["mismatch/abs_max"] < 1e-4  # the weights that sampled are those that train
    other = shutil.copytree(directory, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("# Tools", "# Functions"))
    for more in ([], ["--dry_run"]):
        assert run(tmp_path / "no", other, "--mode=train_only", *more, **replay) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "its tokens would mean other text" in line
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_a_run_goes_on_where_its_model_was_moved(tmp_path, directory, trained, capsys):
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    moved = tmp_path / "moved"
    shutil.copytree(directory, moved)
    assert run(tmp_path / "run", moved, **{"steps": 3, "rollout.max_staleness": 0}) == 0
    template = moved / "chat_template.jinja"
    template.write_text(template.read_text().replace("# Tools", "# Functions"))
    assert run(tmp_path / "run", moved, **{"steps": 4, "rollout.max_staleness": 0}) == 2
    assert "was begun with the chat template" in capsys.readouterr().err
    # In a directory of its own it may: the weights go on, and the change is told.
    fork = [f"--resume={tmp_path / 'run'}", "--config.metrics.progress=plain"]
    assert run(tmp_path / "fork", moved, *fork, **{"steps": 4, "rollout.max_staleness": 0}) == 0
    assert "was trained with another tokenizer or chat template" in capsys.readouterr().out


@pytest.mark.slow
def test_a_teacher_may_be_a_larger_pretrained_model(tmp_path, directory, capsys):
    teacher = make_directory(tmp_path / "teacher", num_layers=2)
    opd = {"algorithm.name": "opd", "teacher.checkpoint": teacher}
    assert run(tmp_path / "run", directory, **opd) == 0
    pins = json.loads((tmp_path / "run" / "roles.json").read_text())
    assert pins["teacher"]["checkpoint"] == str(teacher)
    other = make_directory(tmp_path / "other", family="llama31")
    assert run(tmp_path / "no", directory, **{**opd, "teacher.checkpoint": other}) == 2
    assert "give a checkpoint of the same tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reward_model_starts_from_a_model_with_a_head_of_its_own(tmp_path):
    """Of whose weights it takes all but the head over the vocabulary."""
    untied = make_directory(tmp_path / "untied", tie_embeddings=False)
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "yes", "rejected": "no"}\n' * 4)
    data = {"algorithm.name": "rm", "data.path": rows, "data.batch_rows": 4, "data.epochs": 1}
    assert run(tmp_path / "run", untied, **data) == 0
    (row,) = [row for row in read_metrics(tmp_path / "run") if "preference/loss" in row]
    assert row["preference/loss"] == pytest.approx(np.log(2), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("history", ["keep", "template"])
def test_calls_of_tools_are_parsed_and_answered_under_a_template(tmp_path, directory, history):
    """Scripted episodes of a tool environment through the qwen3 template: sft on them trains."""
    task = {
        "tag": "calculator",
        "env": "calculator",
        "script_episodes": 8,
        "script_skill": 1.0,
        "config": {},
    }
    changes = {
        "engine.context": 1024, "engine.chunk_sizes": "(512,)", "learner.row_tokens": 4096, "rollout.history": history,
        "rollout.max_new_tokens": 96, "rollout.max_turns": 6, "algorithm.name": "sft", "data.batch_rows": 4,
    }  # fmt: skip
    changes |= {f"tasks.sources[0].{k}": v for k, v in task.items() if k != "config"}
    assert run(tmp_path / "run", directory, **changes) == 0
    (row,) = [row for row in read_metrics(tmp_path / "run") if "data/epoch" in row]
    assert np.isfinite(row["sft/loss"])
