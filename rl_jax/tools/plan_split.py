"""`python -m rl_jax.tools.plan_split --trace RUN --costs FILE --servers N`: how many of N equal servers shall prefill.

For before they start; serve/split.py has the arithmetic and what it leaves out.

What is asked of servers comes from the trajectories that a run wrote (metrics.rollouts_every), or from a simulated
workload by name. What a server takes comes from a file of measured points,
    {"prefill": [[tokens of a prompt, seconds], ...], "decode": [[requests at once, seconds a token], ...], "slots": 64}
(benchmarks/prefill.py and benchmarks/decode.py measure such), or is a class of simulate/costs.py by name: a roofline,
which compares ratios and predicts no speed.
1. A turn goes to a prefill server where it is its episode's first, or adds more than engine.append_limit tokens; what
   others add is appended by decode servers, and counts as nothing here. One unit of traffic is such a turn and all
   that is sampled until the next one.
2. Each ratio's rate is predicted; the highest is the answer, of equals the one with more decode servers.
Must not: start a server, or write anything.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rl_jax.resume import RunDirError, stored_config
from rl_jax.rollout.traces import TraceError, read_traces
from rl_jax.serve.split import Split, Table, Traffic, choose_split, rate
from rl_jax.simulate import pd_ratio
from rl_jax.simulate.costs import HARDWARE
from rl_jax.simulate.staleness import WORKLOADS
from rl_jax.simulate.workload import TaskShape, rng_of

NUM_DRAWN = 400  # episodes of a workload: the means are within some per cent
APPEND_LIMIT = 256  # engine.append_limit, where no run says


class Unit(NamedTuple):
    """A turn as servers see it. Tokens."""

    added: int  # to what was there before it
    sampled: int
    context: int  # when it began to sample
    is_first: bool  # nothing of its context was there before


def traffic_of(turns: Iterable[Unit], append_limit: int, at_once: int) -> tuple[Traffic, float]:
    """Means of the turns that prefill servers get, and the mean history of a sampled token. Raises: ValueError without
    a turn."""
    turns = list(turns)
    prefilled = [turn for turn in turns if turn.is_first or turn.added > append_limit]
    sampled = sum(turn.sampled for turn in turns)
    if not prefilled or not sampled:
        raise ValueError("there is no turn in which anything was sampled")
    history = sum(turn.sampled * (turn.context + turn.sampled / 2) for turn in turns) / sampled
    num = len(prefilled)
    prompt = sum(turn.added for turn in prefilled) / num
    return Traffic(prompt, max(1.0, sampled / num), at_once), history


def turns_of_run(path: Path) -> list[Unit]:
    """Of all rollouts/step_N/train of a run directory, or of one such directory.

    Raises: FileNotFoundError, TraceError."""
    found = sorted(path.glob("rollouts/step_*/train")) or [path]
    turns = []
    for trajectory in (t for directory in found for t in read_traces(directory)):
        context = 0
        for i, turn in enumerate(trajectory.turns):
            added, sampled = len(turn.prompt_tokens), len(turn.tokens)
            context += added
            turns.append(Unit(added, sampled, context, i == 0))
            context += sampled
    return turns


def turns_of_workload(shape: TaskShape) -> list[Unit]:
    """Of NUM_DRAWN episodes."""
    rng, turns = rng_of("plan_split", shape.tag), []
    for _ in range(NUM_DRAWN):
        context = 0
        for i in range(max(1, int(shape.turns(rng)))):
            added = max(1, int((shape.observation if i else shape.prompt)(rng)))
            sampled = max(1, int(shape.answer(rng)))
            context += added
            is_new = i == 0 or not shape.keeps_history
            turns.append(Unit(context if is_new else added, sampled, context, is_new))
            context += sampled
    return turns


def read_table(path: Path) -> Table:
    """Raises: ValueError naming the file, OSError."""
    try:
        tree = json.loads(path.read_text())
        points = {
            name: tuple((float(x), float(s)) for x, s in tree[name])
            for name in ("prefill", "decode")
        }
        return Table(points["prefill"], points["decode"], int(tree["slots"]))
    except (KeyError, TypeError, ValueError) as error:
        form = '{"prefill": [[tokens, seconds], ...], "decode": [[requests, seconds], ...], "slots": 64}'
        raise ValueError(
            f"{path} is no cost table ({type(error).__name__}: {error}); give {form}"
        ) from None


def lines(table: Table, traffic: Traffic, num_servers: int) -> list[str]:
    """The table of all ratios, and the choice. Raises: ValueError for fewer than two servers."""
    best = choose_split(table, traffic, num_servers)
    said = [
        f"a turn that is prefilled: {traffic.prompt:.0f} tokens, then {traffic.answer:.0f} sampled;"
        f" {traffic.at_once} at once",
        f"{'prefill':>7} {'decode':>6} {'turns/s':>9} {'of best':>7}  bound by",
    ]
    for num in range(1, num_servers):
        split = rate(table, traffic, num, num_servers - num)
        share = split.turns_per_s / best.turns_per_s
        mark = "  <- best" if split == best else ""
        said.append(_row(split, share) + mark)
    said.append(f"best: {best.num_prefill} prefill, {best.num_decode} decode")
    return said


def _row(split: Split, share: float) -> str:
    return f"{split.num_prefill:>7} {split.num_decode:>6} {split.turns_per_s:>9.3g} {share:>7.2f}  {split.bound}"


def _at_once(path: Path) -> tuple[int, int]:
    """(episodes that may be under way, engine.append_limit) of a run. Raises: RunDirError."""
    rollout, engine = (stored_config(path).get(name, {}) for name in ("rollout", "engine"))
    live = rollout["batch_groups"] * rollout["group_size"] * (1 + rollout["max_staleness"])
    most = rollout["env_workers"] * rollout["envs_per_worker"]
    return min(live, most), engine["append_limit"]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 what was asked, 3 the trace's data."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.tools.plan_split", allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="run directory, or one rollouts/step_N/train")
    source.add_argument("--workload", default="", help="of rl_jax/simulate, e.g. game")
    parser.add_argument(
        "--costs", required=True, help="JSON file of measured points, or H800 or H20"
    )
    parser.add_argument("--servers", type=int, required=True, help="how many there are")
    parser.add_argument("--at_once", type=int, default=0, help="episodes under way (a run says it)")
    parser.add_argument("--append_limit", type=int, default=None, help="tokens (a run says it)")
    args = parser.parse_args(argv)
    try:
        print("\n".join(_plan(args)))
        return 0
    except (ValueError, RunDirError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, TraceError | OSError) else 2


def _plan(args: argparse.Namespace) -> list[str]:
    at_once, append_limit = args.at_once, args.append_limit
    if args.trace is not None:
        turns = turns_of_run(args.trace)
        if at_once <= 0 or append_limit is None:
            told = _at_once(args.trace)
            at_once, append_limit = (
                at_once or told[0],
                append_limit if append_limit is not None else told[1],
            )
    else:
        turns = turns_of_workload(_shape(args.workload))
        append_limit = APPEND_LIMIT if append_limit is None else append_limit
    if at_once <= 0:
        raise ValueError(
            f"--at_once={at_once}: a workload does not say how many episodes are under way; give 1 or more"
        )
    traffic, history = traffic_of(turns, append_limit, at_once)
    return lines(_costs(args.costs, history), traffic, args.servers)


def _shape(name: str) -> TaskShape:
    shapes = {shape.tag: shape for shape in (*pd_ratio.TRACES, *WORKLOADS)}
    if name not in shapes:
        raise ValueError(f"--workload={name} is none of {', '.join(shapes)}")
    return shapes[name]


def _costs(name: str, history: float) -> Table:
    if name in HARDWARE:
        return pd_ratio.table(int(history), HARDWARE[name])
    if not Path(name).exists():
        raise ValueError(
            f"--costs={name} is no file, and none of the classes {', '.join(HARDWARE)}"
        )
    return read_table(Path(name))


if __name__ == "__main__":
    sys.exit(main())
