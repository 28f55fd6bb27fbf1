"""One conversion, from checks to a directory with its name.

Life: 1 DST is free, SRC is opened and fits a model, the disk has room. 2 Everything is written into a hidden directory
beside DST, a shard at a time. 3 With verify it is read back there. 4 One rename. Invariant: DST is absent (or empty, as
it was) or complete. Must not: know formats (sources.py).
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from rl_jax.checkpoint import CheckpointError
from rl_jax.console import say
from rl_jax.disk import existing
from rl_jax.learner.attention import plain_attention
from rl_jax.models import hf
from rl_jax.models.hf_config import CONFIG
from rl_jax.models.hf_files import (
    SUMS,
    WeightsError,
    cast,
    check_digests,
    num_bytes,
    weight_files,
    write_digests,
    write_json,
    write_weights,
)
from rl_jax.models.model import Model
from rl_jax.tools.sources import Origin, SourceError, open_source

ERRORS = (SourceError, WeightsError, CheckpointError)
TEXT_BYTES = 64 << 20  # more than any tokenizer takes
NOTE_S = 2.0  # between two lines of progress
NUM_TOKENS = 8  # of the forward that is compared

Specs = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def exit_code(error: BaseException) -> int:
    if isinstance(error, (WeightsError, CheckpointError)):
        return 3
    return 7 if isinstance(error, OSError) else 2


def convert(
    src: Path,
    dst: Path,
    *,
    dtype: str = "",
    verify: bool = False,
    files_from: Path | None = None,
    more: Mapping[str, bytes] = MappingProxyType({}),
    max_shard_bytes: int = hf.MAX_SHARD_BYTES,
) -> None:
    """more: files to put beside the others, by name.

    Raises: one of ERRORS, RunDirError or OSError, one line; DST is then as it was.
    """
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise SourceError(f"{dst} is not empty; name a new directory")
    start = time.monotonic()
    origin = open_source(src, files_from)
    specs = {n: (np.dtype(dtype or own), shape) for n, (own, shape) in origin.specs.items()}
    total = sum(num_bytes(*spec) for spec in specs.values())
    say(f"{src}: {origin.what}; {len(specs)} tensors, {total / 1e9:.2f} GB to write into {dst}")
    _check_disk(dst, total + TEXT_BYTES)
    dst.parent.mkdir(parents=True, exist_ok=True)
    temporary = dst.parent / f".{dst.name}.{os.getpid()}"
    temporary.mkdir()
    try:
        digests = _write(origin, specs, temporary, max_shard_bytes)
        for name, content in more.items():
            (temporary / name).write_bytes(content)
        write_digests(temporary)
        if verify:
            _verify(origin, specs, temporary, digests)
        os.rename(temporary, dst)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    say(f"{dst} is complete, {time.monotonic() - start:.1f} s")


def _check_disk(dst: Path, need: int) -> None:
    free = shutil.disk_usage(existing(dst)).free
    if free < need:
        raise SourceError(
            f"{dst} needs {need / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free; free some, name another"
            " place, or use --dtype=bfloat16"
        )


def _write(origin: Origin, specs: Specs, directory: Path, max_shard_bytes: int) -> dict[str, str]:
    """Weights, config and what goes along; the digest of each tensor as it was given to the writer."""
    digests: dict[str, str] = {}
    written, last = 0, time.monotonic()

    def seen(name: str, array: np.ndarray) -> None:
        nonlocal written, last
        digests[name] = _digest(array)
        written += array.nbytes
        if time.monotonic() - last > NOTE_S:
            last = time.monotonic()
            say(f"  {len(digests)} of {len(specs)} tensors, {written / 1e9:.2f} GB")

    write_weights(directory, specs, _cast(origin, specs), max_shard_bytes, seen)
    first = next(iter(specs.values()))[0]  # the embedding's, where they differ
    write_json(directory / CONFIG, origin.config(first.name))
    names = origin.write_files(directory)
    say(f"  with {', '.join(names)}" if names else "  no tokenizer: that of the run is code")
    return digests


def _cast(origin: Origin, specs: Specs) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in origin.tensors():
        yield name, cast(origin.path, name, array, specs[name][0])


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8)).hexdigest()


# --- reading it back ------------------------------------------------------------------------------


def _verify(origin: Origin, specs: Specs, directory: Path, digests: Mapping[str, str]) -> None:
    """Files against SHA256SUMS, tensors against what was given to the writer, logits against the source's.

    Raises: WeightsError.
    """
    check_digests(directory, [p.name for p in directory.iterdir() if p.name != SUMS])
    found: dict[str, str] = {}
    for file in weight_files(directory):
        found |= {name: _digest(array) for name, array in load_file(directory / file).items()}
    odd = [name for name in {**digests, **found} if digests.get(name) != found.get(name)]
    if odd:
        raise WeightsError(
            f"{len(odd)} tensors read back differ from what was written, first {odd[0]}; is the disk sound?"
        )
    say(f"  verified: {len(found)} tensors read back byte for byte")
    model = origin.model
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    loaded = hf.load(directory, model, dict.fromkeys(model.abstract, place), np.float32)
    ours = _logits(model, loaded)
    del loaded
    theirs = _logits(model, hf.incoming(model, _cast(origin, specs)))
    if not np.array_equal(ours, theirs):
        gap = np.abs(ours - theirs).max()
        raise WeightsError(f"logits of what was written differ from the source's by up to {gap:.3g}")  # fmt: skip
    rounding = ""
    if any(dtype != origin.specs[name][0] for name, (dtype, _) in specs.items()):
        gap = np.abs(ours - _logits(model, hf.incoming(model, origin.tensors()))).max()
        rounding = f"; rounding moved them by up to {gap:.3g}"
    say(f"  verified: logits of {NUM_TOKENS} tokens are equal to the source's{rounding}")


def _logits(model: Model, params: Mapping[str, jax.Array]) -> np.ndarray:
    """f32[NUM_TOKENS, V] of ids from all over the vocabulary."""
    tokens = jnp.linspace(0, model.vocab_size - 1, NUM_TOKENS, dtype=jnp.int32)[None]
    positions, segments = jnp.arange(NUM_TOKENS)[None], jnp.ones((1, NUM_TOKENS), jnp.int32)
    attend = plain_attention(model.settings, positions, segments)
    forward = jax.jit(
        lambda params: model.logits(params, model.hidden(params, tokens, positions, attend))
    )
    return np.asarray(forward({n: jnp.asarray(a, jnp.float32) for n, a in params.items()}))[0]
