"""The files of a Hugging Face directory: safetensors in one file or in shards, their index, and digests of the bytes.

Owns: `Weights`, which reads any slice of any tensor, and `write_weights`, which writes one shard at a time. safetensors
finds a truncated file and not a flipped bit, so what is written here has SHA256SUMS beside it (as `sha256sum -c` reads
it), and `check_digests` compares where that file is present. Weights read here are numpy arrays of their own memory,
never a view of the file: a device may alias what it is given.
Must not: know what a tensor means (hf.py), or hold more than one shard.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rl_jax.disk import naming

INDEX, SINGLE, SUMS = "model.safetensors.index.json", "model.safetensors", "SHA256SUMS"
MAX_SHARD_BYTES = 2 << 30  # what a writer holds at once
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
FIRST = 20  # names that an error lists; it counts the others
# dtype -> the bits of its exponent, which are all set in what is not finite
EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
CHECKED = 1 << 20  # values of a tensor, compared at a time

# What goes with weights and is text, copied byte for byte where there is one.
BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip


class WeightsError(ValueError):
    """Weights that cannot be read, or that do not fit the model; one line."""


@dataclass(frozen=True)
class Tensor:
    """What a header says of one tensor."""

    dtype: str  # as safetensors writes it: F32, BF16, ...
    shape: tuple[int, ...]


class Weights:
    """The tensors of a directory, opened; a context manager. Raises: WeightsError."""

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self.files = weight_files(self.directory)
        self._open: dict[str, Any] = {}  # file name -> its reader
        self._file: dict[str, str] = {}  # tensor name -> file name
        self.tensors: dict[str, Tensor] = {}
        try:
            for name in self.files:
                self._read_header(name)
            self._check_index()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or a slice of it; fresh memory."""
        part = self._open[self._file[name]].get_slice(name)
        shape = self.tensors[name].shape
        try:
            return part[index] if index else part[tuple(slice(0, n) for n in shape)]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.directory / self._file[name]}: {name}: {error}") from error

    def among(self, name: str) -> str:
        """ " in FILE", of a tensor of a directory with several files."""
        return f" in {self._file[name]}" if len(self.files) > 1 else ""

    def path_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self.directory / self._file[name]

    def close(self) -> None:
        for reader in self._open.values():
            reader.__exit__(None, None, None)
        self._open.clear()

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self.close()

    def _read_header(self, name: str) -> None:
        path = self.directory / name
        try:
            # Not mmap: pages of a mapped file count as ours until the system wants them back.
            reader = safe_open(path, framework="numpy", backend="pread")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} cannot be read: {_why_unread(path, error)}") from None
        self._open[name] = reader
        tensors = reader.keys()
        for tensor in tensors:
            if tensor in self._file:
                raise WeightsError(
                    f"{self.directory}: {tensor} is in {self._file[tensor]} and in {name}; keep one"
                )
            self._file[tensor] = name
            part = reader.get_slice(tensor)
            self.tensors[tensor] = Tensor(part.get_dtype(), tuple(part.get_shape()))

    def _check_index(self) -> None:
        """Every tensor of the index is in the file that it names."""
        if not (self.directory / INDEX).is_file():
            return
        listed = _index(self.directory)
        odd = [name for name, file in listed.items() if self._file.get(name) != file]
        if odd:
            raise WeightsError(
                f"{self.directory / INDEX} lists {len(odd)} tensors that are not in their file, first {odd[0]} in"
                f" {listed[odd[0]]} ({some(odd)}); fetch both again"
            )


def cast(where: Path | str, name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in a dtype, all of it finite, before and after. Raises: WeightsError."""
    check_finite(where, name, array)
    with np.errstate(over="ignore"):
        found = array.astype(dtype, copy=False)
    if found.dtype != array.dtype and found.itemsize <= array.itemsize:
        check_finite(f"{where}, in {found.dtype.name}", name, found)
    return found


def check_finite(where: Path | str, name: str, array: np.ndarray) -> None:
    """Raises: WeightsError if a value is NaN or infinite."""
    exponent = EXPONENTS.get(array.dtype.name)
    if exponent is None:
        return
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    exponent = bits.dtype.type(exponent)
    for start in range(0, len(bits), CHECKED):
        is_odd = bits[start : start + CHECKED] & exponent == exponent
        if is_odd.any():
            at = start + int(is_odd.argmax())
            index = [int(i) for i in np.unravel_index(at, array.shape)]
            value = float(array.reshape(-1)[at])
            raise WeightsError(
                f"{where}: {name} has {value} at {index}, where weights must be finite numbers of"
                f" {array.dtype.name}: fetch or convert the file again, or take a checkpoint from before"
            )


def _why_unread(path: Path, error: Exception) -> str:
    """What is wrong with a file that the library refused; of one that is too short or too long, in numbers."""
    has, needs = 0, 0
    try:
        has = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begins = file.read(1)
            needs = 8 + length
            if has >= needs:
                file.seek(8)
                parts = json.loads(file.read(length))
                ends = [p["data_offsets"][1] for n, p in parts.items() if n != "__metadata__"]
                needs += max(ends, default=0)
            elif begins not in (b"{", b""):
                needs = has  # no header at all
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        needs = has  # what the library said stands
    if has != needs:
        what = "is cut short" if has < needs else "is longer than it says"
        return f"it {what}: {has:,} bytes, of {needs:,} by its header; fetch it again"
    return f"{error}; it is no safetensors file: fetch it again"


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that hold a directory's model. Raises: WeightsError."""
    if (directory / INDEX).is_file():
        names = sorted(set(_index(directory).values()))
    elif (directory / SINGLE).is_file():
        return [SINGLE]
    else:
        others = sorted(p.name for p in directory.glob("*.bin")) if directory.is_dir() else []
        why = (
            f" but {others[0]}, a pickle, which is not read; save it as safetensors"
            if others
            else "; fetch its *.safetensors (and the index, of shards), or make the directory of a GGUF file or of a"
            " run with python -m rl_jax.tools.convert SRC DIR"
        )
        raise WeightsError(f"{directory} has no {SINGLE} and no {INDEX}{why}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise WeightsError(
            f"{directory} lacks {len(missing)} of {len(names)} shards: {some(missing)}; fetch them"
        )
    return names


def _index(directory: Path) -> dict[str, str]:
    """tensor name -> file name, of the index."""
    path = directory / INDEX
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} cannot be read ({type(error).__name__}: {error}); fetch it again"
        ) from None
    if not isinstance(listed, dict) or any(
        not isinstance(file, str) or Path(file).name != file for file in listed.values()
    ):
        raise WeightsError(
            f"{path} has no weight_map from tensors to files beside it; fetch it again"
        )
    return listed


def write_weights(
    directory: Path,
    specs: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    seen: Callable[[str, np.ndarray], None] | None = None,
) -> None:
    """Write tensors as one file, or as shards and their index. arrays: in the order of specs; one shard is held.

    seen: told of each array as it will be written.
    """
    sizes = {name: num_bytes(*spec) for name, spec in specs.items()}
    shards = _shards(sizes, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    given = iter(arrays)
    for file, tensors in zip(names, shards, strict=True):
        held: dict[str, np.ndarray] = {}
        for name in tensors:
            found, array = next(given)
            dtype, shape = specs[name]
            assert (found, array.dtype, array.shape) == (name, dtype, shape), f"{found} for {name}"
            held[name] = np.ascontiguousarray(array)
            if seen is not None:
                seen(name, held[name])
        path = directory / file
        with naming(path):
            path.touch()
            mode = path.stat().st_mode
            save_file(held, path, metadata={"format": "pt"})
            path.chmod(mode)  # the library's own is for the owner alone
    if len(shards) > 1:
        where = {n: file for file, shard in zip(names, shards, strict=True) for n in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        write_json(directory / INDEX, index)


def num_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names in order, cut where a shard would be over `most` bytes; a larger tensor has one for itself."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > most:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    return shards


# --- text files and digests -----------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    with naming(path):
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_beside(source: Path, directory: Path) -> list[str]:
    """Copy what text a model comes with (BESIDE), byte for byte; the names copied."""
    names = [n for n in BESIDE if (source / n).is_file()]
    for name in names:
        with naming(directory / name):
            shutil.copyfile(source / name, directory / name)
    return names


def write_digests(directory: Path) -> None:
    """SHA256SUMS over every file of a directory, all of them durable."""
    lines = []
    for path in sorted(p for p in directory.iterdir() if p.is_file() and p.name != SUMS):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        lines.append(f"{_sha256(path)}  {path.name}\n")
    with naming(directory / SUMS):
        (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def check_digests(directory: Path, names: Iterable[str]) -> bool:
    """Whether there is a SHA256SUMS, and then these files are as it says. Raises: WeightsError."""
    path = directory / SUMS
    if not path.is_file():
        return False
    sums = _read_sums(directory)
    names = list(names)
    for name in names:
        if name not in sums:
            raise WeightsError(
                f"{path} has no line for {name}, which is newer; remove {SUMS} if it is meant so"
            )
    with ThreadPoolExecutor() as pool:  # hashing lets the interpreter's lock go
        found = list(pool.map(lambda name: _sha256(directory / name), names))
    for name, digest in zip(names, found, strict=True):
        if digest != sums[name]:
            raise WeightsError(
                f"{directory / name} does not match its line of {SUMS}: its bytes have changed; fetch or convert it"
                f" again, or remove {SUMS} if it is meant so"
            )
    return True


def weights_digest(directory: Path) -> str:
    """sha256 of config.json and the weights, each by its own; of the same bytes the same, wherever they lie.

    A SHA256SUMS is believed of the weights, since loading them checks it.
    """
    whole, sums = hashlib.sha256(), _read_sums(directory)
    digests = {"config.json": _sha256(directory / "config.json")}
    digests |= {n: sums.get(n) or _sha256(directory / n) for n in weight_files(directory)}
    for name, digest in digests.items():
        whole.update(f"{digest}  {name}\n".encode())
    return whole.hexdigest()


def _read_sums(directory: Path) -> dict[str, str]:
    """Name -> sha256 of a SHA256SUMS; {} where there is none."""
    path, sums = directory / SUMS, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        digest, _, name = line.partition("  ")
        sums[name] = digest
    return sums


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def some(names: Iterable[str]) -> str:
    """The first names, and how many others there are."""
    names = list(names)
    more = f" and {len(names) - FIRST} more" if len(names) > FIRST else ""
    return ", ".join(names[:FIRST]) + more
