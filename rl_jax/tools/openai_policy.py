"""A policy behind any OpenAI-compatible endpoint, as check_env plays it: chat completions, tool calls included.

One conversation at a time. What the model says goes to the environment as it came, so what the environment cannot take
is the environment's fault; what is no answer is the endpoint's (PolicyError).
Must not: judge an environment, or log a token.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_jax.rewards.http_client import Deadlines, HttpClient, HttpError
from rl_jax.types import Action, Message, StepResult, Task, ToolCall

HERE_S = 3.0  # for the endpoint to say that it is there


class PolicyError(Exception):
    """The endpoint gave nothing that can be played, in one line."""


class OpenAIPolicy:
    def __init__(self, url: str, model: str, token: str = "", answer_s: float = 60.0):
        """url: of the API, as http://127.0.0.1:8000/v1. Raises: ValueError."""
        deadlines = Deadlines(read_s=answer_s, total_s=2 * answer_s)
        self._client = HttpClient(url, token=token, deadlines=deadlines, retries=1)
        at_once = Deadlines(connect_s=HERE_S / 2, read_s=HERE_S, total_s=HERE_S)
        self._doorbell = HttpClient(url, token=token, deadlines=at_once, retries=0)
        self.model, self.num_answers = model, 0
        self._said: list[dict[str, Any]] = []  # of this conversation, as the API has it
        self._open: list[str] = []  # ids of the last turn's calls, not yet answered

    async def check(self) -> None:
        """Whether there is anybody, before a conversation waits for it. Raises: PolicyError, within HERE_S."""
        try:
            await self._doorbell.call("GET", "/models")
        except HttpError as error:
            # It may have no list of models, and be there all the same.
            if error.kind != "status" or error.status in (401, 403):
                raise PolicyError(error.detail) from None

    async def act(self, number: int, task: Task, seen: StepResult) -> Action:
        """The next turn; number 0 begins a conversation. Raises: PolicyError."""
        if number == 0:
            self._said, self._open = [], []
            self._hear(task.messages)
        self._hear(seen.messages)
        asked: dict[str, Any] = {"model": self.model, "messages": self._said}
        if task.tools:
            asked["tools"] = list(task.tools)
        try:
            answer = await self._client.call("POST", "/chat/completions", asked)
        except HttpError as error:
            raise PolicyError(error.detail) from None
        message = _message_of(answer)
        self.num_answers += 1
        calls, self._open = _calls_of(message)
        said = {"role": "assistant", "content": message.get("content") or ""}
        if calls:
            said["tool_calls"] = message["tool_calls"]
        self._said.append(said)
        return Action(said["content"], calls)

    async def close(self) -> None:
        await self._client.close()
        await self._doorbell.close()

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            said = {"role": message.role, "content": message.content}
            if message.role == "tool":  # answers come in the order of the calls
                said["tool_call_id"] = self._open.pop(0) if self._open else "call"
            self._said.append(said)


def _message_of(answer: Any) -> Mapping[str, Any]:
    try:
        message = answer["choices"][0]["message"]
        content = message.get("content")
    except (LookupError, TypeError, AttributeError):
        shown = json.dumps(answer)[:200]
        raise PolicyError(f"its answer has no choices[0].message: {shown}") from None
    if content is not None and not isinstance(content, str):
        raise PolicyError(f"its message's content is {type(content).__name__}, not text")
    return message


def _calls_of(message: Mapping[str, Any]) -> tuple[tuple[ToolCall, ...], list[str]]:
    """(calls, their ids)."""
    calls, ids = [], []
    for call in message.get("tool_calls") or ():
        try:
            name, text = call["function"]["name"], call["function"]["arguments"]
            arguments = json.loads(text) if text else {}
            ids.append(str(call["id"]))
        except (LookupError, TypeError, ValueError):
            raise PolicyError(f"a tool call cannot be read: {json.dumps(call)[:200]}") from None
        if not isinstance(arguments, dict):
            raise PolicyError(f"the arguments of a call of {name} are no object: {text[:100]}")
        calls.append(ToolCall(str(name), arguments, ids[-1]))
    return tuple(calls), ids
