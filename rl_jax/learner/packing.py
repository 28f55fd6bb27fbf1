"""Which row each trajectory goes to: few rows, and the same work on every shard of every microbatch.

Rows are cut into microbatches of R rows, and a microbatch's rows into as many equal runs as the mesh has batch shards;
one such run is a cell. All shards go through the same number of microbatches and wait for each other in each, so that
a step takes as long as the dearest cell of each microbatch: cells are filled to equal predicted cost, sum L + c sum
L^2, where c is what attention costs beside the matrices (L^2 becomes w (2 L - w) in layers with a window of w). On one
shard nobody waits, and fewest rows are best.
Must not: look at more than lengths (same lengths, same rows).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rl_jax.learner.flops import matrix_weights
from rl_jax.models.features import form_of
from rl_jax.models.model import Model
from rl_jax.models.value import ValueModel

Cell = list[list[int]]  # its rows, of members


@dataclass(frozen=True)
class Balance:
    """Over what a batch is spread."""

    shards: int  # of a microbatch's rows
    quadratic: float  # c: cost of a token pair, in costs of a token
    windowed: float = 0.0  # share of the layers that see back `window` tokens only
    window: int = 0

    def cost(self, length: int) -> float:
        """Predicted work of one trajectory, in tokens."""
        reach = min(length, self.window)
        pairs = (1 - self.windowed) * length * length + self.windowed * reach * (2 * length - reach)
        return length + self.quadratic * pairs


def pair_cost(model: Model | ValueModel) -> float:
    """c of the model's shapes: multiplications of causal attention for a pair, over those of its matrices for a token.

    A token costs 2 FLOPs a matrix weight (the head apart, which runs on trained tokens only); it attends to half of
    the sequence's L tokens, 4 FLOPs each a head dimension and layer.
    """
    s = model.settings
    return s.num_layers * s.num_heads * s.head_dim / matrix_weights(model)


def balance_of(model: Model | ValueModel, shards: int) -> Balance:
    s = model.settings
    num_windowed = sum(form_of(s, layer).window > 0 for layer in range(s.num_layers))
    return Balance(shards, pair_cost(model), num_windowed / s.num_layers, s.window)


def balanced_rows(
    members: Sequence[int],
    lengths: Sequence[int],
    row_tokens: int,
    per_microbatch: int,
    by: Balance,
) -> list[list[int]]:
    """Rows of members, whole microbatches of them (some rows may be empty), in no more microbatches than first fit
    needs; row m * R + s * (R / shards) + j is the j-th of shard s in microbatch m.

    Longest first, each into the cheapest cell with room. Where a tight batch leaves no room that way, first fit's own
    rows are dealt out, dearest first. What could not be evened out meets its like in one microbatch.
    """
    fitted = first_fit(members, lengths, row_tokens)
    num_microbatches = ceil(len(fitted) / per_microbatch)
    size = per_microbatch // by.shards
    num_cells = num_microbatches * by.shards
    cells = _filled(members, lengths, row_tokens, num_cells, size, by)
    cells = cells or _dealt(fitted, lengths, num_cells, size, by)
    return [row for cell in _paired(cells, lengths, by) for row in cell]


def first_fit(members: Sequence[int], lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Members by falling length, each into the first row with room; ties keep the order given."""
    rows: list[list[int]] = []
    room: list[int] = []
    for member in sorted(members, key=lambda i: -lengths[i]):
        row = next((r for r, free in enumerate(room) if lengths[member] <= free), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[row].append(member)
        room[row] -= lengths[member]
    return rows


def _filled(
    members: Sequence[int],
    lengths: Sequence[int],
    row_tokens: int,
    num_cells: int,
    size: int,
    by: Balance,
) -> list[Cell]:
    """Each member into the cheapest cell that has room, there into the fullest such row; [] if one finds no room."""
    rows: list[list[int]] = [[] for _ in range(num_cells * size)]
    room, cost = [row_tokens] * len(rows), [0.0] * num_cells
    for member in sorted(members, key=lambda i: -lengths[i]):
        length = lengths[member]
        for cell in sorted(range(num_cells), key=cost.__getitem__):
            own = range(cell * size, (cell + 1) * size)
            fits = [r for r in own if room[r] >= length]
            if fits:
                row = min(fits, key=room.__getitem__)
                break
        else:
            return []
        rows[row].append(member)
        room[row] -= length
        cost[cell] += by.cost(length)
    return [rows[c * size : (c + 1) * size] for c in range(num_cells)]


def _dealt(
    fitted: list[list[int]], lengths: Sequence[int], num_cells: int, size: int, by: Balance
) -> list[Cell]:
    """Whole rows, the dearest first, each to the cheapest cell with a row left."""
    cells: list[Cell] = [[] for _ in range(num_cells)]
    cost = [0.0] * num_cells
    costs = {id(row): _cost([row], lengths, by) for row in fitted}
    for row in sorted(fitted, key=lambda row: -costs[id(row)]):
        cell = min((c for c in range(num_cells) if len(cells[c]) < size), key=cost.__getitem__)
        cells[cell].append(row)
        cost[cell] += costs[id(row)]
    return [[*cell, *([] for _ in range(size - len(cell)))] for cell in cells]


def _paired(cells: list[Cell], lengths: Sequence[int], by: Balance) -> list[Cell]:
    """Cells of like cost in one microbatch, and there the dearest on the shard that has had least so far."""
    cost = [_cost(cell, lengths, by) for cell in cells]
    order = sorted(range(len(cells)), key=lambda c: -cost[c])
    had, out = [0.0] * by.shards, []
    for first in range(0, len(order), by.shards):
        shards = sorted(range(by.shards), key=had.__getitem__)
        placed = dict(zip(shards, order[first : first + by.shards], strict=True))
        for shard, cell in placed.items():
            had[shard] += cost[cell]
        out += [cells[placed[shard]] for shard in range(by.shards)]
    return out


def _cost(cell: Cell, lengths: Sequence[int], by: Balance) -> float:
    return sum(by.cost(lengths[i]) for row in cell for i in row)
