"""Programs lowered from shapes alone: traced and written down as XLA takes them; nothing is allocated, compiled or run.

Owns: `lower`, which names the program that cannot be traced, and `Lowering`, which stands where jax.jit stands and
lowers each program at its call, so that code which runs programs lowers them too, with the same arguments.
Must not: know a program.
"""

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.stages import Lowered

Program = tuple[str, Lowered]  # and its name


class LoweringError(ValueError):
    """A program that cannot be traced; one line that names it, and the place in the code where that ended."""

    def __init__(self, program: str, error: Exception):
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "site-packages" not in Path(f.filename).parts]
        at = f" ({ours[-1].filename}:{ours[-1].lineno})" if ours else ""
        said = next(iter(str(error).splitlines()), "")  # JAX goes on with advice
        super().__init__(f"{program} cannot be traced: {type(error).__name__}: {said}{at}")


@contextmanager
def tracing(program: str) -> Generator[None, None, None]:
    """Whatever fails inside is told of `program`. Raises: LoweringError."""
    try:
        yield
    except LoweringError:
        raise
    except Exception as error:  # the boundary to JAX, and to the code of plugins inside a program
        raise LoweringError(program, error) from error


def lower(name: str, program: Any, *arguments: Any, **static: Any) -> Lowered:
    """A jitted program lowered for arguments of these shapes and shardings. Raises: LoweringError."""
    with tracing(name):
        return program.lower(*arguments, **static)


class Lowering:
    """What jax.jit makes, but a call lowers it, keeps it in `made`, and returns its results' shapes and shardings."""

    def __init__(self, made: list[Program], function: Callable, **options: Any):
        """options: of jax.jit."""
        self.name = ""  # set by whoever made it
        self._made, self._program = made, jax.jit(function, **options)

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        lowered = lower(self.name, self._program, *arguments, **static)
        self._made.append((self.name, lowered))
        return lowered.out_info
