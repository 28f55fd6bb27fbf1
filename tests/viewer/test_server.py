"""The viewer over HTTP on loopback, in a terminal and as one file: who is answered, and what hostile text becomes."""

import html.parser
import http.client
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_jax.names import resolve
from rl_jax.testing.generated_run import HOSTILE
from rl_jax.tools import view
from rl_jax.viewer import server as server_module
from rl_jax.viewer import text
from rl_jax.viewer.api import Api, to_json
from rl_jax.viewer.server import Server

ROOT = Path(__file__).resolve().parents[2]
ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]"
)


@pytest.fixture(scope="module")
def server(run):
    with Server(Api(run, resolve)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def get(server, target, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    try:
        connection.putrequest(
            method, target, skip_host="Host" in headers, skip_accept_encoding=True
        )
        for name, value in headers.items():
            if value is None:
                continue
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_the_page_may_load_its_own_files_and_nothing_else(server):
    for target in server_module.PAGE_FILES:
        status, headers, body = get(server, target)
        policy = dict(
            part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
        )
        assert status == 200 and body
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert (
            "unsafe" not in headers["Content-Security-Policy"]
            and policy["frame-ancestors"] == "'none'"
        )
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_no_file_of_the_page_makes_elements_of_text():
    """What would parse text of a run as HTML or code stands nowhere in the page."""
    for path in (ROOT / "rl_jax" / "viewer" / "page").iterdir():
        source = path.read_text(encoding="utf-8")
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|srcdoc",
            source,
        )
        assert found == [], path.name
        assert not re.search(r"<\w+[^>]*\son\w+=", source) and "style=" not in source


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8787"}, 200),
        ({"Host": "[::1]:8787"}, 200),
        ({"Host": None}, 403),  # none at all
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": "127.0.0.1:1", "Origin": "http://evil.example"}, 403),
        ({"Host": "127.0.0.1:1", "Origin": "null"}, 403),
        ({"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:1"}, 200),
    ],
)
def test_only_pages_of_its_own_are_answered(server, headers, status):
    for target in ("/", "/api/run"):
        assert get(server, target, **headers)[0] == status


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/api/nothing", 404), ("/../config.json", 404), ("/page/core.js", 404), ("/config.json", 404),
        ("/api/episode?step=5&split=..%2Ftrain&i=1", 404), ("/api/episode?step=x", 400),
        ("/api/columns?split=train&last=-1", 400), ("/api/run?" + "x" * 20_000, 414),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_in_one_line(server, target, status):
    found, headers, body = get(server, target)
    assert found == status and headers["Content-Type"].startswith("application/json")
    assert "\n" not in json.loads(body)["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_nothing_but_get_is_served(server, method):
    assert get(server, "/api/run", method)[0] == 405


def test_an_error_nobody_thought_of_does_not_end_the_viewer(server, monkeypatch):
    def broken(asked):
        raise ZeroDivisionError("by <b>zero</b>")

    monkeypatch.setitem(server.api.routes, "run", broken)
    status, _, body = get(server, "/api/run")
    assert status == 500 and json.loads(body)["error"] == "ZeroDivisionError: by <b>zero</b>"
    assert get(server, "/api/metrics")[0] == 200


def test_it_listens_on_loopback_alone(server):
    assert server.server_address[0] == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")


def test_answers_are_ascii_and_have_no_nan(hostile):
    api = Api(hostile, resolve)
    for name, asked in (
        ("run", {}),
        ("episode", {"step": "3", "i": "0"}),
        ("failures", {}),
        ("events", {}),
    ):
        json.loads(to_json(api.answer(name, asked)).decode("ascii"))
    assert (
        to_json({"a": [float("nan"), float("inf"), 1.5, "\ud83d"]})
        == b'{"a":[null,null,1.5,"\\ud83d"]}'
    )


# --- text ----------------------------------------------------------------------------------------------------------


def printed(run, *words, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "rl_jax.tools.view", str(run), "--text", *words],
        capture_output=True, cwd=ROOT, timeout=60, check=False, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def lines(api, **asked):
    return list(text.report(api, text.Asked(**asked)))


def test_text_tells_the_run_and_its_last_steps(api):
    said = lines(api, most=3, width=100)
    assert said[0].startswith("run calm: done, step 12 of 12, last sign of life ")
    assert any(re.match(r"reward/mean +0\.\d+  [\u2581-\u2588]+$", line) for line in said)
    assert [line.split()[0] for line in said if re.match(r" +\d+ ", line)] == ["10", "11", "12"]
    assert said[-1].startswith("episodes of 12 steps (1 to 12): --step=N lists them")
    assert max(map(len, said[4:-1])) <= 120


def test_text_lists_and_filters_the_episodes_of_a_step(api):
    said = lines(api, step=5, low=0.5, most=2)
    index = api.samples.index(5, "train")
    num = int((index.reward >= 0.5).sum())
    assert said[0].startswith(f"step 5 train: {num} of 16 episodes, mean reward ")
    assert said[-1] == f"and {num - 2} more: --most={num}" and len(said) == 1 + 10 + 1 + 2 + 1


def test_text_shows_one_episode_turn_by_turn(api):
    said = lines(api, step=5, episode=6)
    shown = api.answer("episode", {"step": "5", "i": "6"})
    assert sum(line.startswith("--- turn ") for line in said) == len(shown["turns"])
    assert "> " + shown["turns"][0]["said"]["text"].split("\n")[0] in said


def test_nothing_a_run_says_acts_on_the_terminal(hostile):
    api = Api(hostile, resolve)
    everything = [
        *lines(api), *lines(api, failures=True), *lines(api, step=3),
        *(line for i in range(12) for line in lines(api, step=3, episode=i)),
    ]  # fmt: skip
    told = "\n".join(everything)
    assert ACTS.search(told) is None
    for name in (r"\x1b[31mred", r"\x07", r"\u202e", r"\ud83d", r"\x9b2J"):
        assert name in told, name


def test_as_a_program_in_a_terminal_that_is_no_utf8(hostile):
    out, _ = printed(hostile, "--step=3", "--episode=1")
    assert "step 3 train episode 1" in out
    out, err = printed(hostile, "--step=99", code=3)
    assert (
        out == ""
        and err == "error: step 99 has no complete traces of train; there are steps 1 to 6\n"
    )


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["none"], 2, "none is no directory; give a run directory, such as runs/NAME"),
        (
            ["RUN", "--text", "--reward=high"],
            2,
            "--reward='high' is no LOW..HIGH, such as 0..0.5 or 0.9..",
        ),
        (["RUN", "--text", "--episode=3"], 2, "--episode=3 needs --step"),
        (["RUN", "--export", "x.html", "--export_mb=0.1"], 2, "--export_mb=0.1 is below 1"),
        (["RUN", "--export", "no/x.html"], 2, "--export=no/x.html: there is no directory no"),
        (
            ["RUN", "--text", "--step=3", "--episode=99"],
            3,
            "step 3 train has episodes 0 to 15, not 99",
        ),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    run, tmp_path, capsys, monkeypatch, words, code, why
):
    monkeypatch.chdir(tmp_path)
    assert view.main([str(run) if word == "RUN" else word for word in words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {why}")


def test_a_port_that_is_taken_is_one_line(run, server, capsys):
    port = server.server_address[1]
    assert view.main([str(run), f"--port={port}"]) == 1
    assert capsys.readouterr().err == f"error: port {port} is taken; try --port=0\n"


def test_code_that_a_config_names_is_not_loaded_unasked(copy, capsys):
    config = json.loads((copy / "config.json").read_text())
    config["model"]["tokenizer"] = "rl_jax.tokens:ByteTokenizer"
    (copy / "config.json").write_text(json.dumps(config))
    api = Api(copy, view.of_the_table)
    assert not api.texts.has_tokens and "--plugins loads it" in api.texts.fault
    assert Api(copy, resolve).texts.has_tokens


# --- one file ------------------------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """Names of all elements, and what stands in scripts."""

    def __init__(self):
        super().__init__()
        self.names, self.scripts, self.policy = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        attrs = dict(attrs)
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]
        assert not any(name.startswith("on") for name in attrs)
        assert not str(attrs.get("src", "")) and not str(attrs.get("href", "")).startswith(
            ("/", "http")
        )

    def handle_data(self, data):
        if self.names[-1:] == ["script"]:
            self.scripts.append(data)


def test_an_exported_file_is_whole_and_nothing_in_it_breaks_out(hostile, tmp_path, capsys):
    path = tmp_path / "one.html"
    assert view.main([str(hostile), "--export", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ")
    found = Elements()
    found.feed(path.read_text(encoding="utf-8"))
    assert found.names.count("script") == 2 and found.names.count("img") == 0
    assert "default-src 'none'" in found.policy and found.policy.count("sha256-") == 2
    assert not set(found.scripts[0]) & set(
        "<>&"
    )  # so it can neither end its element nor begin a comment
    data = json.loads(found.scripts[0])
    api = Api(hostile, resolve)
    for key, shown in data["episodes"].items():
        step, split, i = key.split("/")
        assert shown == json.loads(
            to_json(api.answer("episode", {"step": step, "split": split, "i": i}))
        )
    assert len(data["episodes"]) == 6 * 12 + 6 * 4
    assert data["episodes"]["3/train/0"]["tag"] == HOSTILE[0]


def test_an_export_holds_the_newest_steps_that_have_room_and_says_which(
    run, tmp_path, monkeypatch, capsys
):
    assert view.main([str(run), "--export", str(tmp_path / "a.html"), "--export_mb=1"]) == 0
    whole = (tmp_path / "a.html").stat().st_size
    monkeypatch.setattr("rl_jax.viewer.export.MIN_BYTES", 1000)
    assert (
        view.main(
            [str(run), "--export", str(tmp_path / "b.html"), f"--export_mb={0.6 * whole / 1e6}"]
        )
        == 0
    )
    size = (tmp_path / "b.html").stat().st_size
    found = Elements()
    found.feed((tmp_path / "b.html").read_text())
    data = json.loads(found.scripts[0])
    held = {int(key.split("/")[0]) for key in data["episodes"]}
    assert size <= 0.6 * whole and held == set(range(min(held), 13)) and min(held) > 1
    assert f"left out: episodes of steps before {min(held)}" in capsys.readouterr().out
    assert data["holds"].endswith(f"episodes of steps {min(held)} to 12")
    assert view.main([str(run), "--export", str(tmp_path / "c.html"), "--export_mb=0.06"]) == 2
    assert "is too small: curves, lists and failures alone take 0." in capsys.readouterr().err
    assert not (tmp_path / "c.html").exists()


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_port_that_is_none_is_told(port, tmp_path, capsys):
    with pytest.raises(SystemExit):
        view.main([str(tmp_path), f"--port={port}"])
    assert "is no port: 0 to 65535" in capsys.readouterr().err
