"""A timeline as Chrome-trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing read.

Owns: the layout: which group of spans is a process of the picture and which row a thread of it; bubbles as slices with
the name of what was waited for; arrows from the chunk that computed an episode's first prompt over the episode to the
step that trained it.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the trace event format).
Invariants: slices of one thread do not overlap unless one lies within the other: what overlaps gets a thread more;
every arrow has a begin and an end, each inside of a slice; times are microseconds from the window's begin, never below
0.
Must not: read a file.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rl_jax.tools.bubbles import LEAST_S, Bubble, Interval, subtract, union
from rl_jax.tools.trace_files import Attempt, Episode, Span

# Processes of the picture, in order: group of spans -> title.
GROUPS = {
    "driver": "driver",
    "prefill": "prefill",
    "decode": "decode",
    "train": "train",
    "sync": "sync",
    "env": "env workers",
    "reward": "reward",
    "ckpt": "ckpt",
    "episodes": "episodes",
    "rollout": "staleness bound",
    "compile": "compile",
    "life": "processes",
}
FLAT = ("env", "reward", "episodes", "life")  # what lies within another one there is no part of it
SAVE = "the save of version"


class Slice(NamedTuple):
    group: str
    row: str
    name: str
    category: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


def chrome_trace(
    attempt: Attempt,
    window: Interval,
    bubbles: Sequence[Bubble],
    episodes: Sequence[Episode],
) -> dict[str, Any]:
    """The whole JSON object. bubbles, episodes: those outside of the window are left out."""
    slices = [
        s
        for s in (*_spans(attempt), *_bubbles(attempt, bubbles), *_episodes(episodes))
        if s.end_s > window[0] and s.start_s < window[1]
    ]
    placed = list(_placed(slices, window))
    names, numbers = _numbers(placed)
    events = [*names]
    for one, thread in placed:
        start_s, end_s = max(one.start_s, window[0]), min(one.end_s, window[1])
        events.append(
            {
                "ph": "X",
                "name": one.name,
                "cat": one.category,
                "ts": _us(start_s, window),
                "dur": max(round((end_s - start_s) * 1e6, 3), 0.0),
                "pid": numbers[one.group],
                "tid": numbers[one.group, thread],
                "args": dict(one.args),
            }
        )
    events += _arrows(placed, numbers, episodes, window)
    about = {
        "attempt": attempt.number,
        "lost_spans": attempt.num_lost,
        "dropped_spans": attempt.num_dropped,
        "clocks_within_s": attempt.within_s,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _us(at_s: float, window: Interval) -> float:
    return round((at_s - window[0]) * 1e6, 3)


def _spans(attempt: Attempt) -> Iterator[Slice]:
    for span in attempt.spans:
        if span.group not in GROUPS or span.kind in ("wait", "started"):
            continue
        group = "ckpt" if span.kind == SAVE else span.group
        row = "checkpoints" if span.kind == SAVE else span.row
        yield Slice(group, row, _name(span), span.kind, span.start_s, span.end_s, span.more)


def _name(span: Span) -> str:
    number = span.more.get("number", span.more.get("step", ""))
    kind = span.kind.removeprefix("time/").removesuffix("_s")
    return f"{kind} {number}".strip()


def _bubbles(attempt: Attempt, bubbles: Iterable[Bubble]) -> Iterator[Slice]:
    group = {s.row: s.group for s in attempt.spans if s.group in ("prefill", "decode")}
    rows = [s.row for s in attempt.of("train")]
    own: dict[str, list[Interval]] = {}
    for s in attempt.spans:
        if s.group in ("prefill", "decode") and s.kind in ("compile", "swap"):
            own.setdefault(s.row, []).append((s.start_s, s.end_s))
    for bubble in bubbles:
        gaps = [(bubble.start_s, bubble.end_s)]
        if bubble.cause in ("compile", "sync") and len(bubble.shares) == 1:
            # There the server's own slice says so. A learner on its devices compiles beside it, too.
            gaps = subtract(gaps, union(own.get(bubble.unit, ())))
        row = bubble.unit if bubble.unit in group else (rows or ["learner"])[0]
        name = f"waits for: {bubble.cause}"
        shares = {cause: round(share, 4) for cause, share in bubble.shares.items()}
        for start, end in gaps:
            if end - start >= LEAST_S:
                yield Slice(
                    group.get(bubble.unit, "train"), row, name, "bubble", start, end, shares
                )


def _episodes(episodes: Iterable[Episode]) -> Iterator[Slice]:
    for e in episodes:
        if e.running_s is not None and e.scored_s is not None:
            args = {"episode": e.session, "state": e.state, "step": e.step}
            yield Slice("episodes", "live", e.tag, "episode", e.running_s, e.scored_s, args)


def _placed(slices: Sequence[Slice], window: Interval) -> Iterator[tuple[Slice, str]]:
    """Each with its thread: of a row the first in which it overlaps nothing that it does not lie within."""
    rows: dict[tuple[str, str], list[Slice]] = {}
    for one in slices:
        rows.setdefault((one.group, one.row), []).append(one)
    for (group, row), mine in rows.items():
        ends: list[
            list[float]
        ] = []  # of each thread, the ends of its slices that are open, outermost first
        free: list[tuple[float, int]] = []  # (end of a thread's outermost slice, its number)
        for one in sorted(mine, key=lambda s: (s.start_s, -s.end_s)):
            nests = group not in FLAT
            lane = next((i for i, open_ in enumerate(ends[:4]) if _fits(open_, one, nests)), None)
            if lane is None and free and free[0][0] <= one.start_s:
                lane = heapq.heappop(free)[1]
                ends[lane] = []
            if lane is None:
                lane = len(ends)
                ends.append([])
            ends[lane].append(one.end_s)
            if len(ends[lane]) == 1 and lane >= 4:
                heapq.heappush(free, (one.end_s, lane))
            yield one, row if lane == 0 else f"{row} ({lane + 1})"


def _fits(open_: list[float], one: Slice, nests: bool) -> bool:
    """Closes what is over by then."""
    while open_ and open_[-1] <= one.start_s:
        open_.pop()
    return not open_ or (nests and one.end_s <= open_[-1])


def _numbers(placed: Sequence[tuple[Slice, str]]) -> tuple[list[dict[str, Any]], dict[Any, int]]:
    """The events that name processes and threads, and the numbers of both."""
    events: list[dict[str, Any]] = []
    numbers: dict[Any, int] = {}
    threads = sorted(
        {(one.group, thread) for one, thread in placed}, key=lambda t: (t[0], len(t[1]), t[1])
    )
    for pid, (group, title) in enumerate(GROUPS.items(), 1):
        mine = [thread for of, thread in threads if of == group]
        if not mine:
            continue
        numbers[group] = pid
        meta = {"ph": "M", "ts": 0, "pid": pid, "tid": 0}
        events.append({**meta, "name": "process_name", "args": {"name": title}})
        events.append({**meta, "name": "process_sort_index", "args": {"sort_index": pid}})
        for tid, thread in enumerate(mine, 1):
            numbers[group, thread] = tid
            events.append({**meta, "tid": tid, "name": "thread_name", "args": {"name": thread}})
            events.append(
                {**meta, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            )
    return events, numbers


def group_of(session: str) -> str:
    """Of GROUP/SAMPLE#ATTEMPT."""
    return session.rpartition("/")[0]


def _arrows(
    placed: Sequence[tuple[Slice, str]],
    numbers: Mapping[Any, int],
    episodes: Iterable[Episode],
    window: Interval,
) -> Iterator[dict[str, Any]]:
    """prompt -> episode -> step, of episodes of which two of the three are in the window.

    Members of a group have one prompt, which servers compute once: who had it from there has the arrow of the first."""
    prompts: dict[str, tuple[Slice, str]] = {}
    of_group: dict[str, tuple[Slice, str]] = {}
    lives: dict[str, tuple[Slice, str]] = {}
    updates: dict[int, tuple[Slice, str]] = {}
    for one, thread in placed:
        for session in one.args.get("first", ()) if one.category == "chunk" else ():
            prompts[session] = (one, thread)
            of_group.setdefault(group_of(session), (one, thread))
        if one.category == "episode":
            lives[one.args["episode"]] = (one, thread)
        is_policys = one.category == "update" and one.args.get("model") == "policy"
        if is_policys and one.start_s >= window[0]:
            updates[one.args["version"] + 1] = (one, thread)  # the last: a warm start's came before
    for number, episode in enumerate(episodes, 1):
        session = episode.session
        step = updates.get(episode.step) if episode.step is not None else None
        life, prompt = lives.get(session), prompts.get(session) or of_group.get(group_of(session))
        if life is not None and prompt is not None and prompt[0].start_s > life[0].end_s:
            prompt = None  # another attempt's
        stops = [stop for stop in (prompt, life, step) if stop is not None]
        if len(stops) < 2:
            continue
        for i, (one, thread) in enumerate(stops):
            phase = "s" if i == 0 else "f" if i == len(stops) - 1 else "t"
            start_s, end_s = max(one.start_s, window[0]), min(one.end_s, window[1])
            # Of an episode its end: its prompt was computed while it lived, and no arrow goes back in time.
            share = 1 - 1e-3 if one.category == "episode" else 0.5
            at_s = start_s + share * (end_s - start_s)
            yield {
                "ph": phase,
                "id": number,
                "name": "episode",
                "cat": "episode",
                "ts": _us(at_s, window),
                "pid": numbers[one.group],
                "tid": numbers[one.group, thread],
                **({"bp": "e"} if phase != "s" else {}),
            }
