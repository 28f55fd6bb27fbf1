"""docs/algorithms.md: its list is the table's, and its worked example is an algorithm that the common suite takes."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import rl_jax.algorithms as table
from rl_jax import launch, schema
from rl_jax.algorithms import ALGORITHMS, options, sequence_losses, token_losses
from rl_jax.algorithms.rules import rules
from rl_jax.settings import AlgorithmSettings
from rl_jax.testing.trajectories import fake_group
from tests.algorithms import test_common
from tests.algorithms.test_common import estimates, make
from tests.test_exit_codes import CONFIG

EXAMPLE_CODE = r"```python\n# rl_jax/algorithms/[^\n]*\n(.*?)```"
PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(EXAMPLE_CODE, PAGE, re.S)  # the file, and the line of the table
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.S | re.M))
COMMON = {**table.RATIO, **table.STD}  # what most policy algorithms read, and its usual value


def test_the_page_lists_the_table_in_its_order():
    assert list(SECTIONS) == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_and_needs_on_the_page_are_the_entrys(name):
    entry, text = ALGORITHMS[name], SECTIONS[name]
    for part in ("Defaults: ", "Source: ", "Differs: "):
        assert text.count(f"\n{part}") == 1, part
    defaults = re.search(r"Defaults: (.*?)\.\n", text, re.S)[1]
    told = dict(re.findall(r"`([\w.]+)` ([^,\s]+)", defaults))
    own = {k: str(v) for k, v in entry.defaults.items() if COMMON.get(k, "") != v}
    assert told == own
    needs = re.search(r"Needs: (.*?)\.\n", text, re.S)
    assert set(re.findall(r"`(\w+)`", needs[1] if needs else "")) == entry.needs


def test_every_option_of_the_page_exists():
    keys = re.findall(r"`((?:filter|overlong|kl|correction|rollout|guards)\.[a-z_0-9]+)[`=]", PAGE)
    known = set(schema.leaf_keys())
    assert len(keys) > 20
    assert [k for k in keys if not {k, f"algorithm.{k}"} & known] == []


def test_the_page_names_the_readers_of_std_scope():
    (told,) = re.findall(r"divide by a std: ([^.]*)\.", PAGE)
    readers = [name for name, entry in ALGORITHMS.items() if "std_scope" in entry.defaults]
    assert re.findall(r"`(\w+)`", told) == readers
    (alone,) = re.findall(r"\. ([^.]*) read `std_eps` alone", PAGE)
    others = {name for name, entry in ALGORITHMS.items() if "std_eps" in entry.defaults}
    assert set(re.findall(r"`(\w+)`", alone)) == others - set(readers)


def test_functions_that_no_name_has_are_named_where_the_page_says_so():
    rows = PAGE[PAGE.index("## What is not offered") : PAGE.index("## Alarms")]
    for name in ("dppo_kl_reg", "kimi_token"):
        assert f"`{name}`" in rows and (
            hasattr(token_losses, name) or hasattr(sequence_losses, name)
        )


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The page's file as a package of somebody else."""
    code, _ = EXAMPLE
    (tmp_path / "added_algorithms").mkdir()
    (tmp_path / "added_algorithms" / "rank.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "added_algorithms.rank:Rank"
    sys.modules.pop("added_algorithms.rank", None)


@pytest.fixture
def example(package, monkeypatch):
    """And its line of the table, as a contributor would add them, beside the real ones."""
    _, line = EXAMPLE
    line = line.replace("rl_jax.algorithms.rank", "added_algorithms.rank")
    ((name, entry),) = eval("{" + line + "}", vars(table)).items()
    monkeypatch.setitem(ALGORITHMS, name, entry)
    yield name
    test_common.jitted.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--dry_run"], pytest.param(["--config.steps=2"], marks=pytest.mark.slow)]
)
def test_the_same_class_runs_as_a_plugin(package, tmp_path, capsys, words):
    """Word by word as it stands on the page, without a line of the table."""
    words = [CONFIG, f"--run_dir={tmp_path / 'run'}", f"--config.algorithm.name={package}", *words]
    assert launch.main(words) == 0, capsys.readouterr().err
    own = options.resolved(AlgorithmSettings(name=package))
    assert own.ratio_max == 4.0 and own.clip_low is None


def test_an_algorithm_in_one_file_and_one_line_passes_the_common_suite(example):
    suite = [f for n, f in vars(test_common).items() if n.startswith("test_")]
    taken = [f for f in suite if list(inspect.signature(f).parameters) == ["algorithm"]]
    assert taken == suite and len(taken) >= 10
    for check in taken:
        check(make(example))
    assert list(rules(AlgorithmSettings(name=example), group_size=4)) == []
    refused = list(rules(AlgorithmSettings(name=example, tau=0.5), group_size=4))
    assert len(refused) == 1 and "tau=0.5 is not read by rank" in refused[0]


def test_the_examples_advantages_are_ranks(example):
    group = fake_group(0, [3.0, 0.1, 0.1, None, 7.0], [8, 8, 8, 8, 8])
    values = [float(v.max() + v.min()) for v in estimates(make(example), [group])]
    assert values == pytest.approx([1 / 3, -2 / 3, -2 / 3, 0.0, 1.0])
    module = importlib.import_module("added_algorithms.rank")
    assert module.__doc__.startswith("Rank:")
