"""The records that cross a process, as (body, arrays): JSON, and host arrays beside it.

Invariants: a record comes back equal, floats and NaN bits of arrays included; what another process says is checked
before it is a record: fields, types, dtypes, lengths, and of a Turn that its spans cover its tokens.
Must not: touch a device or a socket.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from kernels.kv import KVSpec
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

Arrays = tuple[np.ndarray, ...]
Wire = tuple[dict[str, Any], Arrays]

REQUEST_FIELDS = {
    "uid": str, "attempt": int, "turn": int, "temperature": float, "top_p": float, "top_k": int,
    "max_new_tokens": int, "seed": int, "tag": str, "priority": int, "min_version": int, "deadline_s": float,
    "token_index": int, "place": str, "min_new_tokens": int, "likely": bool, "scores": bool, "salt": str,
}  # fmt: skip
TURN_ARRAYS = {  # dtype, number of dimensions, whether it may be absent
    "prompt_tokens": (np.int32, 1, False),
    "tokens": (np.int32, 1, False),
    "logprobs": (np.float32, 1, False),
    "sampled_logprobs": (np.float32, 1, True),
    "context_mixed": (np.bool_, 1, False),
    "routing": (np.int16, 3, True),
    "support": (np.int32, 2, True),
}
PIECE_ARRAYS = {
    "tokens": (np.int32, 1, False),
    "logprobs": (np.float32, 1, False),
    "sampled_logprobs": (np.float32, 1, False),
    "ids": (np.int32, 2, True),
    "likely": (np.float32, 2, True),
    "ranks": (np.int32, 1, True),
}
OF_SAMPLED = ("logprobs", "sampled_logprobs", "context_mixed", "support")  # one a sampled token


class CodecError(ValueError):
    """What another process sent is not the record it should be."""


def request_to_wire(request: TurnRequest) -> Wire:
    body = {name: kind(getattr(request, name)) for name, kind in REQUEST_FIELDS.items()}
    body |= {
        "stop_token_ids": [int(i) for i in request.stop_token_ids],
        "stop": list(request.stop),
        "adapter": request.adapter,
    }
    return body, (np.asarray(request.tokens, np.int32),)


def request_from_wire(body: Any, arrays: Sequence[np.ndarray]) -> TurnRequest:
    """Raises: CodecError."""
    values = {name: _get(body, name, kind) for name, kind in REQUEST_FIELDS.items()}
    return TurnRequest(
        **values,
        tokens=_array("tokens", arrays[0] if arrays else None, np.int32, 1),
        stop_token_ids=tuple(_each(body, "stop_token_ids", int)),
        stop=tuple(_each(body, "stop", str)),
        adapter=_optional(body, "adapter", str),
    )


def turn_to_wire(turn: Turn) -> Wire:
    present = [name for name in TURN_ARRAYS if getattr(turn, name) is not None]
    body = {
        "arrays": present,
        "spans": [[int(s.start), int(s.end), int(s.version)] for s in turn.spans],
        "finish": turn.finish.value,
        "cached_prompt": int(turn.cached_prompt),
        "server": turn.server,
        "pool": turn.pool,
        "times_s": {name: float(value) for name, value in turn.times_s.items()},
    }
    arrays = tuple(np.asarray(getattr(turn, name), TURN_ARRAYS[name][0]) for name in present)
    return body, arrays


def turn_from_wire(body: Any, arrays: Sequence[np.ndarray]) -> Turn:
    """Raises: CodecError."""
    values = _named(body, arrays, TURN_ARRAYS)
    num = len(values["tokens"])
    for name in OF_SAMPLED:
        if values[name] is not None and len(values[name]) != num:
            raise CodecError(f"{name} has {len(values[name])} entries for {num} sampled tokens")
    return Turn(
        **values,
        spans=_spans(body, num),
        finish=_finish(body),
        cached_prompt=_get(body, "cached_prompt", int),
        server=_get(body, "server", str),
        pool=_get(body, "pool", str),
        times_s=_numbers(body, "times_s"),
    )


def piece_to_wire(piece: NewTokens) -> Wire:
    ids, likely = (None, None) if piece.likely is None else piece.likely
    given = {**vars(piece), "ids": ids, "likely": likely}
    present = [name for name in PIECE_ARRAYS if given[name] is not None]
    arrays = tuple(np.asarray(given[name], PIECE_ARRAYS[name][0]) for name in present)
    return {"arrays": present, "version": int(piece.version)}, arrays


def piece_from_wire(body: Any, arrays: Sequence[np.ndarray]) -> NewTokens:
    """Raises: CodecError."""
    values = _named(body, arrays, PIECE_ARRAYS)
    sizes = {len(array) for array in values.values() if array is not None}
    ids, likely = values.pop("ids"), values.pop("likely")
    shapes = {None if array is None else array.shape for array in (ids, likely)}
    if len(sizes) != 1 or 0 in sizes or len(shapes) != 1:
        raise CodecError(f"new tokens come with arrays of {sorted(sizes)} entries")
    best = None if ids is None or likely is None else (ids, likely)
    return NewTokens(**values, version=_get(body, "version", int), likely=best)


def error_to_wire(error: TurnError) -> dict[str, Any]:
    return {
        "kind": error.kind,
        "server": error.server,
        "detail": error.detail,
        "retryable": bool(error.retryable),
    }


def error_from_wire(body: Any) -> TurnError:
    """Raises: CodecError."""
    words = [_get(body, name, str) for name in ("kind", "server", "detail")]
    return TurnError(*words, retryable=_get(body, "retryable", bool))


def ack_to_wire(ack: Ack) -> dict[str, Any]:
    return {
        "server": ack.server,
        "version": int(ack.version),
        "block": int(ack.block),
        "pause_s": float(ack.pause_s),
    }


def ack_from_wire(body: Any) -> Ack:
    """Raises: CodecError."""
    kinds = {"server": str, "version": int, "block": int, "pause_s": float}
    return Ack(**{name: _get(body, name, kind) for name, kind in kinds.items()})


def digest_to_wire(digest: Digest) -> dict[str, Any]:
    return {"values": {name: [int(a), int(b)] for name, (a, b) in digest.values.items()}}


def digest_from_wire(body: Any) -> Digest:
    """Raises: CodecError."""
    values = {}
    for name, pair in _get(body, "values", dict).items():
        is_pair = isinstance(pair, list) and [type(n) for n in pair] == [int, int]
        if not is_pair or not all(0 <= n < 1 << 32 for n in pair):
            raise CodecError(f"the digest of {name!r:.80} is {pair!r:.80}, not two numbers of u32")
        values[name] = (pair[0], pair[1])
    return Digest(values)


def prefix_to_wire(prefix: Prefix) -> Wire:
    """Of the prefix's own pages: kv may hold those of others. Waits for the device."""
    num = prefix.spec.pages_of(prefix.num_tokens - prefix.start)
    mine = slice(prefix.first, prefix.first + num)
    body = {
        "start": int(prefix.start),
        "num_tokens": int(prefix.num_tokens),
        "version": int(prefix.version),
        "adapter": prefix.adapter,
        "tokens_sha": prefix.tokens_sha,
        "spec": {f.name: getattr(prefix.spec, f.name) for f in fields(KVSpec)},
        "has_routes": prefix.routes is not None,
    }
    arrays = [np.asarray(array)[mine] for pair in prefix.kv for array in pair]
    if prefix.routes is not None:
        arrays.append(np.asarray(prefix.routes))
    return body, tuple(arrays)


def prefix_from_wire(body: Any, arrays: Sequence[np.ndarray]) -> Prefix:
    """With host arrays as kv, of its own pages only. Raises: CodecError."""
    spec = _spec(_get(body, "spec", dict))
    start, num_tokens = _get(body, "start", int), _get(body, "num_tokens", int)
    has_routes = _get(body, "has_routes", bool)
    if len(arrays) != 2 * spec.num_layers + has_routes or not 0 <= start < num_tokens:
        raise CodecError(f"{len(arrays)} arrays for tokens [{start}, {num_tokens}) of {spec}")
    if start % spec.page_size:
        raise CodecError(f"a prefix starts at token {start}, within a page of {spec.page_size}")
    routes = arrays[-1] if has_routes else None
    kv = arrays[: 2 * spec.num_layers]
    want = (spec.pages_of(num_tokens - start), *spec.shape[1:])
    for array in kv:
        if array.shape != want or array.dtype != kv[0].dtype:
            raise CodecError(f"pages of {array.dtype}{list(array.shape)}, expected {list(want)}")
    return Prefix(
        kv=tuple(zip(kv[::2], kv[1::2])),
        first=0,
        start=start,
        num_tokens=num_tokens,
        version=_get(body, "version", int),
        adapter=_optional(body, "adapter", str),
        tokens_sha=_get(body, "tokens_sha", str),
        spec=spec,
        routes=routes,
    )


def stats_from_wire(body: Any) -> dict[str, float]:
    """Counters and gauges by name. Raises: CodecError."""
    return _numbers(body, "stats")


def _named(
    body: Any, arrays: Sequence[np.ndarray], table: Mapping[str, tuple[Any, int, bool]]
) -> dict[str, Any]:
    """The arrays by the names that came with them; None for one that may be absent, and is."""
    present = _each(body, "arrays", str)
    if len(present) != len(arrays) or len(set(present)) != len(present):
        raise CodecError(f"{len(arrays)} arrays came for the names {present!r:.200}")
    sent = dict(zip(present, arrays))
    if unknown := sorted(set(sent) - set(table)):
        raise CodecError(f"there is no array {unknown[0]!r:.40} in it")
    return {
        name: None
        if sent.get(name) is None and is_optional
        else _array(name, sent.get(name), dtype, ndim)
        for name, (dtype, ndim, is_optional) in table.items()
    }


def _get(body: Any, name: str, kind: type) -> Any:
    value = body.get(name) if isinstance(body, Mapping) else None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise CodecError(f"{name} is {value!r:.80}, expected {kind.__name__}")
    return value


def _optional(body: Any, name: str, kind: type) -> Any:
    return None if body.get(name) is None else _get(body, name, kind)


def _each(body: Any, name: str, kind: type) -> list[Any]:
    values = _get(body, name, list)
    for value in values:
        if type(value) is not kind:
            raise CodecError(f"{name} holds {value!r:.80}, expected {kind.__name__}")
    return values


def _numbers(body: Any, name: str) -> dict[str, float]:
    values = _get(body, name, dict)
    return {key: _get(values, key, float) for key in values}


def _array(name: str, array: np.ndarray | None, dtype: Any, ndim: int) -> np.ndarray:
    if array is None or array.dtype != dtype or array.ndim != ndim:
        what = "absent" if array is None else f"{array.dtype}{list(array.shape)}"
        raise CodecError(f"{name} is {what}, expected {np.dtype(dtype)} of {ndim} dimensions")
    return array


def _spans(body: Any, num_tokens: int) -> tuple[VersionSpan, ...]:
    spans, end = [], 0
    for item in _get(body, "spans", list):
        if not isinstance(item, list) or [type(n) for n in item] != [int] * 3:
            raise CodecError(f"{item!r:.80} is no version span")
        span = VersionSpan(*item)
        if span.start != end or span.end <= span.start:
            raise CodecError(f"a version span is [{span.start}, {span.end}) behind token {end}")
        spans.append(span)
        end = span.end
    if end != num_tokens:
        raise CodecError(f"version spans cover {end} of {num_tokens} sampled tokens")
    return tuple(spans)


def _finish(body: Any) -> FinishReason:
    word = _get(body, "finish", str)
    try:
        return FinishReason(word)
    except ValueError:
        raise CodecError(f"finish is {word!r:.40}") from None


def _spec(values: Mapping[str, Any]) -> KVSpec:
    kinds = {f.name: str if f.name in ("dtype", "layout") else int for f in fields(KVSpec)}
    known = {name: _get(values, name, kind) for name, kind in kinds.items()}
    if any(kind is int and known[name] < 1 for name, kind in kinds.items()):
        raise CodecError(f"{values!r:.200} is no KV spec")
    try:
        return KVSpec(**known)
    except ValueError as error:
        raise CodecError(str(error)) from None
