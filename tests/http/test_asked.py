"""Fields beyond sampling by OpenAI's and vLLM's clients: scored and repeated prompts, least tokens, salts, options."""

import asyncio

import numpy as np
import pytest

from rl_jax.http.asks import Ask, Sampling
from rl_jax.http.completion import End, Scored, Sessions, complete
from rl_jax.http.text import Detokenizer, TextStream
from rl_jax.testing.fake_sampler import FakeSampler
from rl_jax.tokens import ByteTokenizer
from rl_jax.types import NewTokens

ASK = {"prompt": "abcdef", "max_tokens": 4, "seed": 4, "ignore_eos": True}
ENCODE = ByteTokenizer().encode


def completion(world, **fields):
    answer = world.post("/v1/completions", {**ASK, **fields})
    assert answer.status == 200, answer.body
    return answer.body


def test_prompt_logprobs_are_vllms(world):
    tokens = ENCODE("abcdef")
    body = completion(world, prompt_logprobs=2, n=2, return_tokens_as_token_ids=True)
    for choice in body["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(tokens) - 1
        for token, told in zip(tokens[1:], rest):  # FakeEngine's: the token and the one below it
            value = world.engine.logprob(token)
            assert set(told) == {str(token), str(token - 1)}
            own = told[str(token)]
            assert own["logprob"] == pytest.approx(value) and own["rank"] == token + 1
            assert own["decoded_token"] == f"token_id:{token}"
            assert told[str(token - 1)]["logprob"] == pytest.approx(value - 1)
            assert told[str(token - 1)]["rank"] == 2
    assert body["metadata"]["prompt_weight_version"] == 0
    none = completion(world, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert [list(told) for told in none[1:]] == [[str(t)] for t in tokens[1:]]
    assert completion(world, prompt="a", prompt_logprobs=1)["choices"][0]["prompt_logprobs"] == [
        None
    ]


def test_prompt_logprobs_of_the_other_interfaces(world):
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    chat = world.post("/v1/chat/completions", body).body
    told = chat["prompt_logprobs"]
    assert [str(t) in one for t, one in zip(chat["prompt_token_ids"][1:], told[1:])]
    assert told[0] is None and len(told) == chat["usage"]["prompt_tokens"]
    ask = {"token_ids": [9, 10, 11], "sampling_params": {"max_tokens": 2, "prompt_logprobs": 0}}
    plain = world.post("/inference/v1/generate", ask).body
    assert [list(one or {}) for one in plain["prompt_logprobs"]] == [[], ["10"], ["11"]]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_echo_is_the_prompt_before_the_answer_streamed_or_not(world, logprobs, n):
    fields = {"prompt": [ENCODE("a€b"), ENCODE("xyz")], "n": n, "logprobs": logprobs}
    plain, whole = completion(world, **fields), completion(world, **fields, echo=True)
    parts = [{"text": "", "logprobs": None} for _ in range(2 * n)]
    for event in world.events("/v1/completions", {**ASK, **fields, "echo": True}):
        for choice in event["choices"]:
            part = parts[choice["index"]]
            part["text"] += choice["text"]
            if (told := choice["logprobs"]) is not None:
                before = part["logprobs"] or {name: [] for name in told}
                part["logprobs"] = {
                    k: None if v is None else before[k] + v for k, v in told.items()
                }
    for i, (choice, without, part) in enumerate(zip(whole["choices"], plain["choices"], parts)):
        prompt = ("a€b", "xyz")[i // n]
        assert choice["text"] == prompt + without["text"] == part["text"]
        if logprobs is None:
            assert choice["logprobs"] is part["logprobs"] is None
            continue
        told, num = choice["logprobs"], len(ENCODE(prompt))
        assert told == part["logprobs"]
        assert told["token_logprobs"][0] is None and len(told["tokens"]) == num + 4
        values = [world.engine.logprob(t) for t in ENCODE(prompt)[1:]]
        assert told["token_logprobs"][1:num] == pytest.approx(values)
        assert told["token_logprobs"][num:] == without["logprobs"]["token_logprobs"]
        assert told["text_offset"][num] == len(prompt) and told["text_offset"][0] == 0
        assert told["text_offset"] == sorted(told["text_offset"])
        if logprobs:
            assert told["top_logprobs"][0] is None
            assert all(1 <= len(top) <= 3 for top in told["top_logprobs"][1:])


def test_a_prompt_alone_is_scored_without_a_token(world):
    """As evaluation harnesses ask for the likelihood of a text."""
    body = completion(world, max_tokens=0, echo=True, logprobs=1)
    (choice,) = body["choices"]
    assert choice["text"] == "abcdef" and len(choice["logprobs"]["tokens"]) == 6
    assert body["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    events = world.events("/v1/completions", {**ASK, "max_tokens": 0, "echo": True})
    assert "".join(c["text"] for e in events for c in e["choices"]) == "abcdef"
    assert world.post("/v1/completions", {**ASK, "max_tokens": 0}).status == 400


def test_min_tokens_hold_off_stop_tokens(world):
    prompt = np.array(ENCODE("abcdef"))
    ids = completion(world, return_token_ids=True)["choices"][0]["token_ids"]
    ask = {"stop_token_ids": [ids[1]], "max_tokens": 8, "return_token_ids": True}
    assert completion(world, **ask)["choices"][0]["token_ids"] == ids[:2]
    held = completion(world, **ask, min_tokens=4)["choices"][0]
    assert len(held["token_ids"]) >= 4 and ids[1] not in held["token_ids"][:4]
    params = {"max_new_tokens": 8, "sampling_seed": 4, "ignore_eos": True}
    params |= {"stop_token_ids": [ids[1]], "min_new_tokens": 4}
    other = world.post("/generate", {"input_ids": prompt.tolist(), "sampling_params": params})
    assert other.body["output_ids"] == held["token_ids"]


def test_no_stop_string_is_found_in_the_text_of_the_least_tokens():
    tokenizer = ByteTokenizer()
    for num, told in ((0, "on"), (4, "one two thr"), (12, "one two three")):
        text = TextStream(Detokenizer(tokenizer), ("e t", "ee"), shows_stop=False, num_free=num)
        shown = [text.feed(token) for token in tokenizer.encode("one two three")]
        assert "".join(shown) + text.end() == told, num


def test_min_tokens_hold_off_stop_strings(scripted):
    scripted.say("one two three four")
    ask = {"prompt": "x", "max_tokens": 18, "stop": "e t"}
    texts = [
        scripted.post("/v1/completions", {**ask, **more}).body["choices"][0]["text"]
        for more in ({}, {"min_tokens": 5})
    ]
    assert texts == ["on", "one two three four"]


def test_what_comes_before_its_prompt_is_scored_waits(scripted):
    """The second choice is through before the first has scored the prompt of both."""
    done = []

    class Scores(FakeSampler):
        async def generate(self, request, on_tokens=None):
            if request.scores:
                while not done:
                    await asyncio.sleep(0)
                tokens, ones = request.tokens[1:], np.ones(len(request.tokens) - 1)
                on_tokens(NewTokens(tokens, -ones, -ones, 0, None, ones.astype(np.int32)))
            turn = await super().generate(request, on_tokens)
            done.append(request.scores)
            return turn

    sampler = Scores(context=64)
    prompt = np.array([9, 10, 11], np.int32)
    ask = Ask("a", (prompt,), Sampling(4), n=2, prompt_likely=0)

    async def events():
        api = scripted.api
        return [e async for e in complete(ask, api.served, sampler, Sessions(sampler, 4))]

    came = asyncio.run(events())
    assert isinstance(came[0], Scored) and came[0].logprobs == (-1.0, -1.0)
    assert done == [False, True] and sum(isinstance(e, End) for e in came) == 2


def test_a_salt_is_a_partition_of_the_prefix_cache(world):
    prompt = list(range(20, 90))
    for named, fields in (
        (None, {}),
        ("one", {"cache_salt": "one"}),
        ("two", {"cache_salt": "two"}),
    ):
        ask = {"prompt": prompt, **fields}
        told = [completion(world, **ask)["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert [one["cached_tokens"] > 0 for one in told] == [False, True], named


def test_the_house_format_has_no_options(world):
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert world.post("/v1/chat/completions", {**ask, "chat_template_kwargs": {}}).status == 200
    told = {"chat_template_kwargs": {"enable_thinking": False}}
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {**({"messages": ask["messages"]} if path == "/tokenize" else ask), **told}
        answer = world.post(path, body)
        assert answer.status == 400 and answer.body["error"]["param"] == "chat_template_kwargs"
        assert "'enable_thinking' is no option" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    "path, fields, param",
    [
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"min_tokens": 5}, "min_tokens"),
        ("/v1/completions", {"min_tokens": -1}, "min_tokens"),
        ("/v1/completions", {"cache_salt": ""}, "cache_salt"),
        ("/v1/completions", {"cache_salt": "x" * 129}, "cache_salt"),
        ("/v1/completions", {"chat_template_kwargs": {"a": True}}, "chat_template_kwargs"),
        ("/v1/completions", {"echo": 1}, "echo"),
        ("/v1/chat/completions", {"echo": True}, "echo"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"a": [1]}}, None),
    ],
)
def test_what_cannot_be_asked_for_is_named(world, path, fields, param):
    ask = (
        dict(ASK) if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    answer = world.post(path, {**ask, **fields})
    assert answer.status == 400
    assert param is None or answer.body["error"]["param"] == param


def test_a_sampler_that_scores_nothing_is_told_of(scripted):
    scripted.say("abc")
    answer = scripted.post("/v1/completions", {**ASK, "prompt_logprobs": 1})
    assert answer.status == 503 and "not scored" in answer.body["error"]["message"]
