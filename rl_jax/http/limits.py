"""HttpLimits: every bound of what a client may send, ask for or make us wait for. Data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    body_bytes: int = 8 << 20
    header_bytes: int = 16 << 10  # of a request's line and headers together
    body_s: float = 10.0  # for a request's body to arrive
    choices: int = 64  # n, and prompts x n of a request
    prompts: int = 64
    messages: int = 4096
    tools: int = 128
    stops: int = 16
    stop_bytes: int = 256  # of one stop string, in UTF-8
    logprobs: int = 20  # most alternatives a token
    id_chars: int = 128  # of request_id, session_id, user
    queue: int = (
        256  # choices that may wait beyond those that slots generate for; one more gets 429
    )
    sessions: int = 1024  # remembered for prefix affinity; the one used longest ago is forgotten
    request_s: float = (
        600.0  # most that a request may take, and what it gets where it names no timeout_s
    )
    write_s: float = (
        30.0  # for a client to take what a stream has for it, then the stream is aborted
    )
    # of the weights of another server (http/peer.py): files, bytes, seconds in all, seconds without a byte
    peer_files: int = 1024
    peer_bytes: int = 1 << 41
    peer_s: float = 3600.0
    peer_idle_s: float = 30.0
    drain_s: float = 30.0  # for requests under way when the server is told to end
