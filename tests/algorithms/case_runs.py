"""The harness of the worked cases: one case in, its outputs under one dtype, one variant and one layout.

Variants change what must not matter: junk at mask 0, padding, the order of rows. Layouts change how a loss is computed:
rows as they are, several sequences a row (trained tokens only, as the learner packs them), rows split over devices. A
run gives outputs in the case's own rows and columns, whatever it did inside.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.algorithms.aggregate import token_weights
from tests.algorithms.case_host import HOST
from tests.algorithms.case_losses import LOSSES
from tests.algorithms.case_ops import HostOp, LossOp, Outputs, runs

OPS: Mapping[str, HostOp | LossOp] = {**LOSSES, **HOST}

TOLERANCE = {"float64": 1e-9, "float32": 5e-5}
JUNK = (np.nan, np.inf, -np.inf)
NEW_ROWS, NEW_COLUMNS = 2, 3
BUCKET = (
    8,
    12,
)  # rows and slots of a loss's arrays; the shared cases and their variants all fit one
EMPTY = {"ratio": 1.0, "phi": 1.0, "keep": 1.0}  # an empty sequence's value of a part
FAST_COMPILE = {"xla_backend_optimization_level": 0}
INTEGERS = {  # inputs that stay what they are under every dtype
    "groups", "versions", "targets", "replay_ids", "keep_ids", "step_index", "lengths", "n_generated", "version",
    "truncated", "counts", "valid", "mask", "mask_chosen", "mask_rejected",
}  # fmt: skip


def arrays_of(inputs: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The case's lists as arrays; ragged ones, words and records stay lists."""
    out = {}
    for name, value in inputs.items():
        try:
            array = np.asarray(value)
        except ValueError:  # ragged
            array = np.asarray(None)
        if array.dtype.kind not in "bif":
            out[name] = value
        else:
            out[name] = array if name in INTEGERS else array.astype(dtype)
    return out


# --- variants: (inputs, op) -> inputs, and the way back ---------------------------------------------------------------


def poisoned(inputs: dict[str, Any], op: HostOp | LossOp, junk: float) -> dict[str, Any]:
    """`junk` in every float array wherever its mask is 0."""
    out = dict(inputs)
    for name, array in inputs.items():
        mask = inputs.get(op.own_mask.get(name, "mask"))
        is_float = isinstance(array, np.ndarray) and array.dtype.kind == "f"
        if mask is None or not is_float or "mask" in name or array.shape[: mask.ndim] != mask.shape:
            continue
        off = (mask == 0).reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
        out[name] = np.where(off, array.dtype.type(junk), array)
    return out


def with_columns(inputs: dict[str, Any], op: HostOp | LossOp) -> dict[str, Any]:
    """Three columns off its own mask behind each array; rows stay, as an empty one would count."""
    return {
        name: np.pad(
            array,
            [(0, 0), (0, NEW_COLUMNS)],
            constant_values=np.asarray(0.7 if name in op.own_mask else 0).astype(array.dtype),
        )
        for name, array in inputs.items()
    }


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """Two empty rows and three columns off the mask, with numbers in them."""
    num_rows, num_columns = inputs["mask"].shape
    out = {"valid": np.ones(num_rows)} | inputs
    for name, value in out.items():
        if isinstance(value, list):
            out[name] = [*value, *[[]] * NEW_ROWS] if len(value) == num_rows else value
        elif value.ndim and value.shape[0] == num_rows:
            fill = 0.0 if value.ndim == 1 or name == "mask" else 0.7
            fill = -1 if name == "groups" else fill
            pads = [(0, NEW_ROWS)] + [(0, 0)] * (value.ndim - 1)
            if value.ndim > 1 and value.shape[1] == num_columns:
                pads[1] = (0, NEW_COLUMNS)
            out[name] = np.pad(value, pads, constant_values=np.asarray(fill).astype(value.dtype))
    return out


def num_rows_of(inputs: Mapping[str, Any]) -> int:
    """Length of the first input that has one."""
    return next(len(value) for value in inputs.values() if isinstance(value, list) or value.ndim)


def order_of(num_rows: int) -> np.ndarray:
    """A permutation that is not its own inverse where there are rows enough, so that the way back is tried too."""
    return np.roll(np.arange(num_rows), 1)


def permuted_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    order = order_of(num_rows_of(inputs))
    return {
        name: taken(value, order) if len(value) == len(order) else value
        for name, value in inputs.items()
    }


def taken(rows: Any, order: np.ndarray) -> Any:
    return [rows[i] for i in order] if isinstance(rows, list) else np.asarray(rows)[order]


def own_rows(outputs: Outputs, inputs: Mapping[str, Any], back: Callable) -> Outputs:
    """Outputs with a row per row of the inputs, through `back`; the others as they are."""
    num_rows = num_rows_of(inputs)
    out = {}
    for name, value in outputs.items():
        array = value if isinstance(value, list) else np.asarray(value)
        has_rows = (isinstance(array, list) or array.ndim > 0) and len(array) == num_rows
        out[name] = back(array) if has_rows else array
    return out


def without_padding(shape: tuple[int, ...]) -> Callable:
    def back(array):
        array = np.asarray(array[:-NEW_ROWS])
        wide = array.ndim > 1 and array.shape[1] == shape[1] + NEW_COLUMNS
        return array[:, : shape[1]] if wide else array

    return back


# --- layouts of a loss ------------------------------------------------------------------------------------------------


class Layout:
    """Where the slots of [B, T] lie in [R, K], R and K multiples of BUCKET so that cases share programs.

    per_row 0: rows as they are. Else that many sequences side by side in a row, trained tokens only, from the left.
    """

    def __init__(self, mask: np.ndarray, per_row: int = 0, num_devices: int = 1):
        self.mask, self.num_devices = mask, num_devices
        rows, columns = np.nonzero(np.ones_like(mask) if per_row == 0 else mask)
        self._from = (rows, columns)
        segments = np.ones(mask.shape, np.int32)
        if per_row:
            segments += np.arange(len(mask), dtype=np.int32)[:, None] % per_row
            rows = rows // per_row
            columns = np.array([(rows[:i] == row).sum() for i, row in enumerate(rows)], int)
        self._to = (rows, columns)
        needed = (rows.max(initial=0) + 1, columns.max(initial=0) + 1)
        self.shape = tuple(-(-n // size) * size for n, size in zip(needed, BUCKET))
        self.segments = self.place(segments)

    def place(self, array: np.ndarray) -> np.ndarray:
        out = np.zeros((*self.shape, *array.shape[2:]), array.dtype)
        out[self._to] = array[self._from]
        return out

    def restore(self, array: np.ndarray) -> np.ndarray:
        out = np.zeros((*self.mask.shape, *array.shape[2:]), array.dtype)
        out[self._from] = np.asarray(array)[self._to]
        return out

    def put(self, array: np.ndarray) -> jax.Array:
        if self.num_devices == 1:
            return jnp.asarray(array)
        mesh = Mesh(np.array(jax.devices()[: self.num_devices]), ("data",))
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec("data")))


def split_numbers(tree: Any, numbers: list[float]) -> Any:
    """The tree with each number replaced by "#i"; the numbers are appended."""
    if isinstance(tree, Mapping):
        return {key: split_numbers(value, numbers) for key, value in sorted(tree.items())}
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        numbers.append(tree)
        return f"#{len(numbers) - 1}"
    return tree


def join_numbers(tree: Any, numbers: Sequence[Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: join_numbers(value, numbers) for key, value in tree.items()}
    is_number = isinstance(tree, str) and tree.startswith("#")
    return numbers[int(tree[1:])] if is_number else tree


class Read(Mapping):
    """Parameters, and which of them were asked for."""

    def __init__(self, given: Mapping[str, Any]):
        self._given, self._asked = given, set()

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._given[key]

    def __iter__(self):
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def unread(self) -> tuple[str, ...]:
        return tuple(key for key in self._given if key not in self._asked)


UNREAD: dict[tuple[str, str], tuple[str, ...]] = {}  # of a program, once it is traced


def check_read(name: str, unread: tuple[str, ...]) -> None:
    if unread:
        raise ValueError(f"{name} reads no param {', '.join(unread)}")


@cache
def program(name: str, words: str) -> Callable:
    """(gradient, (loss, parts)) of sum(weights * loss); the parameters' numbers are arguments, the rest is `words`."""
    op = LOSSES[name]

    def total(variable, arrays, weights, numbers):
        arrays = {**arrays, op.variable: variable}
        given = Read(join_numbers(json.loads(words), numbers))
        out = op.loss(arrays, given)
        UNREAD[name, words] = given.unread()
        return jnp.where(arrays["mask"], weights * out.loss, 0.0).sum(), out

    return jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=FAST_COMPILE)


def run_loss(
    name: str, inputs: dict[str, Any], params: Mapping[str, Any], per_row: int, num_devices: int
) -> Outputs:
    op, mask = LOSSES[name], inputs["mask"] != 0
    layout = Layout(mask, per_row, num_devices)
    params = dict(params)
    aggregation, norm_length = params.pop("agg", op.aggregation), params.pop("norm_len", 0)
    weights = token_weights(mask, aggregation, inputs.get("groups"), norm_length)
    arrays = {}
    for key, value in inputs.items():
        if key in ("mask", "groups", "valid"):
            continue
        if value.ndim == 1:  # one number a sequence
            value = np.repeat(value[:, None], mask.shape[1], axis=1)
        arrays[key] = layout.put(layout.place(value))
    arrays |= {
        "mask": layout.put(layout.place(mask)),
        "segments": layout.put(layout.segments),
        "turns": layout.put(layout.place(runs(mask).astype(np.int32))),
    }
    weights = weights.astype(arrays[op.variable].dtype)
    variable = arrays.pop(op.variable)
    numbers: list[float] = []
    words = json.dumps(split_numbers(params, numbers))
    (loss, out), grad = program(name, words)(
        variable, arrays, layout.put(layout.place(weights)), numbers
    )
    check_read(name, UNREAD[name, words])
    off = ~np.asarray(arrays["mask"])
    assert not np.asarray(grad)[off].any(), "a masked token has a gradient"
    if not op.is_raw:
        assert not np.asarray(out.loss)[off].any(), "a masked token has a loss"
    parts = {key: layout.restore(np.asarray(part)) for key, part in out.parts.items()}
    parts["loss"] = layout.restore(np.asarray(out.loss))
    results = {"loss": loss, f"grad_{op.variable}": layout.restore(np.asarray(grad))}
    for key, (how, part) in op.outputs.items():
        results[key] = reduce(how, part, np.asarray(parts[part], np.float64), mask, weights)
    return results


def reduce(how: str, name: str, part: np.ndarray, mask: np.ndarray, weights: np.ndarray) -> Any:
    if how == "token":
        return np.where(mask, part, 0.0)
    live = mask.any(axis=1)
    if (
        how == "sequence"
    ):  # it stands on every slot of a sequence; a packed row has none of an empty one
        first = np.argmax(mask, axis=1)
        return np.where(live, part[np.arange(len(part)), first], EMPTY.get(name, 0.0))
    if how == "any":
        return (mask & (part != 0)).any(axis=1)
    if how == "sequence_share":
        return (mask & (part != 0)).any(axis=1).sum() / max(live.sum(), 1)
    if how == "total":
        return np.where(mask, weights * part, 0.0).sum()
    assert how in ("share", "mean"), how
    return np.where(mask, part, 0.0).sum() / max(mask.sum(), 1)


# --- one run of one case ----------------------------------------------------------------------------------------------


def run_case(
    case: Mapping[str, Any],
    dtype: str = "float64",
    variant: str | float = "plain",
    per_row: int = 0,
    num_devices: int = 1,
) -> Outputs:
    """Outputs in the case's rows. variant: plain | padded | permuted | a number to poison with."""
    if "params" not in case:
        raise ValueError(f"case {case['name']} has no params; give {{}} where there are none")
    op, params = OPS[case["op"]], case["params"]
    with jax.enable_x64(dtype == "float64"):
        inputs = arrays_of(case["inputs"], dtype)
        if variant == "padded" and op.own_mask:
            changed = with_columns(inputs, op)
            back = lambda array: array[:, :-NEW_COLUMNS] if np.ndim(array) > 1 else array
        elif variant == "padded":
            changed, back = padded(inputs), without_padding(inputs["mask"].shape)
        elif variant == "permuted":
            inverse = np.argsort(order_of(num_rows_of(inputs)))
            changed, back = permuted_rows(inputs), lambda array: taken(array, inverse)
        elif variant == "plain":
            changed, back = inputs, lambda array: array
        else:
            changed, back = poisoned(inputs, op, float(variant)), lambda array: array
        if isinstance(op, LossOp):
            outputs = run_loss(case["op"], changed, params, per_row, num_devices)
        else:
            given = Read(params)
            outputs = op.run(changed, given)
            check_read(case["op"], given.unread())
        if variant == "permuted" and "kept_rows" in outputs:  # rows by their places
            places = order_of(num_rows_of(inputs))[outputs["kept_rows"]]
            outputs["kept_rows"] = np.sort(places)
        return own_rows(outputs, changed, back)


def compare(got: Outputs, case: Mapping[str, Any], dtype: str) -> list[str]:
    """What is off, one line an output; every output of the case must be there."""
    wrong = []
    for name, want in case["expected"].items():
        if name not in got:
            wrong.append(f"{case['op']}: output {name} is missing")
        elif (distance := farthest(got[name], want)) > TOLERANCE[dtype]:
            wrong.append(f"{case['op']}: {name} is off by {distance:.3g} in {dtype}")
    return wrong


def farthest(got: Any, want: Any) -> float:
    """Largest |got - want| / max(1, |want|); infinite for another shape, key or word."""
    if isinstance(want, Mapping):
        got = got.item() if isinstance(got, np.ndarray) else got
        if got.keys() != want.keys():
            return np.inf
        return max((farthest(got[key], want[key]) for key in want), default=0.0)
    if isinstance(want, list) and any(isinstance(v, (list, str, dict)) for v in want):
        if len(got) != len(want):
            return np.inf
        return max((farthest(g, w) for g, w in zip(got, want)), default=0.0)
    if isinstance(want, str):
        return 0.0 if str(got) == want else np.inf
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return np.inf
    gaps = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    return float(np.max(np.where(np.isnan(gaps), np.inf, gaps), initial=0.0))
