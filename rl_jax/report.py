"""What a person reads after a run: the closing lines, with its figures, one sample episode and what to type next.

Must not: touch a device, or write.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_jax.algorithms.options import entry_of
from rl_jax.driver import DriverState
from rl_jax.rollout.traces import read_traces
from rl_jax.settings import Settings
from rl_jax.types import Trajectory

SAMPLE_LINES = 24  # of the sample episode


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
    ended = {k.lower(): v for k, v in summary["episodes"].items()}
    if saved := summary.get("saved", 0):
        # The ledger, which knows training alone, has them as dropped.
        ended = {"saved": saved, **ended, "dropped": ended["dropped"] - saved}
    ended = {k: v for k, v in ended.items() if v}
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
    view = f"  {python()} -m rl_jax.tools.view {path}   # its curves, episodes and tokens, in a browser"
    lines = [view, go_on] if mode == "eval" else [view, evaluate, go_on]
    if settings.rollout.max_staleness:
        return [*lines, f"{fork} --config.rollout.max_staleness=0   # the same loop, synchronous"]
    return [*lines, f"{fork} --config.rollout.max_staleness=1   # the same loop, asynchronous"]


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
    half = SAMPLE_LINES // 2
    if len(lines) > SAMPLE_LINES:  # how it began, and how it ended
        lines = [*lines[:half], f"  ... ({len(lines) - 2 * half} lines)", *lines[-half:]]
    return lines


def _turn_texts(directory: Path, uid: str) -> list[tuple[str, str]]:
    with open(directory / "traces.jsonl", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record["uid"] == uid:
                return [(turn["prompt_text"], turn["text"]) for turn in record["turns"]]
    return []
