"""`python -m rl_jax.tools.serve MODEL_DIR`: a Hugging Face directory behind OpenAI's HTTP interface.

    --mesh=FILE.py[:arg]   whose prefill and decode pools serve, each server a thread; pools that train are left out,
                           and so are their devices
    --port, --admin_port   the public plane, and that of whoever runs it; 0 = any free port

Life: 1 Arguments and the directory are checked, within a second, before JAX is loaded. 2 Servers compile while the
weights are read. 3 Both planes listen; /ready says 200. 4 SIGTERM ends it gracefully (rl_jax/http/server.py).
Beyond loopback each plane wants a token file of its own. Needs the extra `serve`.
Exit codes: 0, 2 (arguments, a directory that cannot be served, a port), 5 (servers that do not get ready), 130.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl_jax import backend, config
from rl_jax.asgi import cannot_listen, is_loopback, read_token
from rl_jax.http.limits import HttpLimits
from rl_jax.mesh.plan import MeshPlan
from rl_jax.model_source import with_source
from rl_jax.settings import EngineSettings, ModelSettings, Settings

CHUNKS = (64, 512)  # packed prefill sizes, as far as the context is longer
MAX_CONTEXT = 4096  # of --context, where nothing is said; the KV cache takes memory by it


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    args = parser().parse_args(argv)
    try:
        settings, limits, tokens = check(args)
    except (ValueError, OSError) as error:
        return told(error)
    try:
        importlib.import_module("rl_jax.http.server")
    except ModuleNotFoundError as error:
        print(f"error: serving needs {error.name}; pip install 'rl_jax[serve]'", file=sys.stderr)
        return 2
    plan = MeshPlan.from_settings(settings.mesh, settings.model)
    backend.avoid_broken_fusions()
    try:
        if settings.mesh.platform == "cpu" or all(pool.hardware == "cpu" for pool in plan.pools):
            backend.simulate_cpu_devices(plan.num_devices)
        backend.use_platform(settings.mesh.platform)
    except backend.BackendError as error:
        return told(error)
    backend.enable_compile_cache()
    return importlib.import_module("rl_jax.serving").run(args, settings, plan, limits, tokens)


def told(error: BaseException) -> int:
    for line in getattr(error, "errors", str(error).splitlines()):
        print(f"error: {' '.join(line.split())}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m rl_jax.tools.serve", allow_abbrev=False)
    add = out.add_argument
    add(
        "model",
        type=Path,
        metavar="MODEL_DIR",
        help="config.json, safetensors, tokenizer, chat template",
    )
    add("--name", default="", help="the model's name for clients (default: the directory's)")
    add("--mesh", default="one_device", help="FILE.py[:arg], or a name of mesh_configs")
    add("--host", default="127.0.0.1", help="an address; beyond loopback with --token_file")
    add("--port", type=int, default=8000)
    add("--token_file", default="", help="a file with the token that clients must send")
    add("--admin_host", default="127.0.0.1", help="beyond loopback with --admin_token_file")
    add("--admin_port", type=int, default=8001)
    add("--admin_token_file", default="", help="a file with the operator's token")
    add("--dtype", default="", choices=("", "float32", "bfloat16"), help="of served weights")
    add(
        "--context",
        type=int,
        default=0,
        help=f"most tokens of a history (0: the model's, up to {MAX_CONTEXT})",
    )
    add("--slots", type=int, default=32, help="requests that one server generates for at once (32)")
    add("--num_pages", type=int, default=0, help="of the KV cache; 0: all slots at full context")
    add(
        "--steps_per_block",
        type=int,
        default=4,
        help="tokens a slot makes between two looks at requests",
    )
    add("--num_stop_tokens", type=int, default=8, help="most stop token ids of a request")
    add(
        "--tool_parser",
        default="auto",
        help="a name of TOOL_PARSERS; auto: of the template's family",
    )
    add("--queue", type=int, default=HttpLimits.queue, help="choices that wait; one more gets 429")
    add(
        "--request_s", type=float, default=HttpLimits.request_s, help="most that a request may take"
    )
    add(
        "--drain_s",
        type=float,
        default=HttpLimits.drain_s,
        help="for requests under way at the end",
    )
    add(
        "--write_s",
        type=float,
        default=HttpLimits.write_s,
        help="for a client to take what a stream has",
    )
    return out


def check(args: argparse.Namespace) -> tuple[Settings, HttpLimits, tuple[str, str]]:
    """Settings, limits, and the tokens of both planes. Raises: ValueError (ConfigError too), OSError."""
    errors = port_errors(args)
    for name in (
        "slots",
        "steps_per_block",
        "num_stop_tokens",
        "queue",
        "request_s",
        "drain_s",
        "write_s",
    ):
        if not getattr(args, name) > 0:
            errors.append(f"--{name}={getattr(args, name)} must be above 0")
    if errors:
        raise ValueError("\n".join(errors))
    tokens = []
    for host, flag in (("host", "token_file"), ("admin_host", "admin_token_file")):
        token = read_token(getattr(args, flag), f"--{flag}")
        if not token and not is_loopback(getattr(args, host)):
            raise ValueError(
                f"--{host}={getattr(args, host)} is open to others; give --{flag}, or use --{host}=127.0.0.1"
            )
        tokens.append(token)
    model = with_source(ModelSettings(source=str(args.model), tokenizer=str(args.model)))
    model = replace(model, dtype=args.dtype or model.dtype)
    context = args.context or min(model.max_context or MAX_CONTEXT, MAX_CONTEXT)
    if context < 2 or (model.max_context and context > model.max_context):
        raise ValueError(
            f"--context={context} must be 2 to {model.max_context or MAX_CONTEXT}, the model's"
        )
    engine = EngineSettings(
        slots=args.slots, context=context, num_pages=args.num_pages,
        steps_per_block=args.steps_per_block, num_stop_tokens=args.num_stop_tokens,
        chunk_sizes=tuple(size for size in CHUNKS if size < context) or (context,),
    )  # fmt: skip
    limits = HttpLimits(
        queue=args.queue, request_s=args.request_s, drain_s=args.drain_s, write_s=args.write_s
    )
    mesh = config.load_mesh(args.mesh)
    mesh = replace(mesh, pools=tuple(p for p in mesh.pools if p.kind not in ("train", "role")))
    settings = Settings(model=model, engine=engine, mesh=mesh)
    # What the edge lets through may all come to one server.
    serve = replace(settings.serve, queue_size=limits.queue + 2 * args.slots * len(mesh.pools) * 8)
    rollout = replace(settings.rollout, tool_parser=args.tool_parser)
    return replace(settings, serve=serve, rollout=rollout), limits, (tokens[0], tokens[1])


def port_errors(args: argparse.Namespace) -> list[str]:
    """What is wrong with the ports of both planes, before a model is read and compiled for them."""
    asked, errors = {"port": args.host, "admin_port": args.admin_host}, []
    for name, host in asked.items():
        port = getattr(args, name)
        if not 0 <= port <= 65535:
            errors.append(f"--{name}={port} must be 0 (any that is free) to 65535")
        elif why := cannot_listen(host, port):
            errors.append(f"--{name}={port} cannot be had at {host}: {why}")
    if args.port == args.admin_port > 0 and args.host == args.admin_host:
        errors.append(f"--port and --admin_port are both {args.port}: each plane needs its own")
    return errors


if __name__ == "__main__":
    sys.exit(main())
