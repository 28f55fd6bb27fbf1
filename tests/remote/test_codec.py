"""Every record that crosses a process comes back equal; what is no record is a CodecError."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv import KVSpec
from rl_jax.remote import codec
from rl_jax.remote.codec import CodecError
from rl_jax.remote.framing import encode_json
from rl_jax.types import (
    Ack,
    Digest,
    FinishReason,
    NewTokens,
    Prefix,
    Turn,
    TurnError,
    TurnRequest,
    VersionSpan,
)

words, ints = st.text(max_size=12), st.integers(-(2**31), 2**31 - 1)
seconds = st.floats(allow_nan=False, allow_infinity=False)


def through_json(body):
    return json.loads(encode_json(body))


def equal(got, want) -> bool:
    """Field by field; arrays down to the bits of a NaN."""
    for field in fields(want):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if isinstance(b, np.ndarray):
            if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True


def bits(n: int, dtype, seed: int) -> np.ndarray:
    """n elements of any bits, NaNs among them."""
    raw = np.random.default_rng(seed).integers(0, 256, n * np.dtype(dtype).itemsize, np.uint8)
    return (raw % 2 if dtype == np.bool_ else raw).view(dtype)


@st.composite
def turns(draw):
    P, N, seed = draw(st.integers(0, 5)), draw(st.integers(0, 6)), draw(st.integers(0, 99))
    cuts = sorted({0, N, *draw(st.lists(st.integers(0, N), max_size=2))})
    spans = [VersionSpan(a, b, draw(ints)) for a, b in zip(cuts, cuts[1:])]
    maybe = lambda array: array if draw(st.booleans()) else None
    return Turn(
        prompt_tokens=bits(P, np.int32, seed),
        tokens=bits(N, np.int32, seed),
        logprobs=bits(N, np.float32, seed),
        sampled_logprobs=maybe(bits(N, np.float32, seed + 1)),
        spans=tuple(spans),
        context_mixed=bits(N, np.bool_, seed),
        finish=draw(st.sampled_from(FinishReason)),
        cached_prompt=draw(ints),
        server=draw(words),
        pool=draw(words),
        times_s=draw(st.dictionaries(words, seconds, max_size=4)),
        routing=maybe(bits((P + N) * 6, np.int16, seed).reshape(P + N, 2, 3)),
        support=maybe(bits(N * 2, np.int32, seed).reshape(N, 2)),
    )


@st.composite
def requests(draw):
    values = {"str": words, "int": ints, "float": seconds, "bool": st.booleans()}
    chosen = {name: draw(values[kind.__name__]) for name, kind in codec.REQUEST_FIELDS.items()}
    chosen["seed"] = draw(st.integers(0, 2**64 - 1))
    return TurnRequest(
        **chosen,
        tokens=bits(draw(st.integers(0, 6)), np.int32, draw(st.integers(0, 99))),
        stop_token_ids=tuple(draw(st.lists(ints, max_size=3))),
        stop=tuple(draw(st.lists(words, max_size=3))),
        adapter=draw(st.none() | words),
    )


@settings(deadline=None)
@given(requests())
def test_request_comes_back(request_):
    body, arrays = codec.request_to_wire(request_)
    assert equal(codec.request_from_wire(through_json(body), arrays), request_)
    assert {*codec.REQUEST_FIELDS, "tokens", "stop_token_ids", "stop", "adapter"} == {
        field.name for field in fields(TurnRequest)
    }


@settings(deadline=None)
@given(st.integers(1, 6), st.booleans(), st.booleans(), ints)
def test_new_tokens_come_back(num, has_likely, is_prompt, version):
    logprobs = bits(num, np.float32, 1)
    best = (
        bits(num * 3, np.int32, 2).reshape(num, 3),
        bits(num * 3, np.float32, 3).reshape(num, 3),
    )
    ranks = bits(num, np.int32, 4) if is_prompt else None
    piece = NewTokens(bits(num, np.int32, 5), logprobs, logprobs, version, None, ranks)
    piece = replace(piece, likely=best if has_likely else None)
    body, arrays = codec.piece_to_wire(piece)
    got = codec.piece_from_wire(through_json(body), arrays)
    assert equal(replace(got, likely=None), replace(piece, likely=None))
    assert (got.likely is None) == (not has_likely)
    if got.likely is not None:
        assert [a.tobytes() for a in got.likely] == [a.tobytes() for a in best]


@pytest.mark.parametrize("cut", [["tokens"], ["likely"], ["ids", "logprobs"], ["version"]])
def test_what_are_no_new_tokens_is_refused(cut):
    ones = np.ones(3, np.float32)
    best = (np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32))
    body, arrays = codec.piece_to_wire(NewTokens(np.zeros(3, np.int32), ones, ones, 1, best))
    kept = [i for i, name in enumerate(body["arrays"]) if name not in cut]
    body = {"arrays": [body["arrays"][i] for i in kept], "version": "1" if "version" in cut else 1}
    with pytest.raises(CodecError):
        codec.piece_from_wire(body, [arrays[i] for i in kept])
    with pytest.raises(CodecError):
        names = {"arrays": ["tokens", "logprobs", "sampled_logprobs"], "version": 1}
        codec.piece_from_wire(names, [np.zeros(3, np.int32), ones, ones[:2]])


@settings(deadline=None)
@given(turns())
def test_turn_comes_back(turn):
    body, arrays = codec.turn_to_wire(turn)
    assert equal(codec.turn_from_wire(through_json(body), arrays), turn)


@settings(deadline=None)
@given(words, words, words, st.booleans())
def test_turn_error_comes_back(kind, server, detail, retryable):
    body = through_json(codec.error_to_wire(TurnError(kind, server, detail, retryable)))
    got = codec.error_from_wire(body)
    assert vars(got) == vars(TurnError(kind, server, detail, retryable))


@settings(deadline=None)
@given(
    words, ints, ints, seconds, st.dictionaries(words, st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
)
def test_ack_and_digest_come_back(server, version, block, pause_s, values):
    ack, digest = Ack(server, version, block, pause_s), Digest(values)
    assert codec.ack_from_wire(through_json(codec.ack_to_wire(ack))) == ack
    assert codec.digest_from_wire(through_json(codec.digest_to_wire(digest))) == digest


SPEC = KVSpec(2, 1, 3, 4, 64, "float32")


def prefix(start=4, num_tokens=13, first=2, dtype=np.float32) -> Prefix:
    """The KV of tokens [start, num_tokens) at pages `first` and after of shared arrays."""
    pages = lambda seed: bits(8 * 4 * 3, dtype, seed).reshape(8, 4, 1, 3)
    kv = tuple((pages(2 * layer), pages(2 * layer + 1)) for layer in range(2))
    return Prefix(kv, first, start, num_tokens, 5, None, "sha", SPEC)


def test_prefix_comes_back_as_its_own_pages():
    sent = prefix()
    body, arrays = codec.prefix_to_wire(sent)
    got = codec.prefix_from_wire(through_json(body), arrays)
    assert replace(got, kv=(), first=2) == replace(sent, kv=())
    for mine, theirs in zip(got.kv, sent.kv, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.tobytes() == b[2:5].tobytes() and a.shape == (3, 4, 1, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokens": np.zeros(3, np.int64)}, "tokens is int64"),
        ({"logprobs": np.zeros(2, np.float32)}, "logprobs has 2 entries for 3"),
        ({"spans": (VersionSpan(0, 2, 1),)}, "cover 2 of 3"),
        ({"spans": (VersionSpan(1, 3, 1),)}, r"is \[1, 3\) behind token 0"),
        ({"finish": None}, "finish"),
        ({"times_s": {"queue": float("inf")}}, "queue is inf"),
    ],
)
def test_what_is_no_turn_is_refused(change, text):
    turn = Turn(
        np.zeros(1, np.int32), np.zeros(3, np.int32), np.zeros(3, np.float32), None,
        (VersionSpan(0, 3, 1),), np.zeros(3, bool), FinishReason.EOS, 0, "s", "p", {},
    )  # fmt: skip
    body, arrays = codec.turn_to_wire(turn)
    for name, value in change.items():
        if name == "spans":
            body["spans"] = [[s.start, s.end, s.version] for s in value]
        elif name == "finish":
            body["finish"] = "done"
        elif name == "times_s":
            body["times_s"] = value
        else:
            arrays = tuple(value if kept == name else a for kept, a in zip(body["arrays"], arrays))
    with pytest.raises(CodecError, match=text):
        codec.turn_from_wire(body, arrays)


READERS = {
    "request": lambda body: codec.request_from_wire(body, ()),
    "turn": lambda body: codec.turn_from_wire(body, ()),
    "error": codec.error_from_wire,
    "ack": codec.ack_from_wire,
    "digest": codec.digest_from_wire,
    "prefix": lambda body: codec.prefix_from_wire(body, ()),
    "stats": codec.stats_from_wire,
}


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(READERS)), st.data())
def test_any_other_json_is_a_codec_error(name, data):
    leaf = st.none() | st.booleans() | ints | words
    anything = st.recursive(
        leaf,
        lambda x: st.lists(x, max_size=3) | st.dictionaries(words, x, max_size=3),
        max_leaves=9,
    )
    with pytest.raises(CodecError):
        READERS[name](data.draw(anything))


def test_prefix_with_pages_that_do_not_fit_its_tokens_is_refused():
    body, arrays = codec.prefix_to_wire(prefix())
    for changed, given_arrays in (
        ({}, arrays[:-1]),
        ({"num_tokens": 40}, arrays),
        ({"start": 3}, arrays),
        ({"spec": {**body["spec"], "layout": "other"}}, arrays),
        ({"spec": {**body["spec"], "page_size": 0}}, arrays),
    ):
        with pytest.raises(CodecError):
            codec.prefix_from_wire({**body, **changed}, given_arrays)
