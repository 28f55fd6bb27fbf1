"""A real model behind HTTP: other weights for a running server, of its own disk's directories or a peer's over its
operator's plane; and what it scores."""

import http.server
import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rl_jax.http.limits import HttpLimits
from rl_jax.http.peer import Peer, PeerError, fetch
from rl_jax.mesh.plan import MeshPlan
from rl_jax.models import hf
from rl_jax.names import resolve
from rl_jax.serving import Service
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.testing.http_world import LIMITS, World
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.tokens.load import load_tokenizer
from rl_jax.tools import serve
from tests.tokens import families

pytestmark = pytest.mark.slow(seconds=10)
ASK = {"prompt": [9, 10, 11, 12], "max_tokens": 6, "temperature": 0, "ignore_eos": True,
       "return_token_ids": True, "logprobs": 0}  # fmt: skip
FILES = {"model.safetensors", "config.json", "SHA256SUMS"}


def write(directory, seed):
    """A tiny random model with a family's tokenizer and template."""
    families.write(directory, "qwen3")
    size = load_tokenizer(str(directory), resolve).vocab_size
    size += -size % 8
    sizes = {"num_layers": 1, "embed_size": 32, "head_dim": 8, "mlp_size": 48}
    model, params = tiny_model(seed, size, qk_norm=True, max_context=64, **sizes)
    hf.save(directory, params, model.settings, vocab_size=size, copy_from=None)
    return directory


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write(root / name, seed) for seed, name in enumerate("abc")]


@pytest.fixture(scope="module")
def served(directories):
    """(planes of a service, its digest at start)"""
    words = [str(directories[0]), "--context=32", "--slots=2"]
    settings, limits, _ = serve.check(serve.parser().parse_args(words))
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    service = Service(settings, plan, "tiny", replace(limits, logprobs=3))
    digest = service.start()
    world = World(
        service.api.sampler, service.cluster.targets, api=service.api, update=service.update,
        weights=(str(directories[0]), digest),
    )  # fmt: skip
    yield world
    world.stop()
    service.close()


def said(world):
    """(version, token ids, log-probs) of an answer."""
    body = world.post("/v1/completions", ASK).body
    (choice,) = body["choices"]
    version = body["metadata"]["weight_version"]
    return version, choice["token_ids"], choice["logprobs"]["token_logprobs"]


def update(world, **body):
    return world.post("/admin/update_weights", body, admin=True)


def told(world):
    return world.get("/admin/digest", admin=True).body


@contextmanager
def plane(**named):
    """Another server's planes."""
    world = World(FakeSampler(), **named)
    try:
        yield world, f"http://127.0.0.1:{world.admin_port}"
    finally:
        world.stop()


def test_a_directory_and_a_peer_bring_other_weights(served, directories):
    a, b, _ = directories
    before = said(served)
    digest_a = told(served)["digest"]
    start = before[0]
    # Weights under another digest than the one asked for change nothing.
    answer = update(served, directory=str(b), digest="0" * 64)
    assert answer.status == 400 and "not 000" in answer.body["error"]["message"]
    assert said(served) == before and told(served) == {"digest": digest_a, "version": start}
    answer = update(served, directory=str(b)).body
    assert answer["version"] == start + 1 and answer["digest"] != digest_a
    after = said(served)
    assert after[0] == start + 1 and after[2] != before[2]
    # Back, by the digest of the first, and what is said is what was said.
    assert update(served, directory=str(a), digest=digest_a).body["digest"] == digest_a
    assert said(served) == (start + 2, *before[1:])
    with plane(weights=(str(b), answer["digest"]), admin_token="secret") as (peer, url):
        wrong = update(served, peer=url, peer_token="guess")
        assert wrong.status == 400 and "answers 401" in wrong.body["error"]["message"]
        assert said(served) == (start + 2, *before[1:])
        got = update(served, peer=url, peer_token="secret").body
        assert (got["version"], got["digest"]) == (start + 3, answer["digest"])
        assert got["peer_version"] == peer.sampler.version()
    assert said(served) == (start + 3, *after[1:])
    # It has no files of them itself, and says where they are.
    assert served.get("/admin/weights", admin=True).status == 409
    assert update(served, directory=str(a)).status == 200
    assert {f["name"] for f in served.get("/admin/weights", admin=True).body["files"]} == FILES


def test_a_peer_whose_files_are_not_what_it_serves_brings_nothing(served, directories):
    """As where it was updated while its files were fetched, or keeps another dtype."""
    before = said(served), told(served)
    with plane(weights=(str(directories[2]), "1" * 64)) as (_, url):
        answer = update(served, peer=url)
        assert answer.status == 400 and "has the digest" in answer.body["error"]["message"]
        other = update(served, peer=url, digest="2" * 64)
        assert other.status == 400 and "it serves the digest 1" in other.body["error"]["message"]
    assert (said(served), told(served)) == before


def test_files_are_served_by_their_names_alone(directories):
    with plane(weights=(str(directories[0]), "1" * 64)) as (world, url):
        for name in ("tokenizer.json", "..%2Fa%2Fconfig.json", "../b/config.json", "", "x" * 300):
            assert world.get(f"/admin/weights/{name}", admin=True).status == 404, name
        assert json.loads(world.get("/admin/weights/config.json", admin=True).body)
        assert world.get("/admin/weights").status == 404  # not of the public plane
    with plane() as (world, _):
        assert world.get("/admin/weights", admin=True).status == 409


def test_fetched_files_are_the_same_and_bounded(directories, tmp_path):
    source = directories[1]
    with plane(weights=(str(source), "1" * 64)) as (_, url):
        fetch(Peer(url, ""), tmp_path, LIMITS)
        assert {path.name for path in tmp_path.iterdir()} == FILES
        for path in tmp_path.iterdir():
            assert path.read_bytes() == (source / path.name).read_bytes()
        for limits in (replace(LIMITS, peer_files=2), replace(LIMITS, peer_bytes=1000)):
            (tmp_path / str(limits.peer_files)).mkdir()
            with pytest.raises(PeerError, match="may come"):
                fetch(Peer(url, ""), tmp_path / str(limits.peer_files), limits)


@contextmanager
def liar(manifest, body=b"{}", told=None):
    """A peer that says what it likes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            said = json.dumps(manifest).encode() if self.path == "/admin/weights" else body
            self.send_response(200)
            is_file = told is not None and self.path != "/admin/weights"
            self.send_header("content-length", str(told if is_file else len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def listing(*names, size=2):
    files = [{"name": name, "bytes": size} for name in names]
    return {"version": 1, "digest": "1" * 64, "files": files}


@pytest.mark.parametrize(
    "manifest, body, length, message",
    [
        (listing("../config.json"), b"{}", None, "no list of files"),
        (listing("a/b"), b"{}", None, "no list of files"),
        (listing(".bashrc"), b"{}", None, "no list of files"),
        (listing("a", "a"), b"{}", None, "names a file twice"),
        (listing("a", size=-1), b"{}", None, "no list of files"),
        (listing("a", size=1 << 60), b"{}", None, "may come"),
        ({"files": []}, b"{}", None, "no list of files"),
        ([1], b"{}", None, "no list of files"),
        (listing("a"), b"{}}", None, "a is cut or too long"),
        (listing("a"), b"{", None, "a is cut or too long"),
        (listing("a"), b"{", 2, "does not answer"),  # and then silence
        (listing(*map(str, range(60_000))), b"{}", None, "says more than"),
    ],
)
def test_a_peer_that_lies_brings_nothing(tmp_path, manifest, body, length, message):
    limits = HttpLimits(peer_idle_s=20.0 if length is None else 0.2)
    with liar(manifest, body, length) as url, pytest.raises(PeerError, match=message):
        (into := tmp_path / "into").mkdir()
        fetch(Peer(url, ""), into, limits)
    assert list(tmp_path.iterdir()) == [into]


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "127.0.0.1:1", "http://a:b@c", "http://x/y", "http://x:99999"]
)
def test_what_is_no_address_is_told(tmp_path, url):
    with pytest.raises(PeerError, match="no address"):
        fetch(Peer(url, ""), tmp_path, LIMITS)


def test_a_peer_that_is_not_there_is_told(served):
    answer = update(served, peer="http://127.0.0.1:9")
    assert answer.status == 400 and answer.body["error"]["param"] == "peer"
    assert update(served).status == update(served, directory="a", peer="b").status == 400
    assert update(served, directory="a", peer_token="b").status == 400
    assert update(served, directory="nowhere").status == 400


def test_what_was_sampled_is_scored_as_it_was_sampled(served):
    """Each token's log-prob and alternatives from prefill are those from decoding."""
    body = served.post("/v1/completions", {**ASK, "temperature": 1, "seed": 3, "logprobs": 3}).body
    (sampled,) = body["choices"]
    whole = [*ASK["prompt"], *sampled["token_ids"]]
    ask = {
        **ASK,
        "prompt": whole,
        "echo": True,
        "max_tokens": 0,
        "logprobs": 3,
        "prompt_logprobs": 3,
    }
    (scored,) = served.post("/v1/completions", ask).body["choices"]
    values, told = scored["logprobs"]["token_logprobs"], sampled["logprobs"]
    assert values[-6:] == pytest.approx(told["token_logprobs"], abs=1e-5)
    assert [one[str(t)]["logprob"] for one, t in zip(scored["prompt_logprobs"][1:], whole[1:])] == (
        values[1:]
    )
    for one, other in zip(scored["logprobs"]["top_logprobs"][-6:], told["top_logprobs"]):
        assert one == pytest.approx(other, abs=1e-5)
    assert len(values) == len(whole) and max(values[1:]) < 0
