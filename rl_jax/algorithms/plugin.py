"""The border to an algorithm from outside the table: what it raises is one line that names it, its function and where.

What it gives is asked for where it is taken (contract.py), of every algorithm. An error of an algorithm of the table is
a bug of ours, and keeps its trace.
Must not: change what passes through.
"""

import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_jax.algorithms import ALGORITHMS
from rl_jax.algorithms.algorithm import RewardPartError
from rl_jax.algorithms.contract import AlgorithmRaised, ContractError
from rl_jax.settings import AlgorithmSettings

OURS = Path(__file__).resolve().parents[1]


class Guarded:
    """An algorithm whose functions raise ContractError, AlgorithmRaised or RewardPartError and nothing else."""

    def __init__(self, name: str, algorithm: Any):
        self.named, self._algorithm = f"algorithm.name={name}", algorithm

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._algorithm, name)
        is_function = callable(value) and not isinstance(value, type)
        return self._guard(name, value) if is_function else value

    def _guard(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ContractError as error:  # of a base class, which does not know the plugin's name
                raise type(error)(self, *error.said) from error
            except (AlgorithmRaised, RewardPartError):
                raise
            except Exception as error:  # the boundary to a plugin's code
                said = next(iter(str(error).splitlines()), "")
                text = f"{type(error).__name__}: {said}" if said else type(error).__name__
                raise AlgorithmRaised(
                    f"{self.named}: {name}() raised {text} ({_place(error)})"
                ) from error

        call.__self__ = self  # as a method has it: who takes its result names whose it is
        return call


def make_algorithm(settings: AlgorithmSettings, resolve: Callable[..., Any]) -> Any:
    """The algorithm that the settings name. resolve: (name, table) -> the object behind it."""
    return guarded(settings.name, resolve(settings.name, ALGORITHMS)(settings))


def guarded(name: str, algorithm: Any) -> Any:
    """The algorithm as the system calls it; itself, if it is one of the table."""
    of_table = name in ALGORITHMS or name in {entry.target for entry in ALGORITHMS.values()}
    return algorithm if of_table else Guarded(name, algorithm)


def _place(error: Exception) -> str:
    """The innermost line of an error that is neither a library's nor ours, else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not _is_library(Path(f.filename))]
    last = (theirs or list(frames))[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def _is_library(path: Path) -> bool:
    homes = (OURS, Path(sysconfig.get_path("stdlib")), Path(sys.prefix))
    return "site-packages" in path.parts or any(path.is_relative_to(home) for home in homes)
