"""An agent of envs/outside_agent.py by the official client; a worker process imports it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openai import OpenAI

from rl_jax.testing.outside_agents import NUM_TURNS, reward


def play(base_url: str, api_key: str, payload: Mapping[str, Any]) -> float:
    """By the official client, its second turn as a stream; what it saw is appended to payload["log"]. In tasks of odd
    index it sums up its history before the second turn."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)
    messages: list[Any] = [{"role": "system", "content": "even"}]
    said = []
    for turn in range(NUM_TURNS):
        if turn == 1 and payload["index"] % 2:
            messages = [{"role": "user", "content": f"before: {said[0]}"}]
        messages.append({"role": "user", "content": f"{payload['index']}.{turn}"})
        if turn == 0:
            reply = client.chat.completions.create(model="policy", messages=messages)
            text = reply.choices[0].message.content or ""
        else:
            stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        messages.append({"role": "assistant", "content": text})
        said.append(text)
    with Path(payload["log"]).open("a") as file:  # appends of one line do not mix
        file.write(json.dumps({"index": payload["index"], "said": said}) + "\n")
    return reward(said)
