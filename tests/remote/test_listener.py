"""Links over TCP: who knows the secret and is expected comes in, once; nobody else learns or holds up anything."""

import json
import os
import secrets
import socket
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.remote import link, listener
from rl_jax.remote.channel import Channel
from rl_jax.remote.link import CLAIM, MAGIC, NONCE_SIZE, PROOF_SIZE, LinkError, proof
from rl_jax.remote.listener import MAX_HALF_OPEN, Listener
from rl_jax.settings import ClusterSettings

PATIENCE_S = 10.0
SECRET = link.new_secret()
TOLD = {"factory": "a:b", "settings": {}}


@pytest.fixture
def here():
    made = Listener("127.0.0.1", 0, SECRET, ["decode.0", "decode.1"])
    yield made
    made.close()


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def come(here, server="decode.0", attempt="", secret=SECRET, patience_s=0.0):
    return link.connect(here.address, secret, server, attempt, patience_s)


def raw(here):
    """A connection, and the nonce that was said on it."""
    sock = socket.create_connection(here.address, PATIENCE_S)
    hello = b""
    while len(hello) < len(MAGIC) + NONCE_SIZE:
        hello += sock.recv(100)
    assert hello.startswith(MAGIC)
    return sock, hello[len(MAGIC) :]


def claim_bytes(theirs, claim, secret=SECRET, speaker="process", size=None):
    ours = secrets.token_bytes(NONCE_SIZE)
    size = len(claim) if size is None else size
    return CLAIM.pack(MAGIC, ours, size) + claim + proof(secret, speaker, theirs, ours, claim)


CLAIMED = json.dumps({"server": "decode.0", "attempt": ""}).encode()


def says_nothing(sock) -> bool:
    """Whether the other side hangs up without a word."""
    sock.settimeout(PATIENCE_S)
    try:
        return sock.recv(1000) == b""
    except ConnectionResetError:  # it did not read all of it
        return True


def test_expected_process_is_told_its_attempt_and_a_channel_runs_on_the_link(here):
    expected = here.expect("decode.0", "1.a", TOLD, by_name=False)
    theirs, told = come(here)
    ours = expected.link(PATIENCE_S)
    assert told == {**TOLD, "attempt": "1.a"} and here.stats()["linked"] == 1
    for sock in (ours, theirs):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    double = lambda request: request.answer(request.body, [2 * request.arrays[0]])
    there = Channel(theirs, "driver", "1.a", ClusterSettings(), handlers={"double": double})
    one = Channel(ours, "decode.0", "1.a", ClusterSettings())
    there.start(), one.start()
    try:
        array = np.arange(3_000_000, dtype=np.float32)
        answer = one.call("double", {"n": 1}, [array], deadline_s=PATIENCE_S)
        assert answer.body == {"n": 1} and np.array_equal(answer.arrays[0], 2 * array)
    finally:
        for channel in (one, there):
            channel.close()
            channel.join(PATIENCE_S)


def test_nobody_without_the_secret_comes_in_or_hears_more_than_a_nonce(here):
    expected = here.expect("decode.0", "1.a", TOLD, by_name=False)
    nonces = set()
    for speaker, secret in (("process", link.new_secret()), ("listener", SECRET)):
        sock, nonce = raw(here)
        nonces.add(nonce)
        with sock:
            sock.sendall(claim_bytes(nonce, CLAIMED, secret, speaker))
            assert says_nothing(sock)
    assert len(nonces) == 2 and here.stats()["unproved"] == 2
    with pytest.raises(LinkError, match="hangs up: it has another secret") as caught:
        come(here, secret=link.new_secret())
    assert SECRET.hex() not in str(caught.value)
    assert expected.link(0.0) is None
    assert come(here)[1]["attempt"] == "1.a"  # and the real one is still awaited


def test_handshake_that_was_overheard_proves_nothing_again(here):
    here.expect("decode.0", "1.a", TOLD, by_name=False)
    heard = bytearray()
    relay = socket.create_server(("127.0.0.1", 0))

    def listen_in():
        """Between a process and the listener."""
        inner, _ = relay.accept()
        outer = socket.create_connection(here.address)
        inner.sendall(outer.recv(1000))
        heard.extend(inner.recv(4096))
        outer.sendall(heard)
        inner.sendall(outer.recv(100_000))

    thread = threading.Thread(target=listen_in, daemon=True)
    thread.start()
    _, told = link.connect(relay.getsockname(), SECRET, "decode.0", "", 0.0)
    thread.join(PATIENCE_S)
    relay.close()
    assert told["attempt"] == "1.a"
    until(lambda: here.stats()["linked"] == 1)
    here.expect("decode.1", "1.b", TOLD, by_name=False)
    sock, _ = raw(here)
    with sock:
        sock.sendall(heard)
        assert says_nothing(sock)
    assert here.stats()["unproved"] == 1 and here.stats()["linked"] == 1


def test_listener_that_does_not_know_the_secret_is_refused_by_the_process():
    fake = socket.create_server(("127.0.0.1", 0))

    def pretend():
        """Answers as a listener would that lacks the secret."""
        sock, _ = fake.accept()
        nonce = secrets.token_bytes(NONCE_SIZE)
        sock.sendall(MAGIC + nonce)
        got = sock.recv(4096)
        _, theirs, size = CLAIM.unpack(got[: CLAIM.size])
        claim = got[CLAIM.size : CLAIM.size + size]
        sock.sendall(link.answer_bytes(link.new_secret(), (nonce, theirs, claim), TOLD))

    thread = threading.Thread(target=pretend, daemon=True)
    thread.start()
    with pytest.raises(LinkError, match="does not know the secret of this run"):
        link.connect(fake.getsockname(), SECRET, "decode.0", "", 0.0)
    thread.join(PATIENCE_S)
    fake.close()


def test_garbage_and_claims_beyond_the_limit_are_hung_up_on(here):
    for sent in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        CLAIM.pack(MAGIC, bytes(NONCE_SIZE), link.MAX_CLAIM + 1) + b"x" * 2000,
        CLAIM.pack(MAGIC, bytes(NONCE_SIZE), 0),
    ):
        sock, _ = raw(here)
        with sock:
            sock.sendall(sent)
            assert says_nothing(sock)
    assert here.stats()["garbage"] == 3
    sock, nonce = raw(here)
    with sock:  # one that knows the secret is told why
        sock.sendall(claim_bytes(nonce, b"[" * 900))
        assert b"cannot be read" in sock.recv(1000)
    assert here.stats()["garbage"] == 4
    sock, _ = raw(here)
    sock.close()
    until(lambda: here.stats()["gone"] == 1)


def test_slow_guests_hold_up_nobody_and_are_bounded(here, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE_S", 1.0)
    here.expect("decode.0", "1.a", TOLD, by_name=False)
    slow, nonce = raw(here)
    whole, sent = claim_bytes(nonce, CLAIMED), 0
    others = [raw(here)[0] for _ in range(MAX_HALF_OPEN - 2)]
    start = time.monotonic()
    come(here)[0].close()
    assert time.monotonic() - start < 0.5
    others.append(raw(here)[0])
    crowd = socket.create_connection(here.address, PATIENCE_S)
    assert says_nothing(crowd) and here.stats()["crowded"] == 1
    with pytest.raises(ConnectionError):
        while time.monotonic() - start < PATIENCE_S:  # a byte now and then gives no more time
            slow.sendall(whole[sent : sent + 1])
            sent += 1
            time.sleep(0.05)
    assert time.monotonic() - start < 3
    until(lambda: here.stats()["slow"] == MAX_HALF_OPEN)
    for sock in (slow, crowd, *others):
        sock.close()
    here.expect("decode.1", "1.b", TOLD, by_name=False)
    assert come(here, "decode.1")[1]["attempt"] == "1.b"


def refused(here, *args, text):
    with pytest.raises(LinkError, match=text):
        come(here, *args)


def test_attempts_that_are_unknown_linked_already_or_over_are_refused_and_counted(here):
    refused(here, "decode.7", text=r"no server 'decode.7' \(decode.0, decode.1\)")
    refused(here, text="decode.0 awaits no process now")
    expected = here.expect("decode.0", "1.a", TOLD, by_name=True)
    refused(here, text="started by the driver itself")
    refused(here, "decode.0", "1.z", text="awaits no attempt '1.z'")
    assert come(here, "decode.0", "1.a")[1]["attempt"] == "1.a"
    refused(here, "decode.0", "1.a", text="has a process already")
    refused(here, text="has a process already")
    expected.withdraw()
    refused(here, "decode.0", "1.a", text="attempt 1.a of decode.0 is over")
    here.expect("decode.0", "2.b", TOLD, by_name=True)
    refused(here, "decode.0", "1.a", text="attempt 1.a of decode.0 is over")
    counted = {"linked": 1, "unknown": 3, "duplicate": 2, "late": 3}
    assert {name: num for name, num in here.stats().items() if num} == counted
    assert here.missing() == ["decode.1"]


def test_process_waits_for_its_turn_and_not_where_that_is_of_no_use(here):
    first = here.expect("decode.0", "1.a", TOLD, by_name=False)
    come(here)
    result = SimpleNamespace(told=None)
    thread = threading.Thread(
        target=lambda: setattr(result, "told", come(here, patience_s=PATIENCE_S)[1])
    )
    thread.start()
    until(lambda: here.stats()["duplicate"] > 0)
    first.withdraw()
    here.expect("decode.0", "2.b", TOLD, by_name=False)
    thread.join(PATIENCE_S)
    assert result.told["attempt"] == "2.b"
    start = time.monotonic()
    with pytest.raises(LinkError, match="no server"):
        come(here, "other", patience_s=PATIENCE_S)
    assert time.monotonic() - start < 2


def test_withdrawn_attempt_leaves_no_socket_behind(here):
    expected = here.expect("decode.0", "1.a", TOLD, by_name=False)
    sock, _ = come(here)
    until(lambda: here.stats()["linked"] == 1)
    expected.withdraw()
    assert says_nothing(sock) and expected.link(0.0) is None


def test_address_in_use_and_addresses_are_told(here):
    with pytest.raises(OSError, match=rf"cluster.host:port = 127.0.0.1:{here.address[1]}"):
        Listener("127.0.0.1", here.address[1], SECRET, [])
    assert link.address_of("[::1]:80") == ("::1", 80) and link.address_text("::1", 80) == "[::1]:80"
    for text in ("host", ":80", "host:", "host:0", "host:70000", "host:x"):
        with pytest.raises(ValueError, match="is no HOST:PORT"):
            link.address_of(text)


def test_secret_is_long_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "secret"
    link.write_secret(path, SECRET)
    assert path.stat().st_mode & 0o777 == 0o600 and link.read_secret(path) == SECRET
    os.chmod(path, 0o640)
    with pytest.raises(ValueError, match=r"may be read by others \(mode 640\): chmod 600"):
        link.read_secret(path)
    with pytest.raises(ValueError, match="holds 31 bytes; a secret has at least 32"):
        link.secret_of("ab" * 31, "X")
    with pytest.raises(ValueError, match="X is no secret") as caught:
        link.secret_of("hunter2", "X")
    assert "hunter2" not in str(caught.value) and PROOF_SIZE == 32


def test_listener_may_be_closed_at_any_moment_and_twice():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that its thread is met at every line
    try:
        for _ in range(300):
            made = Listener("127.0.0.1", 0, SECRET, ["decode.0"])
            made.close()
            made.close()
    finally:
        sys.setswitchinterval(interval)
    with pytest.raises(ConnectionError):
        socket.create_connection(made.address, PATIENCE_S)
