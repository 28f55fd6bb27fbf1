"""The dry run: an episode of each source there and back, its longest first prompts, and every program traced."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from rl_jax import launch
from rl_jax.algorithms.grpo import Grpo
from rl_jax.build_roles import Setting
from rl_jax.config import ConfigError, parse
from rl_jax.learner.learner import Learner
from rl_jax.learner.trained import state_bytes
from rl_jax.mesh import MeshPlan, build_meshes
from rl_jax.plan_record import checkpoint_need
from rl_jax.preflight import (
    NUM_LONGEST,
    NUM_PROMPTS,
    check_messages,
    to_count,
    vocabulary_remedy,
)
from rl_jax.run_dir import RunDir
from rl_jax.settings import ModelSettings
from rl_jax.testing.envs import EvenEnv
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.tokens import ByteTokenizer
from rl_jax.types import Message

CONFIG = f"--config={Path(__file__).parent / 'job_config.py'}"
ECHO = "--config.tasks.sources[0].env=rl_jax.testing.envs:EchoEnv"
MISBEHAVING = "--config.tasks.sources[0].env=rl_jax.testing.envs:MisbehavingEnv"
ROOM = "--config.rollout.max_new_tokens=12"


class LossyTokenizer(ByteTokenizer):
    """Cannot tell an e from an E."""

    def encode(self, text):
        return super().encode(text.replace("e", "E"))


class CutTokenizer(ByteTokenizer):
    """Keeps the observations, and no text that a script says."""

    def encode(self, text):
        return super().encode(text if " " in text else text[:-1])


class MeanLoss(Grpo):
    """Reduces what the learner reduces; broadcast, it would train something else."""

    def token_loss(self, x):
        loss, sums = super().token_loss(x)
        return loss.mean(), sums


class BranchingLoss(Grpo):
    def token_loss(self, x):
        loss, sums = super().token_loss(x)
        return (loss if loss.sum() > 0 else -loss), sums


def dry_run(directory, capsys, *words):
    code = launch.main([CONFIG, "--dry_run", f"--run_dir={directory}", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err, err
    return code, out, [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_scripted_episode_goes_through_the_tokenizer_and_back(tmp_path, capsys):
    code, out, errors = dry_run(tmp_path, capsys, ECHO, ROOM)
    assert (code, errors) == (0, [])
    assert "tag even: a scripted episode keeps its text through the tokenizer: " in out
    trip = json.loads((tmp_path / "plan.json").read_text())["round_trips"]["even"]
    assert trip["num_turns"] > 0 and 0 < trip["num_sampled"] < trip["num_tokens"] <= 128


@pytest.mark.slow
def test_a_notebook_cell_whose_loop_runs_can_run_a_job(tmp_path, capsys):
    async def cell():
        return dry_run(tmp_path, capsys, ECHO, ROOM)

    code, out, errors = asyncio.run(cell())
    assert (code, errors) == (0, []) and "a scripted episode keeps its text" in out


def test_step_without_a_reward_is_found_by_the_script(tmp_path, capsys):
    fault = "--config.tasks.sources[0].config.fault=none_reward"
    code, _, errors = dry_run(tmp_path, capsys, MISBEHAVING, fault, ROOM)
    assert code == 2 and len(errors) == 1, errors
    assert (
        "tag even: a scripted episode of task even/train/0: reward of step 0 is None" in errors[0]
    )
    assert "give StepResult a reward in every step(), 0.0 for none" in errors[0]


@pytest.mark.slow
def test_environment_without_a_script_shows_its_first_observation(tmp_path, capsys):
    code, out, errors = dry_run(tmp_path, capsys)
    assert (code, errors) == (0, [])
    assert "tag even: the first observation (the environment has no script()) keeps" in out
    trip = json.loads((tmp_path / "plan.json").read_text())["round_trips"]["even"]
    assert (trip["num_turns"], trip["num_sampled"]) == (0, 0)


def test_tokenizer_that_loses_text_is_told_with_both_texts(tmp_path, capsys):
    lossy = "--config.model.tokenizer=tests.test_preflight:LossyTokenizer"
    code, _, errors = dry_run(tmp_path, capsys, lossy)
    assert code == 2 and len(errors) == 1
    assert "tag even: 'even 0' was said, but the tokens decode to" in errors[0]
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_script_that_the_tokenizer_cuts_stops_the_dry_run_where_a_warm_start_plays_it(
    tmp_path, capsys
):
    words = ["--config.model.tokenizer=tests.test_preflight:CutTokenizer", ECHO, ROOM]
    code, _, errors = dry_run(tmp_path, capsys, *words, "--config.warm_start.steps=1")
    assert code == 2 and len(errors) == 1 and "once tokenized" in errors[0], errors
    code, out, errors = dry_run(tmp_path, capsys, *words)
    assert (code, errors) == (0, []) and "the first observation (scripted episode: " in out


def test_environment_that_breaks_in_its_first_episode_is_one_line(tmp_path, capsys):
    fault = [
        "--config.tasks.sources[0].config.fault=raise",
        "--config.tasks.sources[0].config.at=reset",
    ]
    code, _, errors = dry_run(tmp_path, capsys, MISBEHAVING, ROOM, *fault)
    assert code == 2 and len(errors) == 1 and "the environment is broken" in errors[0], errors


# --- first prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_first_prompt_over_the_context_is_refused_by_task_and_size(tmp_path, capsys):
    code, out, errors = dry_run(tmp_path, capsys, ECHO, "--config.rollout.max_new_tokens=116")
    assert (code, errors) == (0, [])
    # bos, user, "say ant0", end, assistant
    assert (
        "tag even: longest first prompt of 8 of 8 train tasks: 12 tokens of 12 (even/train/0" in out
    )
    prompts = json.loads((tmp_path / "plan.json").read_text())["prompts"]["even"]
    assert [(p["split"], p["num_tokens"], p["limit"]) for p in prompts] == [
        ("train", 12, 12), ("eval", 12, 12),
    ]  # fmt: skip
    over = "--config.rollout.max_new_tokens=117"
    code, _, errors = dry_run(tmp_path / "over", capsys, ECHO, over)
    assert code == 2 and len(errors) == 2, errors
    assert errors[0].startswith(
        "error: tag even: the first prompt of task even/train/0 has 12 tokens, above the 11 that engine.context=128"
        " leaves beside rollout.max_new_tokens=117; raise engine.context to at least 129"
    )
    assert "task even/eval/8 has" in errors[1] and not (tmp_path / "over").exists()


def test_prompts_are_counted_all_over_a_split_and_where_tasks_say_most():
    def task(i, num_chars):
        (one,) = EvenEnv.tasks({"num_tasks": 1}, "train")
        return replace(one, id=str(i), messages=(Message("user", "x" * num_chars),))

    tasks = [task(i, 500 if i == 997 else 5) for i in range(1000)]
    counted = [int(one.id) for one in to_count(tasks)]
    assert 997 in counted and NUM_PROMPTS <= len(counted) <= 2 * NUM_PROMPTS + NUM_LONGEST
    assert counted[0] == 0 and max(counted) > 950 and counted == sorted(set(counted))
    assert to_count(tasks[:40]) == tasks[:40]


def test_a_task_that_says_more_than_the_context_is_refused_before_a_run_starts():
    def task(i, num_chars):
        (one,) = EvenEnv.tasks({"num_tasks": 1}, "train")
        return replace(one, id=str(i), messages=(Message("user", "x" * num_chars),))

    settings = parse([CONFIG, "--config.rollout.max_new_tokens=28"]).settings  # 100 are left
    pool = SimpleNamespace(splits=lambda tag: ("train", "eval"))
    pool.list_tasks = lambda tag, split: [task(i, i if split == "train" else 5) for i in range(101)]
    check_messages(settings, pool, ByteTokenizer())
    pool.list_tasks = lambda tag, split: [task(i, i if split == "train" else 5) for i in range(202)]
    with pytest.raises(ConfigError) as refused:
        check_messages(settings, pool, ByteTokenizer())
    (line,) = refused.value.errors
    assert line.startswith(
        "tag even: the text of task 201 has 201 tokens, above the 100 that engine.context=128"
    )


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_programs_of_all_roles_and_of_distinct_servers_are_traced(tmp_path, capsys):
    words = [
        "--mesh=split_8:train2",
        "--config.algorithm.name=ppo",
        "--config.algorithm.kl.coef=0.1",
    ]
    code, out, errors = dry_run(tmp_path, capsys, *words)
    assert (code, errors) == (
        0,
        [],
    ) and "simulated on the CPU (kernels chosen by platform are not" in out
    names = json.loads((tmp_path / "plan.json").read_text())["programs"]
    assert names[:4] == ["critic's values", "critic step", "policy step", "reference_logprobs"]
    assert {
        "prefill.0 append",
        "prefill.0 extract",
        "decode.0 append",
        "decode.0 insert",
        "decode.0 generate",
    } < {*names}
    assert not [name for name in names if name.startswith(("prefill.1", "decode.1"))]


@pytest.mark.parametrize(
    "plugin, line",
    [
        ("MeanLoss", "MeanLoss: token_loss() gave a loss that is an array float32[]; it must give the loss of"),
        ("BranchingLoss", "BranchingLoss: token_loss() raised TracerBoolConversionError: Attempted"),
    ],
)  # fmt: skip
def test_plugin_that_cannot_be_traced_is_one_line_with_the_program(tmp_path, capsys, plugin, line):
    name = f"--config.algorithm.name=tests.test_preflight:{plugin}"
    code, _, errors = dry_run(tmp_path, capsys, name)
    assert code == 2 and len(errors) == 1 and line in errors[0], errors
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_kernel_that_only_another_platform_has_is_not_part_of_the_tracing(tmp_path, capsys):
    code, _, errors = dry_run(tmp_path, capsys, "--config.learner.attention=cudnn")
    assert (code, errors) == (0, [])


@pytest.mark.parametrize(
    "words, mode, at_once",
    [
        (["steps=10", "checkpoint.every=2"], "train", 3),  # keep=2, and the one being written
        (["steps=4", "checkpoint.every=2"], "train", 2),  # after steps 2 and 4
        (["steps=10", "checkpoint.every=2", "checkpoint.keep=20"], "train", 5),
        (["steps=10"], "train", 1),
        (["steps=0", "checkpoint.every=2"], "train", 1),
        (["steps=10", "checkpoint.keep=1"], "rollout_only", 2),  # its start is kept
        (["steps=10", "checkpoint.every=2"], "train_only", 1),
    ],
)
def test_checkpoints_at_once_are_those_kept_and_the_one_being_written(
    tmp_path, words, mode, at_once
):
    settings = parse([CONFIG, *(f"--config.{word}" for word in words)]).settings
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    setting = Setting(
        settings, plan, build_meshes(plan), tmp_path / "r", launch.resolve, print, mode
    )
    model = tiny_model()[0]
    need = checkpoint_need(setting, model)
    assert (need.num_at_once, need.where) == (at_once, str(tmp_path))
    weights = sum(x.size * x.dtype.itemsize for x in model.abstract.values())
    learns = mode != "rollout_only" and settings.steps > 0  # else its optimizer holds zeros
    assert need.num_bytes == (state_bytes(model, settings.learner) if learns else weights)
    assert need.more_bytes == at_once * need.num_bytes
    for step in (1, 2):
        (tmp_path / "r" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    assert checkpoint_need(setting, model).more_bytes == max(at_once - 2, 1) * need.num_bytes
    assert checkpoint_need(replace(setting, mode="eval"), model) is None


HUGE = ["--config.model.embed_size=4194304", "--config.model.mlp_size=4194304"]  # a petabyte


@pytest.mark.slow
def test_checkpoint_that_fits_no_disk_is_shown_and_a_run_of_it_refused(tmp_path, capsys):
    code, out, errors = dry_run(tmp_path / "dry", capsys, *HUGE)  # which allocates nothing
    assert (code, errors) == (0, [])
    need = json.loads((tmp_path / "dry" / "plan.json").read_text())["checkpoint"]
    assert need["num_bytes"] > 1e15 > need["free_bytes"] and need["num_at_once"] == 1
    assert "NOT EVEN ONE FITS" in out
    code = launch.main([CONFIG, f"--run_dir={tmp_path / 'r'}", *HUGE])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith(f"error: a checkpoint takes {need['num_bytes']:,} bytes (")
    assert f"but {tmp_path} has " in line and not (tmp_path / "r").exists()


# --- plan.json -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_keeps_the_plan_that_its_dry_run_printed(tmp_path, capsys, monkeypatch):
    assert dry_run(tmp_path / "dry", capsys)[0] == 0
    dry = json.loads((tmp_path / "dry" / "plan.json").read_text())

    def init(self, key):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(Learner, "init", init)  # it ends when its directory is made
    assert launch.main([CONFIG, f"--run_dir={tmp_path / 'r'}"]) == 2
    kept = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert kept["mesh"] == "one_device" and kept["tasks"] == {"even": {"train": 8, "eval": 8}}
    assert {*dry} - {*kept} == {"round_trips", "prompts", "programs"} and {*kept} < {*dry}
    for plan in (dry, kept):
        del plan["checkpoint"]["free_bytes"], plan["checkpoint"]["where"]
    assert kept == {name: dry[name] for name in kept}


@pytest.mark.slow
def test_dry_run_leaves_the_plan_of_a_run_alone_and_refuses_another_config(tmp_path, capsys):
    RunDir.open(tmp_path / "r", parse([CONFIG]).settings, files={"plan.json": "{}"}).close()
    (tmp_path / "r" / "rollouts" / "step_1" / "train").mkdir(parents=True)
    assert dry_run(tmp_path / "r", capsys)[0] == 0
    code, _, errors = dry_run(tmp_path / "r", capsys, "--config.seed=5")
    assert code == 2 and "belongs to another config: seed 0 there, 5 here" in errors[0]
    assert (tmp_path / "r" / "plan.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("source", "tokenizer", "remedy"),
    [
        ("", "byte", "set it to 0 to take theirs"),
        ("/models/a", "/models/b", "take the tokenizer of /models/a"),
        ("/models/a", "/models/../models/a", "of different models: fetch the directory again"),
    ],
)
def test_remedy_for_a_vocabulary_that_is_too_small_never_goes_in_a_circle(
    source, tokenizer, remedy
):
    assert remedy in vocabulary_remedy(ModelSettings(source=source, tokenizer=tokenizer))
