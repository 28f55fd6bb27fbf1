"""Which requests a decode server can never serve, and what to change about them."""

from rl_jax.serve.commands import Add
from rl_jax.settings import EngineSettings


def refusal(command: Add, engine: EngineSettings, has_extras: bool) -> tuple[str, str] | None:
    """(TurnError.kind, what is wrong) by the request alone, or None. has_extras: the engine has `score` and `held`."""
    request, context = command.request, engine.context
    n, num_stops = len(request.tokens), len(request.stop_token_ids)
    if n == 0:
        return "unsupported", "has an empty context; send at least one token"
    if n == 1 and command.job is not None:
        return "unsupported", "has 1 token; a prefix needs 2"
    if n >= context:
        detail = f"has {n} tokens but engine.context={context}; shorten it or raise the context"
        return "context", detail
    if request.stop:
        return "unsupported", "has stop strings; use stop_token_ids, text is not known here"
    if request.adapter is not None:
        return "unsupported", f"wants adapter {request.adapter!r}; none is served"
    if not has_extras and (request.likely or request.scores or request.min_new_tokens > 0):
        detail = "wants alternatives, scores or min_new_tokens; build the server with `likely`"
        return "unsupported", detail
    if num_stops > engine.num_stop_tokens:
        detail = f"has {num_stops} stop token ids but engine.num_stop_tokens={engine.num_stop_tokens}; raise it"
        return "unsupported", detail
    return None
