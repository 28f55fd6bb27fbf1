"""Messages cross a socket bit for bit; what is malformed is refused by itself, and what is no frame ends the stream."""

import itertools
import json
import socket
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.remote import framing
from rl_jax.remote.framing import DTYPES, FramingError, Message, Reader, Refused, Unsendable

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=20)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@st.composite
def arrays(draw):
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    num_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=num_bytes, max_size=num_bytes)), np.uint8)
    raw = raw % 2 if dtype == np.bool_ else raw
    return raw.view(dtype).reshape(shape)


def written(messages) -> bytes:
    return b"".join(bytes(head) + bytes(payload) for head, payload in messages)


def message(number, envelope, body, given=()):
    return framing.frames(
        number, envelope, framing.encode_json(body), framing.plain_arrays(list(given))
    )


def read_all(raw: bytes) -> list:
    """What a Reader says of these bytes, and the error that ended it, if any."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=lambda: (theirs.sendall(raw), theirs.close()))
        writer.start()
        reader, out = Reader(ours), []
        try:
            while (item := reader.read()) is not None:
                out.append(item)
        except FramingError as error:
            out.append(error)
            ours.close()
        writer.join(10)
    return out


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Down to the bits of a NaN."""
    return (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes())


@settings(deadline=None, max_examples=60)
@given(json_values, st.lists(arrays(), max_size=4))
def test_any_message_comes_back_bit_for_bit(body, given_arrays):
    (got,) = read_all(written(message(7, {"k": "call"}, body, given_arrays)))
    assert got.envelope == {"k": "call"}
    assert json.dumps(got.body) == json.dumps(body)
    assert all(itertools.starmap(same, zip(got.arrays, given_arrays, strict=True)))


def test_surrogates_nan_bits_and_other_byte_orders_arrive():
    nan = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)
    big = np.arange(3, dtype=">i4")
    (got,) = read_all(written(message(1, {}, "a\ud835b", [nan, big, big[::2]])))
    assert got.body == "a\ud835b"
    assert got.arrays[0].view(np.uint32).tolist() == [0x7FC00001, 0xFFC12345]
    assert [a.tolist() for a in got.arrays[1:]] == [[0, 1, 2], [0, 2]]


def test_large_arrays_are_cut_and_frames_of_messages_may_alternate():
    large = np.arange(framing.CHUNK, dtype=np.int32)  # four chunks
    one, two = list(message(1, {"n": 1}, None, [large])), list(message(2, {"n": 2}, None, [large]))
    assert len(one) == 5 and max(len(payload) for _, payload in one) == framing.CHUNK
    mixed = [frame for pair in zip(one, two) for frame in pair]
    between = message(3, {"n": 3}, "small")
    got = read_all(written([*mixed[:4], *between, *mixed[4:]]))
    assert [item.envelope["n"] for item in got] == [3, 1, 2]
    assert all(np.array_equal(item.arrays[0], large) for item in got[1:])


@pytest.mark.parametrize(
    ("body", "given_arrays"),
    [
        (float("nan"), []),
        ({"a": object()}, []),
        (None, [np.array(["text"])]),
        (None, [np.array([object()])]),
        (None, [np.zeros(2, np.complex64)]),
        ("x" * framing.MAX_HEADER, []),
    ],
)
def test_what_is_no_message_is_refused_before_it_is_sent(body, given_arrays):
    with pytest.raises(Unsendable):
        list(message(1, {}, body, given_arrays))


def header(text: bytes) -> bytes:
    return framing.frame_head(framing.HEADER, 1, len(text), zlib.crc32(text)) + text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe\n1",
        b"[{}]\nnull",
        b'[{}, {"a": 1}]\nnull',
        b"[[], []]\nnull",
        b'[{}, [["object", [1]]]]\nnull',
        b'[{}, [["int32", [-1]]]]\nnull',
        b'[{}, [["int32", [true]]]]\nnull',
        b'[{}, [["int32", [1000000000000000]]]]\nnull',
        b'[{}, [["int8", [16000000000]], ["int8", [16000000000]]]]\nnull',
        b'[{}, [["int32"]]]\nnull',
        b"[{}, []]\nNaN",
        b"[{}, []]\n{",
        b"[{}, []]\n" + b"[" * 100_000,
    ],
)
def test_malformed_header_is_one_refused_message(text):
    after = written(message(2, {"n": 2}, "fine", [np.ones(3)]))
    refused, fine = read_all(header(text) + after)
    assert isinstance(refused, Refused) and refused.why
    assert isinstance(fine, Message) and fine.body == "fine"


def test_flipped_bit_refuses_its_message_and_no_other():
    raw = bytearray(written(message(1, {"k": "call", "id": 5}, None, [np.zeros(100), np.ones(9)])))
    raw[-300] ^= 1  # within the first array
    after = written(message(2, {"n": 2}, "fine"))
    refused, fine = read_all(bytes(raw) + after)
    assert refused.envelope == {"k": "call", "id": 5} and "checksum" in refused.why
    assert fine.body == "fine"
    raw = bytearray(written(message(1, {}, "text")))
    raw[-1] ^= 1
    refused, fine = read_all(bytes(raw) + after)
    assert "checksum of a header" in refused.why and fine.body == "fine"


def test_too_much_data_and_a_cancelled_message_are_told_apart_from_the_next():
    frames = list(message(1, {"id": 1}, None, [np.zeros(8, np.uint8)]))
    longer = list(message(1, {}, None, [np.zeros(9, np.uint8)]))[1]
    after = written(message(2, {"n": 2}, "fine"))
    refused, fine = read_all(written([frames[0], longer]) + after)
    assert "more data" in refused.why and fine.body == "fine"
    cancelled = [
        frame
        for number in range(framing.MAX_OPEN + 1)  # one more than may be under way
        for frame in (
            next(message(number, {}, None, [np.zeros(8)])),
            framing.cancel_frame(number),
        )
    ]
    (fine,) = read_all(written([*cancelled, *message(2, {}, "fine", [np.zeros(8)])]))
    assert fine.body == "fine"


def test_more_messages_under_way_than_may_be_are_refused():
    heads = [next(message(i, {"id": i}, None, [np.zeros(8)])) for i in range(framing.MAX_OPEN + 1)]
    (refused,) = read_all(written(heads))
    assert refused.envelope == {"id": framing.MAX_OPEN} and "on their way" in refused.why


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=1, max_size=200))
def test_garbage_ends_the_stream_with_a_typed_error(garbage):
    before = written(message(1, {}, "fine"))
    fine, *rest = read_all(before + garbage)
    assert fine.body == "fine"
    assert [type(item) for item in rest] == [FramingError]


def test_frame_beyond_its_limit_is_not_read():
    for kind, size in ((1, framing.MAX_HEADER + 1), (2, framing.CHUNK + 1), (3, 1), (9, 0)):
        (error,) = read_all(framing.frame_head(kind, 1, size, 0) + b"x" * 10)
        assert isinstance(error, FramingError) and "no frame begins" in str(error), kind


def test_flipped_byte_anywhere_is_found():
    """In a head it ends the stream: what it says of size and message cannot be believed."""
    clean = written(message(1, {"k": "call", "id": 5}, "text", [np.arange(3)]))
    for at in range(len(clean)):
        raw = bytearray(clean)
        raw[at] ^= 0x10
        got = read_all(bytes(raw))
        assert not any(isinstance(item, Message) for item in got), at
        assert [type(item) for item in got] in (
            [Refused],
            [Refused, FramingError],
            [FramingError],
        ), at
