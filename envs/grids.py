"""Grids of letters that somebody walks on: the four moves, and the shortest way.

Must not: know what an environment's other letters mean.
"""

from collections import deque
from collections.abc import Sequence

Cell = tuple[int, int]  # (row, column)

MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}  # (row, column)
BLOCKED = "#H"  # a wall, a hole


def shortest_way(rows: Sequence[str], start: Cell) -> str | None:
    """Moves of a shortest way from a cell to G over cells that are no wall and no hole; None if there is none."""
    came_from: dict[Cell, tuple[Cell, str]] = {start: (start, "")}
    frontier = deque([start])
    while frontier:
        cell = frontier.popleft()
        if rows[cell[0]][cell[1]] == "G":
            way = ""
            while cell != start:
                cell, letter = came_from[cell]
                way = letter + way
            return way
        for letter, (down, right) in MOVES.items():
            row, column = following = (cell[0] + down, cell[1] + right)
            is_inside = 0 <= row < len(rows) and 0 <= column < len(rows[0])
            if is_inside and following not in came_from and rows[row][column] not in BLOCKED:
                came_from[following] = (cell, letter)
                frontier.append(following)
    return None
