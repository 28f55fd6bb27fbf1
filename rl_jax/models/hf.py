"""Weights of a Hugging Face directory <-> Params.

Owns: TOP, LAYER and POST_NORMS, the one table of names and layouts; `load`, which puts each device's slice of each
tensor on that device, and `save`.
Invariants: a value is copied, transposed and rounded, nothing else, so that a round trip in one dtype gives the same
bytes. A tied model is written without lm_head; one that comes with an lm_head must have the embedding's. Names, shapes
and dtypes are all checked before the first value is read.
Life of a load: 1 headers against the model. 2 digests of the files, where there is a SHA256SUMS. 3 tensor by tensor:
each addressable device's slice is read, cast, transposed, and on the device before the next is read.
Must not: read config.json (hf_config.py), or know meshes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rl_jax.models import hf_config
from rl_jax.models.decoder import build_model
from rl_jax.models.hf_files import (
    DTYPES,
    INDEX,
    MAX_SHARD_BYTES,
    Weights,
    WeightsError,
    cast,
    check_digests,
    copy_beside,
    some,
    write_digests,
    write_json,
    write_weights,
)
from rl_jax.models.model import Model, Params
from rl_jax.settings import ModelSettings

Index = tuple[slice, ...]
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
CHECKED_ROWS = 4096  # of a head and its embedding, compared at a time


@dataclass(frozen=True)
class Place:
    """Where one of our weights stands in a file."""

    name: str
    axes: tuple[tuple[int, ...], ...]  # for each axis of the file, the axes of ours that it joins

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(math.prod(ours[d] for d in joined) for joined in self.axes)

    def outgoing(self, array: np.ndarray) -> np.ndarray:
        """Ours as the file has it."""
        order = [d for joined in self.axes for d in joined]
        return array.transpose(order).reshape(self.shape(array.shape))

    def incoming(
        self, shape: tuple[int, ...], index: Index, read: Callable[[Index], np.ndarray]
    ) -> np.ndarray:
        """Ours[index], of fresh memory. shape: of the whole of ours; read: a slice of the file's."""
        bounds = [range(*part.indices(n)) for part, n in zip(index, shape, strict=True)]
        outer, sizes, inner = [], [], []
        for joined in self.axes:
            first, *rest = joined
            stride = math.prod(shape[d] for d in rest)
            outer.append(slice(bounds[first].start * stride, bounds[first].stop * stride))
            sizes += [len(bounds[first]), *(shape[d] for d in rest)]
            inner += [slice(None), *(slice(bounds[d].start, bounds[d].stop) for d in rest)]
        block = read(tuple(outer)).reshape(sizes)[tuple(inner)]
        order = [d for joined in self.axes for d in joined]
        return np.ascontiguousarray(block.transpose(np.argsort(order)))


_VECTOR, _TABLE = ((0,),), ((0,), (1,))
_MATRIX = ((1,), (0,))  # [in, out] of ours, [out, in] there
_HEADS = ((1, 2), (0,))  # [D, heads, Dh] of ours, [heads x Dh, D] there

TOP = {
    "embed": Place(EMBED, _TABLE),
    "final_norm.scale": Place("model.norm.weight", _VECTOR),
    "unembed": Place(HEAD, _MATRIX),
}
# Below "layers.N." of ours and "model.layers.N." there. A family lacks those that its settings say; none has others.
LAYER = {
    "attention_norm.scale": Place("input_layernorm.weight", _VECTOR),
    "attention.query": Place("self_attn.q_proj.weight", _HEADS),
    "attention.key": Place("self_attn.k_proj.weight", _HEADS),
    "attention.value": Place("self_attn.v_proj.weight", _HEADS),
    "attention.query_bias": Place("self_attn.q_proj.bias", ((0, 1),)),
    "attention.key_bias": Place("self_attn.k_proj.bias", ((0, 1),)),
    "attention.value_bias": Place("self_attn.v_proj.bias", ((0, 1),)),
    "attention.query_norm.scale": Place("self_attn.q_norm.weight", _VECTOR),
    "attention.key_norm.scale": Place("self_attn.k_norm.weight", _VECTOR),
    "attention.out": Place("self_attn.o_proj.weight", ((2,), (0, 1))),
    "mlp_norm.scale": Place("post_attention_layernorm.weight", _VECTOR),
    "mlp.gate": Place("mlp.gate_proj.weight", _MATRIX),
    "mlp.up": Place("mlp.up_proj.weight", _MATRIX),
    "mlp.down": Place("mlp.down_proj.weight", _MATRIX),
}
# With post_norms (Gemma), where "post_attention_layernorm" is behind the attention.
POST_NORMS = {
    "attention_post_norm.scale": Place("post_attention_layernorm.weight", _VECTOR),
    "mlp_norm.scale": Place("pre_feedforward_layernorm.weight", _VECTOR),
    "mlp_post_norm.scale": Place("post_feedforward_layernorm.weight", _VECTOR),
}

# A model for text and images: its text model's names, and what stands beside it.
TEXT_MODEL = (("model.language_model.", "model."), ("language_model.", ""))
BESIDE_TEXT = (
    "model.vision_tower.",
    "vision_tower.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
)
OLD_BUFFER = ".rotary_emb.inv_freq"  # that old Llama files hold; rope needs none


def places(model: Model) -> dict[str, Place]:
    """Our name of each weight -> where it stands, in the order in which files are written."""
    table = {**LAYER, **(POST_NORMS if model.settings.post_norms else {})}
    found = {"embed": TOP["embed"]}
    for name in model.abstract:
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            place = table[rest]
            found[name] = Place(f"model.layers.{number}.{place.name}", place.axes)
        else:
            found[name] = TOP[name]
    return found


def specs(model: Model, dtype: Any = None) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """File's name -> dtype (None: the model's own) and shape, of all that a directory of this model holds."""
    return {
        place.name: (np.dtype(dtype or model.abstract[n].dtype), place.shape(model.abstract[n].shape))
        for n, place in places(model).items()
    }  # fmt: skip


class Source:
    """A directory's weights, found to be this model's; a context manager. Raises: WeightsError."""

    def __init__(self, directory: Path | str, model: Model, skips_head: bool = False):
        """skips_head: the model has no head where the directory's has one."""
        self.model, self._places = model, places(model)
        self.weights = Weights(directory)
        try:
            self._actual = matched(self.weights, model)
            if HEAD in self._actual and "unembed" not in model.abstract and not skips_head:
                self._check_head(self._actual)
        except BaseException:
            self.weights.close()
            raise

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *error: object) -> None:
        self.weights.close()

    def specs(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """As the function `specs`, in the dtypes of the files."""
        found = {p.name: self.weights.tensors[self._actual[p.name]] for p in self._places.values()}
        return {n: (DTYPES[tensor.dtype], tensor.shape) for n, tensor in found.items()}

    def ours(self, name: str, index: Index, dtype: Any) -> np.ndarray:
        """Params[name][index]."""
        actual = self._actual[self._places[name].name]
        read = lambda part: self._read(actual, part, dtype)
        return self._places[name].incoming(self.model.abstract[name].shape, index, read)

    def theirs(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, tensor) of each, as it is, in the order of `specs`."""
        for place in self._places.values():
            yield place.name, self._read(self._actual[place.name])

    def _read(self, actual: str, part: Index = (), dtype: Any = None) -> np.ndarray:
        """A slice of a file's tensor, in a dtype (None: its own), of finite values only."""
        array = self.weights.read(actual, part)
        return cast(self.weights.path_of(actual), actual, array, dtype or array.dtype)

    def _check_head(self, actual: Mapping[str, str]) -> None:
        """An lm_head beside a tied embedding is the embedding."""
        shapes = [self.weights.tensors[actual[n]].shape for n in (HEAD, EMBED)]
        is_same, (rows, width) = shapes[0] == shapes[1], shapes[1]
        for start in range(0, rows if is_same else 0, CHECKED_ROWS):
            part = (slice(start, min(start + CHECKED_ROWS, rows)), slice(0, width))
            head, embed = (self.weights.read(actual[n], part) for n in (HEAD, EMBED))
            is_same = is_same and np.array_equal(head, embed)
        if not is_same:
            raise WeightsError(
                f"{self.weights.directory}: {HEAD} differs from {EMBED}, but config.json says tie_word_embeddings;"
                " set that to false if the head is the model's own"
            )


def check_headers(directory: Path | str, model: Model) -> None:
    """That a directory's files are whole and hold this model's tensors: headers alone are read, no value and no digest.

    Raises: WeightsError, one line.
    """
    with Weights(directory) as weights:
        matched(weights, model)


def matched(weights: Weights, model: Model) -> dict[str, str]:
    """Plain name -> the file's, if names, shapes and dtypes are the model's; with HEAD where the model has none.

    Raises: WeightsError that lists all others.
    """
    tensors, actual = weights.tensors, {}
    for name in tensors:
        plain = name
        for prefix, short in TEXT_MODEL:
            if name.startswith(prefix):
                plain = short + name.removeprefix(prefix)
                break
        if not name.startswith(BESIDE_TEXT) and not name.endswith(OLD_BUFFER):
            actual[plain] = name
    wanted = {n: shape for n, (_, shape) in specs(model).items()}
    found = {n: tensors[name].shape for n, name in actual.items() if n in wanted or n != HEAD}
    unknown = [
        f"{n} {tensors[actual[n]].dtype}{weights.among(actual[n])}"
        for n in wanted
        if n in actual and tensors[actual[n]].dtype not in DTYPES
    ]
    check_tensors(
        weights.directory,
        wanted,
        found,
        {f"of a dtype that is none of {', '.join(DTYPES)}": unknown},
        lambda name: weights.among(actual[name]),
    )
    return actual


def check_tensors(
    where: Path,
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    more: Mapping[str, list[str]],
    among: Callable[[str], str] = lambda name: "",
) -> None:
    """Raises: WeightsError that lists what is missing, unexpected or of another shape, and `more`: fault -> names.

    among: which of several files a found tensor is in.
    """
    faults = {
        "missing": [n for n in wanted if n not in found],
        "unexpected": [n + among(n) for n in found if n not in wanted],
        "of another shape": [
            f"{n} {list(found[n])}, not {list(shape)}{among(n)}"
            for n, shape in wanted.items()
            if n in found and found[n] != shape
        ],
        **more,
    }
    told = [f"{len(names)} {fault} ({some(names)})" for fault, names in faults.items() if names]
    if told:
        raise WeightsError(
            f"{where}: of {len(wanted)} tensors that the model has, {'; '.join(told)}: config.json and the weights are"
            " of different models, or a file is missing; fetch all of one model again"
        )


def load(
    directory: Path | str,
    model: Model,
    shardings: Mapping[str, jax.sharding.Sharding],
    dtype: Any = None,
    skips_head: bool = False,
) -> Params:
    """Params of a directory, each array on its sharding; values are rounded to dtype (None: the model's own).

    skips_head: as of Source.

    Beside the arrays the host holds one tensor's slices for its devices: at its peak a load of SmolLM2-135M in float32
    (538 MB, 272 tensors, one CPU device, 1.6 s) held 542 MB. Raises: WeightsError, one line.
    """
    with Source(directory, model, skips_head) as source:
        weights = source.weights
        index = [INDEX] if (weights.directory / INDEX).is_file() else []
        check_digests(weights.directory, [*weights.files, *index])
        return {
            name: _place(source, name, shardings[name], np.dtype(dtype or spec.dtype))
            for name, spec in model.abstract.items()
        }


def _place(
    source: Source, name: str, sharding: jax.sharding.Sharding, dtype: np.dtype
) -> jax.Array:
    """One weight on its devices; each slice is read once, however many devices have it."""
    slices: dict[tuple, np.ndarray] = {}
    shape = source.model.abstract[name].shape

    def slice_of(index: Index) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in slices:
            slices[key] = source.ours(name, index, dtype)
        return slices[key]

    # A device may go on using a slice's memory: each is of this weight alone, and nobody writes it again.
    return jax.make_array_from_callback(shape, sharding, slice_of).block_until_ready()


def save(
    directory: Path,
    params: Mapping[str, jax.Array],
    settings: ModelSettings,
    *,
    vocab_size: int,
    copy_from: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a Hugging Face directory; what is there already of these names is replaced.

    params: in one dtype, all of it addressable from this process. copy_from: a directory whose tokenizer, template and
    generation files go along byte for byte, and its config.json where it says the same model. The host holds one shard.
    Raises: ValueError if no Hugging Face family has the model, OSError.
    """
    model = build_model(settings, vocab_size)
    dtype = np.dtype(params["embed"].dtype)
    source = hf_config.read(copy_from) if copy_from is not None else None
    config = hf_config.exported(settings, vocab_size, dtype.name, source)
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, specs(model, dtype), outgoing(model, params), max_shard_bytes)
    write_json(directory / hf_config.CONFIG, config)
    if copy_from is not None:
        copy_beside(copy_from, directory)
    write_digests(directory)


def incoming(model: Model, tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Params on the host of all tensors that a directory holds."""
    names = {place.name: (name, place) for name, place in places(model).items()}
    params = {}
    for theirs, array in tensors:
        name, place = names[theirs]
        shape = model.abstract[name].shape
        params[name] = place.incoming(shape, (slice(None),) * len(shape), array.__getitem__)
    return params


def outgoing(model: Model, params: Mapping[str, jax.Array]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of each weight as a directory holds it."""
    for name, place in places(model).items():
        yield place.name, place.outgoing(np.asarray(params[name]))
