"""An agent from outside as the episode: any program that talks to an OpenAI client, its model call being the policy.

    config: {"agent": "package.module:function"}      function(base_url, api_key, payload) -> reward

The function is called once an episode, in a thread of the worker. It uses base_url as any OpenAI client does
(chat.completions, streaming or not, tools); what it returns is the episode's reward, None for none. Interception:
each of its calls becomes a turn. The messages that are new since its last call are the observation; the policy's
answer, with the tokens that were sampled, is the run's; the call gets it as a completion. So what is trained is what
was sampled, and no history is ever encoded again.

    1 reset() starts an endpoint on loopback and the agent, and gives the messages of its first call.
    2 step(action) answers the call that waits, and gives the messages of the next one; or the reward, if the agent
      ended.

A call whose messages do not begin with all that was said before, or hold an answer that the policy did not give, comes
of an agent that rewrote its history (cut or summed it up, asked again, began another talk): its messages are a new
context (StepResult.new_context), a sample of the same episode that is trained apart; what was sampled before stays as
it was sampled. The run counts these (episodes/forked_contexts), and all contexts of an episode share its budgets.

Invariants: one call at a time. Sampling is the run's (rollout.*): what the agent asks for of it is not looked at, n
above 1 is refused. Tools are the config's, and the agent must send the same.
Must not: know tokens, or wait without a deadline.
"""

import hmac
import importlib
import json
import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from typing import Any

from envs import read_config
from envs.splits import check_split
from rl_jax.types import Action, Message, StepResult, Task, ToolCall

MAX_BODY = 8 << 20
MODEL = "policy"


@dataclass(frozen=True)
class OutsideAgentConfig:
    agent: str = ""  # package.module:function
    num_tasks: int = 64  # of train; the payload of task i is {"split", "index": i, **data}
    eval_size: int = 16
    max_turns: int = 8
    data: Mapping[str, Any] = field(default_factory=dict)  # for the agent, of every task
    tools: tuple[Mapping[str, Any], ...] = ()  # function schemas that the agent offers
    agent_timeout_s: float = 60.0  # from an answer to the agent's next call, or its end

    def __post_init__(self):
        module, _, name = self.agent.partition(":")
        if not module or not name:
            raise ValueError(f"outside_agent: agent={self.agent!r} must be package.module:function")
        if min(self.num_tasks, self.eval_size, self.max_turns) < 1 or self.agent_timeout_s <= 0:
            raise ValueError(
                f"outside_agent: num_tasks={self.num_tasks}, eval_size={self.eval_size}, max_turns={self.max_turns} and"
                f" agent_timeout_s={self.agent_timeout_s:g} must be above 0"
            )


class AgentFault(Exception):
    """What the agent did that no episode can be made of."""


@dataclass
class Call:
    """One call of the agent, and where its answer goes."""

    messages: tuple[Message, ...]
    tools: Any
    streams: bool
    answer: "queue.Queue[Action | None]" = field(default_factory=lambda: queue.Queue(1))


@dataclass(frozen=True)
class Ended:
    reward: float | None = None
    error: BaseException | None = None


class OutsideAgent:
    """One live episode: an endpoint and an agent's thread."""

    splits = ("train", "eval")

    def __init__(self):
        self._endpoint: Endpoint | None = None
        self._call: Call | None = None  # that waits for the policy
        self._said: list[Message] = []  # all that the agent and the policy said
        self._tools: Sequence[Any] = ()
        self._timeout_s = 0.0

    @classmethod
    def tasks(cls, cfg: Mapping[str, Any], split: str) -> Sequence[Task]:
        """Raises ValueError: unknown key or split, or values out of range."""
        config: OutsideAgentConfig = read_config(OutsideAgentConfig, cfg)
        check_split("outside_agent", split, cls.splits)
        num = config.num_tasks if split == "train" else config.eval_size
        own = {"agent": config.agent, "timeout_s": config.agent_timeout_s}
        return [
            Task(
                id=f"{split}/{i}",
                env="",
                tag="",
                messages=(),
                payload={**own, "given": {"split": split, "index": i, **config.data}},
                reward="env",
                max_turns=config.max_turns,
                tools=tuple(config.tools),
            )
            for i in range(num)
        ]

    def reset(self, task: Task, seed: int) -> StepResult:
        """Starts the agent. Raises: AgentFault, ImportError, and what the agent raises before its first call."""
        self.close()
        module, _, name = task.payload["agent"].partition(":")
        agent = attrgetter(name)(importlib.import_module(module))
        self._tools, self._timeout_s, self._said = task.tools, task.payload["timeout_s"], []
        endpoint = self._endpoint = Endpoint(self._timeout_s)
        given = {**task.payload["given"], "seed": seed}

        def run() -> None:
            try:
                ended = Ended(agent(endpoint.url, endpoint.key, given))
            except (
                BaseException
            ) as error:  # the boundary to the agent: raised again where the episode is
                ended = Ended(error=error)
            endpoint.events.put(ended)

        threading.Thread(target=run, name="outside-agent", daemon=True).start()
        first = self._next()
        if isinstance(first, Ended):
            raise AgentFault("the agent ended without a call of its model")
        return replace(self._seen(first), reward=None)

    def step(self, action: Action) -> StepResult:
        """Raises: AgentFault, and what the agent raises."""
        assert self._call is not None, "step() comes after reset()"
        call, self._call = self._call, None
        self._said.append(Message("assistant", action.text, action.tool_calls))
        call.answer.put(action)
        after = self._next()
        if isinstance(after, Ended):
            self.close()
            return StepResult((), reward=after.reward, done=True)
        return self._seen(after)

    def close(self) -> None:
        """The agent's next call finds nobody; its thread ends with that."""
        if self._call is not None:
            self._call.answer.put(None)
            self._call = None
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _next(self) -> Call | Ended:
        assert self._endpoint is not None
        try:
            event = self._endpoint.events.get(timeout=self._timeout_s)
        except queue.Empty:
            raise AgentFault(
                f"the agent neither called nor ended within {self._timeout_s:g} s"
            ) from None
        if isinstance(event, Call):
            self._call = event
        elif event.error is not None:
            raise event.error
        return event

    def _seen(self, call: Call) -> StepResult:
        """What the call says beyond what was said, or all of it. Raises: AgentFault."""
        if (call.tools or []) != json.loads(json.dumps(list(self._tools))):
            raise AgentFault("the agent sends other tools than tasks.sources[..].config.tools")
        known, given = self._said, call.messages
        new = given[len(known) :]
        goes_on = bool(new) and all(map(_same, known, given))
        if known and any(message.role == "assistant" for message in new):
            goes_on = False  # an answer that the policy did not give
        self._said = list(given)
        if goes_on:
            return StepResult(new, reward=0.0)
        return StepResult(given, reward=0.0, new_context=bool(known))


def _same(a: Message, b: Message) -> bool:
    calls = lambda m: [(c.name, dict(c.arguments)) for c in m.tool_calls]
    return a.role == b.role and a.content == b.content and calls(a) == calls(b)


class Endpoint:
    """OpenAI's chat completions for one agent, on loopback, with a key of its own. Calls wait in `events`."""

    def __init__(self, timeout_s: float):
        """timeout_s: for the policy to answer is the run's (rollout.*); ours is for a body to arrive."""
        self.events: queue.Queue[Call | Ended] = queue.Queue()
        self.key = secrets.token_hex(16)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, timeout_s))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(endpoint: Endpoint, timeout_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = timeout_s

        def do_GET(self) -> None:
            models = {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rl_jax"}],
            }
            self._send(200, models) if self.path == "/v1/models" else self._refuse(
                404, "no such path"
            )

        def do_POST(self) -> None:
            size = self.headers.get("content-length", "")
            if not size.isdigit() or int(size[:20]) > MAX_BODY:
                self.close_connection = True
                return self._refuse(413, f"a body needs a length, of at most {MAX_BODY} bytes")
            raw = self.rfile.read(int(size))
            if not hmac.compare_digest(
                self.headers.get("authorization", ""), f"Bearer {endpoint.key}"
            ):
                return self._refuse(401, "no such key")
            if self.path != "/v1/chat/completions":
                return self._refuse(404, "only /v1/chat/completions is there")
            try:
                call = _read(json.loads(raw))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                return self._refuse(400, f"{type(error).__name__}: {error}"[:300])
            endpoint.events.put(call)
            action = (
                call.answer.get()
            )  # the episode's deadline is the worker's, which ends this process
            if action is None:
                return self._refuse(503, "the episode is over")
            self._stream(action) if call.streams else self._send(200, _completion(action))

        def _refuse(self, status: int, message: str) -> None:
            kind = "invalid_request_error" if status < 500 else "server_error"
            error = {"message": message, "type": kind, "param": None, "code": None}
            self._send(status, {"error": error})

        def _send(self, status: int, said: Any) -> None:
            body = json.dumps(said, allow_nan=False).encode("ascii")
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, action: Action) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            whole = _completion(action)
            choice = whole["choices"][0]
            delta = choice.pop("message")
            for i, one in enumerate(delta.get("tool_calls", ())):
                one["index"] = i
            head = {**whole, "object": "chat.completion.chunk"}
            head.pop("usage")
            for part, finish in ((delta, None), ({}, choice["finish_reason"])):
                chunk = {**head, "choices": [{"index": 0, "delta": part, "finish_reason": finish}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            """The run's own logs tell of episodes."""

    return Handler


def _read(body: Any) -> Call:
    """Raises ValueError, TypeError, KeyError, AttributeError: no call that a turn can be made of."""
    if body.get("n", 1) not in (None, 1):
        raise ValueError("n: one answer a call; the run samples the group")
    messages = []
    for given in body["messages"]:
        content = given.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        calls = tuple(
            ToolCall(
                c["function"]["name"],
                json.loads(c["function"]["arguments"] or "{}"),
                c.get("id", ""),
            )
            for c in given.get("tool_calls") or ()
        )
        role = "system" if given["role"] == "developer" else given["role"]
        messages.append(Message(str(role), str(content), calls))
    if not messages:
        raise ValueError("messages: there is none")
    return Call(tuple(messages), body.get("tools"), bool(body.get("stream")))


def _completion(action: Action) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": action.text}
    if action.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for i, call in enumerate(action.tool_calls)
        ]
    finish = "tool_calls" if action.tool_calls else "stop"
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
