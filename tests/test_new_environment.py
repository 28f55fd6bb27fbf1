"""As a new user would: the environment and the reward of docs/environments.md, checked, then trained from a config."""

import sys
from pathlib import Path

import pytest

from rl_jax import launch
from rl_jax.config import parse
from rl_jax.metrics import read_metrics
from rl_jax.tools import check_env
from tests.test_exit_codes import CONFIG

PAGE = Path(__file__).resolve().parents[1] / "docs" / "environments.md"
BLOCKS = PAGE.read_text(encoding="utf-8").split("```python\n")[1:]
# Files of the page by name, word by word.
FILES = {b.split(".py")[0][2:]: b.partition("```")[0] for b in BLOCKS if b.startswith("# ")}


@pytest.fixture
def vowels(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, body in FILES.items():
        (tmp_path / f"{name}.py").write_text(body, encoding="utf-8")
    return tmp_path / "vowels.py"


def test_the_pages_configs_pass_their_checks(vowels):
    sources = {}
    for name in ("train_vowels", "self_play"):
        settings = parse([f"--config={vowels.with_name(name)}.py"]).settings
        (sources[name],) = settings.tasks.sources
    assert sources["train_vowels"].reward == "vowels:VowelShare"
    assert sources["self_play"].env == "two_player" and settings.algorithm.name == "role_ema"


@pytest.mark.slow
def test_the_pages_environment_is_checked_and_trained(vowels, capsys, tmp_path):
    code = check_env.main([f"{vowels}:Vowels", f"--reward={vowels}:VowelShare"])
    assert code == 0 and "vowels:Vowels: nothing wrong" in capsys.readouterr().out
    source = "--config.tasks.sources[0]"
    names = [f"{source}.env=vowels:Vowels", f"{source}.reward=vowels:VowelShare"]
    words = [f"--run_dir={tmp_path}/run", f"{source}.tag=vowels", *names, "--config.steps=2"]
    assert launch.main([CONFIG, *words]) == 0
    steps = [row for row in read_metrics(tmp_path / "run") if "policy/loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0.0 <= row["reward/mean"] <= 1.0 for row in steps)
