"""Mesh axes, logical axes, and the rules that send the one to the other. Imports nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

AXES = ("data", "fsdp", "tensor", "expert", "context")
KINDS = ("prefill", "decode", "train", "colocated", "role")
SERVING = ("prefill", "decode", "colocated")

# Axes of weights, then of activations ("batch", "length"), of slots, and of the KV cache ("pages").
LOGICAL_AXES = (
    "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "norm", "batch", "length", "slots",
    "pages",
)  # fmt: skip
# Logical axes that meet in one array: their rules may not name the same mesh axis.
TOGETHER = (
    ("vocab", "embed"),
    ("embed", "heads", "head_dim"),
    ("embed", "kv_heads", "head_dim"),
    ("embed", "mlp"),
    ("batch", "length", "heads"),
    ("slots", "kv_heads", "head_dim"),
    ("pages", "kv_heads", "head_dim"),
)

# (logical axis, mesh axes it is split over); an axis without a rule is not split.
Rules = tuple[tuple[str, tuple[str, ...]], ...]
RulesLike = Mapping[str, Any] | Iterable[tuple[str, Any]]

TRAIN_RULES: Rules = (
    ("vocab", ("tensor",)),
    ("embed", ("fsdp",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("batch", ("data", "fsdp")),
)
SERVE_RULES: Rules = (
    ("vocab", ("tensor",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("slots", ("data",)),
    ("pages", ("data",)),
)


def merge_rules(defaults: RulesLike, rules: RulesLike) -> Rules:
    """The defaults with the given rules in place of those of the same logical axis.

    A rule's value is a mesh axis, several, or None / () for "not split".
    """
    merged: dict[str, Any] = dict(defaults) | dict(rules)
    return tuple((logical, as_tuple(axes)) for logical, axes in merged.items())


def full_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of all of AXES, 1 where not given; names not in AXES are left to `check`."""
    return {name: axes.get(name, 1) for name in AXES}


def mesh_axes(logical: Sequence[str | None], rules: RulesLike) -> list[tuple[str, ...]]:
    """The mesh axes that the rules split each of these logical axes over; () for none."""
    table = dict(merge_rules((), rules))
    return [table.get(name, ()) if name else () for name in logical]


def as_tuple(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """A rule's value, or an entry of a PartitionSpec, as the mesh axes it names."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def cut(axes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in axes.items() if size != 1) or "-"


def ranges(devices: Sequence[int]) -> str:
    """Devices as "0-3,6"; in the order given, as order is meaning."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] == device - 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"
