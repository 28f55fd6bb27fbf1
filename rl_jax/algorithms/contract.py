"""What an algorithm must give, part by part of the protocol, and the one line that says it did not; without jax.

Whoever takes what an algorithm gave asks here, so that the line names the algorithm, the function, what came back and
what is wanted, instead of an error deep in what goes on with it. Exit code 2: an algorithm that breaks its contract is
a file of the user's to mend.
Must not: import jax, or call an algorithm.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_jax.types import Group, Trajectory

MAX_SAID = 80  # characters of a value


class ContractError(ValueError):
    """A function of an algorithm gave what cannot be used."""

    def __init__(self, algorithm: Any, function: str, gave: str, want: str):
        called = function if function.endswith("]") else f"{function}()"
        self.said = (function, gave, want)
        super().__init__(f"{name_of(algorithm)}: {called} gave {gave}; it must give {want}")


class NotFinite(ContractError):
    """Its arrays have the right shapes, and a NaN or an infinity where something trains."""


class AlgorithmRaised(ValueError):
    """A function of an algorithm from outside the table raised: its own words, and where."""


def name_of(algorithm: Any) -> str:
    """For people: as the config names it, where it is known."""
    said = getattr(algorithm, "named", None)
    return said if isinstance(said, str) else type(algorithm).__name__


def check_pair(algorithm: Any, function: str, result: Any, want: str) -> tuple[Any, Any]:
    """The result, if it is of two parts. Raises ContractError."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ContractError(algorithm, function, show(result), want)
    return result[0], result[1]


def check_arrays(
    algorithm: Any,
    function: str,
    arrays: Any,
    members: Sequence[Trajectory],
    trained: Sequence[bool] | None = None,
) -> list[np.ndarray]:
    """One array a member, each as long as its tokens. trained: of which members the trained tokens must be finite.

    Raises: ContractError.
    """
    want = f"one f32[T] for each of the {len(members)} trajectories, in their order"
    if not isinstance(arrays, Sequence | np.ndarray) or isinstance(arrays, str):
        raise ContractError(algorithm, function, show(arrays), want)
    if len(arrays) != len(members):
        gave = f"{len(arrays)} arrays for {len(members)} trajectories"
        raise ContractError(algorithm, function, gave, want)
    checked = []
    for i, (values, member) in enumerate(zip(arrays, members, strict=True)):
        array = np.asarray(values) if values is not None else np.asarray(None)
        where = f"for trajectory {member.uid} (number {i})"
        if array.dtype.kind not in "fiub":
            raise ContractError(algorithm, function, f"{show(values)} {where}", want)
        if array.shape != member.tokens.shape:
            gave = f"shape {array.shape} {where} of {len(member.tokens)} tokens"
            raise ContractError(algorithm, function, gave, want)
        if trained is not None and trained[i] and not np.isfinite(array[member.loss_mask]).all():
            bad = array[member.loss_mask & ~np.isfinite(array)][0]
            gave = f"{bad} {where}, whose reward is {member.reward.value} ({member.reward.status})"
            raise NotFinite(algorithm, function, gave, "finite values where tokens train")
        checked.append(array)
    return checked


def check_named_arrays(
    algorithm: Any, function: str, arrays: Any, members: Sequence[Trajectory]
) -> dict[str, list[np.ndarray]]:
    """check_arrays of each name. Raises ContractError."""
    return {
        name: check_arrays(algorithm, f"{function}()[{name!r}]", values, members)
        for name, values in check_mapping(algorithm, function, arrays).items()
    }


def check_mapping(algorithm: Any, function: str, result: Any) -> Mapping[str, Any]:
    """Raises ContractError."""
    if not isinstance(result, Mapping):
        want = "a mapping of names of LossInputs, {} for none"
        raise ContractError(algorithm, function, show(result), want)
    return result


def check_trains(algorithm: Any, answers: Sequence[Any]) -> list[bool]:
    """One bool a trajectory. Raises ContractError."""
    for answer in answers:
        if not isinstance(answer, bool | np.bool_):
            raise ContractError(algorithm, "trains", show(answer), "True or False")
    return [bool(answer) for answer in answers]


def check_select(algorithm: Any, result: Any) -> tuple[list[Group], list[tuple[str, str]]]:
    """(groups, (uid, reason) of each that is dropped). Raises ContractError."""
    want = "(the groups to train on, (uid, reason) of each that is dropped)"
    kept, dropped = check_pair(algorithm, "select", result, want)
    for part, is_one in ((kept, _is_group), (dropped, _is_drop)):
        if not isinstance(part, tuple | list) or not all(map(is_one, part)):
            raise ContractError(algorithm, "select", show(result), want)
    return list(kept), [(uid, reason) for uid, reason in dropped]


def _is_group(value: Any) -> bool:
    return isinstance(value, Group)


def _is_drop(value: Any) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    return is_pair and all(isinstance(part, str) for part in value)


def check_state(algorithm: Any, function: str, state: Any) -> Any:
    """A state that a checkpoint can keep. Raises ContractError."""
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ContractError(
            algorithm, function, f"a state that is no JSON ({error})", "plain values as the state"
        ) from None
    return state


def check_token_loss(algorithm: Any, result: Any, shape: tuple[int, ...]) -> tuple[Any, dict]:
    """(loss of each token, sums), while it is traced. shape: [B, K] of its inputs. Raises ContractError."""
    want = f"the loss of each token, of shape {shape} and not reduced, and a dict of (sum, count)"
    loss, sums = check_pair(algorithm, "token_loss", result, want)
    dtype = str(getattr(loss, "dtype", ""))
    if getattr(loss, "shape", None) != shape or not dtype.startswith(("float", "bfloat")):
        raise ContractError(algorithm, "token_loss", f"a loss that is {show(loss)}", want)
    if not isinstance(sums, dict):
        raise ContractError(algorithm, "token_loss", f"sums that are {show(sums)}", want)
    for name, pair in sums.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or any(_shape(part) != () for part in pair):
            gave = f"the figure {name!r} as {show(pair)}"
            raise ContractError(algorithm, "token_loss", gave, "(sum f32[], count f32[]) of each")
    return loss, sums


def _shape(value: Any) -> tuple[int, ...] | None:
    return () if isinstance(value, int | float) else getattr(value, "shape", None)


def show(value: Any) -> str:
    """None, or a value's type, with the shape or the length of what has one."""
    if value is None:
        return "None"
    kind = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"an array {dtype}{list(shape)}"
    if isinstance(value, tuple | list):
        return f"a {kind} of {len(value)} ({', '.join(show(part) for part in value[:2])})"[
            :MAX_SAID
        ]
    return f"a {kind}"
