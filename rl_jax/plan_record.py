"""What a run will hold and move, from shapes alone: the content of plan.json, which a run keeps and a dry run prints.

Owns: the count of device and host memory, sync bytes and checkpoints. Nothing here touches a device; the disk is asked
only how much of it is free. Must not: write, or say what only a dry run finds out (dry_run.py).
"""

import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp

from kernels.kv import KVSpec
from rl_jax import schema
from rl_jax.algorithms.options import entry_of
from rl_jax.build_roles import TRAINING, Setting
from rl_jax.config import ConfigError
from rl_jax.data.corpus import Corpus
from rl_jax.disk import existing
from rl_jax.learner.trained import state_bytes
from rl_jax.mesh import MeshPlan
from rl_jax.mesh.rules import Rules, mesh_axes
from rl_jax.models import MODELS
from rl_jax.models.model import Model
from rl_jax.models.value import ValueModel, value_model
from rl_jax.remote.carriers import REGIONS
from rl_jax.resume import checkpoint_steps
from rl_jax.role_source import needed_roles
from rl_jax.rollout.worker import EnvPool
from rl_jax.serve.roles import AHEAD
from rl_jax.settings import AlgorithmSettings, Settings
from rl_jax.weights.sync import IN_FLIGHT

ADAM_MOMENTS = 2
LINE_WIDTH = 120
POOL_COLUMNS = ("pool", "total", "weights", "train", "kv", "sync")


@dataclass(frozen=True)
class CheckpointNeed:
    """What the checkpoints of a run take of the disk they go to."""

    num_bytes: int  # of one
    num_at_once: int  # kept, and the one that is written before the oldest goes
    num_there: int  # of an earlier attempt
    free_bytes: int
    where: str  # the run directory, or what of it is there

    @property
    def more_bytes(self) -> int:
        """What they take beyond what is there."""
        return self.num_bytes * max(self.num_at_once - self.num_there, 1)


def plan_record(
    setting: Setting, model: Model, pool: EnvPool | None, corpus: Corpus | None
) -> dict[str, Any]:
    """plan.json of a run. corpus: of a supervised run on rows of a file."""
    settings, plan = setting.settings, setting.plan
    num_weights = sum(math.prod(a.shape) for a in model.abstract.values())
    wire = num_weights * jnp.dtype(settings.model.dtype).itemsize
    record: dict[str, Any] = {
        "mesh": plan.name,
        "num_devices": plan.num_devices,
        "num_weights": num_weights,
        "sync_bytes": wire * len(plan.servers),
        "memory": [dict(zip(POOL_COLUMNS, row)) for row in memory_rows(plan, model, settings)],
    }
    if held := host_memory(model, settings):
        record["host_memory"] = held
    if (need := checkpoint_need(setting, model)) is not None:
        record["checkpoint"] = asdict(need)
    if corpus is not None:
        record["data"] = {
            "summary": corpus.describe(),
            **corpus.counts,
            "steps": settings.steps,
            "held_out": len(corpus.held_out),
        }
    if pool is not None:
        tags = [source.tag for source in settings.tasks.sources]
        record["tasks"] = {
            tag: {split: len(pool.list_tasks(tag, split)) for split in pool.splits(tag)}
            for tag in tags
        }
    return record


def plan_lines(record: Mapping[str, Any], setting: Setting) -> list[str]:
    """The record as a person reads it, below the mesh plan's own table."""
    num_servers = len(setting.plan.servers)
    head = ("pool", "device bytes", "weights", "optimizer + gradients", "KV", "weight sync")
    lines = [_table(head, [tuple(row.values()) for row in record["memory"]])]
    lines.append(
        f"model: {record['num_weights']:,} weights; a sync moves {record['sync_bytes'] // max(num_servers, 1):,} bytes"
        f" to each of {num_servers} servers"
    )
    if held := record.get("host_memory"):
        listed = ", ".join(f"{where} {num:,} bytes" for where, num in held.items())
        lines.append(f"host memory that syncs hold: {listed}")
    if "checkpoint" in record:
        lines.append(_disk_line(CheckpointNeed(**record["checkpoint"]), setting.settings))
    if setting.collects:
        lines.append(step_line(setting))
    line = algorithm_line(setting.settings.algorithm)
    lines += textwrap.wrap(line, LINE_WIDTH, subsequent_indent="  ", break_long_words=False)
    if (data := record.get("data")) is not None:
        size = setting.settings.data.batch_rows
        lines.append(f"{data['summary']}; {data['steps']} steps of {size}")
    for tag, sizes in record.get("tasks", {}).items():
        listed = ", ".join(f"{num} {split} tasks" for split, num in sizes.items())
        lines.append(f"tag {tag}: {listed}")
    return lines


def step_line(setting: Setting) -> str:
    """How much a step samples, beside what the servers hold at once."""
    s = setting.settings
    num = s.rollout.batch_groups * s.rollout.group_size
    servers = setting.plan.servers
    num = sum(server.kind != "prefill" for server in servers)
    if s.serve.pd_balance == "auto":
        num = min(len(servers), int(AHEAD * num))
    slots = s.engine.slots * num
    most = s.learner.row_tokens
    return (
        f"a step: {s.rollout.batch_groups:,} groups of {s.rollout.group_size} = {num:,} episodes, at most"
        f" {num * most:,} tokens ({most:,} each); the servers hold {slots:,} episodes at once,"
        f" {num / slots:,.1f} times a step"
    )


def algorithm_line(settings: AlgorithmSettings) -> str:
    """The algorithm's resolved values: its own where the config gave none; what it does not read is left out."""
    values = schema.leaves(schema.to_tree(settings))
    read = [f"{key}={value}" for key, value in values.items() if value is not None]
    return f"algorithm {settings.name}: {', '.join(read[1:])}"


def memory_rows(
    plan: MeshPlan, model: Model, settings: Settings
) -> list[tuple[str, int, int, int, int, int]]:
    """(server or train pool, bytes of one device, weights, optimizer + gradients, KV, a sync), from shapes alone.

    A sync holds a second copy on servers until it is committed, and the buckets under way at both ends. A role is
    counted as of the policy's size. Activations come on top.
    """
    served = jnp.dtype(settings.model.dtype).itemsize
    master = jnp.dtype(settings.model.param_dtype).itemsize
    m, e = settings.model, settings.engine
    pages = e.page_tokens, e.cache_pages
    cache = KVSpec(m.num_layers, m.num_kv_heads, m.head_dim, *pages, m.dtype)
    under_way = IN_FLIGHT * settings.weights.bucket_bytes
    rows = []
    for server in plan.servers:
        weights = sharded_size(model, server.rules, server.axes) * served
        kv = cache.num_bytes // _num_shards(cache.axes, server.rules, server.axes)
        sync = weights + min(under_way, weights)
        rows.append((server.name, weights + kv + sync, weights, 0, kv, sync))
    if plan.train is not None:
        size = sharded_size(model, plan.train.rules, plan.train.axes)
        weights, state = size * master, size * 4 * (ADAM_MOMENTS + 1)
        sync = min(under_way, size * served) if plan.servers else 0
        rows.append((plan.train.pool, weights + state + sync, weights, state, 0, sync))
    for where in sorted(needed_roles(settings)):
        mesh = plan.role(getattr(settings, where).pool, settings.model)
        size, is_critic = sharded_size(model, mesh.rules, mesh.axes), where == "critic"
        weights = size * (master if is_critic else served)
        state = size * 4 * (ADAM_MOMENTS + 1) * is_critic
        rows.append((f"{mesh.pool} {where}", weights + state, weights, state, 0, 0))
    return rows


def host_memory(model: Model, settings: Settings) -> dict[str, int]:
    """Bytes of host memory that weight syncs hold beside the servers: where -> how much; {} where all are one process.

    driver: two regions, of the largest bucket, from the first sync on. each store: a version, from its first bucket
    until all servers of its host have it.
    """
    if settings.cluster.backend == "inproc":
        return {}
    served = jnp.dtype(settings.model.dtype).itemsize
    sizes = [array.size * served for array in model.abstract.values()]
    bucket = max(min(settings.weights.bucket_bytes, sum(sizes)), *sizes)
    out = {"driver": REGIONS * bucket} if settings.weights.transport in ("auto", "shared") else {}
    return out | ({"each store": sum(sizes)} if settings.cluster.stores else {})


def checkpoint_need(setting: Setting, model: Model) -> CheckpointNeed | None:
    """Of all that the mode's run saves; None where it saves nothing.

    Checkpoints are compressed: a trained state in float32 takes 0.93 of its size, an optimizer that never made a step
    next to nothing, so that it is not counted.
    """
    s, mode = setting.settings, setting.mode
    if mode == "eval":
        return None
    saved: list[Model | ValueModel] = [model]
    is_reward_model = entry_of(s.algorithm).rows == "ends"
    if is_reward_model or (mode in TRAINING and "critic" in needed_roles(s)):
        scorer = value_model(setting.resolve(s.model.family, MODELS), s.model, model.vocab_size)
        saved = [scorer] if is_reward_model else [model, scorer]
    learns = mode in TRAINING and s.steps > 0
    num_bytes = sum(state_bytes(one, s.learner) if learns else _weight_bytes(one) for one in saved)
    every = s.checkpoint.every if mode == "train" else 0
    num_saves = 1 + (max(s.steps - 1, 0) // every if every else 0)
    num_kept = s.checkpoint.keep
    if mode == "rollout_only":  # the start is saved too, and kept
        num_saves, num_kept = 2, num_kept + 1
    where = existing(setting.run)
    return CheckpointNeed(
        num_bytes=num_bytes,
        num_at_once=min(num_saves, num_kept + 1),
        num_there=len(checkpoint_steps(setting.run)),
        free_bytes=shutil.disk_usage(where).free,
        where=str(where),
    )


def check_disk(record: Mapping[str, Any]) -> None:
    """Raises: ConfigError where not even the run's first checkpoint has a place on the disk."""
    need = CheckpointNeed(**record["checkpoint"]) if "checkpoint" in record else None
    if need is not None and need.num_bytes > need.free_bytes:
        raise ConfigError(
            [
                f"a checkpoint takes {need.num_bytes:,} bytes (weights, and optimizer state if it trains), but"
                f" {need.where} has {need.free_bytes:,} free; free some space, or name a --run_dir on a larger disk"
            ]
        )


def _disk_line(need: CheckpointNeed, settings: Settings) -> str:
    line = (
        f"disk: a checkpoint takes {need.num_bytes:,} bytes; at most {need.num_at_once} at once (checkpoint.keep="
        f"{settings.checkpoint.keep}) need {need.more_bytes:,} of the {need.free_bytes:,} free in {need.where}; traces"
        " and logs come on top"
    )
    if need.num_bytes > need.free_bytes:
        line += ". NOT EVEN ONE FITS: a run into this place is refused"
    elif need.more_bytes > need.free_bytes:
        line += ". THEY DO NOT FIT: free some space, or lower checkpoint.keep"
    return line


def _weight_bytes(model: Model | ValueModel) -> int:
    return sum(a.size * a.dtype.itemsize for a in model.abstract.values())


def sharded_size(model: Model, rules: Rules, axes: Mapping[str, int]) -> int:
    """Weights that one device holds."""
    return sum(
        math.prod(array.shape) // _num_shards(model.logical_axes[name], rules, axes)
        for name, array in model.abstract.items()
    )


def _num_shards(logical: Sequence[str | None], rules: Rules, axes: Mapping[str, int]) -> int:
    """Pieces that an array with these logical axes is cut into on a mesh of these sizes."""
    return math.prod(axes[axis] for on in mesh_axes(logical, rules) for axis in on)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [head, *[[f"{v:,}" if isinstance(v, int) else v for v in row] for row in rows]]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(str(c).ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells
    )
