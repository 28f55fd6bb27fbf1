"""docs/guide.md 'Training on rows': its commands can be typed as they stand there, and what it says of names holds."""

import json
import shlex
from pathlib import Path

import pytest

from rl_jax import launch
from rl_jax.algorithms import ALGORITHMS
from rl_jax.config import ROOT, ConfigError, parse
from rl_jax.preflight import load_algorithm, load_plugin

PAGE = (Path(__file__).parents[1] / "docs" / "guide.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Training on rows") : PAGE.index("## The run directory")]
BLOCKS = [block.replace("\\\n", " ") for block in SECTION.split("```")[1::2]]
PROGRAM = ["python", "-m", "rl_jax.launch"]
COMMANDS = [
    shlex.split(line, comments=True)[len(PROGRAM) :]
    for block in BLOCKS
    for line in block.splitlines()
    if line.split()[:3] == PROGRAM
]
RUN_SFT, *OTHERS = COMMANDS  # what the others start from
ROWS = {"rows.jsonl": {"prompt": "2+2", "completion": "4"}}
ROWS["pairs.jsonl"] = {"prompt": "2+2", "chosen": "4", "rejected": "5"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with the files that the commands name, and the run that they start from."""
    for name, row in ROWS.items():
        rows = [{**row, "prompt": f"{i}: 2+2"} for i in range(40)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_a_command_for_each_algorithm_of_rows():
    named = {word.partition("=")[2] for words in COMMANDS for word in words if ".name=" in word}
    assert named == {name for name, entry in ALGORITHMS.items() if entry.rows}
    assert len(COMMANDS) >= 6 and "--run_dir=runs/sft" in RUN_SFT
    assert all(any("runs/sft" in w or "scripts" in w for w in words) for words in OTHERS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_its_commands_pass_what_is_checked_of_their_algorithm(here, words):
    parsed = parse(words)
    settings = load_plugin(parsed.settings, launch.resolve, parsed.chosen)
    assert settings == parsed.settings
    load_algorithm(settings, launch.resolve)


@pytest.mark.slow
def test_its_commands_pass_a_dry_run_from_a_run_that_its_first_one_made(here, capsys):
    (here / "runs" / "sft").rmdir()
    assert launch.main([*RUN_SFT, "--dry_run"]) == 0, capsys.readouterr().err
    assert launch.main(RUN_SFT) == 0, capsys.readouterr().err
    for words in OTHERS:
        assert launch.main([*words, "--dry_run"]) == 0, (words, capsys.readouterr().err)


CONFIGS = sorted(path.stem for path in (ROOT / "rl_jax" / "configs").glob("[a-z]*.py"))
WANTED = {  # what an algorithm cannot do without, whatever the file
    "kl_cov": ["--config.rollout.max_staleness=1"],
    "dpo": ["--config.data.path=x"],
    "rm": ["--config.data.path=x"],
    "sft": ["--config.data.path=x"],
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("file", CONFIGS)
def test_every_algorithm_can_be_named_over_every_shipped_config(file, name):
    """What the file sets for its own algorithm and this one does not read is passed over."""
    words = [f"--config={file}", f"--config.algorithm.name={name}", *WANTED.get(name, [])]
    assert wrong_with_the_algorithm(words) == []
    for key, text in (("clip_high", "0.3"), ("entropy_coef", "0.1")):
        lines = wrong_with_the_algorithm([*words, f"--config.algorithm.{key}={text}"])
        is_read = key in ALGORITHMS[name].defaults
        assert is_read or f"algorithm.{key}={text} is not read by {name}" in lines[0]


def wrong_with_the_algorithm(words):
    """Lines about its settings; a checkpoint, a file of rows and a model's directory are not here."""
    try:
        parse(words)
    except ConfigError as error:
        lines = [line for line in error.errors if line.startswith("algorithm.")]
        return [line for line in lines if "needs a teacher; set teacher.checkpoint" not in line]
    return []
