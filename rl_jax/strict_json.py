"""Pieces for reading JSON of others: no NaN, no Infinity, no number beyond floats, and a bounded depth."""

import math
from typing import Any


def no_number(name: str) -> Any:
    """For json.loads' parse_constant."""
    raise ValueError(f"{name} is no number")


def finite(text: str) -> float:
    """For its parse_float. Raises: ValueError for what is too large."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def is_deeper(value: Any, most: int) -> bool:
    """Whether it has more than so many levels; 1 is one without children. It does not recurse."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
