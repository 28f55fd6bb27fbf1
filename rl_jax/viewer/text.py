"""The viewer in a terminal: summary and advice, last steps, episodes, one of them, failures; plain lines.

Invariants: what a run says cannot act on the terminal: control characters, marks of direction, characters without width
and halves of surrogate pairs are written by name, before colours or lines of ours are put round them (there are none);
lists and texts are bounded, and say what they leave out.
"""

import argparse
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_jax.inert import inert
from rl_jax.viewer.api import Api, Refusal
from rl_jax.viewer.run import is_number

MAX_LINES = 200  # of one text
SHOWN = (  # of a step's row; the others are in the page
    "reward/mean", "reward/success", "policy/entropy", "optim/grad_norm", "mismatch/k3", "is/ess", "staleness/mean",
    "length/response", "time/step_s", "time/wait_for_batch_s", "goodput/run",
)  # fmt: skip
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Asked:
    """What of a run is to be printed."""

    split: str = "train"
    step: int | None = None
    episode: int | None = None
    low: float | None = None  # of rewards
    high: float | None = None
    failures: bool = False
    most: int = 20
    width: int = 0  # columns; 0: the terminal's

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Asked":
        """Raises ValueError: a range that is none, an episode without its step."""
        low, dots, high = args.reward.partition("..")
        try:
            lowest, highest = (float(end) if end else None for end in (low, high))
            if args.reward and not dots:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"--reward={args.reward!r} is no LOW..HIGH, such as 0..0.5 or 0.9.."
            ) from None
        if args.episode is not None and args.step is None:
            raise ValueError(f"--episode={args.episode} needs --step")
        if args.most < 1:
            raise ValueError(f"--most={args.most} must be above 0")
        return cls(
            args.split,
            args.step,
            args.episode,
            lowest,
            highest,
            args.failures,
            args.most,
            args.width,
        )


def report(api: Api, asked: Asked) -> Iterator[str]:
    """Lines. Raises Refusal."""
    width = asked.width or shutil.get_terminal_size((100, 24)).columns
    if asked.episode is not None:
        made = _episode(api, asked)
    elif asked.step is not None:
        made = _episodes(api, asked)
    elif asked.failures:
        made = _failures(api, asked)
    else:
        made = _summary(api, asked, width)
    yield from made


def _one(text: Any, most: int) -> str:
    """One line of at most `most` columns."""
    line = inert(str(text)).replace("\n", "\\n").replace("\t", " ")
    return line if len(line) <= most else line[: max(most - 3, 1)] + "..."


def _summary(api: Api, asked: Asked, width: int) -> Iterator[str]:
    run = api.answer("run", {})
    of = f" of {run['steps_planned']}" if run["steps_planned"] else ""
    silent = (
        f", last sign of life {run['silent_s']:.0f} s ago" if run["silent_s"] is not None else ""
    )
    yield _one(f"run {run['name']}: {run['state']}, step {run['step']}{of}{silent}", 1000)
    yield _one("  " + "  ".join(f"{key}={value}" for key, value in run["facts"]), 2000)
    for fault in run["faults"]:
        yield _one(f"  not readable: {fault}", 1000)
    yield ""
    if not run["advice"]:
        yield "advice: no rule speaks at the last step"
    for one in run["advice"]:
        yield _one(f"{one['kind'].upper()} {one['text'].partition(': ')[2]}", 1000)
    if run["num_suppressed"]:
        yield f"({run['num_suppressed']} lines of tuning advice are held back until that is mended)"
    rows = api.run.rows()
    names = [name for name in SHOWN if any(name in row for row in rows)]
    names += sorted({name for row in rows for name in row if name.startswith("eval/success")})
    if names:
        yield ""
        widest = max(map(len, names))
        for name in names:
            values = [row[name] for row in rows if is_number(row.get(name))]
            bars = spark(values, max(10, min(60, width - widest - 26)))
            yield _one(f"{name:<{widest}} {values[-1]:>11.4g}  {bars}", width + 20)
    steps = api.run.last_steps(min(asked.most, 1000))
    if steps:
        yield ""
        columns, left = [], width - 7
        for name in (name for name in SHOWN if any(name in row for row in steps)):
            left -= max(len(name), 9) + 2
            columns += [(name, max(len(name), 9))] if left >= 0 or not columns else []
        yield f"{'step':>6}" + "".join(f"  {name:>{size}}" for name, size in columns)
        for row in steps:
            yield f"{row['step']:>6}" + "".join(
                f"  {row[name]:>{size}.4g}" if name in row else f"  {'-':>{size}}"
                for name, size in columns
            )
    on_disk = run["steps"]
    if on_disk:
        yield ""
        yield (
            f"episodes of {len(on_disk)} steps ({on_disk[0]} to {on_disk[-1]}): --step=N lists them,"
            " --step=N --episode=I shows one; --failures says what was lost"
        )


def spark(values: Sequence[float], num: int) -> str:
    """Means of up to `num` stretches, as bars."""
    if not values:
        return ""
    parts = [
        float(np.mean(part))
        for part in np.array_split(np.asarray(values, float), min(num, len(values)))
    ]
    low, high = min(parts), max(parts)
    if low == high:
        return _BARS[4] * len(parts)
    return "".join(_BARS[1 + int(7.999 * (value - low) / (high - low))] for value in parts)


def _episodes(api: Api, asked: Asked) -> Iterator[str]:
    step = asked.step or 0
    index = api.samples.index(step, asked.split)
    if index is None:
        raise Refusal(
            404, f"step {step} has no complete traces of {asked.split}; there are {_steps(api)}"
        )
    keep = np.ones(index.num, bool)
    if asked.low is not None:
        keep &= index.reward >= asked.low
    if asked.high is not None:
        keep &= index.reward <= asked.high
    found = np.flatnonzero(keep)
    known = index.reward[found][np.isfinite(index.reward[found])]
    mean = f"{known.mean():.4g}" if len(known) else "-"
    yield f"step {step} {asked.split}: {len(found)} of {index.num} episodes, mean reward {mean}"
    if len(known):
        counts, edges = np.histogram(known, 10)
        for count, low, high in zip(counts.tolist(), edges.tolist(), edges[1:].tolist()):
            yield f"  {low:>8.3g} to {high:<8.3g} {count:>7} {'#' * round(40 * count / max(counts.max(), 1))}"
    yield f"{'episode':>7} {'group':>6} {'reward':>8} {'tokens':>7} {'outcome':<10} {'tag':<16} task"
    for i in found[: asked.most].tolist():
        names = api.samples.names(step, asked.split, i)
        yield (
            f"{i:>7} {index.group[i]:>6} {index.reward[i]:>8.3g} {index.length[i]:>7}"
            f" {_one(index.outcomes[index.outcome[i]], 10):<10} {_one(index.tags[index.tag[i]], 16):<16}"
            f" {_one(names.get('task', '-'), 60)}"
        )
    if len(found) > asked.most:
        yield f"and {len(found) - asked.most} more: --most={len(found)}"


def _episode(api: Api, asked: Asked) -> Iterator[str]:
    who = {"step": str(asked.step), "split": asked.split, "i": str(asked.episode)}
    shown = api.answer("episode", who)
    reward = shown["reward"]
    value = "unscored" if reward["value"] is None else f"{reward['value']:g}"
    yield _one(
        f"step {shown['step']} {shown['split']} episode {shown['i']}, group {shown['group']}: {shown['uid']}",
        1000,
    )
    yield _one(
        f"  reward {value} ({reward['status']}), {shown['outcome']}, tag {shown['tag']}, task {shown['task']},"
        f" {shown['num_tokens']} tokens, {shown['num_trained']} trained, begun with version {shown['start_version']}",
        2000,
    )
    parts = ", ".join(f"{name} {part}" for name, part in reward["parts"].items())
    if parts:
        yield _one(f"  parts: {parts}", 2000)
    if reward["detail"]["text"]:
        yield _one(f"  detail: {reward['detail']['text']}", 2000)
    if shown["failure"]:
        yield _one(f"  failure: {shown['failure']}", 2000)
    for turn in shown["turns"]:
        tokens = turn["tokens"]
        known = [x for x in tokens["logprobs"] if x is not None]
        mean = f", mean log-prob {np.mean(known):.3f}" if known else ""
        versions = sorted({v for v in tokens["versions"] if v is not None})
        yield ""
        yield _one(
            f"--- turn {turn['number'] + 1}: {turn['num_prompt']} seen, {turn['num_tokens']} sampled, ended by"
            f" {turn['finish']}, versions {versions}{mean}",
            1000,
        )
        yield from _text(turn["seen"], "< ")
        yield from _text(turn["said"], "> ")
        for call in turn["calls"]:
            if "error" in call:
                yield _one(f"! call that could not be read: {call['error']['text']}", 1000)
            else:
                given = ", ".join(f"{k}={v['text']}" for k, v in call["arguments"].items())
                yield _one(f"* call {call['name']}({given})", 1000)
    if shown["turns_left_out"]:
        yield f"and {shown['turns_left_out']} more turns"


def _text(cut: dict[str, Any], mark: str) -> Iterator[str]:
    lines = inert(cut["text"]).split("\n")
    for line in lines[:MAX_LINES]:
        yield mark + line
    left = cut["left_out"] + sum(map(len, lines[MAX_LINES:]))
    if left:
        yield f"{mark}... and {left} more characters"


def _failures(api: Api, asked: Asked) -> Iterator[str]:
    table = api.answer("failures", {})
    if table["fault"]:
        yield _one(f"not readable: {table['fault']}", 1000)
    yield "attempts at episodes by the states that they reached"
    for state, num in table["states"].items():
        yield f"  {state.lower():<10} {num:>9}"
    yield "what was lost, and why"
    issued = table["states"].get("ISSUED", 0)
    for kind in table["kinds"][: asked.most]:
        share = f"{kind['num'] / issued:7.2%}" if issued else ""
        yield f"  {kind['state'].lower():<10} {kind['num']:>9} {share} {_one(kind['reason'], 100)}"
    if not table["kinds"]:
        yield "  nothing"
    if len(table["kinds"]) > asked.most:
        yield f"  and {len(table['kinds']) - asked.most} more kinds: --most={len(table['kinds'])}"


def _steps(api: Api) -> str:
    steps = api.samples.steps()
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
