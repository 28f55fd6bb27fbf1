"""Ask: what a checked request wants, in tokens. One function for each interface.

Invariants: prompts are tokens of the vocabulary, and prompt + max tokens fit the context, or there is a 400: nothing is
cut silently. Seeds are per choice: choice i of a request with a seed samples the same tokens whatever else runs.
Forced calls (tool_choice required, or one tool by name): the begin of a call, as far as it is certain, is put behind
the prompt; the policy samples the rest. These tokens are the prompt's, not the policy's.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl_jax.http.errors import ApiError, bad, unsupported
from rl_jax.http.limits import HttpLimits
from rl_jax.http.schemas import (
    ChatBody,
    ChatMessage,
    ChosenTool,
    CompletionBody,
    JetstreamBody,
    SamplingFields,
    SglangBody,
    SglangSampling,
    TokensBody,
    TokensSampling,
    Tool,
)
from rl_jax.tokens.renderer import Renderer
from rl_jax.tokens.tool_calls import check_tools
from rl_jax.types import Message, ToolCall

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions
MIN_TEMPERATURE = 0.01  # below it, but for 0, logits / temperature may not be finite
TOO_LONG = "context_length_exceeded"
LONGEST = (
    256  # bytes; hardly a token is longer: what is too long by far is told before it is encoded
)


@dataclass(frozen=True)
class Served:
    """What of the model and its servers a request is checked against."""

    name: str
    renderer: Renderer
    context: int  # most tokens of a history
    vocab_size: int  # of the model: ids a prompt may have
    num_stop_tokens: int
    limits: HttpLimits = HttpLimits()

    @property
    def hidden(self) -> frozenset[int]:
        """Control tokens that text does not show, but for the marks of tool calls."""
        tokenizer: Any = self.renderer.tokenizer
        if (control := getattr(tokenizer, "control", None)) is None:
            return frozenset(range(len(getattr(tokenizer, "SPECIALS", ()))))
        shown = (*tokenizer.speakable, *self.renderer.parser.markers)
        return frozenset(number for text, number in control.items() if text not in shown)


@dataclass(frozen=True)
class Sampling:
    """How every choice of a request samples."""

    max_new_tokens: int  # 0: nothing is sampled, but the prompt scored or repeated
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the turn's ends first, unless they are ignored
    own_stops: frozenset[int] = frozenset()  # of these, those that the request named
    shows_stop: bool = False
    skips_special: bool = True
    processed: bool = False  # log-probs under top-p and top-k
    num_likely: int = 0  # alternatives to tell of each token


@dataclass(frozen=True)
class Ask:
    id: str
    prompts: tuple[np.ndarray, ...]  # i32[n] each
    sampling: Sampling
    n: int = 1  # choices of each prompt
    seed: int = 0
    session: str = ""
    priority: int = 0
    min_version: int = 0
    deadline_s: float = 600.0
    tools: tuple[Mapping[str, Any], ...] = ()
    forced: str = ""  # text that stands behind the prompt and belongs to the answer
    salt: str = ""
    # alternatives to tell of each prompt's own tokens; None: prompts are not scored
    prompt_likely: int | None = None
    echo: bool = False  # the prompt is the begin of the answer
    prompt_tokens: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "prompt_tokens", sum(map(len, self.prompts)))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def seed_of(self, choice: int) -> int:
        """u63, of the seed and the choice's number within its prompt."""
        told = f"{self.seed}/{choice % self.n}".encode()
        return int.from_bytes(hashlib.sha256(told).digest()[:8], "big") >> 1


# --- the interfaces ----------------------------------------------------------------------------------------------


def of_chat(body: ChatBody, served: Served, session: str = "") -> Ask:
    """session: of the header. Raises: ApiError."""
    check_model(body.model, served)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad("max_tokens", f"is {body.max_tokens}, max_completion_tokens another; send one")
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs", "needs logprobs: true")
    check_alternatives("top_logprobs", body.top_logprobs, served)
    check_prompt_logprobs("prompt_logprobs", body.prompt_logprobs, body.stream, served)
    messages, tools = messages_of(body.messages, served), tools_of(body.tools, served)
    offered = () if body.tool_choice == "none" else tools
    forced_text, forced = _forced(body, offered, served)
    first = rendered(messages, offered, served, body.chat_template_kwargs)
    prompt = np.concatenate([first, forced])
    num = body.max_completion_tokens or body.max_tokens
    sampling = _with_likely(_sampling(body, served, num, prompt), body.top_logprobs)
    # An empty tuple has nothing parsed: all is content.
    return _ask(body, (prompt,), sampling, served, session, tools=offered, forced=forced_text)


def of_completion(body: CompletionBody, served: Served, session: str = "") -> Ask:
    """Raises: ApiError."""
    check_model(body.model, served)
    check_alternatives("logprobs", body.logprobs, served)
    check_prompt_logprobs("prompt_logprobs", body.prompt_logprobs, body.stream, served)
    prompts = prompts_of(body.prompt, served, "prompt")
    num = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if num == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad("max_tokens", "is 0, and neither echo nor prompt_logprobs is asked for")
    sampling = _sampling(body, served, num, max(prompts, key=len))
    ask = _ask(body, prompts, _with_likely(sampling, body.logprobs), served, session)
    if not body.echo:
        return ask
    told = [n for n in (ask.prompt_likely, body.logprobs) if n is not None]
    return replace(ask, echo=True, prompt_likely=max(told, default=None))


def of_sglang(body: SglangBody, served: Served, session: str = "") -> Ask:
    """Raises: ApiError."""
    if (body.text is None) == (body.input_ids is None):
        raise bad("text", "send text or input_ids, and not both")
    check_alternatives("top_logprobs_num", body.top_logprobs_num, served)
    given = body.text if body.text is not None else body.input_ids
    prompts = prompts_of(given, served, "text" if body.text is not None else "input_ids")
    params = body.sampling_params or SglangSampling()
    fields = SamplingFields(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, n=params.n,
        seed=params.sampling_seed, stop=params.stop, stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos, include_stop_str_in_output=params.no_stop_trim,
        skip_special_tokens=params.skip_special_tokens, request_id=body.rid, priority=body.priority,
        session_id=body.session_id, min_weight_version=body.min_weight_version,
        timeout_s=body.timeout_s, cache_salt=body.cache_salt, min_tokens=params.min_new_tokens,
    )  # fmt: skip
    sampling = _sampling(fields, served, params.max_new_tokens or 128, max(prompts, key=len))
    sampling = _with_likely(sampling, body.top_logprobs_num)
    return _ask(fields, prompts, sampling, served, session)


def of_tokens(body: TokensBody, served: Served, session: str = "") -> Ask:
    """Raises: ApiError."""
    check_model(body.model, served)
    params = body.sampling_params or TokensSampling()
    check_alternatives("sampling_params.logprobs", params.logprobs, served)
    prompts = prompts_of(body.token_ids, served, "token_ids")
    fields = SamplingFields(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, n=params.n,
        seed=params.seed, stop=params.stop, stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos, request_id=body.request_id, priority=body.priority,
        session_id=body.session_id, min_weight_version=body.min_weight_version,
        timeout_s=body.timeout_s, cache_salt=body.cache_salt, min_tokens=params.min_tokens,
        prompt_logprobs=params.prompt_logprobs,
    )  # fmt: skip
    check_prompt_logprobs("sampling_params.prompt_logprobs", params.prompt_logprobs, False, served)
    num = params.max_tokens or DEFAULT_COMPLETION_TOKENS
    sampling = _with_likely(_sampling(fields, served, num, prompts[0]), params.logprobs)
    return _ask(fields, prompts, sampling, served, session)


def of_jetstream(body: JetstreamBody, served: Served, session: str = "") -> Ask:
    """Greedy, as JetStream samples. Raises: ApiError."""
    if (body.text_content is None) == (body.token_content is None):
        raise bad("text_content", "send text_content or token_content, and not both")
    if body.text_content is not None:
        prompts = prompts_of(body.text_content.text, served, "text_content.text")
    else:
        assert body.token_content is not None
        prompts = prompts_of(body.token_content.token_ids, served, "token_content.token_ids")
    fields = SamplingFields(temperature=0.0)
    return _ask(
        fields, prompts, _sampling(fields, served, body.max_tokens, prompts[0]), served, session
    )


# --- their parts -------------------------------------------------------------------------------------------------


def check_model(name: str | None, served: Served) -> None:
    if name and name != served.name:
        raise ApiError(404, f"model: there is no {name[:80]!r}; there is {served.name}", "model",
                       "model_not_found")  # fmt: skip


def check_alternatives(param: str, num: int | None, served: Served) -> None:
    if num is not None and num > served.limits.logprobs:
        raise bad(param, f"is {num}; at most {served.limits.logprobs}")


def check_prompt_logprobs(
    param: str, num: int | None, streams: bool | None, served: Served
) -> None:
    check_alternatives(param, num, served)
    if num is not None and streams:
        raise bad(param, "a stream does not tell them; send stream: false")


def prompts_of(given: Any, served: Served, param: str) -> tuple[np.ndarray, ...]:
    """i32[n] of each prompt: a text, token ids, or a list of either. Raises: ApiError."""
    is_many = isinstance(given, list) and not isinstance(given[0], int)
    several = given if is_many else [given]
    if len(several) > served.limits.prompts:
        raise bad(param, f"has {len(several)} prompts; at most {served.limits.prompts}")
    return tuple(_prompt(one, served, param) for one in several)


def _prompt(given: str | list[int], served: Served, param: str) -> np.ndarray:
    if isinstance(given, str):
        check_length(param, len(given.encode("utf-8", "replace")) // LONGEST, served)
        tokens = encode(given, served, param)
    else:
        tokens = given
        if (high := max(tokens)) >= served.vocab_size:
            raise bad(param, f"token {high} is outside the vocabulary 0..{served.vocab_size - 1}")
    if not len(tokens):
        raise bad(param, "is empty; send at least one token")
    check_length(param, len(tokens), served)
    return np.array(tokens, np.int32)


def check_length(param: str, num_tokens: int, served: Served) -> None:
    if num_tokens >= served.context:
        raise bad(
            param,
            f"has {num_tokens} or more tokens; the model's context is {served.context}",
            TOO_LONG,
        )


def encode(text: str, served: Served, param: str) -> list[int]:
    try:
        return served.renderer.tokenizer.encode(text)
    except ValueError as error:
        raise bad(param, " ".join(str(error).split())[:300]) from None


def messages_of(given: Sequence[ChatMessage], served: Served) -> list[Message]:
    """Raises: ApiError naming the message."""
    if len(given) > served.limits.messages:
        raise bad("messages", f"are {len(given)}; at most {served.limits.messages}")
    size = sum(len(_content(message)) for message in given)
    check_length("messages", size // LONGEST, served)
    return [_message(message, i) for i, message in enumerate(given)]


def _content(message: ChatMessage) -> str:
    content = message.content
    return "".join(p.text for p in content) if isinstance(content, list) else content or ""


def _message(message: ChatMessage, i: int) -> Message:
    where = f"messages.{i}"
    calls = []
    for j, call in enumerate(message.tool_calls or ()):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise bad(f"{where}.tool_calls.{j}.function.arguments", "is no JSON object")
        calls.append(ToolCall(call.function.name, arguments, call.id or ""))
    if calls and message.role != "assistant":
        raise bad(f"{where}.tool_calls", f"a message of the role {message.role} makes no calls")
    if message.content is None and not calls:
        raise bad(f"{where}.content", "is missing")
    if message.name:
        raise unsupported(f"{where}.name", "the template shows no names")
    role = "system" if message.role == "developer" else message.role
    return Message(role, _content(message), tuple(calls))


def tools_of(given: Sequence[Tool] | None, served: Served) -> tuple[Mapping[str, Any], ...]:
    """As Renderer takes them. Raises: ApiError."""
    if len(given or ()) > served.limits.tools:
        raise bad("tools", f"are {len(given or ())}; at most {served.limits.tools}")
    tools = tuple(tool.model_dump(exclude_none=True) for tool in given or ())
    try:
        check_tools(tools)
    except ValueError as error:
        raise bad("tools", str(error)[:300]) from None
    return tools


def rendered(
    messages: Sequence[Message],
    tools: Sequence[Any],
    served: Served,
    options: Mapping[str, bool | str] | None = None,
) -> np.ndarray:
    """options: chat_template_kwargs. Raises: ApiError."""
    try:
        renderer = served.renderer.with_options(options or {})
    except ValueError as error:
        raise bad("chat_template_kwargs", str(error)[:300]) from None
    try:
        return renderer.first(messages, tools)
    except ValueError as error:
        raise bad("messages", " ".join(str(error).split())[:300]) from None


def _forced(
    body: ChatBody, tools: Sequence[Mapping[str, Any]], served: Served
) -> tuple[str, np.ndarray]:
    """The begin of a call that tool_choice asks for, as text and tokens; nothing where it asks for none."""
    chosen = body.tool_choice
    if chosen in (None, "auto", "none"):
        return "", np.zeros(0, np.int32)
    if not tools:
        raise bad("tool_choice", "needs tools")
    names = [tool["function"]["name"] for tool in tools]
    name = chosen.function.name if isinstance(chosen, ChosenTool) else ""
    if name and name not in names:
        raise bad(
            "tool_choice", f"there is no tool {name[:80]!r}; there are {', '.join(names)[:200]}"
        )
    if not name and len(names) == 1:
        name = names[0]
    renderer = served.renderer
    mark = "RLJAXMARK"  # what the policy shall say stands from here on
    call = ToolCall(name, {mark: 0}) if name else ToolCall(mark, {})
    said = renderer.said(Message("assistant", "", (call,)))
    whole = renderer.text(said)
    certain = whole[: whole.index(mark)]
    if name:
        certain = certain[: certain.rindex("{") + 1]
    # The longest run of its tokens that says nothing beyond.
    num = len(said)
    while num and not certain.startswith(renderer.tokenizer.decode(said[:num])):
        num -= 1
    return renderer.tokenizer.decode(said[:num]), said[:num]


def _sampling(
    fields: SamplingFields, served: Served, max_tokens: int | None, longest: np.ndarray
) -> Sampling:
    """max_tokens: None = all that fits. longest: of the prompts."""
    limits, temperature = served.limits, fields.temperature
    temperature = 1.0 if temperature is None else float(temperature)
    if 0 < temperature < MIN_TEMPERATURE:
        raise bad(
            "temperature", f"is {temperature:g}; use 0 (greedy), or {MIN_TEMPERATURE} or more"
        )
    room = served.context - len(longest)
    if room < 1:
        raise bad("messages", f"have {len(longest)} tokens of {served.context}", TOO_LONG)
    if max_tokens is not None and max_tokens > room:
        raise bad(
            "max_tokens",
            f"is {max_tokens}, and the prompt has {len(longest)} tokens; together they are beyond the model's context"
            f" of {served.context}", TOO_LONG,
        )  # fmt: skip
    most, least = room if max_tokens is None else max_tokens, fields.min_tokens or 0
    if least > most:
        raise bad("min_tokens", f"is {least}, and at most {most} tokens may come")
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if any(len(one.encode("utf-8", "replace")) > limits.stop_bytes for one in stop):
        raise bad("stop", f"has a string of more than {limits.stop_bytes} bytes")
    own = tuple(dict.fromkeys(fields.stop_token_ids or ()))
    ends = () if fields.ignore_eos else served.renderer.stop_token_ids
    stop_token_ids = tuple(dict.fromkeys((*ends, *own)))
    if len(stop_token_ids) > served.num_stop_tokens:
        free = served.num_stop_tokens - len(ends)
        raise bad(
            "stop_token_ids",
            f"are {len(own)}; this server takes {free}, and more with a higher --num_stop_tokens",
        )
    top_k = 0 if fields.top_k is None or fields.top_k < 0 else min(fields.top_k, served.vocab_size)
    top_p = 1.0 if fields.top_p is None else float(fields.top_p)
    return Sampling(
        max_new_tokens=most,
        min_new_tokens=least,
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k >= served.vocab_size else top_k,
        stop=tuple(stop),
        stop_token_ids=stop_token_ids,
        own_stops=frozenset(own),
        shows_stop=bool(fields.include_stop_str_in_output),
        skips_special=fields.skip_special_tokens is not False,
        processed=fields.logprobs_mode == "processed_logprobs",
    )


def _with_likely(sampling: Sampling, num: int | None) -> Sampling:
    """Raises: ApiError."""
    if num and sampling.processed:
        raise unsupported("logprobs_mode", "alternatives are told under scaled_logprobs only")
    return replace(sampling, num_likely=num or 0)


def _ask(
    fields: SamplingFields,
    prompts: tuple[np.ndarray, ...],
    sampling: Sampling,
    served: Served,
    session: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    forced: str = "",
) -> Ask:
    n = 1 if fields.n is None else fields.n
    if len(prompts) * n > served.limits.choices:
        raise bad("n", f"asks for {len(prompts) * n} choices; at most {served.limits.choices}")
    session = fields.session_id or session
    if len(session) > served.limits.id_chars:
        raise bad("session_id", f"has {len(session)} characters; at most {served.limits.id_chars}")
    timeout_s = served.limits.request_s
    if fields.timeout_s is not None:
        timeout_s = min(timeout_s, fields.timeout_s)
    return Ask(
        id=fields.request_id or secrets.token_hex(12),
        prompts=prompts,
        sampling=sampling,
        n=n,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed,
        session=session,
        priority=fields.priority or 0,
        min_version=fields.min_weight_version or 0,
        deadline_s=timeout_s,
        tools=tuple(tools),
        forced=forced,
        salt=fields.cache_salt or "",
        prompt_likely=fields.prompt_logprobs,
    )
