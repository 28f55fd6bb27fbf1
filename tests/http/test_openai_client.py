"""The official client against the server: chat, completions, streams, tools, log-probs, n, seeds, errors."""

import json

import pytest

from rl_jax.tokens import ByteTokenizer

openai = pytest.importorskip("openai")
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SUB = {
    "type": "function",
    "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def chat(client, **fields):
    named = {"model": "tiny", "messages": TALK, "max_tokens": 12, "seed": 5, **fields}
    return client.chat.completions.create(**named)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.list().data[0].weight_version == 0


def test_chat_says_what_the_engine_sampled(client, world):
    reply = chat(client, extra_body={"return_token_ids": True}, logprobs=True)
    prompt = world.api.served.renderer.first([*map(_message, TALK)]).tolist()
    (choice,) = reply.choices
    assert reply.prompt_token_ids == prompt and reply.usage.prompt_tokens == len(prompt)
    seed = _seed(5, 0)
    expected = world.engine.expected(prompt, 12, seed=seed % world.engine.vocab_size)
    ends = [i for i, t in enumerate(expected) if t in world.api.served.renderer.stop_token_ids]
    assert choice.token_ids == expected[: ends[0] + 1 if ends else None]
    assert len(choice.logprobs.content) == len(choice.token_ids) == reply.usage.completion_tokens
    values = [world.engine.logprob(token) for token in choice.token_ids]
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(values)
    assert reply.metadata["weight_version"] == 0
    assert choice.finish_reason == ("stop" if ends else "length")


def _message(given):
    from rl_jax.types import Message

    return Message(given["role"], given["content"])


def _seed(seed, choice):
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:8], "big") >> 1


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_the_same(client, n):
    whole = chat(client, n=n, logprobs=True, extra_body={"return_token_ids": True})
    text, tokens, values, ends = (
        [""] * n,
        [[] for _ in range(n)],
        [[] for _ in range(n)],
        [None] * n,
    )
    usage = None
    stream = chat(
        client, n=n, logprobs=True, stream=True, stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            i = choice.index
            text[i] += choice.delta.content or ""
            tokens[i] += getattr(choice, "token_ids", None) or []
            values[i] += [one.logprob for one in choice.logprobs.content] if choice.logprobs else []
            ends[i] = choice.finish_reason or ends[i]
    assert text == [choice.message.content for choice in whole.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert values == [[one.logprob for one in c.logprobs.content] for c in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, tokens))


def test_seeds_and_choices(client):
    ask = {
        "model": "tiny",
        "prompt": "abc",
        "max_tokens": 8,
        "extra_body": {"return_token_ids": True},
    }
    first = client.completions.create(**ask, n=3, seed=1)
    again = client.completions.create(**ask, n=3, seed=1)
    other = client.completions.create(**ask, n=1, seed=2)
    one = client.completions.create(**ask, n=1, seed=1)
    ids = lambda reply: [choice.token_ids for choice in reply.choices]
    assert ids(first) == ids(again) and len({tuple(t) for t in ids(first)}) == 3
    assert ids(one)[0] == ids(first)[0] != ids(other)[0]
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_completions_take_texts_and_tokens(client):
    encode = ByteTokenizer().encode
    ask = {"model": "tiny", "max_tokens": 5, "seed": 3, "logprobs": 1}
    text = client.completions.create(prompt=["ab", "cd"], **ask)
    tokens = client.completions.create(prompt=[encode("ab"), encode("cd")], **ask)
    single = client.completions.create(prompt=encode("cd"), **ask)
    assert [c.text for c in text.choices] == [c.text for c in tokens.choices]
    assert text.choices[1].text == single.choices[0].text
    logprobs = single.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == single.usage.completion_tokens
    assert logprobs.text_offset[0] == 0 and len(logprobs.top_logprobs) == len(logprobs.tokens)


def test_a_stop_string_across_tokens_ends_the_text_before_it(scripted, scripted_client):
    scripted.say("one two three four", end=False)
    for stream in (False, True):
        reply = scripted_client.completions.create(
            model="tiny", prompt="x", max_tokens=64, stop=["two th", "zzz"], stream=stream
        )
        parts = list(reply) if stream else [reply]
        choices = [c for part in parts for c in part.choices]
        assert "".join(c.text for c in choices) == "one "
        assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == "two th"
    kept = scripted_client.completions.create(
        model="tiny", prompt="x", max_tokens=64, stop="two th",
        extra_body={"include_stop_str_in_output": True, "return_token_ids": True},
    )  # fmt: skip
    assert kept.choices[0].text == "one two th" == ByteTokenizer().decode(kept.choices[0].token_ids)
    assert kept.usage.completion_tokens == len("one two th")


def test_characters_of_several_tokens_come_whole(scripted, scripted_client):
    scripted.say("a€𝄞b")
    chunks = scripted_client.completions.create(
        model="tiny", prompt="x", max_tokens=32, stream=True
    )
    parts = [c.text for chunk in chunks for c in chunk.choices]
    assert "".join(parts) == "a€𝄞b" and not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(scripted, scripted_client, stream):
    scripted.say(f"let me see \n{CALL}")
    reply = chat(scripted_client, tools=[ADD], max_tokens=200, stream=stream)
    if stream:
        deltas = [chunk.choices[0] for chunk in reply]
        content = "".join(c.delta.content or "" for c in deltas)
        calls = [call for c in deltas for call in c.delta.tool_calls or ()]
        finish = deltas[-1].finish_reason
    else:
        content, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
        calls = reply.choices[0].message.tool_calls
    assert content == "let me see" and finish == "tool_calls"
    (call,) = calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
    # The answer to it is rendered as the template's, behind the call.
    scripted.say("3")
    asked = {
        "id": call.id,
        "type": "function",
        "function": {"name": "add", "arguments": call.function.arguments},
    }
    messages = [
        *TALK,
        {"role": "assistant", "content": content, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    assert chat(scripted_client, messages=messages, tools=[ADD]).choices[0].message.content == "3"
    said = ByteTokenizer().decode(scripted.sampler.requests[-1].tokens)
    assert said.endswith(f"{CALL}<|end|><|tool|>3<|end|><|assistant|>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said, told",
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "could not be read"),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "there is no tool 'rm'"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "needs the argument 'b'"),
        ("so: <tool_call>{add}</tool_call>\n\nThe sum is 3.", "could not be read"),
        (f"{CALL} and <tool_call>{{</tool_call> then", "could not be read"),
    ],
)
def test_a_call_that_cannot_be_made_is_content(scripted, scripted_client, said, told, stream):
    scripted.say(said)
    reply = chat(scripted_client, tools=[ADD], max_tokens=200, stream=stream)
    parts = list(reply) if stream else [reply]
    if stream:
        content = "".join(part.choices[0].delta.content or "" for part in parts)
    else:
        content = reply.choices[0].message.content
    assert content == said and parts[-1].choices[0].finish_reason == "stop"
    assert told in parts[-1].metadata["tool_error"]


@pytest.mark.parametrize("stream", [False, True])
def test_content_behind_a_call_is_content(scripted, scripted_client, stream):
    scripted.say(f"a \n{CALL}\nb ")
    reply = chat(scripted_client, tools=[ADD], max_tokens=200, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in reply]
        content = "".join(delta.content or "" for delta in deltas)
        assert sum(len(delta.tool_calls or ()) for delta in deltas) == 1
    else:
        content = reply.choices[0].message.content
    assert content == "a \n\nb"


def test_tool_choice(scripted, scripted_client):
    scripted.say(CALL)
    reply = chat(scripted_client, tools=[ADD], tool_choice="none", max_tokens=200)
    assert reply.choices[0].message.content == CALL and not reply.choices[0].message.tool_calls
    assert "Tools:" not in ByteTokenizer().decode(scripted.sampler.requests[-1].tokens)
    scripted.say('"a": 4, "b": 5}}\n</tool_call>')
    named = {"type": "function", "function": {"name": "add"}}
    reply = chat(scripted_client, tools=[ADD, SUB], tool_choice=named, max_tokens=200)
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 4, "b": 5}
    prompt = ByteTokenizer().decode(scripted.sampler.requests[-1].tokens)
    assert prompt.endswith('<|assistant|><tool_call>\n{"name": "add", "arguments": {')
    scripted.say('sub", "arguments": {}}\n</tool_call>')
    reply = chat(scripted_client, tools=[ADD, SUB], tool_choice="required", max_tokens=200)
    assert reply.choices[0].message.tool_calls[0].function.name == "sub"
    with pytest.raises(openai.BadRequestError, match="there is no tool 'mul'"):
        chat(
            scripted_client,
            tools=[ADD],
            tool_choice={"type": "function", "function": {"name": "mul"}},
        )


def test_control_tokens_are_hidden_unless_asked_for(scripted, scripted_client):
    tokenizer = ByteTokenizer()
    tokens = [*tokenizer.encode("ab"), tokenizer.eos + 1, *tokenizer.encode("c"), tokenizer.end]
    scripted.sampler.script = lambda request: tokens
    assert chat(scripted_client).choices[0].message.content == "abc"
    shown = chat(scripted_client, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].message.content == "ab<|system|>c"


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"temperature": -1}, "temperature", None),
        ({"temperature": 0.001}, "temperature", None),
        ({"n": 65}, "n", None),
        ({"top_p": 0}, "top_p", None),
        ({"stop": ["x" * 300]}, "stop", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, None, "context_length_exceeded"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"extra_body": {"min_p": 0.1}}, "min_p", "unsupported_parameter"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"max_completion_tokens": 5}, "max_tokens", None),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", None),
    ],
)  # fmt: skip
def test_errors_name_the_field(client, fields, param, code):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    error = caught.value
    assert error.type == "invalid_request_error" and (code is None or error.code == code)
    assert param is None or error.param == param, error.message


def test_neutral_values_of_unsupported_fields_are_taken(client):
    fields = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    assert chat(client, **fields).choices


def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError):
        chat(client, model="gpt-5")


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_of_each_token(client, world, stream):
    """FakeEngine's: the sampled token, then those below it, each less likely by 1."""
    reply = chat(client, logprobs=True, top_logprobs=3, stream=stream)
    parts = [part.choices[0] for part in reply] if stream else [reply.choices[0]]
    content = [one for part in parts if part.logprobs for one in part.logprobs.content]
    assert len(content) == 12 or parts[-1].finish_reason == "stop"
    for one in content:
        assert [t.logprob for t in one.top_logprobs] == pytest.approx(
            [one.logprob - i for i in range(3)]
        )
        assert one.top_logprobs[0].token == one.token
    text = client.completions.create(model="tiny", prompt="ab", max_tokens=3, logprobs=2, seed=1)
    assert all(1 <= len(top) <= 2 for top in text.choices[0].logprobs.top_logprobs)
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
