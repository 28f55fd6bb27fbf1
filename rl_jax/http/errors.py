"""ApiError: an answer that is not 200, in OpenAI's shape, and which one a TurnError becomes.

    {"error": {"message": one line, "type": ..., "param": the field or null, "code": a word or null}}

Invariants: a client's fault is 4xx and names the field; 429 and 503 have Retry-After; 500 stands for weights that give
no numbers (nonfinite_logits) and nothing else that is foreseen.
"""

from typing import Any

from rl_jax.types import TurnError

NONFINITE = "nonfinite_logits"
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}


def bad(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param, code)


def unsupported(param: str, why: str) -> ApiError:
    return bad(param, f"unsupported: {why}", "unsupported_parameter")


def of_turn(error: TurnError) -> ApiError:
    """What a client hears of a turn that could not be made."""
    said = str(error)
    if error.kind == "context":
        return ApiError(400, said, None, "context_length_exceeded")
    if error.kind == "unsupported":
        return ApiError(400, said, None, "unsupported_parameter")
    if error.kind == "queue_full":
        return ApiError(429, said, None, "queue_full", 1)
    if error.kind == "deadline":
        return ApiError(408, said, None, "deadline_exceeded")
    if error.kind == "nan":
        return ApiError(500, said, None, NONFINITE)
    return ApiError(503, said, None, "engine_unavailable", 1)
