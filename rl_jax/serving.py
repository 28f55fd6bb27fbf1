"""What `tools.serve` runs once JAX may be loaded: servers of a plan, their weights, and the two planes in front.

Owns: the cluster of servers, and how a directory becomes what they serve.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_jax.cluster import InProcCluster, ServersNotReady
from rl_jax.config import ConfigError
from rl_jax.console import say
from rl_jax.http.admin import Admin, Source
from rl_jax.http.api import Api
from rl_jax.http.app import build_app
from rl_jax.http.asks import Served
from rl_jax.http.limits import HttpLimits
from rl_jax.http.server import Planes, make_server
from rl_jax.mesh import MeshPlan, server_meshes
from rl_jax.models import hf
from rl_jax.names import resolve
from rl_jax.preflight import build_model, present_devices
from rl_jax.settings import Settings
from rl_jax.tokens.load import load_tokenizer, make_renderer
from rl_jax.weights.directory import PublishError, files_of, publish_directory

COMMIT_S = 60.0


class Service:
    """Servers with weights, and an Api over them. `close` ends their threads."""

    def __init__(
        self,
        settings: Settings,
        plan: MeshPlan,
        name: str,
        limits: HttpLimits = HttpLimits(),
        token: str = "",
    ):
        """Raises: ConfigError, hf.WeightsError, ValueError: what cannot be served, one line each."""
        tokenizer = load_tokenizer(settings.model.tokenizer, resolve)
        renderer = make_renderer(tokenizer, settings.rollout.tool_parser, resolve)
        self.settings = settings
        self.model = build_model(settings, resolve, tokenizer.vocab_size)
        vocab_size = settings.model.vocab_size or tokenizer.vocab_size
        errors = plan.check(
            settings.model,
            plan.num_devices,
            settings.learner,
            settings.engine,
            vocab_size,
            trains=False,
        )
        if len(renderer.stop_token_ids) > settings.engine.num_stop_tokens:
            num = len(renderer.stop_token_ids)
            errors.append(f"the model has {num} tokens that end a turn; raise --num_stop_tokens")
        if errors:
            raise ConfigError(errors)
        hf.check_headers(settings.model.source, self.model)
        meshes = server_meshes(plan, present_devices(plan))
        self.cluster = InProcCluster(
            plan, meshes, self.model, settings, renderer.template_sha256, likely=limits.logprobs
        )
        served = Served(
            name, renderer, settings.engine.context, vocab_size, settings.engine.num_stop_tokens,
            limits,
        )  # fmt: skip
        slots = settings.engine.slots * len(self.cluster.decode)
        self.api = Api(served, self.cluster.router, self.cluster.decode, slots=slots, token=token)

    def update(self, directory: str, version: int, kv: str, expected: str) -> Mapping[str, Any]:
        """As http.admin.Update. Raises: PublishError, hf.WeightsError, OSError."""
        targets = self.cluster.targets
        done = publish_directory(
            directory, self.model, targets, version, kv, deadline_s=COMMIT_S, expected=expected
        )
        return {
            "version": done.version,
            "digest": done.digest,
            "fenced": list(done.fenced),
            "acks": [asdict(ack) for ack in done.acks],
        }

    def start(self) -> str:
        """Compile, and serve the directory as version 0; returns its digest. Raises: ServersNotReady, as update."""
        self.cluster.start()
        digest = self.update(self.settings.model.source, 0, "recompute", "")["digest"]
        self.cluster.wait_ready(self.settings.serve.compile_deadline_s)
        return digest

    def planes(
        self,
        public: tuple[str, int],
        admin: tuple[str, int],
        *,
        digest: str = "",
        admin_token: str = "",
        on_started: Callable[[Planes], None] = lambda planes: None,
    ) -> Planes:
        """public, admin: (host, port)."""
        source = Source(self.update, files_of, self.settings.model.source, digest)
        app = Admin(self.api, self.cluster.targets, source, token=admin_token)
        size = self.api.limits.header_bytes
        servers = make_server(build_app(self.api), *public, size), make_server(app, *admin, size)
        return Planes(self.api, *servers, on_started=on_started)

    def close(self) -> None:
        self.cluster.close()


def run(
    args: argparse.Namespace,
    settings: Settings,
    plan: MeshPlan,
    limits: HttpLimits,
    tokens: tuple[str, str],
) -> int:
    """The exit code."""
    name = args.name or Path(args.model).resolve().name
    try:
        service = Service(settings, plan, name, limits, tokens[0])
    except (ValueError, OSError) as error:
        return _tell(error, 2)
    try:
        say(f"compiling for {plan.name}, and reading {settings.model.source}")
        digest = service.start()

        def started(planes: Planes) -> None:
            say(
                f"{name} on http://{args.host}:{planes.public.port}, admin on"
                f" http://{args.admin_host}:{planes.admin.port}, weights {digest[:16]}"
            )

        async def serve() -> None:
            planes = service.planes(
                (args.host, args.port), (args.admin_host, args.admin_port), digest=digest,
                admin_token=tokens[1], on_started=started,
            )  # fmt: skip
            await planes.run()

        asyncio.run(serve())
        return 0
    except KeyboardInterrupt:
        return 130
    except ServersNotReady as error:
        return _tell(error, 5)
    except (PublishError, ValueError, OSError) as error:
        return _tell(error, 2)
    finally:
        service.close()


def _tell(error: BaseException, code: int) -> int:
    for line in getattr(error, "errors", str(error).splitlines()):
        print(f"error: {' '.join(line.split())}", file=sys.stderr)
    return code
