"""What a person reads before and after a run: the dry run's plan, and the closing lines.

`dry_run` shows what config.parse cannot know: the model's real shapes on the plan, the environments' tasks, and that an
episode of each comes back from the tokenizer as it was; it prints tables and starts no server. `closing_lines` gives
the figures, one sample episode and what to type next.
Must not: touch a device, or write beside plan.json of a run directory that was named.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kernels.kv import KVSpec
from rl_jax import schema
from rl_jax.algorithms.options import entry_of
from rl_jax.config import Parsed
from rl_jax.console import say
from rl_jax.data.corpus import Corpus
from rl_jax.driver import DriverState
from rl_jax.mesh import MeshPlan
from rl_jax.mesh.rules import Rules, mesh_axes
from rl_jax.models import MODELS
from rl_jax.models.model import Model
from rl_jax.preflight import round_trips
from rl_jax.role_source import needed_roles
from rl_jax.rollout.traces import read_traces
from rl_jax.rollout.worker import EnvPool
from rl_jax.settings import AlgorithmSettings, Settings
from rl_jax.tokens import ChatRenderer
from rl_jax.types import Trajectory

SAMPLE_LINES = 24  # of the sample episode
ADAM_MOMENTS = 2


def dry_run(
    parsed: Parsed,
    plan: MeshPlan,
    renderer: ChatRenderer,
    pool: EnvPool | None,
    resolve,
    corpus: Corpus | None = None,
) -> int:
    """Print the plan and what it costs; write plan.json into --run_dir if one was given. Returns 0.

    corpus: of a supervised run on rows of a file.
    """
    settings = parsed.settings
    vocab_size = settings.model.vocab_size or renderer.tokenizer.vocab_size
    model: Model = resolve(settings.model.family, MODELS)(settings.model, vocab_size)
    rows = memory_rows(plan, model, settings)
    say(plan.describe())
    say(_table(("pool", "device bytes", "weights", "optimizer + gradients", "KV"), rows))
    num_weights = sum(math.prod(a.shape) for a in model.abstract.values())
    wire = num_weights * jnp.dtype(settings.model.dtype).itemsize
    say(
        f"model: {num_weights:,} weights; a sync moves {wire:,} bytes to each of {len(plan.servers)} servers"
    )
    say(algorithm_line(settings.algorithm))
    report: dict[str, Any] = {
        "mesh": plan.name,
        "num_devices": plan.num_devices,
        "num_weights": num_weights,
        "sync_bytes": wire * len(plan.servers),
        "memory": [dict(zip(("pool", "total", "weights", "train", "kv"), row)) for row in rows],
    }
    if corpus is not None:
        say(f"{corpus.describe()}; {settings.steps} steps of {settings.data.batch_rows}")
        report["data"] = {
            **corpus.counts,
            "steps": settings.steps,
            "held_out": len(corpus.held_out),
        }
    if pool is not None:
        report["tasks"] = _task_report(settings, pool)
        report["round_trips"] = _round_trip_report(settings, renderer, pool)
    if parsed.options.run_dir:
        path = Path(parsed.options.run_dir)
        path.mkdir(parents=True, exist_ok=True)
        (path / "plan.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def algorithm_line(settings: AlgorithmSettings) -> str:
    """The algorithm's resolved values: its own where the config gave none; what it does not read is left out."""
    values = schema.leaves(schema.to_tree(settings))
    read = [f"{key}={value}" for key, value in values.items() if value is not None]
    return f"algorithm {settings.name}: {', '.join(read[1:])}"


def memory_rows(
    plan: MeshPlan, model: Model, settings: Settings
) -> list[tuple[str, int, int, int, int]]:
    """(server or train pool, bytes of one device, weights, optimizer + gradients, KV), from abstract shapes alone.

    A role is counted as of the policy's size. Activations, the staged copy of a sync (one more "weights") and a prefill
    server's scratch cache come on top.
    """
    served = jnp.dtype(settings.model.dtype).itemsize
    master = jnp.dtype(settings.model.param_dtype).itemsize
    m, e = settings.model, settings.engine
    cache = KVSpec(m.num_layers, m.num_kv_heads, m.head_dim, e.context, e.slots, m.dtype)
    rows = []
    for server in plan.servers:
        weights = _sharded_size(model, server.rules, server.axes) * served
        holds_slots = server.kind != "prefill"
        kv = cache.num_bytes // _num_shards(cache.axes, server.rules, server.axes) * holds_slots
        rows.append((server.name, weights + kv, weights, 0, kv))
    if plan.train is not None:
        size = _sharded_size(model, plan.train.rules, plan.train.axes)
        weights, state = size * master, size * 4 * (ADAM_MOMENTS + 1)
        rows.append((plan.train.pool, weights + state, weights, state, 0))
    for where in sorted(needed_roles(settings)):
        mesh = plan.role(getattr(settings, where).pool, settings.model)
        size, is_critic = _sharded_size(model, mesh.rules, mesh.axes), where == "critic"
        weights = size * (master if is_critic else served)
        state = size * 4 * (ADAM_MOMENTS + 1) * is_critic
        rows.append((f"{mesh.pool} {where}", weights + state, weights, state, 0))
    return rows


def closing_lines(
    run_dir: Any, mode: str, summary: Mapping[str, Any], version: int, settings: Settings
) -> list[str]:
    """Figures, one sample episode, next commands. version: of the policy as the run left it."""
    lines = [f"{mode}: {summary['steps']} steps in {summary['wall_s']:.0f} s"]
    if summary["tasks"]:
        first = max(len(name) for name in summary["tasks"])
        for name, value in summary["tasks"].items():
            start = f"{value['first']:.3f} -> " if "first" in value else ""
            lines.append(f"  success {name:<{first}}  {start}{value['last']:.3f}")
    if (lag0 := summary["mismatch"]["lag0_mean_abs"]) is not None:
        lines.append(f"  |trainer - sampler log-prob| at lag 0: {lag0:.1e} mean")
    ended = {k.lower(): v for k, v in summary["episodes"].items() if v}
    if ended:
        lines.append("  episodes: " + ", ".join(f"{v} {k}" for k, v in ended.items()))
    if (sample := _sample_episode(Path(run_dir.path))) is not None:
        lines += ["", *sample, ""]
    return [*lines, "next:", *next_commands(Path(run_dir.path), mode, version, settings)]


def next_commands(path: Path, mode: str, version: int, settings: Settings) -> list[str]:
    """Commands that work on what the run left in `path`."""
    launch = f"  {python()} -m rl_jax.launch"
    fork = f"{launch} --config={path}/config.resolved.py"
    evaluate = f"{launch} --mode=eval --run_dir={path}"
    go_on = f"{launch} --run_dir={path} --config.steps={version + 50}"
    if mode == "rollout_only":
        replay = f"{fork} --mode=train_only --config.rollout.replay_dir={path}   # train on these"
        return [replay, f"{go_on} --mode=rollout_only"]
    if mode == "train_only":
        return [evaluate, f"{fork} --config.rollout.replay_dir= --resume={path}   # RL from it"]
    lines = [go_on] if mode == "eval" else [evaluate, go_on]
    if settings.rollout.max_staleness:
        lines.append(f"{fork} --config.rollout.max_staleness=0   # the same loop, synchronous")
    return lines


def python() -> str:
    """What a person types for the interpreter that runs this."""
    found = shutil.which("python")
    if found and Path(found).resolve() == Path(sys.executable).resolve() and sys.prefix in found:
        return "python"
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def fitted_lines(run_dir: Any, settings: Settings, state: DriverState) -> list[str]:
    """Figures of a supervised run, and what its weights are for."""
    lines = [f"{settings.algorithm.name}: {state.version} steps"]
    for name, value in state.evaluations.items():
        start = f"{value['first']:.4f} -> " if "first" in value else ""
        lines.append(f"  held-out {name}  {start}{value['last']:.4f}")
    path = run_dir.path
    if entry_of(settings.algorithm).rows == "ends":
        return [*lines, f"the reward model is in {path}/checkpoints/step_{state.version}"]
    return [
        *lines,
        "next:",
        f"  {python()} -m rl_jax.launch --mode=eval --run_dir={path}",
        f"  {python()} -m rl_jax.launch --run_dir=runs/rl --resume={path}   # RL from these weights",
    ]


def _task_report(settings: Settings, pool: EnvPool) -> dict[str, Any]:
    """Tasks of each split."""
    out: dict[str, Any] = {}
    for source in settings.tasks.sources:
        sizes = {s: len(pool.list_tasks(source.tag, s)) for s in pool.splits(source.tag)}
        out[source.tag] = sizes
        listed = ", ".join(f"{num} {split} tasks" for split, num in sizes.items())
        say(f"tag {source.tag}: {listed}")
    return out


def _round_trip_report(
    settings: Settings, renderer: ChatRenderer, pool: EnvPool
) -> dict[str, dict[str, Any]]:
    """Counts of what went through the tokenizer and came back as it was; what does not ends the dry run."""
    trips = round_trips(settings, pool, renderer)
    for tag, trip in trips.items():
        say(
            f"tag {tag}: {trip.what} keeps its text through the tokenizer: {trip.num_turns} turns,"
            f" {trip.num_tokens} tokens of engine.context={settings.engine.context}, {trip.num_sampled} of them sampled"
        )
    return {tag: asdict(trip) for tag, trip in trips.items()}


def _sharded_size(model: Model, rules: Rules, axes: Mapping[str, int]) -> int:
    """Weights that one device holds."""
    return sum(
        math.prod(array.shape) // _num_shards(model.logical_axes[name], rules, axes)
        for name, array in model.abstract.items()
    )


def _num_shards(logical: Sequence[str | None], rules: Rules, axes: Mapping[str, int]) -> int:
    """Pieces that an array with these logical axes is cut into on a mesh of these sizes."""
    return math.prod(axes[axis] for on in mesh_axes(logical, rules) for axis in on)


def _sample_episode(path: Path) -> list[str] | None:
    """The text of one episode of the newest saved step: a success of several turns if there is one."""
    steps = sorted(
        path.glob("rollouts/step_*/eval/index.npz"),
        key=lambda p: int(p.parts[-3].removeprefix("step_")),
    )
    if not steps:
        return None
    trajectories = read_traces(steps[-1].parent)
    if not trajectories:
        return None

    def rank(t: Trajectory) -> tuple[bool, int]:
        return (t.reward.value == 1.0, len(t.turns))

    best = max(trajectories, key=rank)
    lines = [
        f"one episode ({best.tag}, version {best.oldest_version}, reward {best.reward.value:g}):"
    ]
    texts = _turn_texts(steps[-1].parent, best.uid)
    for turn, (prompt, text) in enumerate(texts):
        lines += [f"  turn {turn}  {text!r}  <-", *(f"    {line}" for line in prompt.splitlines())]
    return lines[:SAMPLE_LINES] + (["  ..."] if len(lines) > SAMPLE_LINES else [])


def _turn_texts(directory: Path, uid: str) -> list[tuple[str, str]]:
    with open(directory / "traces.jsonl", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record["uid"] == uid:
                return [(turn["prompt_text"], turn["text"]) for turn in record["turns"]]
    return []


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [head, *[[f"{v:,}" if isinstance(v, int) else v for v in row] for row in rows]]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(str(c).ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells
    )
