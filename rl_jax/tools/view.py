"""`python -m rl_jax.tools.view RUN`: see a run, live or dead: its curves, episodes, tokens, failures.

A page on loopback (the default), one file that needs no server (--export one.html), or text for a terminal (--text).
It reads the run's files alone and writes nothing there; rl_jax/viewer says how. Over SSH: `ssh -L 8787:127.0.0.1:8787
HOST`, then the printed address; or --text there.
Exit codes: 0 ended by Ctrl-C, or all was shown; 2 the command line, or no run is there; 3 what was asked for is not
in the run; 1 a file cannot be written or the port is taken.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_jax.viewer import export, text
from rl_jax.viewer.api import Api, Refusal
from rl_jax.viewer.server import Server

PORT = 8787


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m rl_jax.tools.view", allow_abbrev=False)
    add = out.add_argument
    add("run", type=Path, metavar="RUN", help="a run directory, such as runs/NAME")
    add("--port", type=port_number, default=PORT, help=f"on 127.0.0.1 (default {PORT}; 0: any)")
    add(
        "--plugins",
        action="store_true",
        help="load the tokenizer of a config that names code (package.module:attribute)",
    )
    how = out.add_mutually_exclusive_group()
    how.add_argument(
        "--export", type=Path, metavar="FILE", help="write one self-contained HTML file"
    )
    how.add_argument("--text", action="store_true", help="print summary, advice and the last steps")
    add(
        "--export_mb",
        type=float,
        default=20.0,
        help="most that the exported file may take, in megabytes (default 20)",
    )
    add("--step", type=int, help="with --text: the episodes of a step")
    add("--episode", type=int, help="with --text and --step: one of them, whole")
    add("--split", default="train", choices=("train", "eval"))
    add(
        "--reward",
        default="",
        metavar="LOW..HIGH",
        help="with --text: only episodes with such a reward",
    )
    add("--failures", action="store_true", help="with --text: what was lost, and why")
    add("--most", type=int, default=20, help="with --text: lines of a list")
    add("--width", type=int, default=0, help="with --text: columns of the terminal (0: as it is)")
    return out


def port_number(text: str) -> int:
    """An argparse type."""
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.export is not None and not args.export.absolute().parent.is_dir():
            raise ValueError(f"--export={args.export}: there is no directory {args.export.parent}")
        api = Api(args.run, of_anywhere if args.plugins else of_the_table)
        if args.text:
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8
            for line in text.report(api, text.Asked.of(args)):
                print(line)
        elif args.export is not None:
            size, left_out = export.write(api, args.export, int(args.export_mb * 1e6))
            print(
                f"{args.export}: {size / 1e6:.1f} MB{f'; left out: {left_out}' if left_out else ''}"
            )
        else:
            serve(api, args.port)
    except Refusal as error:
        print(f"error: {error.detail}", file=sys.stderr)
        return 3
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has left: head, less
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        what = (
            f"port {args.port} is taken; try --port=0" if not (args.text or args.export) else error
        )
        print(f"error: {what}", file=sys.stderr)
        return 1
    return 0


def serve(api: Api, port: int) -> None:
    """Until Ctrl-C."""
    with Server(api, port) as server:
        print(f"{api.run.path} is at {server.url}   (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def of_anywhere(name: str, table: Mapping[str, Any]) -> Any:
    from rl_jax.names import (
        resolve,
    )  # with it comes all of the config's checking: a third of the program's start

    return resolve(name, table)


def of_the_table(name: str, table: Mapping[str, Any]) -> Callable[..., Any]:
    """A run's config is data of whoever made the run: code that it names is loaded only where that is asked for."""
    if name not in table:
        raise ValueError(f"{name!r} is code of its own; --plugins loads it")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


if __name__ == "__main__":
    sys.exit(main())
