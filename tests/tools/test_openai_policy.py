"""check_env --openai: a model behind an OpenAI-compatible API plays, and what is no answer is the endpoint's fault."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl_jax.testing.stub_service import StubService, answer
from rl_jax.tools import check_env
from rl_jax.tools.openai_policy import OpenAIPolicy, PolicyError
from rl_jax.types import Action, Message, StepResult, Task, ToolCall

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
TASK = Task("t/0", "e", "t", (Message("system", "be brief"),), {}, "env", 3, (TOOL,))


def said(content=None, calls=()):
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
            for id, name, text in calls
        ]
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


def played(answers, turns):
    """(actions, bodies that the endpoint got)."""

    async def run():
        async with StubService(lambda n: answer(answers[n])) as service:
            policy = OpenAIPolicy(service.url + "/v1", "m", token="secret")
            try:
                found = [await policy.act(i, TASK, seen) for i, seen in enumerate(turns)]
            finally:
                await policy.close()
            assert "authorization: bearer secret" in service.heads[0].lower()
            assert service.heads[0].startswith("POST /v1/chat/completions ")
            return found, [json.loads(body) for body in service.bodies]

    return asyncio.run(run())


def test_calls_their_answers_and_texts_go_both_ways():
    first = StepResult((Message("user", "2+3?"),))
    heard = StepResult((Message("tool", "5"), Message("tool", "6")))
    actions, bodies = played(
        [said(None, [("a", "add", '{"x": 2}'), ("b", "add", "")]), said("5")], [first, heard]
    )
    assert actions == [
        Action("", (ToolCall("add", {"x": 2}, "a"), ToolCall("add", {}, "b"))), Action("5", ()),
    ]  # fmt: skip
    assert bodies[0]["tools"] == [TOOL] and bodies[0]["model"] == "m"
    assert [m["role"] for m in bodies[0]["messages"]] == ["system", "user"]
    told = bodies[1]["messages"][2:]
    assert told[0]["tool_calls"][0]["id"] == "a"
    assert [(m["role"], m["tool_call_id"]) for m in told[1:]] == [("tool", "a"), ("tool", "b")]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({"choices": []}, "no choices"),
        ({"error": "no"}, "no choices"),
        (said(["x"]), "content is list"),
        (said(None, [("a", "add", "{")]), "cannot be read"),
        (said(None, [("a", "add", "[1]")]), "are no object"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_told_in_one_line(reply, why):
    with pytest.raises(PolicyError, match=why):
        played([reply], [StepResult((Message("user", "go"),))])


@pytest.mark.parametrize(
    "words", [["--openai=http://127.0.0.1:1"], ["--model=m"], ["--openai=ftp://x", "--model=m"]]
)
def test_arguments_that_do_not_go_together_are_refused(words, capsys):
    assert check_env.main(["frozen_lake", *words]) == 2
    assert "--openai" in capsys.readouterr().err


@pytest.fixture
def endpoint():
    """Walks right and down by turns, whatever the map."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.send_response(404)  # it has no list of models
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            turn = sum(m["role"] == "assistant" for m in bodies[-1]["messages"])
            body = json.dumps(said("RD"[turn % 2])).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", bodies
    server.shutdown()
    server.server_close()


@pytest.mark.slow(seconds=5)
def test_a_model_plays_frozen_lake_and_a_dead_endpoint_is_a_fault(endpoint, capsys):
    url, bodies = endpoint
    words = ["frozen_lake", "--config", "map_size=4", "--json"]
    assert check_env.main([*words, f"--openai={url}", "--model=walker"]) == 0
    report = json.loads(capsys.readouterr().out)
    (note,) = [
        note for note in report["notes"] if note.startswith("openai policy walker: 4 episodes")
    ]
    assert f"in {len(bodies)} turns" in note and len(bodies) >= 8
    assert bodies[0]["model"] == "walker" and bodies[0]["messages"][-1]["role"] == "user"
    assert check_env.main([*words, "--openai=http://127.0.0.1:9", "--model=gone"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["check"] == "openai policy" and "gone: http://127.0.0.1:9" in fault["detail"]
