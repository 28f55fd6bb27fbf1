"""Whole jobs whose policy calls a tool: with the byte tokenizer, and with a directory's tokenizer and chat template."""

import itertools
import json
import os
from pathlib import Path

import pytest

from rl_jax import launch
from rl_jax.names import resolve
from rl_jax.viewer.api import Api
from tests.tokens.families import write

CONFIG = f"--config={Path(__file__).parent / 'tool_job_config.py'}"


def turns_of(run):
    """(text of what came before a turn, what the policy said) of every turn that was saved."""
    for file in sorted(run.glob("rollouts/step_*/*/traces.jsonl")):
        for line in file.read_text().splitlines():
            turns = json.loads(line)["turns"]
            yield [(turn["prompt_text"], turn["text"]) for turn in turns]


@pytest.mark.slow(seconds=40)
def test_policys_own_words_are_parsed_answered_and_trained(tmp_path):
    assert launch.main([CONFIG, f"--run_dir={tmp_path / 'r'}"]) == 0
    episodes = list(turns_of(tmp_path / "r"))
    answered = [
        (said, prompt)
        for turns in episodes
        for (_, said), (prompt, _) in zip(turns, turns[1:])
        if said.startswith("<tool_call>") and said.endswith("</tool_call><|end|>")
    ]
    results = [prompt for _, prompt in answered if prompt.startswith("<|tool|>")]
    assert results and any(r[len("<|tool|>") :].split("<")[0].isdecimal() for r in results), (
        episodes
    )
    assert len(json.loads((tmp_path / "r" / "plan.json").read_text())["template_sha256"]) == 64
    _seen_in_the_viewer(Api(tmp_path / "r", resolve), answered)


def _seen_in_the_viewer(api, answered):
    """Tool calls, and the advantage of each trained token, of a run that really trained."""
    num_calls = trained = 0
    for step, split in itertools.product(api.samples.steps(), ("train", "eval")):
        if (index := api.samples.index(step, split)) is None:
            continue
        found = api.answer("tools", {"step": str(step), "split": split})
        assert found["fault"] == "" and found["unreadable"] == 0
        num_calls += sum(kind["num"] for kind in found["kinds"] if kind["name"] != "unreadable")
        for i in range(index.num):
            shown = api.answer("episode", {"step": str(step), "split": split, "i": str(i)})
            assert shown["has_advantages"] == (split == "train")
            for tokens in (turn["tokens"] for turn in shown["turns"] if split == "train"):
                assert [a is not None for a in tokens["advantages"]] == tokens["mask"]
                trained += sum(tokens["mask"])
            for turn in shown["turns"]:
                assert "".join(turn["tokens"]["pieces"]) == turn["said"]["text"]
    assert num_calls >= len(answered) and trained > 0


def dry(directory, tmp_path, capsys, *words):
    code = launch.main([CONFIG, "--dry_run", f"--config.model.tokenizer={directory}", *words])
    return code, capsys.readouterr()


@pytest.mark.slow
def test_a_directorys_template_carries_the_episodes_of_a_job(tmp_path, capsys):
    directory = write(tmp_path / "qwen25", "qwen25")
    code, told = dry(directory, tmp_path, capsys)
    assert code == 0, told.err
    assert (
        "tag calculator: a scripted episode keeps its text through the tokenizer: 2 turns"
        in told.out
    )


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_used_is_one_line_and_exit_2(tmp_path, capsys):
    directory = write(tmp_path / "x", "llama31")
    code, told = dry(directory, tmp_path, capsys, "--config.engine.num_stop_tokens=2")
    assert code == 2 and "has 3 tokens that end a turn, above engine.num_stop_tokens=2" in told.err
    code, told = dry(directory, tmp_path, capsys, "--config.model.vocab_size=100")
    assert code == 2 and "model.vocab_size=100 is below the 403 tokens of" in told.err
    code, told = dry(directory, tmp_path, capsys, "--config.rollout.tool_parser=hermse")
    assert code == 2 and "rollout.tool_parser=hermse is unknown; use hermes" in told.err
    os.remove(directory / "chat_template.jinja")
    code, told = dry(directory, tmp_path, capsys)
    assert code == 2 and told.err.count("error: ") == 1
    assert f"model.tokenizer={directory}: {directory} has no chat template" in told.err
