"""The HTTP client against a server that does everything wrong: deadlines, retries and their budget, bounds."""

import asyncio
import time

import pytest

from rl_jax.rewards import http_client
from rl_jax.rewards.http_client import Deadlines, HttpClient, HttpError, RetryBudget, retry_after_s
from rl_jax.testing.stub_service import StubService, answer

QUICK = Deadlines(connect_s=1.0, read_s=0.2, total_s=5.0)
OK = answer({"value": 1})


def talk(script, *payloads, deadlines=QUICK, **options):
    """(answers or HttpErrors of calls one after the other, the stub, seconds)."""

    async def play():
        async with StubService(script) as stub:
            client = HttpClient(stub.url, deadlines=deadlines, **options)
            out = []
            for payload in payloads or ({},):
                try:
                    out.append(await client.call("POST", "/v1/score", payload))
                except HttpError as error:
                    out.append(error)
            await client.close()
            return out, stub

    start_s = time.monotonic()
    out, stub = asyncio.run(asyncio.wait_for(play(), 30))
    return out, stub, time.monotonic() - start_s


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.002)


def test_calls_share_a_connection_and_send_the_token():
    out, stub, _ = talk(lambda n: OK, {"a": "\ud835"}, {"a": 2}, token="secret")
    assert out == [{"value": 1}] * 2 and stub.num_connections == 1
    assert stub.bodies == [b'{"a":"\\ud835"}', b'{"a":2}']
    assert all("Authorization: Bearer secret\r\n" in head for head in stub.heads)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 599])
def test_what_may_pass_is_tried_again(status):
    out, stub, _ = talk(lambda n: answer({}, status) if n < 2 else OK)
    assert out == [{"value": 1}] and len(stub.bodies) == 3


@pytest.mark.parametrize("status", [204, 301, 400, 401, 404, 413, 501 - 100])
def test_what_no_retry_mends_fails_at_once(status):
    (error,), stub, _ = talk(lambda n: answer({"error": "so"}, status))
    assert (error.kind, error.status, len(stub.bodies)) == ("status", status, 1)
    assert "which no retry mends" in error.detail


def test_a_connection_that_is_cut_is_opened_again():
    out, stub, _ = talk(lambda n: [b"HTTP/1.1 200 x\r\nContent-Le", None] if n == 0 else OK)
    assert out == [{"value": 1}] and stub.num_connections == 2


def test_a_kept_connection_that_was_closed_meanwhile_costs_no_retry():
    script = lambda n: [*OK, None]  # it says nothing of closing
    out, stub, _ = talk(script, {}, {}, {}, retries=0)
    assert out == [{"value": 1}] * 3 and stub.num_connections == 3


@pytest.mark.parametrize(
    "steps",
    [
        [1.0],  # nothing
        [b"HTTP/1.1 200 x\r\n", 1.0],
        [b"HTTP/1.1 200 x\r\nContent-Length: 99\r\n\r\n", *[b"x", 0.02] * 90],  # trickles
        [*[b"HTTP/1.1 100 Continue\r\n\r\n", 0.02] * 90],
    ],
)
def test_an_answer_that_hangs_or_trickles_ends_at_the_read_deadline(steps):
    """Fault 7: each byte comes in time, the answer never does."""
    (error,), stub, seconds = talk(lambda n: steps, retries=1)
    assert error.kind == "timeout" and "no whole answer within 0.2 s, after 2 tries" in error.detail
    assert len(stub.bodies) == 2 and 0.4 <= seconds < 2.5


@pytest.mark.slow
def test_tries_and_pauses_end_at_the_total_deadline():
    (error,), stub, seconds = talk(
        lambda n: [9.0], deadlines=Deadlines(1.0, 0.2, 0.7), retries=1000
    )
    assert error.kind == "timeout" and "no time for another try within 0.7 s" in error.detail
    assert 2 <= len(stub.bodies) <= 4 and seconds < 2.5


@pytest.mark.slow
def test_retry_after_is_waited_for():
    out, stub, seconds = talk(lambda n: OK if n else answer({}, 503, "Retry-After: 1"))
    assert out == [{"value": 1}] and 1.0 <= seconds < 3.0


def test_retry_after_beyond_the_total_deadline_is_not_waited_for():
    (error,), stub, seconds = talk(lambda n: answer({}, 503, "Retry-After: 60"))
    assert "no time for another try within 5 s" in error.detail
    assert len(stub.bodies) == 1 and seconds < 2.0


@pytest.mark.slow
def test_a_service_that_paces_its_callers_costs_them_no_retries():
    paced = lambda n: OK if n else answer({}, 429, "Retry-After: 1")
    out, stub, _ = talk(paced, retries=0, budget=RetryBudget(0))
    assert out == [{"value": 1}] and len(stub.bodies) == 2


@pytest.mark.parametrize(
    "text, date, seconds",
    [
        ("3", "", 3.0),
        ("-3", "", 0.0),
        ("soon", "", 0.0),
        ("²", "", 0.0),
        ("Wed, 21 Oct 2026 07:28:30 GMT", "Wed, 21 Oct 2026 07:28:00 GMT", 30.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", "Wed, 21 Oct 2026 07:28:30 GMT", 0.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", "", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_beside_the_answers_own(text, date, seconds):
    assert retry_after_s(text, date) == seconds


def test_retries_of_all_calls_come_out_of_one_budget():
    budget = RetryBudget(3)
    out, stub, _ = talk(lambda n: answer({}, 500), {}, {}, {}, retries=2, budget=budget)
    assert [len(error.args) for error in out] == [1] * 3
    assert len(stub.bodies) == 3 + 3 and budget.left == 0
    assert "after 3 tries" in out[0].detail and "budget of 3 retries is used up" in out[2].detail
    budget.refill()
    assert budget.left == 1


@pytest.mark.parametrize(
    "steps, said",
    [
        (answer(b"NaN"), "is no JSON (it holds NaN)"),
        (answer(b"[1, Infinity]"), "it holds Infinity"),
        (answer(b"\xff\xfe"), "is no JSON"),
        (answer(b"[" * 100_000), "is no JSON"),
        (answer(b""), "is no JSON"),
        ([b"SMTP ready\r\n\r\n"], "is no answer of HTTP/1.1"),
        ([b"HTTP/1.1 ok fine\r\n\r\n"], "is no answer of HTTP/1.1"),
        ([b"HTTP/1.1 200 x\r\nX: " + b"y" * 70_000], "a line or headers of over 32768 bytes"),
        ([b"HTTP/1.1 200 x\r\nContent-Length: 99999999999\r\n\r\n"], "more than 8388608 bytes"),
        ([b"HTTP/1.1 200 x\r\nContent-Length: -1\r\n\r\n"], "whose Content-Length is '-1'"),
        ([b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n"], "a chunk without a size"),
        ([b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n"], "more than 8388608"),
    ],
)
def test_what_is_no_http_or_no_json_is_told_and_not_tried_again(steps, said):
    (error,), stub, _ = talk(lambda n: steps)
    assert (error.kind, len(stub.bodies)) == ("protocol", 1) and said in error.detail


@pytest.mark.parametrize(
    "steps",
    [
        [b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n", b'3\r\n{"v\r\n8;e=1\r\nalue": 1\r\n',
         b"1\r\n}\r\n0\r\nTrailer: x\r\n\r\n"],
        [b'HTTP/1.1 200 x\r\nConnection: close\r\n\r\n{"value"', b": 1}", None],
        [b"HTTP/1.1 100 Continue\r\n\r\n", *OK],
    ],
)  # fmt: skip
def test_bodies_in_chunks_or_to_the_connections_end_are_read(steps):
    out, _, _ = talk(lambda n: steps, {}, {})
    assert out == [{"value": 1}] * 2


def test_a_port_where_nobody_listens_is_asked_again_until_the_total_deadline():
    async def play():
        async with StubService(lambda n: OK) as stub:
            url = stub.url
        return await HttpClient(url, deadlines=Deadlines(0.2, 0.2, 0.4), retries=0).call("GET", "/")

    with pytest.raises(HttpError, match="no connection .* within 0.4 s") as caught:
        asyncio.run(play())
    assert caught.value.kind == "connect"


@pytest.mark.parametrize(
    "url, token, said",
    [
        ("localhost:80", "", "is no URL"),
        ("ftp://x", "", "is no URL"),
        ("http://a:b@c", "", "holds a password"),
        ("http://c", "a\nX: b", "no header may"),
    ],
)
def test_urls_and_tokens_that_are_none(url, token, said):
    with pytest.raises(ValueError, match=said):
        HttpClient(url, token=token)
