"""The other interfaces, the operator's plane, tokens, versions, sessions, and the end of a server."""

import threading
import time
from dataclasses import replace

import pytest

from rl_jax.asgi import refusal
from rl_jax.testing.http_world import ENGINE, LIMITS, until
from rl_jax.tokens import ByteTokenizer

ASK = {"prompt": "abc", "max_tokens": 6, "seed": 4, "ignore_eos": True}
LONG = {**ASK, "max_tokens": 400}
ENCODE = ByteTokenizer().encode


def test_every_interface_samples_the_same(world):
    whole = world.post("/v1/completions", {**ASK, "return_token_ids": True, "logprobs": 0}).body
    tokens = whole["choices"][0]["token_ids"]
    params = {"max_new_tokens": 6, "sampling_seed": 4, "ignore_eos": True}
    for prompt in ({"text": "abc"}, {"input_ids": ENCODE("abc")}):
        body = world.post(
            "/generate", {**prompt, "sampling_params": params, "return_logprob": True}
        ).body
        assert body["output_ids"] == tokens and body["text"] == whole["choices"][0]["text"]
        meta = body["meta_info"]
        assert (
            meta["finish_reason"] == {"type": "length", "length": 6}
            and meta["weight_version"] == "0"
        )
        values = whole["choices"][0]["logprobs"]["token_logprobs"]
        assert [row[:2] for row in meta["output_token_logprobs"]] == [
            [v, t] for v, t in zip(values, tokens)
        ]
    events = world.events("/generate", {"text": "abc", "sampling_params": params})
    assert events[-1]["output_ids"] == tokens and events[-1]["text"] == whole["choices"][0]["text"]
    sampling = {"max_tokens": 6, "seed": 4, "ignore_eos": True, "logprobs": 0}
    given = world.post(
        "/inference/v1/generate", {"token_ids": ENCODE("abc"), "sampling_params": sampling}
    )
    assert given.body["choices"][0]["token_ids"] == tokens
    many = world.post("/generate", {"text": ["abc", "b"], "sampling_params": params}).body
    assert len(many) == 2 and many[0]["output_ids"] == tokens


PAGES = [
    ({"Origin": "https://evil.example"}, "Origin is 'https://evil.example'"),
    ({"Origin": "null"}, "Origin is 'null'"),
    ({"Host": "evil.example:8000"}, "Host is 'evil.example:8000'"),
    ({"Host": "127.0.0.1.evil.example"}, "without a token only loopback is answered"),
]


@pytest.mark.parametrize("plane", ["public", "admin"])
def test_pages_of_other_sites_are_not_answered(world, plane):
    """As a browser lets them ask: by an Origin of their own, or by a name of their own that is made to mean us."""
    admin = plane == "admin"
    path = "/admin/pause" if admin else "/v1/completions"
    for headers, why in PAGES:
        answer = world.post(path, {} if admin else ASK, headers, admin=admin)
        assert answer.status == 403 and why in answer.body["error"]["message"], headers
    assert not world.get("/admin/status", admin=True).body["paused"]
    port = world.admin_port if admin else world.port
    own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    path = "/admin/resume" if admin else "/tokenize"
    assert world.post(path, {} if admin else {"prompt": "a"}, own, admin=admin).status == 200


def test_with_a_token_any_name_of_ours_is_answered():
    own = {b"host": b"[fd00::1]:8000", b"origin": b"http://[fd00::1]:8000"}
    assert refusal(own, True) is None
    assert refusal({b"host": b"[::1]:8000"}, False) is None and refusal({}, False) is None
    assert "Host" in (refusal(own, False) or "")
    assert "Origin" in (refusal({**own, b"origin": b"http://evil.example"}, True) or "")


def test_jetstream_streams_greedily(world):
    answer = world.post("/v1/generate", {"max_tokens": 5, "text_content": {"text": "abc"}})
    assert answer.status == 200 and '"stream_content"' in answer.body
    assert world.get("/v1/health").body == {"is_live": True}
    both = {"max_tokens": 5, "text_content": {"text": "a"}, "token_content": {"token_ids": [9]}}
    assert world.post("/v1/generate", both).status == 400


def test_tokenize_and_back(world):
    text = "héllo \u0000 𝄞"
    tokens = world.post("/tokenize", {"prompt": text}).body["tokens"]
    assert tokens == ENCODE(text)
    assert world.post("/detokenize", {"tokens": tokens}).body == {"prompt": text}
    assert world.post("/detokenize", {"tokens": [264]}).status == 400


def test_health_ready_and_metrics(world):
    assert world.get("/health").body == {"status": "ok"} and world.get("/ready").status == 200
    assert world.get("/health_generate").body["tokens"] == 1
    before = metric(world, "vllm:generation_tokens_total")
    world.post("/v1/completions", ASK)
    assert metric(world, "vllm:generation_tokens_total") == before + 6
    assert (
        metric(world, "rl_jax:weight_version") == 0
        and metric(world, "vllm:num_requests_running") == 0
    )
    text = world.get("/metrics").body
    for name in ("vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_bucket",
                 "vllm:kv_cache_usage_perc", "vllm:request_success_total"):  # fmt: skip
        assert name in text


def metric(world, name):
    lines = world.get("/metrics").body.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).split()[-1])


def test_the_page_loads_nothing_from_elsewhere(world):
    page = world.get("/")
    assert page.status == 200 and '<script src="/page.js"' in page.body
    assert page.headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'"
    )
    assert "onclick" not in page.body and "<style" not in page.body and "http" not in page.body
    assert world.get("/page.js").status == world.get("/page.css").status == 200


def test_openapi_has_every_path(world):
    paths = world.get("/openapi.json").body["paths"]
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/generate",
        "/v1/generate",
        "/tokenize",
    } <= set(paths)
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"] and "$ref" not in str(body)


# --- versions, sessions --------------------------------------------------------------------------------------------


def test_an_older_version_than_asked_for_is_409(own_world):
    world = own_world()
    assert world.post("/v1/completions", {**ASK, "min_weight_version": 1}).status == 409
    answer = world.post("/admin/update_weights", {"directory": "7"}, admin=True)
    assert answer.status == 200 and answer.body["version"] == 1
    said = world.post("/v1/completions", {**ASK, "min_weight_version": 1}).body
    assert said["metadata"]["weight_version"] == 1
    assert world.get("/v1/models").body["data"][0]["weight_version"] == 1


def test_a_swap_within_an_answer_is_told_token_by_token(own_world):
    world = own_world()
    world.pace.block_s = 0.02
    events = []
    thread = threading.Thread(
        target=lambda: events.extend(world.events("/v1/completions", {**LONG, "max_tokens": 200}))
    )
    thread.start()
    until(lambda: world.gauges()["running"] == 1)
    world.post("/admin/update_weights", {"directory": "3"}, admin=True)
    thread.join(20)
    (spans,) = events[-1]["metadata"]["weight_versions"]
    assert [s["version"] for s in spans] == [0, 1]
    assert (
        spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 200
    )
    assert {e["weight_version"] for e in events if "weight_version" in e} == {0, 1}


def test_a_session_finds_its_kv_again(world):
    prompt = list(range(9, 109))
    named, before = {"X-Session-ID": "talk-1"}, world.gauges()["sessions"]
    first = world.post(
        "/v1/completions", {**ASK, "prompt": prompt, "return_token_ids": True}, named
    ).body
    longer = [*prompt, *first["choices"][0]["token_ids"], 11, 12]
    second = world.post("/v1/completions", {**ASK, "prompt": longer}, named).body
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt)
    assert world.gauges()["sessions"] == before + 1


def test_sessions_are_forgotten_by_age(own_world):
    world = own_world(limits=replace(LIMITS, sessions=3))
    for i in range(6):
        assert world.post("/v1/completions", {**ASK, "session_id": f"s{i}"}).status == 200
    until(lambda: world.server.stats()["sessions"] == 3)


# --- tokens of both planes -----------------------------------------------------------------------------------------


def test_each_plane_wants_its_own_token(own_world):
    world = own_world(token="clients", admin_token="operators")
    bearer = lambda token: {"authorization": f"Bearer {token}"}
    for headers in ({}, bearer("operators"), bearer(""), {"authorization": "clients"}):
        assert world.post("/v1/completions", ASK, headers).status == 401
        assert world.ask("GET", "/metrics", headers=headers).status == 401
    assert world.post("/v1/completions", ASK, bearer("clients")).status == 200
    assert world.get("/health").status == world.get("/ready").status == 200
    for headers in ({}, bearer("clients")):
        assert world.ask("GET", "/admin/status", headers=headers, admin=True).status == 401
        assert world.post("/admin/pause", {}, headers, admin=True).status == 401
    assert world.ask("GET", "/admin/status", headers=bearer("operators"), admin=True).status == 200


# --- the operator's plane --------------------------------------------------------------------------------------------


def admin(world, path, body=None):
    return world.post(f"/admin/{path}", body or {}, admin=True)


def test_the_public_plane_has_no_admin_route(world):
    assert world.post("/admin/pause", {}).status == 404


def test_pause_and_resume(world):
    assert admin(world, "pause").body["paused"] is True
    blocks = world.engine.num_blocks
    answers = []
    thread = threading.Thread(target=lambda: answers.append(world.post("/v1/completions", ASK)))
    thread.start()
    until(lambda: world.api.num_choices == 1)
    time.sleep(0.1)
    assert world.engine.num_blocks == blocks and not answers
    assert admin(world, "resume").body["paused"] is False
    thread.join(10)
    assert answers[0].status == 200


def test_abort_ends_one_or_all_with_what_was_sampled(world):
    world.pace.block_s = 0.02
    answers = {}
    ask = lambda name: answers.update(
        {name: world.post("/v1/completions", {**LONG, "request_id": name})}
    )
    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    until(lambda: world.gauges()["running"] == 2)
    status = world.get("/admin/status", admin=True).body
    assert status["requests"] == ["one", "two"]
    time.sleep(0.1)
    assert admin(world, "abort", {"request_id": "one"}).body == {"aborted": 1}
    threads[0].join(10)
    choice = answers["one"].body["choices"][0]
    assert (
        choice["finish_reason"] == "abort"
        and 0 < answers["one"].body["usage"]["completion_tokens"] < 400
    )
    assert "two" not in answers
    assert admin(world, "abort").body == {"aborted": 1}
    threads[1].join(10)
    assert answers["two"].body["choices"][0]["finish_reason"] == "abort"


def test_drain_refuses_what_comes_and_waits_for_the_rest(world):
    world.pace.block_s = 0.01
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(world.post("/v1/completions", {**ASK, "max_tokens": 100}))
    )
    thread.start()
    until(lambda: world.gauges()["running"] == 1)
    drained = admin(world, "drain", {"deadline_s": 10})
    assert drained.body == {"drained": True} and world.api.num_choices == 0
    no = world.post("/v1/completions", ASK)
    assert no.status == 503 and no.headers["retry-after"] and world.get("/ready").status == 503
    admin(world, "resume")
    thread.join(10)
    assert answers[0].status == 200 and world.post("/v1/completions", ASK).status == 200


@pytest.mark.parametrize(
    "body, told",
    [
        ({"directory": "nowhere"}, "has no config.json"),
        ({"directory": "1", "version": 0}, "versions only rise"),
        ({}, "directory"),
        ({"directory": "1", "kv": "lose"}, "kv"),
        ({"directory": "1", "digest": "abc"}, "digest"),
        ({"directory": "1", "pickle": True}, "no such field"),
    ],
)
def test_an_update_that_cannot_be_leaves_the_old_version(world, body, told):
    answer = admin(world, "update_weights", body)
    assert answer.status == 400 and told in answer.body["error"]["message"]
    assert world.sampler.version() == 0


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_server_that_ends_finishes_what_it_has_and_says_503(own_world):
    world = own_world()
    world.pace.block_s = 0.02
    answers = []
    ask = lambda num: answers.append(world.post("/v1/completions", {**ASK, "max_tokens": num}))
    short, long = (threading.Thread(target=ask, args=(num,)) for num in (60, 480))
    short.start(), long.start()
    until(lambda: world.gauges()["running"] == 2)
    start = time.monotonic()
    world.loop.call_soon_threadsafe(world.planes.stop)
    until(lambda: world.api.stopping)
    assert world.get("/ready").status == 503 and world.post("/v1/completions", ASK).status == 503
    short.join(10), long.join(10)
    finishes = sorted(a.body["choices"][0]["finish_reason"] for a in answers)
    assert finishes == ["abort", "length"]  # drain_s was not enough for the long one
    world.stop()
    assert time.monotonic() - start < world.limits.drain_s + 5
    assert world.gauges()["free_slots"] == ENGINE.slots
