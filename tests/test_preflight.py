"""The dry run's round trip: text -> tokens -> text of one episode a source."""

import asyncio
import json
from pathlib import Path

from rl_jax import launch
from rl_jax.tokens import ByteTokenizer

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


def dry_run(directory, capsys, *words):
    code = launch.main([CONFIG, "--dry_run", f"--run_dir={directory}", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err, err
    return code, out, [line for line in err.splitlines() if line.startswith("error: ")]


def test_scripted_episode_goes_through_the_tokenizer_and_back(tmp_path, capsys):
    code, out, errors = dry_run(tmp_path, capsys, ECHO, ROOM)
    assert (code, errors) == (0, [])
    assert "tag even: a scripted episode keeps its text through the tokenizer: " in out
    trip = json.loads((tmp_path / "plan.json").read_text())["round_trips"]["even"]
    assert trip["num_turns"] > 0 and 0 < trip["num_sampled"] < trip["num_tokens"] <= 128


def test_a_notebook_cell_whose_loop_runs_can_run_a_job(tmp_path, capsys):
    async def cell():
        return dry_run(tmp_path, capsys, ECHO, ROOM)

    code, out, errors = asyncio.run(cell())
    assert (code, errors) == (0, []) and "a scripted episode keeps its text" in out


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
