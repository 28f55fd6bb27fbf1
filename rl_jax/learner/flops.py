"""FLOPs of a model on sequences, and what the devices of a mesh could do: for cost predictions and utilisation.

Counted is what the mathematics needs: matrices, attention to what a token sees of its sequence, the head on trained
tokens; forward once and backward twice that, nothing recomputed and no padding (arXiv:2204.02311, appendix B).
Must not: measure anything.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import jax
from jax.sharding import Mesh

from rl_jax.models.features import form_of
from rl_jax.models.model import Model
from rl_jax.models.value import ValueModel

# Dense bfloat16 FLOP/s of one device by the start of its device_kind, longest first; from the makers' data sheets.
PEAK_FLOPS = {
    "NVIDIA GB200": 2.5e15,
    "NVIDIA B200": 2.25e15,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


# Bytes a second of one device's memory, likewise.
PEAK_BYTES = {
    "NVIDIA GB200": 8e12,
    "NVIDIA B200": 8e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H100": 3.35e12,
    "NVIDIA A100-SXM4-80GB": 2.04e12,
    "NVIDIA A100 80GB": 1.94e12,
    "NVIDIA A100": 1.555e12,
    "NVIDIA L4": 300e9,
    "TPU v6 lite": 1640e9,
    "TPU v6e": 1640e9,
    "TPU v5 lite": 819e9,
    "TPU v5e": 819e9,
    "TPU v5": 2765e9,
    "TPU v4": 1228e9,
}


def peaks_of(devices: Iterable[jax.Device]) -> dict[str, float | None]:
    """peak_flops and peak_bytes, a second, of all of them; None where one's kind is in no table, or there is none."""
    kinds = [device.device_kind for device in devices]
    return {
        "peak_flops": peak_of(kinds, PEAK_FLOPS),
        "peak_bytes": peak_of(kinds, PEAK_BYTES),
    }


def peak_flops(mesh: Mesh) -> float | None:
    """Of all devices of the mesh; None where a kind is not in the table, as a CPU."""
    return peak_of([device.device_kind for device in mesh.devices.flat], PEAK_FLOPS)


def peak_of(kinds: Sequence[str], table: Mapping[str, float]) -> float | None:
    """The sum over devices of these kinds; None where one is not in the table, or there is none."""
    peaks = [next((v for k, v in table.items() if kind.startswith(k)), None) for kind in kinds]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None


def matrix_weights(model: Model | ValueModel) -> int:
    """Weights of the layers' matrices: each costs a token 2 FLOPs forward."""
    return sum(
        prod(array.shape)
        for name, array in model.abstract.items()
        if array.ndim > 1 and "vocab" not in model.logical_axes[name]
    )


def seen_pairs(length: int, window: int) -> float:
    """Pairs of tokens that a layer scores in a sequence: each with itself and those before, or `window` in all."""
    inside = min(length, window or length)
    return inside * (inside + 1) / 2 + (length - inside) * inside


def train_flops(model: Model | ValueModel, lengths: Sequence[int], num_trained: int) -> float:
    """Of one step over sequences of these lengths, of whose tokens num_trained have a loss."""
    s, tokens = model.settings, sum(lengths)
    windows = Counter(form_of(s, layer).window for layer in range(s.num_layers))
    pairs = sum(
        num * seen_pairs(length, window) for window, num in windows.items() for length in lengths
    )
    head = 0 if isinstance(model, ValueModel) else s.embed_size * model.vocab_size
    attention = 4 * s.num_heads * s.head_dim * pairs
    return 3.0 * (2 * matrix_weights(model) * tokens + attention + 2 * head * num_trained)
