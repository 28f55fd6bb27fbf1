"""What the settings of rewards may not be, in one line each; and the example of docs/rewards.md as it stands there."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rl_jax import schema
from rl_jax.config import ConfigError, parse
from rl_jax.rewards import REWARDS
from rl_jax.rewards.judge import Judge
from rl_jax.settings import RewardSettings, Settings, TaskSettings, TaskSource
from rl_jax.types import EpisodeView, Reward, Task
from rl_jax.validate import check_name
from rl_jax.validate_rewards import JUDGE_S, reward_errors

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "rewards.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8080"


def errors(source=TaskSource(), **rewards):
    settings = Settings(tasks=TaskSettings((source,)), rewards=RewardSettings(**rewards))
    return list(reward_errors(settings, check_name))


@pytest.mark.parametrize(
    "source, said",
    [
        ({"reward": "exact"}, "tasks.sources[0].reward=exact is unknown; use exact_match"),
        ({"reward": "composite"}, "tasks.sources[0].parts={} with reward=composite"),
        ({"parts": {"math": 1.0}}, "parts={'math': 1.0} with reward=env: parts are what the reward composite is"),
        ({"reward": "composite", "parts": {"maths": 1.0}}, "tasks.sources[0].parts=maths is unknown; use math"),
        ({"reward": "composite", "parts": {"math": "1"}}, "parts.math='1' is a weight; use a finite number"),
        ({"shaping": {"brevity": float("nan")}}, "shaping.brevity=nan is a weight"),
        ({"shaping": {"brevity": True}}, "shaping.brevity=True is a weight"),
        ({"shaping": {"composite": 1.0}}, "tasks.sources[0].shaping=composite is unknown"),
        ({"turn_reward": "env"}, "tasks.sources[0].turn_reward=env is unknown"),
        ({"turn_reward": "math", "turn_weight": float("inf")}, "turn_weight=inf must be a finite number"),
    ],
)  # fmt: skip
def test_rewards_of_a_source(source, said):
    (line,) = errors(TaskSource(**source))
    assert said in line


@pytest.mark.parametrize(
    "rewards, said",
    [
        ({"token_file": "t"}, "rewards.token_file=t is of a service, and rewards.url names none"),
        ({"url": "127.0.0.1:8080"}, "rewards.url=127.0.0.1:8080 is no URL of a service"),
        ({"url": "ftp://x"}, "is no URL"),
        ({"url": "http://x:99999"}, "is no URL"),
        ({"url": "http://a:b@x"}, "holds a password, which would stand in config.json"),
        ({"url": URL, "options": {"math": {}}}, "rewards.options is not read with a rewards.url"),
        ({"url": URL, "timeout_s": 300.0}, "rewards.total_timeout_s=120 is less than the rewards.timeout_s=300"),
        ({"options": {"judge": {}}}, "rewards.options.judge: no task source names this scorer; they name math"),
        ({"options": {"math": 3}}, "rewards.options.math=3 must be a mapping"),
    ],
)  # fmt: skip
def test_where_rewards_come_from(rewards, said):
    assert said in errors(TaskSource(reward="math"), **rewards)[0]


def test_what_is_right_has_no_errors():
    source = TaskSource(
        reward="composite", parts={"math": 1.0, "env": 0.5}, shaping={"brevity": 0.1},
        turn_reward="judge",
    )  # fmt: skip
    assert errors(source, timeout_s=40.0, options={"judge": {"url": URL, "model": "m"}}) == []
    assert errors(source, url=URL, token_file="t") == []
    assert source.scorers == {"math", "brevity", "judge"}


@pytest.mark.parametrize(
    "options, timeout_s, said",
    [
        ({}, 40.0, "rewards.options.judge needs url and model"),
        ({"url": URL}, 40.0, "rewards.options.judge needs model"),
        ({"url": URL, "model": "m"}, 10.0, "timeout_s=10 ends the judge's process before its own timeout_s=30"),
        ({"url": URL, "model": "m", "timeout_s": 50}, 40.0, "before its own timeout_s=50; raise it"),
    ],
)  # fmt: skip
def test_the_judge_has_an_endpoint_and_the_time_to_ask_it(options, timeout_s, said):
    source = TaskSource(reward="judge")
    (line,) = errors(source, timeout_s=timeout_s, options={"judge": options})
    assert said in line
    assert inspect.signature(Judge).parameters["timeout_s"].default == JUDGE_S


def test_the_command_line_reaches_and_checks_the_new_settings():
    with pytest.raises(ConfigError) as caught:
        parse(["--config.rewards.url=nowhere", "--config.rewards.retries=-1",
               "--config.tasks.sources[0].turn_reward=prm"])  # fmt: skip
    said = "\n".join(caught.value.errors)
    assert (
        "rewards.url=nowhere is no URL" in said and "rewards.retries=-1 must be at least 0" in said
    )
    assert "tasks.sources[0].turn_reward=prm is unknown" in said
    settings = parse(["--config.rewards.adaptive_timeout=true"]).settings
    assert settings.rewards.adaptive_timeout


def test_the_page_names_every_scorer_and_every_setting():
    table = PAGE[PAGE.index("| scorer |") : PAGE.index("`math` takes what")]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert named <= REWARDS.keys() <= named | set(re.findall(r"`(\w+)`", pages))
    assert len(named) >= 8
    keys = {k for k in schema.leaf_keys() if k.startswith("rewards.")}
    assert keys <= set(re.findall(r"`(rewards\.\w+)`", PAGE))


def test_the_scorer_of_the_page_scores():
    scope: dict = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(code, scope)  # the page's own text
    task = Task("t", "e", "e", (), {"words": 2}, "r", 1)
    view = lambda text: EpisodeView((), (text,), {}, ())
    reward = scope["WordCount"]().score(task, view("two words"))
    assert reward == Reward(1.0, {}, (), "scored", "word_count/1")
    assert scope["WordCount"](slack=1).score(task, view("one")).value == 1.0
    with pytest.raises(ValueError, match="no payload"):
        scope["WordCount"]().score(replace(task, payload={}), view("x"))
