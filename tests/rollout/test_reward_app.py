"""The reward service: what it answers and refuses, and that who kills its workers, or itself, loses no reward."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import psutil
import pytest

from rl_jax.rewards.check import reward_of
from rl_jax.rollout import wire
from rl_jax.rollout.http_scorers import HttpScorers, ServiceError
from rl_jax.rollout.process import Limit
from rl_jax.rollout.reward_app import AppLimits, RewardApp
from rl_jax.rollout.scorer_pool import ScorerPool
from rl_jax.settings import RewardSettings
from rl_jax.tools import reward_server
from rl_jax.types import EpisodeView
from tests.rollout.doubles import echo_tasks

SLEEPING = "rl_jax.testing.scorers:SleepingScorer"
VIEW = EpisodeView((), ("2", "3"), {}, (0.0,))
TASK = echo_tasks(num=1, reward=SLEEPING)[0]


def body(name=SLEEPING, view=VIEW, payload=None, **more):
    task = wire.task_to_wire(replace(TASK, payload=payload or {}))
    said = {"name": name, "task": task, "view": wire.view_to_wire(view), **more}
    return json.dumps(said).encode()


class Service:
    """A RewardApp as an ASGI server calls it."""

    def __init__(self, token="", limits=AppLimits(), **settings):
        pool = {"keep_alive_s": settings.pop("keep_alive_s", 60.0)}
        settings = RewardSettings(**{"workers": 2, "timeout_s": 5.0} | settings)
        self.pool = ScorerPool({SLEEPING: SLEEPING}, settings, Limit(30.0, "--start"), **pool)
        self.app = RewardApp(self.pool, [SLEEPING], token, limits)

    @asynccontextmanager
    async def live(self):
        events, sent = asyncio.Queue(), asyncio.Queue()
        life = asyncio.create_task(self.app({"type": "lifespan"}, events.get, sent.put))
        events.put_nowait({"type": "lifespan.startup"})
        assert (await sent.get())["type"] == "lifespan.startup.complete"
        try:
            yield self
        finally:
            events.put_nowait({"type": "lifespan.shutdown"})
            assert (await sent.get())["type"] == "lifespan.shutdown.complete"
            await life

    async def ask(self, path, data=None, headers=(), gone_s=None):
        """(status, JSON, headers); None if the caller goes after gone_s."""
        scope = {"type": "http", "method": "GET" if data is None else "POST", "path": path,
                 "headers": [(b"content-length", b"%d" % len(data or b"")), *headers]}  # fmt: skip
        asked, sent = [{"type": "http.request", "body": data or b""}], []

        async def receive():
            if asked:
                return asked.pop()
            await asyncio.sleep(60 if gone_s is None else gone_s)
            return {"type": "http.disconnect"}

        async def send(event):
            sent.append(event)

        await self.app(scope, receive, send)
        if not sent:
            return None
        headers, said = dict(sent[0]["headers"]), sent[1]["body"]
        is_json = headers[b"content-type"] == b"application/json"
        return sent[0]["status"], json.loads(said) if is_json else said.decode(), headers


def serve(play, **options):
    async def run():
        service = Service(**options)
        async with service.live():
            return await play(service)

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.slow
def test_the_service_tells_prometheus_what_it_has_to_those_with_the_token():
    async def play(service):
        status, _, _ = await service.ask("/metrics")
        assert status == 401
        return await service.ask("/metrics", headers=[(b"authorization", b"Bearer secret")])

    status, text, headers = serve(play, token="secret")
    assert status == 200 and headers[b"content-type"].startswith(b"text/plain; version=0.0.4")
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found["rl_jax:workers_busy"] == 0 and found["rl_jax:calls_waiting"] == 0
    assert found["process_resident_memory_bytes"] > 0


REFUSED = [
    ("/v1/none", None, 404, "there are /healthz"),
    ("/v1/score", None, 405, "takes POST"),
    ("/v1/scorers", b"", 405, "takes GET"),
    ("/v1/score", b"", 400, "no score request (JSONDecodeError"),
    ("/v1/score", b"[" * 4000, 400, "no score request"),
    ("/v1/score", b"[]", 400, "no score request (TypeError"),
    ("/v1/score", b"{}", 400, "no score request (KeyError: 'name'"),
    ("/v1/score", b'{"name": "x", "task": {}, "view": {}}', 400, "no score request"),
    ("/v1/score", body(view=replace(VIEW, info={"a": 1e400})), 400, "no score request"),
    ("/v1/score", body("os:abort"), 404, "no scorer 'os:abort'; there are rl_jax.testing"),
    ("/v1/score", body(turn=2), 400, "turn is 2; the view has 2 turns"),
    ("/v1/score", body(turn=True), 400, "turn is True"),
    ("/v1/score", body(limit_s="9"), 400, "limit_s is '9'; use seconds above 0"),
    ("/v1/score", body(wait_s=-1), 400, "wait_s is -1"),
    ("/v1/score", b"x" * 5000, 413, "a body of more than 4096 bytes"),
]


@pytest.mark.slow
def test_the_service_scores_tells_what_it_has_and_refuses_the_rest():
    async def play(service):
        status, said, _ = await service.ask("/v1/score", body(payload={"value": 0.5}))
        assert (status, reward_of(said).value, said["scorer_version"]) == (200, 0.5, "sleeping/1")
        status, said, _ = await service.ask("/v1/score", body(turn=1))
        assert (status, said["value"]) == (200, 3.0)
        for answer, wanted in (("x", "error"), (None, "schema")):
            _, said, _ = await service.ask(
                "/v1/score", body(payload={"value": answer, "seconds": answer or 0})
            )
            assert (said["status"], said["value"]) == (wanted, None)
        _, said, _ = await service.ask("/v1/score", body(payload={"seconds": 9}, limit_s=0.2))
        assert said["status"] == "timeout" and 0.1 < said["seconds"] < 3
        status, said, _ = await service.ask("/v1/scorers")
        assert (status, said["scorers"], said["counts"]["reward_env_timeout"]) == (
            200,
            [SLEEPING],
            1,
        )
        assert said["of_turns"] == [SLEEPING]
        assert (await service.ask("/healthz"))[:2] == (200, {"status": "ok"})
        for path, data, wanted, why in REFUSED:
            status, said, _ = await service.ask(path, data)
            assert (status, why in said["error"]) == (wanted, True), (path, data[:80], said)
        for header in ((b"origin", b"https://evil.example"), (b"host", b"evil.example:8000")):
            status, said, _ = await service.ask("/v1/score", body(), [header])
            assert (status, "evil.example" in said["error"]) == (403, True), header

    serve(play, limits=AppLimits(max_body=4096))


@pytest.mark.slow
def test_the_service_wants_its_token_paces_who_comes_when_all_work_and_forgets_who_left():
    async def play(service):
        status, said, _ = await service.ask("/v1/score", body())
        assert status == 401 and "Bearer" in said["error"]
        assert (await service.ask("/v1/scorers", headers=[(b"authorization", b"Bearer no")]))[
            0
        ] == 401
        assert (await service.ask("/healthz"))[0] == 200
        ask = lambda *args, **more: service.ask("/v1/score", body(*args, **more), [TOKEN])
        gone = service.ask("/v1/score", body(payload={"seconds": 1.0}), [TOKEN], gone_s=0.2)
        assert await gone is None  # its worker is busy until its call ends, and then free
        await asyncio.sleep(0.1)
        assert service.pool.num_busy == 1
        late = asyncio.create_task(ask())
        await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        status, said, headers = await ask(wait_s=0.1)
        assert (status, headers[b"retry-after"]) == (429, b"1")
        assert (await late)[0] == 200 and service.pool.num_busy == 0

    TOKEN = (b"authorization", b"Bearer open sesame")
    serve(play, token="open sesame", workers=1, limits=AppLimits(max_waiting=1))


@pytest.mark.slow
def test_workers_start_when_they_are_needed_and_end_when_they_are_not():
    async def play(service):
        pool = service.pool
        while pool.workers:  # of the check at the start
            await asyncio.sleep(0.02)
        calls = [service.ask("/v1/score", body(payload={"seconds": 0.5})) for _ in range(5)]
        calls = asyncio.gather(*calls)
        peak = 0
        while not calls.done():
            peak = max(peak, pool.num_busy)
            await asyncio.sleep(0.02)
        assert [status for status, *_ in calls.result()] == [200] * 5 and peak == 2
        pids = [worker.pid for worker in pool.workers.values()]
        while pool.workers:
            await asyncio.sleep(0.02)
        while any(psutil.pid_exists(pid) for pid in pids):
            await asyncio.sleep(0.02)
        assert (pool.counts["reward_starts"], pool.counts["reward_retired"]) == (2, 3)
        assert (await service.ask("/v1/score", body()))[0] == 200

    serve(play, keep_alive_s=0.3)


@pytest.mark.slow
def test_no_reward_is_lost_when_scorers_are_killed_in_their_calls():
    """A10: kill -9 of whichever worker has a call, again and again, while all are busy."""

    async def play(service):
        values = [float(i) for i in range(24)]
        calls = asyncio.gather(
            *(service.ask("/v1/score", body(payload={"value": v, "seconds": 0.15})) for v in values)
        )
        killed = 0
        while killed < 3:
            await asyncio.sleep(0.2)
            if busy := [w for w in service.pool.workers.values() if w.num_waiting and w.is_usable]:
                os.kill(busy[0].pid, signal.SIGKILL)
                killed += 1
        said = [answer for _, answer, _ in await calls]
        assert [answer["value"] for answer in said] == values
        assert service.pool.counts["reward_env_died"] == 3

    serve(play)


@pytest.mark.slow
def test_a_run_loses_no_reward_when_the_service_itself_is_killed(tmp_path):
    """The whole program behind its socket: found by check(), killed in calls, started again at the same place."""
    pytest.importorskip("uvicorn", reason="the service's own server is an extra")
    (tmp_path / "token").write_text("sesame\n")
    port = free_port()
    command = [sys.executable, "-m", "rl_jax.tools.reward_server", f"--port={port}", f"--reward={SLEEPING}",
               f"--token_file={tmp_path / 'token'}", "--workers=2"]  # fmt: skip
    settings = RewardSettings(
        url=f"http://127.0.0.1:{port}", token_file=str(tmp_path / "token"), timeout_s=5.0,
        retries=40, total_timeout_s=50.0,
    )  # fmt: skip
    servers = [subprocess.Popen(command)]
    workers = []

    async def play():
        scorers = HttpScorers([SLEEPING], settings)
        while True:
            try:
                await scorers.check()
                break
            except ServiceError:
                await asyncio.sleep(0.1)
        await scorers.start()
        tasks = [replace(TASK, payload={"value": float(i), "seconds": 0.3}) for i in range(8)]
        calls = asyncio.gather(*(scorers.score(SLEEPING, task, VIEW) for task in tasks))
        await asyncio.sleep(0.5)
        workers.extend(psutil.Process(servers[0].pid).children())
        servers[0].kill()
        servers[0].wait()
        servers.append(subprocess.Popen(command))
        answers = await calls
        await scorers.close()
        return [answer.reward.value for answer in answers], scorers.counts["reward_retries"]

    try:
        values, retries = asyncio.run(asyncio.wait_for(play(), 60))
        assert values == [float(i) for i in range(8)] and retries > 0
        assert len(workers) == 2
        psutil.wait_procs(workers, timeout=10)  # the workers of the one that was killed end with it
        assert not any(worker.is_running() for worker in workers)
        servers[-1].send_signal(signal.SIGTERM)
        assert servers[-1].wait(timeout=20) in (0, -signal.SIGTERM)
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                server.kill()
            server.wait()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--reward=exact_match", "--workers=0"], "--workers=0 must be above 0"),
        (["--reward=exact_match", "--host=0.0.0.0"], "is open to others, and without --token_file"),
        (["--reward=exakt"], "no reward 'exakt'; use one of "),
        (["--reward=exact_match", "--token_file=none"], "token_file=none cannot be read"),
        (["--reward=exact_match", "--options=none.json"], "No such file"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(capsys, argv, said):
    assert reward_server.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
