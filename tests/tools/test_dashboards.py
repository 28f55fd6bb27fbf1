"""deploy/dashboards: what is there is what the tables say, names only what an exporter tells, and can be imported."""

import json
import re

import pytest

from rl_jax.advice import RULES
from rl_jax.exposition import FAMILIES, TurnTimes
from rl_jax.metrics import METRICS
from rl_jax.tools import dashboards
from rl_jax.tools.dashboards import (
    DIRECTORY,
    alerts,
    expression,
    grafana,
    known_names,
    names_in,
)

GRAFANA = json.loads((DIRECTORY / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in GRAFANA["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTS = [alert["expr"] for alert in alerts()]


def test_the_files_are_what_the_tables_say(tmp_path, capsys):
    assert dashboards.main(["--check"]) == 0, "run python -m rl_jax.tools.dashboards"
    assert dashboards.main([str(tmp_path)]) == 0
    (tmp_path / "alerts.yaml").write_text("groups: []\n")
    assert dashboards.main([str(tmp_path), "--check"]) == 1
    assert "alerts.yaml: differs" in capsys.readouterr().out


@pytest.mark.parametrize("expr", [*EXPRESSIONS, *ALERTS])
def test_every_name_is_one_that_an_exporter_tells(expr):
    names = set(names_in(expr))
    assert names and names <= known_names()


def test_names_are_found_wherever_they_stand():
    expr = (
        'sum(rate(vllm:x_bucket{run=~"$run",a="rl_jax:no"}[5m])) / rl_jax:y > 2 and process_z == 0'
    )
    assert list(names_in(expr)) == ["vllm:x_bucket", "rl_jax:y", "process_z"]
    assert "rl_jax:reward_median" not in known_names() and "rl_jax:step" in known_names()
    assert "vllm:e2e_request_latency_seconds" not in known_names()  # a histogram has no such series


@pytest.mark.parametrize("expr", [*EXPRESSIONS, *ALERTS])
def test_expressions_are_well_formed(expr):
    """Balanced, with durations and labels as PromQL has them; promtool itself is not a Python package."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
    stack = []
    for char in bare:
        if char in "([{":
            stack.append(char)
        elif char in ")]}":
            assert stack and stack.pop() + char in ("()", "[]", "{}"), expr
    assert not stack
    assert all(re.fullmatch(r"\d+[smh]", inside) for inside in re.findall(r"\[([^]]*)\]", bare))
    for labels in re.findall(r"\{([^}]*)\}", bare):
        assert all(re.fullmatch(r'\w+(=|=~|!=|!~)""', one) for one in labels.split(",")), expr
    assert not re.search(r"\bnan\b|\binf\b|None", bare)


def test_the_dashboard_can_be_imported():
    assert GRAFANA["id"] is None and GRAFANA["uid"] and GRAFANA["schemaVersion"] >= 36
    (asked,) = GRAFANA["__inputs"]
    ids = [panel["id"] for panel in GRAFANA["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["datasource"]["uid"] == f"${{{asked['name']}}}" and panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) >= 1
    places = [panel["gridPos"] for panel in GRAFANA["panels"]]
    cells = [
        (x, y)
        for p in places
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert max(x for x, _ in cells) < 24
    assert grafana() == GRAFANA


def test_the_dashboard_shows_every_family_that_people_watch():
    shown = {name for expr in EXPRESSIONS for name in names_in(expr)}
    hidden = {
        "rl_jax:info", "rl_jax:attempt", "rl_jax:paused", "rl_jax:learner_steps_total", "rl_jax:orders_total",
        "rl_jax:worker_lines_total", "rl_jax:workers", "rl_jax:busy_seconds_total", "rl_jax:blocks_total",
        "rl_jax:swaps_total", "vllm:num_preemptions_total", "vllm:request_success_total",
        "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    }  # fmt: skip
    families = {re.sub("_bucket$", "", name) for name in shown}
    assert set(FAMILIES) - families == hidden
    assert TurnTimes  # whose histograms stand among them


def test_alerts_are_the_rules_of_advice_and_yaml_reads_them_back():
    yaml = pytest.importorskip("yaml")
    said = yaml.safe_load((DIRECTORY / "alerts.yaml").read_text(encoding="utf-8"))
    (group,) = said["groups"]
    assert group["rules"] == alerts() and len(alerts()) == len(RULES) + 3
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Za-z]\w*", rule["alert"]) and re.fullmatch(
            r"\d+[smh]", rule["for"]
        )
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    yaml.safe_load((DIRECTORY / "scrape.yaml").read_text(encoding="utf-8"))


def test_expressions_of_each_kind_by_hand():
    of = {rule.name: expression(rule) for rule in RULES}
    assert of["ess"] == "rl_jax:is_ess < 0.3"
    assert of["mismatch_k3"] == "rl_jax:mismatch_k3 > 0.1"
    assert (
        of["entropy_jump"]
        == "rl_jax:policy_entropy / quantile_over_time(0.5, rl_jax:policy_entropy[1h]) > 3"
    )
    assert of["errored"] == (
        "(increase(rl_jax:episodes_errored[30m])) / (increase(rl_jax:episodes_issued[30m]) > 0) > 0.05"
    )
    assert of["stalled"].startswith(
        "rl_jax:seconds_since_row > 6 * quantile_over_time(0.5, rl_jax:time_step_s"
    )
    assert "and rl_jax:paused == 0" in of["stalled"]


def test_every_metric_of_a_rule_is_in_the_table():
    named = {rule.metric for rule in RULES} | {
        n for rule in RULES for n in (rule.per, rule.less) if n
    }
    assert named - set(METRICS) <= {"nonfinite_dropped"}
