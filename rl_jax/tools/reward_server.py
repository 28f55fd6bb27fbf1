"""`python -m rl_jax.tools.reward_server`: scorers as a service over HTTP, which any number of runs may share.

It runs the scorers that --reward names, and no others, in worker processes that can be killed: started when a call
finds none free, ended when they had no call for --keep_alive_s, at most --workers. It keeps no state, so as many of it
may run behind one address as are wanted, and each may be killed at any time: callers ask again.
Beyond loopback it wants a token: what it runs, it runs on text that a policy wrote.
Needs the extra `uvicorn`. Exit codes: 0, 2 (the arguments, or a scorer that cannot be made), 130, 143 (told to end).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_jax.asgi import is_loopback, read_token
from rl_jax.console import say
from rl_jax.rewards import REWARDS
from rl_jax.rollout.process import Limit
from rl_jax.rollout.reward_app import AppLimits, RewardApp
from rl_jax.rollout.scorer_pool import ScorerPool
from rl_jax.settings import RewardSettings

BACKLOG = 2048
CLOSE_S = 5  # for answers under way when it is told to end


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    args = parser().parse_args(argv)
    try:
        app = build(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        import uvicorn  # an extra
    except ModuleNotFoundError:
        print("error: the service needs uvicorn; pip install 'rl_jax[uvicorn]'", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        app, host=args.host, port=args.port, lifespan="on", log_level="warning", access_log=False,
        backlog=BACKLOG, timeout_graceful_shutdown=CLOSE_S, server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    say(f"reward service on http://{args.host}:{args.port}, up to {args.workers} workers")
    try:
        server.run()
    except KeyboardInterrupt:
        return 130
    return 0 if server.started else 2


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m rl_jax.tools.reward_server", allow_abbrev=False)
    out.add_argument(
        "--host", default="127.0.0.1", help="an address; beyond loopback with --token_file"
    )
    out.add_argument("--port", type=int, default=8080)
    out.add_argument("--workers", type=int, default=4, help="most processes at once")
    out.add_argument("--keep_alive_s", type=float, default=60.0, help="of a process without a call")
    out.add_argument("--timeout_s", type=float, default=30.0, help="most that a call may ask for")
    out.add_argument(
        "--start_timeout_s", type=float, default=60.0, help="for scorers to be imported"
    )
    out.add_argument(
        "--max_waiting", type=int, default=1024, help="calls that wait; others get 429"
    )
    out.add_argument(
        "--token_file", default="", help="a file with the token that callers must send"
    )
    said = "a scorer: a name of REWARDS, or package.module:attribute; may be given again"
    out.add_argument("--reward", action="append", metavar="NAME", required=True, help=said)
    out.add_argument("--options", type=Path, help="a JSON file: scorer -> keyword arguments")
    return out


def build(args: argparse.Namespace) -> RewardApp:
    """Raises: ValueError, OSError: what is wrong with the arguments, in one line."""
    for name in ("workers", "max_waiting", "keep_alive_s", "timeout_s", "start_timeout_s"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}={getattr(args, name)} must be above 0")
    token = read_token(args.token_file, "--token_file")
    if not token and not is_loopback(args.host):
        raise ValueError(
            f"--host={args.host} is open to others, and without --token_file they may run scorers; give a token file,"
            " or use --host=127.0.0.1"
        )
    names = args.reward
    if unknown := [name for name in names if name not in REWARDS and ":" not in name]:
        raise ValueError(
            f"no reward {unknown[0]!r}; use one of {', '.join(REWARDS)} or package.module:attribute"
        )
    options = _options(args.options, names)
    settings = RewardSettings(timeout_s=args.timeout_s, workers=args.workers, options=options)
    pool = ScorerPool(
        {name: REWARDS.get(name, name) for name in names},
        settings,
        Limit(args.start_timeout_s, "--start_timeout_s"),
        keep_alive_s=args.keep_alive_s,
    )
    limits = AppLimits(args.timeout_s, max_waiting=args.max_waiting)
    return RewardApp(pool, names, token, limits)


def _options(path: Path | None, names: Sequence[str]) -> dict[str, Any]:
    options = json.loads(path.read_text(encoding="utf-8")) if path else {}
    if not isinstance(options, dict) or not all(isinstance(v, dict) for v in options.values()):
        raise ValueError(f'--options={path} is no JSON of the form {{"scorer": {{"key": value}}}}')
    if unknown := sorted(options.keys() - set(names)):
        raise ValueError(f"--options={path} names {unknown[0]!r}, which is not served")
    return options


if __name__ == "__main__":
    sys.exit(main())
