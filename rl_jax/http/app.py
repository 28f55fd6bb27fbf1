"""build_app: an Api as a FastAPI app, for its routes, its /openapi.json, and any ASGI server.

FastAPI neither reads bodies nor makes answers: each path's handler (api.py) does, so that limits, errors and streams
are ours; what no route takes is an ApiError as well.
"""

import copy
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rl_jax.http.api import GETS, POSTS, Api, Handler
from rl_jax.http.asks import Served
from rl_jax.http.errors import ApiError
from rl_jax.http.schemas import TOKEN, Body
from rl_jax.http.transport import send_bytes, send_json

PAGE = Path(__file__).parent / "page"
FILES = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
         "/page.css": ("page.css", "text/css")}  # fmt: skip
# The page may load its own files and ask its own server; no inline code, nothing from elsewhere.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}
STATUSES = (400, 401, 403, 408, 409, 413, 429, 503)


class Answered(Response):
    """What a handler does with a connection."""

    def __init__(self, api: Api, handler: Handler):
        super().__init__()
        self._api, self._handler = api, handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._api.answer(scope, receive, send, self._handler)


def build_app(api: Api) -> FastAPI:
    app = FastAPI(title="rl_jax", version="1", docs_url=None, redoc_url=None)
    for path, handler in GETS.items():
        _add(app, api, path, handler, "GET", None)
    for path, (kind, handler) in POSTS.items():
        _add(app, api, path, handler, "POST", kind)
    for path, (name, kind) in FILES.items():
        _add(app, api, path, _file(name, kind), "GET", None, shown=False)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = ApiError(
            error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}"
        )

        async def handle(api: Api, scope: Any, headers: Any, receive: Any, send: Any) -> None:
            await send_json(send, detail.status, detail.body(), dict(error.headers or {}))

        return Answered(api, handle)

    app.add_exception_handler(HTTPException, refused)
    return app


def _add(
    app: FastAPI, api: Api, path: str, handler: Handler, method: str, kind: type[Body] | None, *, shown: bool = True
) -> None:  # fmt: skip
    async def endpoint() -> Response:
        return Answered(api, handler)

    statuses = STATUSES if kind is not None else (401, 403, 429, 503)
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=path,
        response_model=None,
        include_in_schema=shown,
        responses={s: {"description": "an error", "content": _json(ERROR)} for s in statuses},
        openapi_extra=None if kind is None else {"requestBody": _request_body(kind, api.served)},
    )


def _file(name: str, kind: str) -> Handler:
    body = (PAGE / name).read_bytes()

    async def handle(api: Api, scope: Any, headers: Any, receive: Any, send: Any) -> None:
        await send_bytes(send, 200, body, f"{kind}; charset=utf-8", PAGE_HEADERS)

    return handle


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _request_body(kind: type[Body], served: Served) -> dict[str, Any]:
    """The schema of a body: parts written out, as an operation has no place for definitions; the model's name and the
    bounds of its tokens; and no other field, since those are refused.
    """
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return whole(copy.deepcopy(parts[value["$ref"].rpartition("/")[2]]))
            out = {k: whole(v) for k, v in value.items()}
            if out.get("format") == TOKEN:
                out["exclusiveMaximum"] = served.vocab_size
            if isinstance(names := out.get("properties"), dict) and out.get("type") == "object":
                out["additionalProperties"] = False
                if "model" in names:
                    names["model"] = {"type": ["string", "null"], "enum": [served.name, None]}
            return out
        return [whole(v) for v in value] if isinstance(value, list) else value

    return {"required": True, "content": _json(whole(schema))}
