"""`python -m rl_jax.tools.convert SRC DST`: any model we read -> a Hugging Face directory.

SRC is a Hugging Face directory (rewritten in another dtype, or its text model alone), a GGUF file, or a run directory
or its checkpoints/step_N (an export of what was trained). Must not: import jax before it is told to stay on the CPU.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_jax import backend
from rl_jax.resume import RunDirError

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 what was asked, 3 the source's data, 7 the disk, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.tools.convert", allow_abbrev=False)
    parser.add_argument(
        "src",
        type=Path,
        help="Hugging Face directory, GGUF file, run directory, or its checkpoints/step_N",
    )
    parser.add_argument("dst", type=Path, help="directory to write; new or empty")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="", help="of what is written (default: as it is)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read it back and compare bytes and logits"
    )
    parser.add_argument("--files_from", type=Path, help="where a run's tokenizer lies now")  # fmt: skip
    args = parser.parse_args(argv)
    return run(args.src, args.dst, dtype=args.dtype, verify=args.verify, files_from=args.files_from)


def run(src: Path, dst: Path, **options: Any) -> int:
    """conversion.convert with these options; what is wrong is one line on stderr."""
    backend.only_simulate(1)
    conversion = importlib.import_module("rl_jax.tools.conversion")
    try:
        conversion.convert(src, dst, **options)
        return 0
    except (*conversion.ERRORS, RunDirError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return conversion.exit_code(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
