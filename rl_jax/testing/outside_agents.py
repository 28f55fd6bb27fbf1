"""An agent of envs/outside_agent.py: what somebody else's loop looks like."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

NUM_TURNS = 2


def reward(said: list[str]) -> float:
    """The share of answers of an even number of characters: an untrained policy earns some of it."""
    return sum(len(one) % 2 == 0 for one in said) / len(said)


def plain(base_url: str, api_key: str, payload: Mapping[str, Any]) -> float:
    """Talks HTTP by itself: two questions, each with all that was said before."""
    messages, said = [], []
    for turn in range(NUM_TURNS):
        question = f"{payload['split']} {payload['index']}.{turn}: say something even"
        messages.append({"role": "user", "content": question})
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append(message)
        said.append(message["content"])
    return reward(said)
