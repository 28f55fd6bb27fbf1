"""Servers that somebody else starts: the commands, the secret, who did not come, what is waited for and what is not."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl_jax.child import SECRET_VARIABLE
from rl_jax.remote.link import new_secret
from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.remote.starter import SECRET_FILE, ExternalStarter
from rl_jax.settings import ClusterSettings
from rl_jax.testing.fake_servers import fake_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(kit, tmp_path):
    """made(names) -> (starter, servers, operator or None); all is closed at the end."""
    closing, operators = [], []

    def make(names, operated=True, **fields):
        cluster = ClusterSettings(heartbeat_s=0.2, lease_s=kit.LEASE_S, **fields)
        specs = [fake_spec(name, "decode", kit.ENGINE, kit.SERVE) for name in names]
        starter = ExternalStarter(cluster, tmp_path, specs)
        servers = [RemoteDecodeServer(spec, cluster, tmp_path, 20.0, starter) for spec in specs]
        operator = kit.Operator(starter.commands, names) if operated else None
        operators.extend([operator] if operator else [])
        closing.extend([*servers, *operators, starter])
        for server in servers:
            server.start()
        return starter, servers, operator

    yield make
    for operator in operators:
        operator.retire()
    for part in closing:
        part.close()


def test_commands_name_server_address_and_secret_file_and_never_the_secret(kit, tmp_path):
    specs = [fake_spec(name, "decode", kit.ENGINE, kit.SERVE) for name in ("decode.0", "decode.1")]
    starter = ExternalStarter(ClusterSettings(), tmp_path, specs)
    path = tmp_path / SECRET_FILE
    secret = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600 and len(bytes.fromhex(secret)) == 32
    for spec, command in zip(specs, starter.commands, strict=True):
        assert secret not in command and "\n" not in command
        words = shlex.split(command)
        assert words[words.index("python") :][:3] == [
            "python",
            "-m",
            "rl_jax.remote.server_process",
        ]
        assert f"--server={spec.name}" in words and f"--secret_file={path}" in words
        assert any(word.startswith("--connect=127.0.0.1:") for word in words)
        assert any("xla_force_host_platform_device_count=1" in word for word in words)
    starter.close()
    assert not path.exists()


def test_secret_of_the_environment_is_taken_out_of_it_and_lies_nowhere(kit, tmp_path, monkeypatch):
    specs = [fake_spec("decode.0", "decode", kit.ENGINE, kit.SERVE)]
    monkeypatch.setenv(SECRET_VARIABLE, new_secret().hex())
    starter = ExternalStarter(ClusterSettings(), tmp_path, specs)
    starter.close()
    assert SECRET_VARIABLE not in os.environ and list(tmp_path.iterdir()) == []
    assert "secret" not in starter.commands[0]
    monkeypatch.setenv(SECRET_VARIABLE, "ab" * 16)
    with pytest.raises(ValueError, match=f"{SECRET_VARIABLE} holds 16 bytes"):
        ExternalStarter(ClusterSettings(), tmp_path, specs)


def test_servers_that_did_not_come_are_named(made):
    start = time.monotonic()
    _, servers, _ = made(["decode.0", "decode.1"], operated=False, start_timeout_s=0.5)
    for server in servers:
        with pytest.raises(RuntimeError) as caught:
            server.wait_ready(10.0)
        text = str(caught.value)
        assert f"{server.name}: no process of it came to 127.0.0.1:" in text
        assert "within 0.5 s (cluster.start_timeout_s)" in text
        assert "none came at all: decode.0, decode.1" in text
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("words", "secret", "text"),
    [
        (["--connect=127.0.0.1:9"], None, "no --secret_file, and no RL_JAX_CLUSTER_SECRET"),
        (["--connect=127.0.0.1:9"], "5a" * 32, "no link to 127.0.0.1:9: .*refused"),
    ],
)
@pytest.mark.slow
def test_process_that_cannot_be_linked_says_why_in_one_line(words, secret, text):
    environment = {**os.environ} | ({SECRET_VARIABLE: secret} if secret else {})
    program = [sys.executable, "-m", "rl_jax.remote.server_process", "--server=decode.0"]
    done = subprocess.run(
        [*program, "--patience_s=0", *words], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "server_process:" in line]
    assert re.search(text, line), line


@pytest.mark.slow
def test_process_is_accepted_again_as_long_as_the_budget_lasts_and_nothing_waits_for_it(made, kit):
    starter, (server,), operator = made(["decode.0"], restarts=1)
    for life in (1, 2):
        server.wait_ready(kit.PATIENCE_S)
        server.stage(f"v{life}", life, 0, {"offset": kit.World.offset(life)})
        assert server.commit(f"v{life}", "recompute", 20.0).version == life
        if life == 1:
            operator.pause()
        os.kill(operator.pid("decode.0"), signal.SIGKILL)
        kit.until(lambda: server.fenced is not None)
        if life == 1:
            kit.until(lambda: server._lives.num == 2)
            start = time.monotonic()
            with pytest.raises(ConnectionError, match="nobody has started another one"):
                server.stage("v1.1", 1, 0, {"offset": kit.World.offset(1)})
            assert time.monotonic() - start < 5
            operator.resume()
    kit.until(lambda: server._lives.final is not None)
    assert "it was started 2 times (cluster.restarts=1)" in server.fenced
    assert starter.stats()["linked"] == 2
    operator.retire()  # its process came once more, or comes now; nothing waits for it, and it is told so
    assert operator.processes["decode.0"].wait(kit.PATIENCE_S / 2) != 0


DRIVER = """
import sys, time
from pathlib import Path
from rl_jax.remote.server import RemoteDecodeServer
from rl_jax.remote.starter import ExternalStarter
from rl_jax.settings import ClusterSettings, EngineSettings, ServeSettings
from rl_jax.testing.fake_servers import fake_spec

spec, folder = fake_spec("decode.0", "decode", EngineSettings(), ServeSettings()), Path(sys.argv[1])
starter = ExternalStarter(ClusterSettings(), folder, [spec])
server = RemoteDecodeServer(spec, ClusterSettings(), folder, 20.0, starter)
server.start()
print(starter.commands[0], flush=True)
server.wait_ready(120)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_process_ends_with_its_driver(kit, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    operator = None
    try:
        operator = kit.Operator([driver.stdout.readline().strip()], ["decode.0"])
        assert driver.stdout.readline() == "ready\n"
        operator.pause()
        process = psutil.Process(operator.pid("decode.0"))
        assert SECRET_VARIABLE not in process.environ()
        secret = (tmp_path / SECRET_FILE).read_text().strip()
        assert not any(secret in word for word in process.cmdline())
    finally:
        driver.kill()
        driver.wait(10)
        if operator is not None:
            operator.close()
    assert not process.is_running()
