"""Prometheus text: valid by its own parser, from every kind of process; who may read it, what a reader cannot do."""

import http.client
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from rl_jax import exposition
from rl_jax.config import ConfigError
from rl_jax.exporter import MAX_READERS, Exporter, open_exporter
from rl_jax.exposition import FAMILIES, FLEET_STATES, Text, TurnTimes, row_name
from rl_jax.http.prometheus import HttpMetrics
from rl_jax.learner_process import LearnerService
from rl_jax.metrics import METRICS
from rl_jax.progress import Progress
from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.remote.spec import Spec, scraped
from rl_jax.remote.starter import LocalStarter
from rl_jax.serve.request_table import COUNTERS
from rl_jax.settings import (
    ClusterSettings,
    EngineSettings,
    MetricsSettings,
    ServeSettings,
    Settings,
)
from rl_jax.testing.fake_learner import FakeLearner
from rl_jax.testing.fake_servers import fake_spec
from rl_jax.types import FinishReason
from rl_jax.watching import ENDPOINTS, Watch, check_watch


def parsed(text):
    """family -> {labels: value}, by Prometheus' own parser, which refuses what is malformed."""
    parser = pytest.importorskip("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def get(address, path="/metrics", **headers):
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def wait_for(true, seconds=60.0):
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- the text --------------------------------------------------------------------------------------------------------


def test_names_of_rows_are_distinct_and_none_is_a_family_of_its_own():
    names = [row_name(name)[0] for name in METRICS]
    assert len(set(names)) == len(names) and not set(names) & set(FAMILIES)
    assert row_name("reward/mean.sums") == ("rl_jax:reward_mean", {"of": "sums"})
    assert row_name("is/ess_lag2") == ("rl_jax:is_ess_lag2", {})


def test_labels_cannot_break_out_of_their_quotes():
    hostile = 'a"} 1\nrl_jax:step 99\\'
    text = Text(process=hostile)
    text.add("rl_jax:step", 3)
    text.row({f"reward/part.{hostile}": 1.0})
    found = parsed(str(text))
    assert found[("rl_jax:step", (("process", hostile),))] == 3 and len(found) == 2


def test_only_names_of_the_table_can_be_told_and_what_is_unknown_is_absent():
    text = Text()
    text.add("rl_jax:step", None)
    assert str(text) == ""
    with pytest.raises(KeyError):
        text.add("rl_jax:invented", 1)


def test_times_of_a_turn_by_hand():
    times, text = TurnTimes(), Text()
    times.add({"queue": 1.0, "prefill": 2.0, "transfer": 0.5, "decode": 4.0, "first_token": 1.0}, 4)
    times.add(
        {"queue": 0.0, "prefill": 0.0, "decode": 0.02, "first_token": 0.02}, 1
    )  # no second token
    times.add({"queue": 1.0}, 4)  # of a server that says less: not told
    times.tell(text)
    found = parsed(str(text))
    total = lambda name: (found[(f"vllm:{name}_sum", ())], found[(f"vllm:{name}_count", ())])
    assert total("time_to_first_token_seconds") == (4.52, 2)
    assert total("time_per_output_token_seconds") == (1.0, 1)
    assert total("e2e_request_latency_seconds") == (7.52, 2)
    assert found[("vllm:e2e_request_latency_seconds_bucket", (("le", "10.0"),))] == 2
    assert found[("vllm:e2e_request_latency_seconds_bucket", (("le", "0.025"),))] == 1


def test_the_http_servers_names_are_of_the_same_table_or_its_own():
    text = HttpMetrics('m"').text({"vllm:num_requests_running": 1.0})
    parsed(text)
    assert "vllm:e2e_request_latency_seconds" in set(exposition.names_of(text))


def test_what_counts_up_for_long_keeps_every_digit():
    """A counter of six digits stands still between two scrapes, or leaps, once it has seven."""
    metrics = HttpMetrics("m")
    metrics.generation_tokens = 123_456_789
    metrics.e2e.add(1_234_567.25)
    found = parsed(metrics.text({}))
    assert found[("vllm:generation_tokens_total", (("model_name", "m"),))] == 123_456_789
    assert found[("vllm:e2e_request_latency_seconds_sum", (("model_name", "m"),))] == 1_234_567.25


def fake_server(name="decode.0", fenced=None, **stats):
    counters = dict.fromkeys(COUNTERS, 0) | {f"finish_{r.value}": 0 for r in FinishReason}
    gauges = {"waiting": 2, "filling": 1, "running": 3, "pages": 10, "free_pages": 4}
    return SimpleNamespace(
        name=name, fenced=fenced, version=7, stats=lambda: {**counters, **gauges, **stats},
        progress=lambda: SimpleNamespace(is_compiling=False),
    )  # fmt: skip


def test_a_server_is_told_under_vllms_names():
    text = Text()
    exposition.tell_server(
        text, fake_server(decode_tokens=50, prefill_tokens=20, append_tokens=3, refused=1)
    )
    found = {name: v for (name, labels), v in parsed(str(text)).items() if len(labels) == 1}
    assert found["vllm:num_requests_running"] == 4 and found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.6 and found["rl_jax:weight_version"] == 7
    assert found["vllm:generation_tokens_total"] == 50 and found["vllm:prompt_tokens_total"] == 23
    assert found["rl_jax:queue_rejects_total"] == 1


def test_each_server_is_in_exactly_one_state():
    servers = [
        fake_server("a"), fake_server("b", fenced="stands still"),
        SimpleNamespace(**vars(fake_server("c")), suspect="silent", gone=None),
        SimpleNamespace(**vars(fake_server("d")), suspect=None, gone="ended 3 times"),
    ]  # fmt: skip
    text = Text()
    exposition.tell_fleet(text, servers)
    found = parsed(str(text))
    state = {dict(labels)["server"]: dict(labels)["state"] for (_, labels), v in found.items() if v}
    assert state == {"a": "live", "b": "fenced", "c": "suspect", "d": "gone"}
    assert len(found) == 4 * len(FLEET_STATES)


# --- who may read it -------------------------------------------------------------------------------------------------


@pytest.fixture
def exporter():
    exporter = Exporter("127.0.0.1", 0, lambda: "up 1\n")
    yield exporter
    exporter.close()


def test_loopback_answers_metrics_and_nothing_else(exporter):
    assert get(exporter.address) == (200, "up 1\n")
    assert get(exporter.address, "/")[0] == 404
    assert get(exporter.address, Origin="http://evil.example")[0] == 403
    assert get(exporter.address, Host="evil.example")[0] == 403


def test_others_need_the_token(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.token_file"):
        Exporter("0.0.0.0", 0, str)
    exporter = Exporter("0.0.0.0", 0, lambda: "up 1\n", "secret")
    try:
        here = ("127.0.0.1", exporter.address[1])
        assert get(here)[0] == 401 and get(here, Authorization="Bearer secre")[0] == 401
        assert get(here, Authorization="Bearer secret") == (200, "up 1\n")
    finally:
        exporter.close()


def test_a_source_that_fails_is_a_500_and_the_next_scrape_works():
    answers = [ValueError("secret inside"), "up 1\n"]

    def source():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    exporter = Exporter("127.0.0.1", 0, source)
    try:
        status, text = get(exporter.address)
        assert status == 500 and "secret" not in text
        assert get(exporter.address)[0] == 200
    finally:
        exporter.close()


def test_readers_that_hang_are_bounded(exporter):
    hanging = [socket.create_connection(exporter.address) for _ in range(MAX_READERS)]
    try:
        for one in hanging:
            one.sendall(b"GET /metrics HT")
        wait_for(lambda: get(exporter.address)[0] == 503, 5)
    finally:
        for one in hanging:
            one.close()
    wait_for(lambda: get(exporter.address)[0] == 200, 5)


def test_a_port_that_is_taken_costs_a_process_its_metrics_alone(exporter, caplog):
    scrape = {"host": "127.0.0.1", "port": exporter.address[1], "token_file": ""}
    assert open_exporter(scrape, str) is None and "no metrics at" in caplog.text
    assert open_exporter({}, str) is None
    with pytest.raises(ConfigError, match="cannot be had"):
        check_watch(MetricsSettings(port=exporter.address[1]))


def test_processes_have_the_ports_behind_the_drivers():
    specs = [Spec(name=f"x.{i}", program="p") for i in range(2)]
    assert scraped(specs, MetricsSettings(), 0) == tuple(specs)
    ports = [s.scrape["port"] for s in scraped(specs, MetricsSettings(port=9000), 3)]
    assert ports == [9004, 9005]


# --- processes -------------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self, path):
        self.path, self.attempt, self.events, self.written = path, 0, [], {}
        self.decision = SimpleNamespace(resume_step=0)

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def write_json(self, name, value):
        self.written[name] = value


def test_the_driver_tells_its_last_row_its_servers_and_where_the_others_are(tmp_path):
    port, run = free_port(), FakeRun(tmp_path)
    settings = Settings(run_id="r-1", metrics=MetricsSettings(port=port))
    watch = Watch.open(settings, run, Progress(10, "none"), str, lambda name, table: None)
    try:
        watch.on_row(0, {"eval/success.sums": 0.1})
        watch.on_row(1, {"time/step_s": 9.0, "reward/mean": 0.25, "alarm/ess": 1.0})
        watch.on_row(2, {"time/step_s": 9.0, "reward/mean": 0.5, "reward/mean.sums": 1.0})
        rollout = SimpleNamespace(
            pool=SimpleNamespace(counts={"restarts": 2}), lag_s=lambda limit_s: 0.001,
            ledger=SimpleNamespace(counts=lambda: {"ISSUED": 3, "TRAINED": 9}),
        )  # fmt: skip
        cluster = SimpleNamespace(targets=[fake_server()], specs=(), router=SimpleNamespace())
        watch.attach(
            cluster, rollout, scraped([Spec(name="learner.0", program="p")], settings.metrics, 0)
        )
        cluster.router.on_turn(
            SimpleNamespace(times_s={"queue": 0.0, "prefill": 0.1, "decode": 0.2}, tokens=[1])
        )
        status, text = get(("127.0.0.1", port))
    finally:
        watch.close()
    found = {key[0] if len(key[1]) == 1 else key: value for key, value in parsed(text).items()}
    assert status == 200 and found["rl_jax:step"] == 2 and found["rl_jax:steps"] == 10
    assert found["rl_jax:reward_mean"] == 0.5
    assert "rl_jax:alarm_ess" not in found, "the alarm of a step before would be told for good"
    assert found["rl_jax:eval_success", (("of", "sums"), ("process", "driver"))] == 0.1
    assert found["rl_jax:reward_mean", (("of", "sums"), ("process", "driver"))] == 1.0
    assert found["rl_jax:driver_lag_seconds"] == 0.001 and found["rl_jax:paused"] == 0
    assert found["rl_jax:episode_states", (("process", "driver"), ("state", "trained"))] == 9
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    assert found["vllm:num_requests_running", (("process", "driver"), ("server", "decode.0"))] == 4
    targets = {one["labels"]["process"]: one["targets"] for one in run.written[ENDPOINTS]}
    assert targets == {
        "driver": [f"127.0.0.1:{port}"], "learner.0": [f"127.0.0.1:{port + 1}"],
    }  # fmt: skip
    assert all(one["labels"]["run"] == "r-1" for one in run.written[ENDPOINTS])


CLUSTER = ClusterSettings(heartbeat_s=0.2, lease_s=10.0)


def scrape_at(port):
    return {"host": "127.0.0.1", "port": port, "token_file": ""}


def text_at(port):
    try:
        return get(("127.0.0.1", port))[1]
    except OSError:
        return ""


@pytest.mark.slow(seconds=5)
def test_a_servers_process_tells_its_server(tmp_path):
    port = free_port()
    spec = fake_spec("decode.0", "decode", EngineSettings(), ServeSettings())
    spec = type(spec)(**{**vars(spec), "scrape": scrape_at(port)})
    server = RemoteDecodeServer(spec, CLUSTER, tmp_path, 30.0, LocalStarter(CLUSTER, tmp_path))
    server.start()
    try:
        wait_for(lambda: "vllm:num_requests_running" in text_at(port))
        found = parsed(text_at(port))
    finally:
        server.close()
    where = (("process", "decode.0"), ("server", "decode.0"))
    assert found["vllm:num_requests_running", where] == 0
    assert found["vllm:kv_cache_usage_perc", where] == 0
    assert found["vllm:e2e_request_latency_seconds_count", where] == 0
    assert found["rl_jax:orders_total", (("process", "decode.0"), ("verb", "build"))] == 1


@pytest.mark.slow
def test_a_learners_process_tells_its_orders_and_steps(tmp_path, monkeypatch):
    port = free_port()
    monkeypatch.setattr(
        "rl_jax.testing.fake_learner.Spec", lambda **of: Spec(**of, scrape=scrape_at(port))
    )
    learner = FakeLearner(CLUSTER, tmp_path)
    try:
        wait_for(lambda: text_at(port))
        found = parsed(text_at(port))
    finally:
        learner.close()
    assert found["process_resident_memory_bytes", (("process", "learner.0"),)] > 1e6
    text, own = Text(), SimpleNamespace(_roles=object(), _num_steps=4, _version=9)
    LearnerService.tell(own, text)
    assert parsed(str(text))["rl_jax:learner_steps_total", ()] == 4
    assert parsed(str(text))["rl_jax:weight_version", ()] == 9


def test_endpoints_can_be_read_by_prometheus_file_sd(tmp_path):
    """The form: a list of {"targets": ["host:port"], "labels": {name: text}}."""
    run = FakeRun(tmp_path)
    settings = Settings(metrics=MetricsSettings(port=free_port()))
    watch = Watch.open(settings, run, Progress(1, "none"), str, lambda name, table: None)
    watch.close()
    listed = json.loads(json.dumps(run.written[ENDPOINTS]))
    for one in listed:
        assert set(one) == {"targets", "labels"}
        assert all(exposition.is_label(name) for name in one["labels"])
        assert all(isinstance(value, str) for value in one["labels"].values())
    assert threading.active_count() < 50
