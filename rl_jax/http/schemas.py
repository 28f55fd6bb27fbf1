"""What each interface takes, field by field: types and ranges. FastAPI writes /openapi.json from these.

Invariants: types are strict ("1" is no 1); every field is in a schema, or in UNSUPPORTED with why, or unknown, and the
last two are answered with a 400 that names it; a field of UNSUPPORTED that says what happens anyway (its neutral
values) is accepted.
Must not: know tokens, or what a server can do.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_jax import strict_json
from rl_jax.http.errors import ApiError, bad, unsupported

EXACT = 2**53  # below it floats hold every integer
MAX_DEPTH = 64  # of a body's nesting
Checked = TypeVar("Checked", bound="Body")

# field -> (why not, values that ask for nothing)
UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "presence_penalty": ("penalties are not sampled with", (0,)),
    "frequency_penalty": ("penalties are not sampled with", (0,)),
    "repetition_penalty": ("penalties are not sampled with", (1,)),
    "length_penalty": ("there is no beam search", (1,)),
    "use_beam_search": ("there is no beam search", (False,)),
    "logit_bias": ("logits are not biased", ({},)),
    "min_p": ("use top_p or top_k", (0,)),
    "min_tokens": ("this interface has another name for it", (0,)),
    "best_of": ("use n and choose", (1,)),
    "suffix": ("there is no infilling", ("",)),
    "echo": ("only /v1/completions repeats the prompt; use prompt_token_ids", (False,)),
    "response_format": ("output is not constrained", ({"type": "text"},)),
    "guided_json": ("output is not constrained", ()),
    "guided_regex": ("output is not constrained", ()),
    "guided_choice": ("output is not constrained", ()),
    "guided_grammar": ("output is not constrained", ()),
    "structured_outputs": ("output is not constrained", ()),
    "prompt_logprobs": ("prompts are scored by OpenAI's and vLLM's interfaces", (False,)),
    "routed_experts": ("the model has no experts", (False,)),
    "return_routed_experts": ("the model has no experts", (False,)),
    "chat_template": ("the model directory's own template is used", ("",)),
    "chat_template_kwargs": ("only messages go through the template", ({},)),
    "add_generation_prompt": ("it is always added", (True,)),
    "continue_final_message": ("send its tokens to /v1/completions", (False,)),
    "add_special_tokens": ("prompts are encoded as they are; send token ids for others", (False,)),
    "documents": ("put them into a message", ([],)),
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("auto", "none")),
    "cache_salt": ("this interface has no salts", ("",)),
    "parallel_tool_calls": ("the model decides how many calls it makes", (True,)),
    "reasoning_effort": ("use chat_template_kwargs", ("none",)),
    "modalities": ("text only", (["text"],)),
    "audio": ("text only", ()),
    "prediction": ("there is no prediction", ()),
    "store": ("nothing is stored", (False,)),
    "metadata": ("nothing is stored", ({},)),
    "service_tier": ("there is one tier; use priority", ("auto", "default")),
    "truncate_prompt_tokens": ("prompts are never cut", ()),
    "bad_words": ("logits are not biased", ([],)),
    "allowed_token_ids": ("logits are not biased", ()),
    "logits_processors": ("logits are not biased", ([],)),
    "lora_path": ("no adapter is served", ("",)),
    "json_schema": ("output is not constrained", ()),
    "regex": ("output is not constrained", ()),
    "ebnf": ("output is not constrained", ()),
    "min_new_tokens": ("this interface has another name for it", (0,)),
    "return_hidden_states": ("hidden states are not kept", (False,)),
    "input_embeds": ("send token ids", ()),
    "image_data": ("text only", ()),
    "audio_data": ("text only", ()),
    "logprob_start_len": ("use prompt_logprobs of /v1/completions", (-1,)),
    "token_ids_logprob": ("of chosen tokens only", ()),
    "spaces_between_special_tokens": ("text is as the tokenizer decodes it", (True,)),
    "detokenize": ("text always comes", (True,)),
}  # fmt: skip

TOKEN = "token"  # format of an id, whose bound the served model gives (app.py)
Token = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"format": TOKEN})]
Count = Annotated[int, Field(ge=0, lt=2**31)]
DIGEST = "^[0-9a-f]{64}$"
Name = Annotated[str, Field(min_length=1, max_length=128)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Stops = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
)


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def one_of(*names: str) -> ConfigDict:
    """For the schema's readers; who checks it is asks.py."""
    asked: Any = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names
    ]
    return ConfigDict(json_schema_extra={"oneOf": asked})


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Drawing(Body):
    """How tokens are drawn, and what ends them, in every interface's words."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None


class Placing(Body):
    """Where and when a request runs: ours, in every interface."""

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    session_id: Name | None = None
    min_weight_version: Count | None = None
    cache_salt: Name | None = None
    timeout_s: Annotated[float, Field(gt=0)] | None = None


class SamplingFields(Drawing, Placing):
    """What OpenAI's two interfaces share, vLLM's additions and ours."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Count | None = None
    prompt_logprobs: Alternatives | None = None
    seed: Seed | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs_mode: Literal["scaled_logprobs", "processed_logprobs"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Name | None = None
    user: Annotated[str, Field(max_length=128)] | None = None


class CompletionBody(SamplingFields):
    """POST /v1/completions"""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    max_tokens: Count | None = None  # 0: only the prompt, which is echoed or scored
    logprobs: Alternatives | None = None
    echo: bool | None = None


class Part(Body):
    type: Literal["text"]
    text: str


class Function(Body):
    name: str
    arguments: str


class Call(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function


class ChatMessage(Body):
    # A message without content is one of the assistant's with calls, which asks.py checks.
    model_config = ConfigDict(
        json_schema_extra={
            "required": ["role", "content"],
            "not": {"properties": {"content": {"type": "null"}}},
        }
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class ToolFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(Body):
    name: str


class ChosenTool(Body):
    type: Literal["function"]
    function: ChosenFunction


TemplateOptions = Annotated[dict[Name, bool | str], Field(max_length=16)]


class ChatBody(SamplingFields):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template_kwargs: TemplateOptions | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None


class SglangSampling(Drawing):
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    min_new_tokens: Count | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: Seed | None = None


class SglangBody(Placing):
    """POST /generate"""

    model_config = one_of("text", "input_ids")

    text: str | Annotated[list[str], Field(min_length=1)] | None = None
    input_ids: Tokens | Annotated[list[Tokens], Field(min_length=1)] | None = None
    sampling_params: SglangSampling | None = None
    return_logprob: bool | None = None
    return_text_in_logprobs: bool | None = None
    top_logprobs_num: Alternatives | None = None
    stream: bool | None = None
    rid: Name | None = None


class TokensSampling(Drawing):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Count | None = None
    prompt_logprobs: Alternatives | None = None
    seed: Seed | None = None
    logprobs: Alternatives | None = None


class TokensBody(Placing):
    """POST /inference/v1/generate"""

    token_ids: Tokens
    sampling_params: TokensSampling | None = None
    model: str | None = None
    request_id: Name | None = None
    stream: Literal[False] | None = None


class TextContent(Body):
    text: str


class TokenContent(Body):
    token_ids: Tokens


class JetstreamBody(Body):
    """POST /v1/generate"""

    model_config = one_of("text_content", "token_content")

    max_tokens: Annotated[int, Field(ge=1)]
    text_content: TextContent | None = None
    token_content: TokenContent | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages as the model's template shows them."""

    model_config = one_of("prompt", "messages")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Token]


class PeerFile(Body):
    # No path, and nothing hidden.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$", max_length=255)]
    bytes: Annotated[int, Field(ge=0)]


class Manifest(Body):
    """What GET /admin/weights of another server answers (peer.py)."""

    version: Count
    digest: Annotated[str, Field(pattern=DIGEST)]
    files: Annotated[list[PeerFile], Field(min_length=1)]


# --- from bytes --------------------------------------------------------------------------------------------------


def read_json(body: bytes) -> Any:
    """Raises ApiError 400: no JSON, numbers that JSON cannot hold, or nested too deep."""
    try:
        value = json.loads(body, parse_constant=strict_json.no_number, parse_float=_number)
    except RecursionError:
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        said = " ".join(str(error).split())[:200]
        raise ApiError(400, f"the body is no JSON ({said})", None, "invalid_json") from None
    if strict_json.is_deeper(value, MAX_DEPTH):
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


def check_body(kind: type[Checked], value: Any) -> Checked:
    """The body as `kind`. Raises ApiError 400 naming the first field that is wrong."""
    if not isinstance(value, Mapping):
        raise ApiError(400, f"the body is {_kind_of(value)}; send a JSON object")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:200]
        raise bad(param, first["msg"][:300], first["type"]) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deep") from None
    _check_extra(body, "")
    return body


def _check_extra(body: Body, where: str) -> None:
    """Raises ApiError for a field that is in no schema."""
    for name, value in (body.model_extra or {}).items():
        param = f"{where}{name}"[:200]
        if name not in UNSUPPORTED:
            if value is None or (isinstance(body, ChatMessage) and value in ([], {})):
                continue  # what clients send back of an answer that had none of it
            raise bad(param, "there is no such field", "unknown_parameter")
        why, neutral = UNSUPPORTED[name]
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
        ):
            raise unsupported(param, why)
    for name in type(body).model_fields:
        value = getattr(body, name)
        for i, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Body):
                at = f"{name}.{i}." if isinstance(value, list) else f"{name}."
                _check_extra(item, where + at)


def _kind_of(value: Any) -> str:
    kinds = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}
    return kinds.get(type(value), "a number")


def _number(text: str) -> float:
    """5.0 is an integer, as JSON schemas have it; a field for floats takes it as well."""
    value = strict_json.finite(text)
    return int(value) if value.is_integer() and abs(value) < EXACT else value
