"""Offers and pulls by jax.experimental.transfer: what was offered comes, or an error with a name by the deadline."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.mesh import make_mesh
from rl_jax.remote import transfer
from rl_jax.remote.carriers import Carriers
from rl_jax.remote.channel import Answer
from rl_jax.remote.framing import DTYPES
from rl_jax.remote.store import Load
from rl_jax.remote.transfer import Offers, PullRefused, Pulls

HOST = "127.0.0.1"
NUM_OFFERS = 3  # as transfer_sender.py has
LIMIT_S = 30.0


@pytest.fixture
def offers():
    made = Offers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pulls():
    return Pulls(HOST)


def load(arrays, bucket=0, sync_id="v3.1"):
    return Load(sync_id, 3, bucket, arrays, time.monotonic() + LIMIT_S)


def offered(offers, arrays, server="decode.0", **more):
    """What a puller must be told, as it comes over a channel."""
    return json.loads(json.dumps(offers.offer(server, HOST, load(arrays, **more))))


def test_arrays_of_every_dtype_and_layout_come_bit_by_bit(offers, pulls):
    rng = np.random.default_rng(0)
    wide = () if jax.config.jax_enable_x64 else ("int64", "uint64", "float64")
    arrays = {
        name: rng.integers(0, 2 if name == "bool" else 256, 24 * dtype.itemsize, np.uint8).view(dtype).reshape(2, 3, 4)
        for name, dtype in DTYPES.items() if name not in wide
    }  # fmt: skip
    arrays |= {"scalar": np.array(-7, np.int32), "one": np.array([np.nan], np.float32)}
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    sent = dict(arrays)
    for spec in ((None, "fsdp"), ("fsdp", None), ()):
        name = f"cut {spec}"
        arrays[name] = rng.normal(size=(8, 12)).astype(np.float32)
        sent[name] = jax.device_put(arrays[name].copy(), NamedSharding(mesh, PartitionSpec(*spec)))
    told = offered(offers, sent)
    assert [name for name, _ in told["parts"]].count("cut (None, 'fsdp')") == 2
    got = pulls.pull(told, LIMIT_S)
    assert list(got) == list(arrays)
    for name, want in arrays.items():
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape)
        assert np.asarray(got[name]).tobytes() == want.tobytes(), name


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"arrays": [["up", "float32", [4, 5]]]}, "the parts of up that are offered, .* do not make up its shape"),
        ({"parts": [["up", [[0, 3], [0, 4]]]]}, "do not make up its shape"),
        ({"parts": [["up", [[0, 3], [0, 4]]], ["up", [[2, 3], [0, 4]]]]}, "do not make up its shape"),
        ({"parts": [["up", [[0, 16]]]]}, "do not make up its shape"),
        ({"parts": [["up", [[0, 8], [0, 2]]]]}, "do not make up its shape"),
        ({"parts": [["down", [[0, 4], [0, 4]]]]}, "a part of down is offered, which is no array"),
        ({"arrays": [["up", "object", [4, 4]]]}, "a part of up is offered, which is no array"),
        ({"jaxlib": "0.1.0"}, "the sender's jaxlib is 0.1.0, and this process's is"),
        ({"platform": "gpu"}, "the sender's platform is gpu, and this process's is cpu"),
        ({"number": 1 << 62}, "the offer's number is none of 62 bits"),
    ],
)  # fmt: skip
def test_offer_that_does_not_fit_together_is_refused_before_anything_is_asked_for(
    offers, pulls, changed, line
):
    want = np.arange(16, dtype=np.float32).reshape(4, 4)
    told = offered(offers, {"up": want})
    with pytest.raises(PullRefused, match=line):
        pulls.pull(told | changed, LIMIT_S)
    assert np.asarray(pulls.pull(told, LIMIT_S)["up"]).tolist() == want.tolist()


# In a process of its own: one that ran other tests has free memory to give before it asks for more.
MEMORY = """
import gc, re, sys, time
from pathlib import Path
import numpy as np
from rl_jax.remote.store import Load
from rl_jax.remote.transfer import Offers, Pulls

HOST, LIMIT_S, SIZE = "127.0.0.1", 30.0, 32 << 20


def resident():
    gc.collect()
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", text)[1]) << 10


def offered(array, bucket=0, server="decode.0"):
    load = Load("v3.1", 3, bucket, {"up": array}, time.monotonic() + LIMIT_S)
    return offers.offer(server, HOST, load)


offers, pulls = Offers(), Pulls(HOST)
pulls.pull(offered(np.ones(9, np.float32), server="decode.1"), LIMIT_S)  # must not keep the sync's server
before = resident()
for bucket in range(3):
    offered(np.full(SIZE // 4, bucket, np.float32), bucket)
assert resident() - before > 2.5 * SIZE
offers.over("decode.1", "v3.1")
assert offers.num_servers == 1 and resident() - before > 2.5 * SIZE
offers.over("decode.0")
assert offers.num_servers == 0
end = time.monotonic() + LIMIT_S
while resident() - before > 0.5 * SIZE and time.monotonic() < end:
    time.sleep(0.02)
assert resident() - before < 0.5 * SIZE
"""


@pytest.mark.slow
def test_memory_of_offers_that_nobody_pulled_returns_with_their_sync():
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


class Process:
    """A channel to a process that pulls, here; `damage`: what becomes of a bucket's offer on its way."""

    def __init__(self, damage=lambda told: told):
        self.host, self.damage, self.pulls, self.staged = HOST, damage, Pulls(HOST), []

    def call(self, verb, body, arrays=(), **more):
        if verb == "try_pull":
            self.pulls.pull(body["offer"], LIMIT_S)
            return Answer({"why": ""}, ())
        if "offer" in body:
            self.pulls.pull(self.damage(body["offer"]), 0.2)
            self.staged.append("offer")
        else:
            self.staged.append("channel")
        return Answer(None, ())


def test_jax_without_the_module_is_told_in_one_line_and_the_channel_carries(caplog, monkeypatch):
    monkeypatch.setattr(transfer, "unsupported", lambda: "jax 0.1 has none")
    process, carriers = Process(), Carriers("transfer")
    for sync_id in ("v3.1", "v3.2"):
        carriers.carry("decode.0", process, load({"up": np.ones(9, np.float32)}, sync_id=sync_id))
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert line == (
        "decode.0 gets its weights over its channel (weights.transport=transfer): no transfer between devices: jax 0.1"
        " has none"
    )
    assert process.staged == ["channel"] * 2
    with pytest.raises(PullRefused, match=r"jax 0\.1 has none"):
        transfer._serve(HOST)


def test_platform_that_starts_no_transfer_server_is_refused_by_name(offers):
    with pytest.raises(
        PullRefused, match=r"no transfer server of platform cpu starts on 192\.0\.2"
    ):
        offers.offer("decode.0", "192.0.2.1", load({"up": np.ones(9, np.float32)}))
    assert offers.num_servers == 0


@pytest.fixture(scope="module")
def sender():
    """Another process, and what it told of its offers. A pull of it that hangs ends with it; one of this process would
    be in the way of the interpreter's end."""
    root, program = Path(__file__).parents[2], Path(__file__).with_name("transfer_sender.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, str(program)], env=env, **pipes) as process:
        told = [json.loads(process.stdout.readline()) for _ in range(NUM_OFFERS)]
        yield SimpleNamespace(pid=process.pid, told=told)
        process.kill()
    end = time.monotonic() + LIMIT_S
    while hanging() and time.monotonic() < end:
        time.sleep(0.02)
    assert not hanging()


def hanging():
    return [thread for thread in threading.enumerate() if thread.name == "pull"]


@pytest.mark.slow
def test_number_that_was_never_offered_or_was_pulled_ends_at_the_limit_by_name(sender, pulls):
    told = sender.told[0]
    numbers = {one["number"] for one in sender.told}
    assert len(numbers) == NUM_OFFERS and min(numbers) > 1 << 40
    want = list(range(1000))
    assert np.asarray(pulls.pull(told, LIMIT_S)["up"]).tolist() == want
    for number in (told["number"], told["number"] ^ 1):
        start = time.monotonic()
        line = (
            rf"pull of bucket 0 of sync v3.1 \(version 3\) from {HOST}:\d+ did not end within 0.3 s"
        )
        with pytest.raises(TimeoutError, match=line):
            pulls.pull(told | {"number": number}, 0.3)
        assert 0.3 <= time.monotonic() - start < LIMIT_S / 3
    assert len(hanging()) == 2  # given up, and in nobody's way
    assert np.asarray(pulls.pull(sender.told[1], LIMIT_S)["up"]).tolist() == want


@pytest.mark.slow
def test_process_that_failed_in_a_pull_fails_its_stage_and_never_pulls_again(sender, caplog):
    arrays, carriers = {"up": np.ones(9, np.float32)}, Carriers("transfer")
    good = Process()
    bad = Process(lambda told: sender.told[2] | {"number": told["number"]})
    assert carriers.carry("decode.1", good, load(arrays)) == 36
    with pytest.raises(TimeoutError, match="bucket 2 of sync v3.1"):
        carriers.carry("decode.0", bad, load(arrays))
    carriers.over("decode.0")
    for name, process in (("decode.0", bad), ("decode.1", good)):
        assert carriers.carry(name, process, load(arrays, sync_id="v3.2")) == 36
    assert (bad.staged, good.staged) == (["channel"], ["offer", "offer"])
    line = "decode.0 gets its weights over its channel (weights.transport=transfer): no transfer between devices: "
    assert line in caplog.text and "failed: the pull of bucket 2" in caplog.text
    carriers.close()
    assert carriers.offers.num_servers == 0


def all_stopped(pid):
    states = [
        path.read_text().rpartition(")")[2].split()[0]
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}


@pytest.mark.slow
def test_sender_that_dies_in_a_pull_is_told_by_name(sender, pulls):
    """The last one: the sender is gone."""
    os.kill(sender.pid, signal.SIGSTOP)
    end = time.monotonic() + LIMIT_S  # each thread of it stops when it is its turn
    while not all_stopped(sender.pid) and time.monotonic() < end:
        time.sleep(0.01)
    killing = threading.Timer(0.5, lambda: os.kill(sender.pid, signal.SIGKILL))
    killing.start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"bucket 2 of sync v3.1 .* broke off: INTERNAL"):
        pulls.pull(sender.told[2], LIMIT_S)
    assert 0.3 < time.monotonic() - start < LIMIT_S
    killing.join()
