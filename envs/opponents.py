"""The other side's words from a policy that does not change: a checkpoint behind any OpenAI-compatible endpoint.

A run's servers hold one version for everybody, so a frozen opponent is served beside the run (python -m
rl_jax.tools.serve), and asked over HTTP by the environment, which may block. Invariants: no redirect and no proxy is
followed, an answer is bounded, and what is no answer raises: a game is never decided by an endpoint that is not there.
Must not: log a token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from rl_jax.types import Message

MAX_BODY = 1 << 20  # bytes of an answer
SHOWN = 200  # characters of one that an error shows


@dataclass(frozen=True)
class EndpointConfig:
    url: str = ""  # of the API, as http://127.0.0.1:8000/v1
    model: str = ""
    token_file: str = ""  # its one line is sent as a bearer's token
    temperature: float = 1.0
    max_tokens: int = 32
    timeout_s: float = 5.0  # of one answer; below rollout.step_timeout_s, which ends the worker

    def __post_init__(self):
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not self.model:
            raise ValueError(
                f"endpoint: url={self.url!r} and model={self.model!r} must name an API, as http://127.0.0.1:8000/v1,"
                " and the model there"
            )
        if not self.timeout_s > 0 or self.max_tokens < 1 or not self.temperature >= 0:
            raise ValueError(
                f"endpoint: timeout_s={self.timeout_s} must be above 0, max_tokens={self.max_tokens} at least 1,"
                f" temperature={self.temperature} at least 0"
            )


def ask(config: EndpointConfig, messages: Sequence[Message], seed: int) -> str:
    """What the model says next. Raises: ConnectionError, in one line; ValueError for a token file that is none."""
    body = {
        "model": config.model,
        "messages": [{"role": m.role, "content": m.content} for m in messages],
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "seed": seed,
    }
    headers = {"Content-Type": "application/json"}
    if config.token_file:
        try:
            token = Path(config.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"endpoint: token_file={config.token_file}: {error}") from None
        headers["Authorization"] = f"Bearer {token}"
    parts = urlsplit(config.url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=config.timeout_s)
    try:
        path = f"{parts.path.rstrip('/')}/chat/completions"
        connection.request("POST", path, json.dumps(body).encode("ascii"), headers)
        answer = connection.getresponse()
        data = answer.read(MAX_BODY + 1)
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"endpoint {config.url}: {error or type(error).__name__}") from None
    finally:
        connection.close()
    try:
        if answer.status != 200 or len(data) > MAX_BODY:
            raise ValueError
        text = json.loads(data)["choices"][0]["message"]["content"]
        return text if isinstance(text, str) else ""
    except (ValueError, LookupError, TypeError):
        shown = " ".join(data[:SHOWN].decode("utf-8", "replace").split())
        raise ConnectionError(
            f"endpoint {config.url}: status {answer.status}, no chat completion: {shown!r}"
        ) from None
