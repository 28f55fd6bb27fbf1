"""`python -m rl_jax.tools.replay RUN --step N`: one step trained again with every figure, bit for bit what happened.

Owns: the command line and its exit codes (0 equal, or what it need not be was told first; 1 it differs and nothing says
why; 2 what was asked cannot be done; 3 the run's files are not what they were). RUN may be live or read-only: nothing
in it is written or locked.
Must not: import jax before the run's config says which devices to simulate.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_jax import outset
from rl_jax.console import say
from rl_jax.resume import encode


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.tools.replay", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run directory; it is only read")
    parser.add_argument("--step", type=int, required=True, help="the step to train again")
    parser.add_argument(
        "--json", action="store_true", help="one JSON document, with every trained token"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="a file outside of RUN, instead of stdout"
    )
    args = parser.parse_args(argv)
    if args.output is not None and args.output.absolute().is_relative_to(args.run.absolute()):
        parser.error(f"-o {args.output} lies in {args.run}, where nothing is written; name another")
    try:
        settings = (
            importlib.import_module("rl_jax.tools.recorded").Recorded.read(args.run, args.step).here
        )
        outset.set_backend(settings)
        code, text = _replay(args.run, args.step, args.json)
        if args.output is None:
            say(text)
        else:
            args.output.write_text(text + "\n", encoding="utf-8")
        return code
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return 130
    except Exception as error:
        code = importlib.import_module("rl_jax.exit_codes").exit_code(error)
        if code is None:
            raise
        for line in getattr(error, "errors", (str(error),)):
            say(f"error: {line}", sys.stderr)
        return code


def _replay(run: Path, step: int, as_json: bool) -> tuple[int, str]:
    """(exit code, what is to be printed)."""
    replay_step = importlib.import_module("rl_jax.tools.replay_step")
    replay = replay_step.Replay.open(run, step)
    if reasons := replay.reasons():
        say(f"it need not be equal bit for bit: {'; '.join(reasons)}", sys.stderr)
    outcome = replay.run(lambda line: say(line, sys.stderr))
    code = 1 if outcome.differing and not reasons else 0
    if as_json:
        return code, encode(outcome.to_tree(), indent=1)
    return code, "\n".join(replay_step.report_lines(outcome))


if __name__ == "__main__":
    sys.exit(main())
