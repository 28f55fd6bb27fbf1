"""`python -m rl_jax.tools.serve` as its user meets it: what it refuses at once, and a server from start to SIGTERM."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from rl_jax.mesh import MeshPlan
from rl_jax.tools import serve
from tests.http.test_update import write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("served") / "tiny", 0)


@pytest.mark.slow(seconds=2)  # a model is written first
@pytest.mark.parametrize(
    "words, told",
    [
        (["--host=0.0.0.0"], "--host=0.0.0.0 is open to others; give --token_file"),
        (["--admin_host=0.0.0.0"], "give --admin_token_file"),
        (["--context=65"], "--context=65 must be 2 to 64, the model's"),
        (["--slots=0"], "--slots=0 must be above 0"),
        (["--port=65536"], "--port=65536 must be 0 (any that is free) to 65535"),
        (["--port=TAKEN"], "cannot be had at 127.0.0.1"),
        (["--admin_port=TAKEN"], "--admin_port="),
        (["--port=FREE", "--admin_port=FREE"], "each plane needs its own"),
        (["--request_s=nan"], "--request_s=nan must be above 0"),
        (["--token_file=nowhere"], "--token_file"),
        (["--mesh=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line_before_jax_is_loaded(directory, capsys, words, told):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = {"FREE": free.getsockname()[1]}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports["TAKEN"] = taken.getsockname()[1]
        for name, port in ports.items():
            words = [word.replace(name, str(port)) for word in words]
        assert serve.main([str(directory), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and told in line


def test_all_that_cannot_be_is_told_at_once(directory, capsys):
    words = ["--slots=0", "--queue=0", "--port=-1"]
    assert serve.main([str(directory), *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.slow(seconds=1)
def test_pools_that_train_take_no_device(directory):
    args = serve.parser().parse_args([str(directory), "--mesh=split_2"])
    settings, _, _ = serve.check(args)
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    assert plan.num_devices == 1 and plan.train is None
    told = plan.check(settings.model, 1)
    assert told and "0 pools train" in told[0]
    assert plan.check(settings.model, 1, trains=False) == []


def test_a_directory_without_a_model_is_told(tmp_path, capsys):
    assert serve.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def ask(address, method, path, body=None, token=""):
    """(status, what was said) of a plane."""
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, said


@pytest.mark.slow(seconds=15)
def test_a_server_with_prefill_and_decode_pools_from_start_to_sigterm(directory, tmp_path):
    """On a mesh of two kinds of servers, with a token for its clients."""
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    mesh = tmp_path / "pools.py"
    pools = [{"name": kind, "kind": kind} for kind in ("prefill", "decode")]
    mesh.write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config():\n"
        f"    pools = [ConfigDict(pool) for pool in {pools}]\n"
        "    return ConfigDict({'name': 'two', 'platform': 'cpu', 'pools': pools})\n"
    )
    words = [
        str(directory),
        f"--mesh={mesh}",
        "--port=0",
        "--admin_port=0",
        "--context=32",
        "--slots=2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_jax.tools.serve", *words, f"--token_file={tmp_path / 'token'}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "RL_JAX_CACHE": str(ROOT / ".cache" / "serve")},
    )  # fmt: skip
    said = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"on http://(\S+), admin on http://(\S+), weights", line):
                break
        else:
            pytest.fail("".join(said))
        public, admin = found.groups()
        assert ask(public, "GET", "/ready")[0] == 200 and ask(public, "GET", "/v1/models")[0] == 401
        body = {"prompt": list(range(9, 25)), "max_tokens": 5, "ignore_eos": True, "seed": 1}
        status, whole = ask(public, "POST", "/v1/completions", body, "secret")
        assert status == 200 and json.loads(whole)["usage"]["completion_tokens"] == 5
        status, events = ask(public, "POST", "/v1/completions", {**body, "stream": True}, "secret")
        texts = [json.loads(e)["choices"][0]["text"] for e in re.findall(r"data: (\{.*\})", events)]
        assert "".join(texts) == json.loads(whole)["choices"][0]["text"]
        servers = json.loads(ask(admin, "GET", "/admin/status")[1])["servers"]
        assert sorted(one["kind"] for one in servers.values()) == ["decode", "prefill"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
