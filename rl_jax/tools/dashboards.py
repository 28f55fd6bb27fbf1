"""`python -m rl_jax.tools.dashboards [--check] [DIRECTORY]`: Grafana's dashboard and Prometheus' files, from tables.

Writes grafana.json (import it; it asks for a Prometheus data source), alerts.yaml (rule_files) and scrape.yaml
(scrape_configs over runs' endpoints.json) into deploy/dashboards, or says with --check what differs.
Owns: PANELS. Alerts are the rules of rl_jax/advice.py, as far as PromQL can say them, and three of the processes
themselves. Invariant: every name is one that an exporter of ours may tell (exposition.py), which tests check.
Must not: read a run.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_jax.advice import RULES, Rule
from rl_jax.console import say
from rl_jax.exposition import FAMILIES, row_name
from rl_jax.metrics import METRICS

DIRECTORY = Path(__file__).resolve().parents[2] / "deploy" / "dashboards"
RUN = '{run=~"$run"}'  # of every series: a label of endpoints.json
DRIVER = '{run=~"$run",process="driver"}'
STEP_S = 60  # of a step, where a rule counts steps and PromQL counts seconds

Target = tuple[str, str]  # PromQL, legend


def last(metric: str, legend: str = "{{run}} {{of}}") -> Target:
    """The last row's value of a metric."""
    return row_name(metric)[0] + DRIVER, legend


def now(family: str, legend: str, where: str = RUN, by: str = "") -> Target:
    return (f"sum by ({by}) ({family}{where})" if by else family + where), legend


def rate(family: str, legend: str, by: str = "") -> Target:
    of = f"rate({family}{RUN}[1m])"
    return (f"sum by ({by}) ({of})" if by else f"sum({of})"), legend


def quantiles(family: str) -> tuple[Target, ...]:
    """Of a turn's times, as the driver sees them."""
    buckets = f"sum by (le) (rate({family}_bucket{DRIVER}[5m]))"
    return tuple((f"histogram_quantile({q / 100:g}, {buckets})", f"p{q}") for q in (50, 90, 99))


OPEN = '{run=~"$run",process="driver",state=~"issued|running|completed|truncated"}'
PARTS = ("step", "wait_for_batch", "batch", "train", "sync", "paused")

# Row -> panels: title, unit, targets.
PANELS: Mapping[str, Sequence[tuple[str, str, Sequence[Target]]]] = {
    "Learning": (
        ("Reward", "short", [last("reward/mean"), last("reward/success", "success {{run}} {{of}}")]),
        ("Evaluation", "percentunit", [last("eval/success")]),
        ("Entropy", "short", [last("policy/entropy")]),
        ("Gradient norm", "short",
         [last("optim/grad_norm", "before clipping"), last("optim/grad_norm_clipped", "after")]),
        ("Groups without signal", "percentunit",
         [last("reward/zero_std_groups"), last("filter/kept", "kept by the filter")]),
        ("Length", "short",
         [last("length/response", "mean"), last("length/response_p90", "p90"), last("length/response_max", "max")]),
        ("Cut episodes", "percentunit",
         [last("length/truncated"), last("finish/length", "turns cut by length")]),
        ("Clipped tokens", "percentunit", [last("policy/clip_frac")]),
    ),
    "Trainer against sampler": (
        ("k3, all lags", "short", [last("mismatch/k3")]),
        ("Mean |difference|", "short",
         [last("mismatch/abs_mean", "all"), last("mismatch/abs_mean_lag0_pure", "lag 0, pure")]),
        ("Effective samples", "percentunit", [last("is/ess")]),
        ("Staleness", "short",
         [last("staleness/mean", "mean"), last("staleness/max", "max"), last("staleness/bound", "bound")]),
    ),
    "Speed": (
        ("Tokens a second", "short",
         [last(f"perf/{what}_tokens_per_s", what) for what in ("decode", "prefill", "train")]),
        ("A step's seconds", "s", [last(f"time/{part}_s", part) for part in PARTS]),
        ("Goodput", "percentunit", [last("goodput/run", "run"), last("goodput/sample", "samples")]),
        ("Utilisation of the train devices", "percentunit", [last("perf/train_mfu")]),
        ("Step", "short",
         [now("rl_jax:step", "{{run}}", DRIVER), now("rl_jax:steps", "of {{run}}", DRIVER)]),
        ("Since the last row", "s",
         [now("rl_jax:seconds_since_row", "{{run}}", DRIVER),
          now("rl_jax:driver_lag_seconds", "lag of the event loop", DRIVER)]),
    ),
    "Servers": (
        ("Requests", "short",
         [now("vllm:num_requests_running", "running {{server}}", by="server"),
          now("vllm:num_requests_waiting", "waiting {{server}}", by="server")]),
        ("KV cache in use", "percentunit", [now("vllm:kv_cache_usage_perc", "{{server}}")]),
        ("Tokens a second, now", "short",
         [rate("vllm:generation_tokens_total", "sampled {{server}}", "server"),
          rate("vllm:prompt_tokens_total", "computed {{server}}", "server")]),
        ("Time to the first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        ("Time an output token", "s", quantiles("vllm:time_per_output_token_seconds")),
        ("A turn, whole", "s", quantiles("vllm:e2e_request_latency_seconds")),
        ("Versions", "short", [now("rl_jax:weight_version", "{{process}} {{server}}")]),
        ("Servers by state", "short", [now("rl_jax:fleet_state", "{{state}}", DRIVER, "state")]),
        ("Refused, aborted, failed", "short",
         [rate("rl_jax:queue_rejects_total", "refused a second"), rate("rl_jax:aborts_total", "aborted"),
          rate("rl_jax:turn_errors_total", "errors")]),
    ),
    "Episodes and workers": (
        ("Episodes by state", "short", [now("rl_jax:episode_states", "{{state}}", OPEN)]),
        ("Dropped and failed", "short",
         [last("episodes/dropped", "dropped"), last("episodes/dropped_stale", "stale"),
          last("episodes/errored", "failed"), last("episodes/cancelled", "cancelled")]),
        ("What befell workers", "short", [rate("rl_jax:pool_events_total", "{{event}}", "event")]),
        ("Scorers of a service", "short",
         [now("rl_jax:workers_busy", "busy"), now("rl_jax:calls_waiting", "waiting")]),
    ),
    "Processes": (
        ("Memory", "bytes", [now("process_resident_memory_bytes", "{{process}}")]),
        ("Memory of devices", "bytes",
         [now("rl_jax:device_bytes_in_use", "{{process}} {{device}}"),
          now("rl_jax:device_bytes_limit", "limit {{process}} {{device}}")]),
        ("Cores in use", "short", [rate("process_cpu_seconds_total", "{{process}}", "process")]),
        ("Open files", "short", [now("process_open_fds", "{{process}}")]),
        ("Lost by trackers", "short", [now("rl_jax:tracker_lost_total", "{{tracker}}")]),
    ),
}  # fmt: skip

SCRAPE = """\
# Prometheus: each run with metrics.port writes its processes' ports to endpoints.json in its directory.
scrape_configs:
  - job_name: rl_jax
    scrape_interval: 15s
    file_sd_configs:
      - files: ["runs/*/endpoints.json"]  # of the checkout; from Prometheus' own directory, or absolute
        refresh_interval: 30s
    # authorization:
    #   credentials_file: /path/of/metrics.token_file
rule_files: ["alerts.yaml"]
"""


def grafana() -> dict[str, Any]:
    """A dashboard as Grafana imports it (schema 39); its data source is asked for."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, of_row in PANELS.items():
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )  # fmt: skip
        y += 1
        for i, (title, unit, targets) in enumerate(of_row):
            place = {"x": 8 * (i % 3), "y": y + 8 * (i // 3), "w": 8, "h": 8}
            panels.append(_panel(len(panels) + 1, title, unit, targets, place))
        y += 8 * -(-len(of_row) // 3)
    run = {
        "name": "run", "label": "run", "type": "query", "datasource": _SOURCE,
        "query": {"query": "label_values(rl_jax:step, run)", "refId": "run"},
        "definition": "label_values(rl_jax:step, run)",
        "refresh": 2, "multi": True, "includeAll": True, "current": {}, "options": [], "sort": 2,
    }  # fmt: skip
    asked = {
        "name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "description": "",
        "pluginId": "prometheus", "pluginName": "Prometheus",
    }  # fmt: skip
    return {
        "__inputs": [asked],
        "__requires": [{"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"}],
        "id": None, "uid": "rl-jax", "title": "rl_jax", "tags": ["rl_jax"], "timezone": "browser",
        "schemaVersion": 39, "version": 1, "editable": True, "refresh": "30s", "graphTooltip": 1,
        "time": {"from": "now-3h", "to": "now"}, "annotations": {"list": []}, "links": [],
        "templating": {"list": [run]}, "panels": panels,
    }  # fmt: skip


def alerts() -> list[dict[str, Any]]:
    """Of every rule of advice.py, and of the processes themselves, as Prometheus' alerting rules."""
    out = [_alert(rule) for rule in RULES]
    own = (
        ("RlJaxProcessDown", 'up{job="rl_jax"} == 0', "2m", "correctness",
         "a process of a run does not answer; see its log in logs/latest, and whether the run has ended"),
        ("RlJaxServerFenced", 'rl_jax:fleet_state{state=~"fenced|gone"} == 1', "5m", "health",
         "a server is fenced or gone, and the others do its work; events.jsonl says why"),
        ("RlJaxTrackerLoses", "increase(rl_jax:tracker_lost_total[15m]) > 0", "0m", "tuning",
         "a tracker does not take what it should get; metrics.jsonl has it all"),
    )  # fmt: skip
    for name, expr, wait, kind, text in own:
        out.append(
            {"alert": name, "expr": expr, "for": wait, "labels": {"severity": SEVERITY[kind], "kind": kind},
             "annotations": {"summary": text}}
        )  # fmt: skip
    return out


SEVERITY = {"correctness": "critical", "health": "warning", "tuning": "info"}
_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def expression(rule: Rule) -> str:
    """PromQL of a rule, over the last rows that the driver tells. Its windows of steps are windows of time here."""
    of = lambda name: row_name(name)[0] if name in METRICS else f"rl_jax:{name}"
    one, limit = of(rule.metric), f"{rule.threshold:g}"
    if rule.test == "open":  # the median of a step's time, from what was scraped
        return (
            f"rl_jax:seconds_since_row > {limit} * quantile_over_time(0.5, {one}[1h])"
            f" and rl_jax:seconds_since_row > {rule.seconds:g} and rl_jax:paused == 0"
        )
    if rule.test == "jump":
        return f"{one} / quantile_over_time(0.5, {one}[1h]) > {limit}"
    if rule.test == "grows":
        return f"increase({one}[15m]) > {limit}"
    if rule.test == "share":
        part = f"increase({one}[30m])" + (
            f" - (increase({of(rule.less)}[30m]) or 0 * increase({one}[30m]))" if rule.less else ""
        )
        return f"({part}) / (increase({of(rule.per)}[30m]) > 0) > {limit}"
    return f"{one} {'<' if rule.test == 'below' else '>'} {limit}"


def _alert(rule: Rule) -> dict[str, Any]:
    wait_s = (
        0
        if rule.test in ("open", "grows", "share")
        else max(rule.seconds, STEP_S * (rule.steps - 1))
    )
    name = "RlJax" + "".join(part.capitalize() for part in rule.name.split("_"))
    note = ""
    if rule.only_below is not None:
        metric, key, share = rule.only_below
        note = (
            f" (only while {metric} is below {share:.0%} of {key}, which Prometheus does not know)"
        )
    return {
        "alert": name,
        "expr": expression(rule),
        "for": f"{wait_s:g}s",
        "labels": {"severity": SEVERITY[rule.kind], "kind": rule.kind},
        "annotations": {"summary": rule.meaning + note, "description": rule.remedy},
    }


def alerts_yaml() -> str:
    """Strings are JSON's, which YAML reads alike."""
    lines = [
        "# Written by python -m rl_jax.tools.dashboards from rl_jax/advice.py: change it there.",
        "groups:",
        "  - name: rl_jax",
        "    rules:",
    ]
    for rule in alerts():
        lines += [f"      - alert: {rule['alert']}", f"        expr: {json.dumps(rule['expr'])}"]
        lines.append(f"        for: {rule['for']}")
        for section in ("labels", "annotations"):
            lines.append(f"        {section}:")
            lines += [f"          {k}: {json.dumps(v)}" for k, v in rule[section].items()]
    return "\n".join(lines) + "\n"


def names_in(expr: str) -> Iterator[str]:
    """Metric names of a PromQL expression of ours: those with a colon, and Prometheus' own of processes."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    yield from re.findall(
        r"\b(?:rl_jax|vllm):\w+|\bprocess_\w+|\bup\b", re.sub(r"\{[^}]*\}", "", bare)
    )


def known_names() -> set[str]:
    """Every name that an exporter may tell; {n} of a metric's name as it is told."""
    names = {"up"}
    for name, (kind, _) in FAMILIES.items():
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + end for end in ends}
    for metric in METRICS:
        numbers = [str(n) for n in range(10)] if "{n}" in metric else [""]
        names |= {row_name(metric.replace("{n}", n))[0] for n in numbers}
    return names | {"rl_jax:nonfinite_dropped"}


def files() -> dict[str, str]:
    return {
        "grafana.json": json.dumps(grafana(), indent=1) + "\n",
        "alerts.yaml": alerts_yaml(),
        "scrape.yaml": SCRAPE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.tools.dashboards", allow_abbrev=False)
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY)
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    args = parser.parse_args(argv)
    differs = []
    for name, text in files().items():
        path = args.directory / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            differs.append(name)
            if not args.check:
                args.directory.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for name in differs:
        say(f"{args.directory / name}: " + ("differs from the tables" if args.check else "written"))
    return 1 if args.check and differs else 0


def _panel(
    number: int, title: str, unit: str, targets: Sequence[tuple[str, str]], place: Mapping[str, int]
) -> dict[str, Any]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 5,
        "showPoints": "auto",
        "spanNulls": True,
    }
    return {
        "id": number, "type": "timeseries", "title": title, "datasource": _SOURCE, "gridPos": dict(place),
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "calcs": []},
                    "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expr, "legendFormat": legend,
             "editorMode": "code", "range": True}
            for i, (expr, legend) in enumerate(targets)
        ],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
