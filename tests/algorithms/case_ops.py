"""What an operation of the worked cases is to the harness (case_runs.py); case_losses.py and case_host.py list them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_jax.algorithms.token_losses import TokenLoss

Arrays = Mapping[str, Any]
Params = Mapping[str, Any]
Outputs = dict[str, Any]


@dataclass(frozen=True)
class HostOp:
    run: Callable[[Arrays, Params], Outputs]
    rows: str = (
        "mask"  # mask: rows and columns may be added; rows: rows may be permuted; fixed: neither
    )
    own_mask: Mapping[str, str] = field(default_factory=dict)  # array -> its mask, where not "mask"
    # whether it selects by the mask itself; not of what takes no mask, whose caller never holds other tokens
    selects: bool = True


@dataclass(frozen=True)
class LossOp:
    loss: Callable[[Arrays, Params], TokenLoss]
    aggregation: str = "token-mean"
    variable: str = "logp"
    # expected name -> (how to reduce, name of the part): token | sequence | share | sequence_share | mean | total
    outputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    rows: str = "mask"
    own_mask: Mapping[str, str] = field(default_factory=dict)
    selects: bool = True
    is_raw: bool = False  # its loss is the input itself, junk and all: what aggregates it selects


def chosen(p: Params, **names: str) -> dict[str, Any]:
    """Our keyword -> the case's parameter, for those that the case gives."""
    return {ours: p[theirs] for ours, theirs in names.items() if theirs in p}


def runs(mask: Any) -> np.ndarray:
    """The turn of each token, a maximal run of mask 1, from 0; -1 before the first."""
    mask = np.asarray(mask) != 0
    begins = mask & ~np.pad(mask, [(0, 0), (1, 0)])[:, :-1]
    return np.cumsum(begins, axis=1) - 1
