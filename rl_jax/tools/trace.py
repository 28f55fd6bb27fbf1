"""A run's timeline as a file for Perfetto; with `summarize` where its time went, in the terminal.

    python -m rl_jax.tools.trace RUN [-o trace.json] [--steps A:B] [--attempt K]
    python -m rl_jax.tools.trace summarize RUN [--steps A:B] [--top 12] [--json]

A run that is under way can be read too, up to half a second before now. The file is opened at ui.perfetto.dev (it stays
in the browser) or chrome://tracing. Exit codes: 0; 2 where there is no timeline, or the seconds do not add up.
Must not: change the run, or import jax.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_jax.disk import naming
from rl_jax.metrics import read_metrics
from rl_jax.progress import duration
from rl_jax.settings_watch import steps_range
from rl_jax.tools.bubbles import Bubble, Grid, account, units_of
from rl_jax.tools.chrome_trace import chrome_trace
from rl_jax.tools.goodput import BUCKETS, Goodput, goodput_of
from rl_jax.tools.trace_files import (
    Attempt,
    TraceFilesError,
    read_attempts,
    read_episodes,
)

EXIT_BAD = 2
MOST_OFF = 0.01  # share of a pool's seconds by which busy ones and bubbles may miss them
NOT_KNOWN = "not known"


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    summarizes = words[:1] == ["summarize"]
    asked = _parser(summarizes).parse_args(words[1:] if summarizes else words)
    try:
        attempts = read_attempts(asked.run)
        return _summarize(asked, attempts) if summarizes else _export(asked, attempts)
    except (TraceFilesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD


def _parser(summarizes: bool) -> argparse.ArgumentParser:
    name = "summarize " if summarizes else ""
    parser = argparse.ArgumentParser(
        prog=f"python -m rl_jax.tools.trace {name}".strip(), allow_abbrev=False,
        description="where a run's time went" if summarizes else "a run's timeline as Chrome-trace JSON",
    )  # fmt: skip
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--steps", type=_steps, help="A:B, both with; else all of it")
    if summarizes:
        parser.add_argument("--top", type=int, default=12, help="bubbles that are listed")
        parser.add_argument("--json", action="store_true", help="one JSON object instead")
    else:
        parser.add_argument("-o", "--out", type=Path, help="else trace.json in the run directory")
        parser.add_argument("--attempt", type=int, help="else the last")
    return parser


def _steps(text: str) -> tuple[int, int]:
    try:
        return steps_range(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --- for Perfetto ----------------------------------------------------------------------------------------------------


def _export(asked: argparse.Namespace, attempts: Sequence[Attempt]) -> int:
    out = asked.out or asked.run / "trace.json"
    if not out.absolute().parent.is_dir():
        raise TraceFilesError(f"--out={out}: there is no directory {out.parent}")
    wanted = attempts[-1].number if asked.attempt is None else asked.attempt
    found = [attempt for attempt in attempts if attempt.number == wanted]
    if not found:
        known = ", ".join(str(attempt.number) for attempt in attempts)
        raise TraceFilesError(f"{asked.run} has no timeline of attempt {wanted}; it has {known}")
    attempt = found[0]
    following = next((a for a in attempts if a.number > attempt.number), None)
    window = attempt.window(asked.steps)
    grid = Grid(attempt, window)
    bubbles = [b for u in units_of(attempt, window) for b in account(u, grid).bubbles or ()]
    episodes = read_episodes(asked.run, attempt, following)
    trace = chrome_trace(attempt, window, bubbles, episodes)
    with naming(out):
        out.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")), encoding="ascii")
    size = out.stat().st_size / 1e6
    print(
        f"{out}: {len(trace['traceEvents'])} events of {duration(window[1] - window[0])}, {size:.1f} MB;"
        " open it at https://ui.perfetto.dev"
    )
    for line in _doubts(attempt):
        print(line)
    return 0


def _doubts(attempt: Attempt) -> list[str]:
    """What is not in the timeline, or not sure, a line each."""
    lines = []
    where = f"attempt {attempt.number}"
    if attempt.num_lost:
        lines.append(f"{where}: {attempt.num_lost} spans were lost (a disk or a link was too slow)")
    if attempt.num_dropped:
        lines.append(
            f"{where}: {attempt.num_dropped} older spans made room (metrics.timeline_bytes); this is of the rest"
        )
    if attempt.num_bad:
        lines.append(f"{where}: {attempt.num_bad} lines cannot be read (a process died in one)")
    if attempt.within_s:
        lines.append(
            f"{where}: clocks of other hosts are estimated by the links' pulses, within"
            f" {1e3 * attempt.within_s:.2f} ms"
        )
    return lines


# --- for the terminal ------------------------------------------------------------------------------------------------


def _summarize(asked: argparse.Namespace, attempts: Sequence[Attempt]) -> int:
    rows = read_metrics(asked.run) if (asked.run / "metrics.jsonl").exists() else []
    goodput = goodput_of(attempts, rows, asked.steps)
    longest = sorted(goodput.bubbles, key=lambda b: b.start_s - b.end_s)[: max(asked.top, 0)]
    if asked.json:
        print(json.dumps(record(goodput, longest), allow_nan=False, indent=1))
    else:
        for line in summary_lines(goodput, longest, attempts):
            print(line)
    return EXIT_BAD if _worst(goodput) > MOST_OFF else 0


def record(goodput: Goodput, longest: Sequence[Bubble] = ()) -> dict[str, Any]:
    """The summary as JSON."""
    pools = {}
    for name, pool in goodput.pools.items():
        pools[name] = {
            "devices": pool.devices,
            "device_seconds_up": pool.up_s,
            "useful": pool.useful_s,
            "buckets": pool.buckets,
            "causes": pool.causes,
            "off": pool.off,
            **goodput.factors(name),
        }
    return {
        "wall_s": goodput.wall_s,
        "pools": pools,
        "all": goodput.factors(),
        "units": {
            f"{u.name}.{i}": {
                "up_s": u.up_s, "busy_s": u.busy_s, "overlap_s": u.overlap_s,
                "bubbles_s": u.by_cause, "off": u.off,
            }
            for i, u in enumerate(goodput.units)
        },
        "longest": [
            {**b._asdict(), "shares": dict(b.shares), "cause": b.cause} for b in longest
        ],
    }  # fmt: skip


def summary_lines(
    goodput: Goodput, longest: Sequence[Bubble], attempts: Sequence[Attempt]
) -> list[str]:
    """What a person reads."""
    lines = [line for attempt in attempts for line in _doubts(attempt)]
    names = list(goodput.pools)
    lines.append(f"wall time {goodput.wall_s:.2f} s; share of each pool's device seconds:")
    shares = {name: _shares(goodput, name) for name in names}
    used = ["useful", *(b for b in BUCKETS if any(shares[n][b] for n in names)), "sum"]
    head = ["", *(f"{name} ({goodput.pools[name].devices:g})" for name in names)]
    table = [head, *([row, *(_percent(shares[n][row]) for n in names)] for row in used)]
    lines += _columns(table)
    factors = [("all", goodput.factors()), *((n, goodput.factors(n)) for n in names)]
    lines.append("goodput = sched x run x prog x sample:")
    kinds = ("sched", "run", "prog", "sample", "product")
    lines += _columns(
        [
            ["", *(name for name, _ in factors)],
            *([k, *(_factor(f[k]) for _, f in factors)] for k in kinds),
        ]
    )
    if any(f["prog"] is None for _, f in factors):
        lines.append("prog is not known where the peak of a device is not (a CPU, another process)")
    if longest:
        lines.append("longest bubbles (seconds from the begin of the run, what it waited for):")
        start_s = attempts[0].start_s
        lines += [f"  {_bubble(bubble, start_s)}" for bubble in longest]
    worst = _worst(goodput)
    verdict = "adds up" if worst <= MOST_OFF else "DOES NOT ADD UP"
    lines.append(f"busy + bubbles = wall time: {verdict}, off by {100 * worst:.3f} % at most")
    return lines


def _worst(goodput: Goodput) -> float:
    return max((x.off for x in (*goodput.units, *goodput.pools.values())), default=0.0)


def _shares(goodput: Goodput, name: str) -> dict[str, float]:
    pool = goodput.pools[name]
    up_s = pool.up_s or 1.0
    shares = {"useful": pool.useful_s / up_s, **{b: s / up_s for b, s in pool.buckets.items()}}
    return {**shares, "sum": sum(shares.values())}


def _bubble(bubble: Bubble, start_s: float) -> str:
    shares = sorted(bubble.shares.items(), key=lambda share: -share[1])
    told = ", ".join(f"{c} {100 * s:.0f} %" if s < 0.995 else c for c, s in shares if s > 0.005)
    length_s, at_s = bubble.end_s - bubble.start_s, bubble.start_s - start_s
    return f"{length_s:8.3f} s at {at_s:8.2f}  {bubble.unit:<12} {told}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _factor(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.3f}"


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  "
        + "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))
        )
        for row in table
    ]


if __name__ == "__main__":
    sys.exit(main())
