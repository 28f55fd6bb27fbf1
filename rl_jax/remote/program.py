"""How a program of a process that the driver asks begins: its command line, its link, and whom it dies with.

    python -m PROGRAM TOLD                              a child of the driver (LocalStarter)
    python -m PROGRAM --connect=HOST:PORT --server=NAME [--secret_file=FILE]      started by anybody else

The link is an inherited descriptor; or comes over TCP, with the run's secret out of the file or RL_JAX_CLUSTER_SECRET,
and patience while the driver is not there or has a process of this name still. A process that has a parent to obey dies
with it even when it is stopped (PR_SET_PDEATHSIG).
Must not: know what the program serves.
"""

import argparse
import faulthandler
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_jax.child import SECRET_VARIABLE, die_with, take_variable
from rl_jax.remote.link import address_of, connect, read_secret, secret_of

log = logging.getLogger(__name__)


def run_program(program: str, serve: Callable[[socket.socket, Mapping[str, Any]], None]) -> None:
    """Begin, and serve the link. serve: gets its socket and what the driver told."""
    faulthandler.enable()
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    if not sys.argv[1:2] or sys.argv[1].startswith("-"):
        serve(*_linked(program))
        return
    told = json.loads(sys.argv[1])
    die_with(told["parent"])
    serve(socket.socket(fileno=told["fd"]), told)


def leave(error: Exception) -> None:
    """The driver is gone, or done: nothing here is of any use to anybody."""
    log.info("the process ends: %s", error)
    os._exit(0)


def _linked(program: str) -> tuple[socket.socket, Mapping[str, Any]]:
    words = _parser(program).parse_args()
    if words.parent:
        die_with(words.parent)
    try:
        secret = _secret(words.secret_file)
        address = address_of(words.connect)
        link = connect(address, secret, words.server, words.attempt, words.patience_s)
    except (OSError, ValueError) as error:
        sys.exit(f"{program}: {error}")
    log.info("%s is linked to %s", words.server, words.connect)
    return link


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", allow_abbrev=False)
    parser.add_argument(
        "--connect", required=True, metavar="HOST:PORT", help="where the driver listens"
    )
    parser.add_argument("--server", required=True, metavar="NAME", help="of the plan: decode.0")
    parser.add_argument(
        "--secret_file",
        type=Path,
        help=f"of the run; without it {SECRET_VARIABLE} holds the secret",
    )
    parser.add_argument(
        "--patience_s", type=float, default=120.0, help="how long to try to reach the driver"
    )
    parser.add_argument("--attempt", default="", help="only by what the driver starts")
    parser.add_argument("--parent", type=int, default=0, help="the process to die with")
    return parser


def _secret(path: Path | None) -> bytes:
    """Raises: OSError; ValueError."""
    given = take_variable(SECRET_VARIABLE)
    if path is not None:
        return read_secret(path)
    if given is None:
        raise ValueError(f"there is no --secret_file, and no {SECRET_VARIABLE} in the environment")
    return secret_of(given, SECRET_VARIABLE)
