"""The curves of docs/quickstart.md are those of benchmarks/results/learning_curves.json; its commands can be typed."""

import json
import re
from pathlib import Path

import pytest

from rl_jax.algorithms import ALGORITHMS
from rl_jax.config import parse

ROOT = Path(__file__).parents[1]
ROWS = json.loads((ROOT / "benchmarks/results/learning_curves.json").read_text())["rows"]
SETS = ("frozen_lake", "frozen_lake_unseen", "chain_sum")


def settings_of(row):
    program, *words = row["command"].removeprefix("python -m ").split()
    assert program == "rl_jax.launch"
    return parse(words).settings


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['run'][:20]}-{row['seed']}")
def test_commands_are_accepted_and_say_what_their_row_says(row):
    settings = settings_of(row)
    named = row["run"].removeprefix("the shipped config: ")
    for word in ("synchronous: ", "plain PPO: "):
        named = named.removeprefix(word)
    name = re.match(r"\w+", named)[0]
    assert name in ALGORITHMS and settings.algorithm.name == name
    assert settings.seed == row["seed"]
    for key, value in re.findall(r"max_staleness (\d)|(\d+) steps", row["run"]):
        assert not key or settings.rollout.max_staleness == int(key)
        assert not value or settings.steps == int(value)
    num = settings.steps // settings.eval.every + row["run"].startswith("the shipped config")
    assert {name: len(values) for name, values in row["success"].items()} == dict.fromkeys(
        SETS, num
    )


def test_the_pages_tables_are_the_rows():
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    shipped, others = page.split("## Other algorithms on the same tasks")
    found = []
    for line in shipped.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1] in SETS:
            found += [{}] if cells[0] else []
            found[-1][cells[1]] = [float(value) for value in cells[2:]]
    for line in others.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].isdecimal():
            values = [[float(value) for value in cell.split()] for cell in cells[2:]]
            found.append(dict(zip(SETS, values)))
    assert found == [row["success"] for row in ROWS]
