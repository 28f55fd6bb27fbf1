"""Bubbles, goodput and the picture of timelines whose every second is known."""

import json
import random
from types import SimpleNamespace

import pytest

from rl_jax.tools import trace
from rl_jax.tools.bubbles import Grid, account, intersect, length, subtract, union, units_of
from rl_jax.tools.chrome_trace import chrome_trace
from rl_jax.tools.goodput import BUCKET_OF, BUCKETS, goodput_of
from rl_jax.tools.trace_files import Attempt, Episode, Span, TraceFilesError
from tests.timeline_checks import check_chrome, names

GIB = 1 << 30
SERVER = {"weight_bytes": 1e9, "peak_flops": None, "peak_bytes": None}
MODEL = {"flops_token": 2e9, "flops_pair": 100.0, "kv_bytes": 1000}


def pool(devices=1, servers=(), trains=False):
    return {"devices": devices, "servers": list(servers), "trains": trains}


def facts(peak_flops=None, peak_bytes=None, **pools):
    peaks = {"peak_flops": peak_flops, "peak_bytes": peak_bytes}
    servers = {name: {**SERVER, **peaks} for p in pools.values() for name in p["servers"]}
    return {"mode": "train", "pools": pools, "servers": servers, "train": peaks, "model": MODEL}


def attempt_of(*spans, number=0, **known):
    """spans: (track, kind, start, end, more)."""
    known = known or {"decode": pool(servers=["decode.0"]), "train": pool(trains=True)}
    made = [Span(t, k, a, b, more[0] if more else {}, "driver") for t, k, a, b, *more in spans]
    return Attempt(number, made, facts(**known))


def lap(name, start, end, step=1):
    return ("driver/steps", f"time/{name}_s", start, end, {"step": step})


def block(start, end, running=1, tokens=4, context=100, server="decode.0"):
    more = {"running": running, "tokens": tokens, "context": context, "version": 0}
    return (f"decode/{server}", "block", start, end, more)


def update(start, end, version=0):
    return ("train/learner", "update", start, end, {"model": "policy", "version": version})


# One synchronous step: decode 0..4 with an environment's second in it, a score, the update, the sync, a save.
SYNCHRONOUS = (
    ("decode/decode.0", "wait", -1.0, 0.0),
    block(0.0, 2.0),
    ("decode/decode.0", "wait", 2.0, 3.0),
    ("env/env_0", "step", 2.0, 3.0),
    block(3.0, 4.0),
    ("decode/decode.0", "wait", 4.0, 7.75),
    ("decode/decode.0", "wait", 8.0, 8.5),
    ("reward", "judge", 4.0, 5.0),
    lap("wait_for_batch", -1.0, 5.0),
    lap("batch", 5.0, 5.5),
    ("driver/now", "the update of step", 5.0, 7.0, {"number": 1}),
    update(5.5, 7.0),
    lap("train", 5.5, 7.0),
    ("driver/now", "the sync of version", 7.0, 8.0, {"number": 1}),
    ("decode/decode.0", "swap", 7.75, 8.0),
    lap("sync", 7.0, 8.0),
    lap("step", -1.0, 8.0),
    ("driver/now", "the save of version", 8.0, 8.5, {"number": 1}),
)


def accounted(*spans, window=None, **known):
    attempt = attempt_of(*spans, **known)
    window = window or (attempt.start_s, attempt.end_s)
    grid = Grid(attempt, window)
    return {u.name: account(u, grid) for u in units_of(attempt, window)}


def test_seconds_of_a_synchronous_step_have_the_causes_that_they_had():
    units = accounted(*SYNCHRONOUS)
    decode, train = units["decode.0"], units["train"]
    assert decode.busy_s == 3.0 and decode.overlap_s == 0.0
    assert decode.by_cause == pytest.approx(
        {"unknown": 1.0, "environments": 1.0, "rewards": 1.0, "learner": 2.0, "sync": 1.0, "save": 0.5}
    )  # fmt: skip
    assert train.busy_s == 1.5
    assert train.by_cause == pytest.approx(
        {"unknown": 1.0, "rollout": 3.0, "environments": 1.0, "rewards": 1.0, "batch": 0.5, "sync": 1.0, "save": 0.5}
    )  # fmt: skip
    assert decode.off < 1e-12 and train.off < 1e-12
    assert [(b.start_s, b.end_s, b.cause) for b in decode.bubbles][:3] == [
        (-1.0, 0.0, "unknown"), (2.0, 3.0, "environments"), (4.0, 7.75, "learner"),
    ]  # fmt: skip


def test_what_a_batch_waits_for_is_shared_by_the_episodes_that_are_there():
    units = accounted(
        block(0.0, 4.0, running=6),
        ("env/env_0", "step", 0.0, 4.0, {"queued": 1}),
        lap("batch", 0.0, 0.0),
        lap("wait_for_batch", 0.0, 4.0, step=2),
    )
    assert units["train"].by_cause == pytest.approx({"rollout": 3.0, "environments": 1.0})
    (bubble,) = units["train"].bubbles
    assert bubble.cause == "rollout" and bubble.shares == pytest.approx(
        {"rollout": 0.75, "environments": 0.25}
    )


def test_pause_that_somebody_asked_for_is_one_whatever_else_goes_on():
    pause = "a pause before step 5, asked for by ann on host"
    units = accounted(
        lap("batch", 0.0, 0.5),
        ("driver/now", pause, 1.0, 4.0),
        ("decode/decode.0", "wait", 0.0, 4.0),
    )
    for unit in units.values():
        assert unit.by_cause["pause"] == 3.0 and unit.off < 1e-12


def test_hosts_work_between_two_blocks_is_neither_use_nor_a_wait():
    units = accounted(
        ("decode/decode.0", "compile", 0.5, 2.0),
        ("decode/decode.0", "wait", 2.0, 3.0),
        block(3.0, 4.0),
        block(4.5, 5.0),
        lap("batch", 2.5, 2.5),
        window=(0.0, 5.0),
    )
    decode = units["decode.0"]
    assert decode.by_cause == pytest.approx(
        {"init": 1.0, "compile": 1.5, "host": 0.5, "unknown": 0.5}
    )
    assert decode.busy_s == 1.5 and decode.off < 1e-12


def test_compile_within_an_update_is_no_use_and_devices_that_do_both_count_once():
    spans = [
        update(0.0, 4.0),
        ("compile/MainThread", "compile", 1.0, 3.0),
        ("compile/serve-all.0", "compile", 3.0, 3.5),
        block(2.5, 6.0, server="all.0"),
        ("decode/all.0", "wait", 6.0, 8.0),
        lap("batch", 0.0, 0.0),
    ]
    units = accounted(*spans, all=pool(servers=["all.0"], trains=True))
    unit = units["all.0"]
    assert length(union([(0, 1), (3, 6)])) == unit.busy_s - unit.overlap_s == 4.0
    assert unit.overlap_s == 1.5  # 2.5 to 4: both wanted the device
    assert unit.by_cause == pytest.approx({"compile": 2.0, "unknown": 2.0}) and unit.off < 1e-12


def test_sets_of_intervals():
    a, b = union([(3, 5), (0, 2), (1, 2.5), (7, 7)]), [(2, 4)]
    assert a == [(0, 2.5), (3, 5)]
    assert subtract(a, b) == [(0, 2), (4, 5)] and intersect(a, b) == [(2, 2.5), (3, 4)]
    assert subtract([(0, 10)], [(1, 2), (3, 4)]) == [(0, 1), (2, 3), (4, 10)]


def test_seconds_of_any_timeline_add_up_and_its_picture_is_sound():
    rng = random.Random(7)
    for _ in range(30):
        spans, at = [lap("batch", rng.uniform(0, 3), 3.0)], 0.0
        while at < 20.0:
            took = rng.expovariate(1.0)
            kind = rng.choice(("block", "chunk", "wait", "swap", "nothing"))
            more = {
                "running": rng.randint(1, 9),
                "tokens": 3,
                "pairs": 6,
                "context": 9,
                "first": [],
            }
            if kind != "nothing":
                spans.append(("decode/decode.0", kind, at, at + took, more))
            at += took
        for name in ("env/env_0", "reward", "train/learner"):
            kind = "update" if name.startswith("train") else "step"
            more = {"model": "policy", "version": 0}
            for _ in range(rng.randint(0, 10)):
                start = rng.uniform(0, 20)
                spans.append((name, kind, start, start + rng.expovariate(2.0), more))
        attempt = attempt_of(*spans)
        window = (rng.uniform(0, 5), rng.uniform(10, 25))
        grid = Grid(attempt, window)
        units = [account(u, grid) for u in units_of(attempt, window)]
        assert max(u.off for u in units) < 1e-9
        for (
            unit
        ) in units:  # and the bubbles that are listed are what their causes say, but for tiny ones
            listed = sum(b.end_s - b.start_s for b in unit.bubbles)
            assert listed == pytest.approx(sum(unit.by_cause.values()), abs=0.05)
        bubbles = [b for u in units for b in u.bubbles]
        check_chrome(json.loads(json.dumps(chrome_trace(attempt, window, bubbles, []))))


# --- goodput --------------------------------------------------------------------------------------


def goodput(*attempts, rows=(), steps=None):
    return goodput_of(attempts, rows, steps)


def test_every_cause_has_a_bucket_and_every_device_counts():
    assert set(BUCKET_OF.values()) < set(BUCKETS)
    found = goodput(
        attempt_of(
            *SYNCHRONOUS,
            decode=pool(devices=6, servers=["decode.0"]),
            idle=pool(devices=2, servers=["idle.0"]),
            train=pool(devices=2, trains=True),
        )
    )
    run = {name: found.factors(name)["run"] for name in found.pools}
    assert run == pytest.approx({"decode": 3 / 9.5, "idle": 0.0, "train": 1.5 / 9.5})
    assert found.factors()["run"] == pytest.approx((6 * 3 + 2 * 0 + 2 * 1.5) / (10 * 9.5))
    assert found.pools["decode"].buckets["env_wait"] == 6.0
    assert found.pools["train"].buckets["reward_wait"] == 2.0
    for one in found.pools.values():
        assert one.useful_s + sum(one.buckets.values()) == pytest.approx(one.up_s)


def test_peak_that_is_not_known_makes_the_product_not_known_and_never_one():
    rows = [{"step": 1, "goodput/sample": 0.5, "batch/tflops": 1.5}]
    found = goodput(attempt_of(*SYNCHRONOUS), rows=rows)
    assert found.factors("decode")["prog"] is None and found.factors()["product"] is None
    assert found.factors("train")["sample"] == 0.5
    lines = "\n".join(trace.summary_lines(found, [], [attempt_of(*SYNCHRONOUS)]))
    assert "not known" in lines and "adds up" in lines


def test_prog_is_what_the_peak_would_take_over_what_was_taken():
    known = {"decode": pool(servers=["decode.0"]), "train": pool(trains=True)}
    spans = [
        lap("step", 0.0, 10.0),
        lap("batch", 0.0, 0.0),
        # 8 tokens of 4 requests are 2 steps, each of 1 GB of weights and 1 MB of KV: 2.002 ms at 1 TB/s.
        block(0.0, 0.01, running=4, tokens=8, context=1000),
        # 1000 tokens of 2 GFLOP and 500,000 pairs of 100 FLOP: 2.00005 TFLOP, 20 ms at 100 TFLOP/s.
        ("decode/decode.0", "chunk", 0.01, 0.05, {"tokens": 1000, "pairs": 500_000, "first": []}),
        update(1.0, 3.0),
    ]
    attempt = attempt_of(*spans, peak_flops=1e14, peak_bytes=1e12, **known)
    found = goodput(attempt, rows=[{"step": 1, "batch/tflops": 50.0, "goodput/sample": 0.8}])
    prog = (0.002002 + 0.0200005) / 0.05
    assert found.factors("decode")["prog"] == pytest.approx(prog)
    assert found.factors("train")["prog"] == pytest.approx(0.25)
    attempt.facts["pools"]["decode"] |= {"servers": ["decode.0", "decode.1"]}
    attempt.facts["servers"]["decode.1"] = SERVER  # of another kind of device, in no table
    half = attempt.spans + [Span(*block(2.0, 3.0, server="decode.1"), "driver")]
    assert goodput(Attempt(0, half, attempt.facts)).factors("decode")["prog"] is None
    whole = found.factors()
    assert whole["prog"] == pytest.approx((prog * 0.05 + 0.25 * 2) / 2.05)
    product = whole["sched"] * whole["run"] * whole["prog"] * 0.8
    assert whole["product"] == pytest.approx(product) and product > 0


def test_what_came_after_the_save_that_a_next_attempt_began_from_is_wasted():
    first = attempt_of(*SYNCHRONOUS, block(9.0, 10.0), update(10.0, 12.0, version=1))
    again = attempt_of(
        ("run/facts", "resumed", 20.0, 20.0, {"version": 1}),
        ("decode/decode.0", "compile", 20.0, 24.0),
        ("decode/decode.0", "wait", 24.0, 25.0),
        block(25.0, 27.0),
        lap("batch", 25.0, 25.0, step=2),
        number=1,
    )
    found = goodput(first, again)
    assert found.pools["decode"].buckets["wasted_after_crash"] == pytest.approx(1.0)
    assert found.pools["train"].buckets["wasted_after_crash"] == pytest.approx(2.0)
    assert found.pools["decode"].useful_s == pytest.approx(3.0 + 2.0)
    assert found.pools["decode"].buckets["recovery"] == pytest.approx(5.0)
    assert found.wall_s == pytest.approx(13.0 + 7.0), "what lies between two attempts is nobody's"
    fresh = attempt_of(block(30.0, 31.0), number=1)  # nothing was saved: all of it is lost
    assert goodput(first, fresh).pools["train"].useful_s == 0.0


def test_pool_whose_process_is_gone_is_not_up():
    life = lambda start, end: (
        ("life/decode.0", "started", start, start),
        ("life/decode.0", "up", start, end, {"why": "killed"}),
    )
    spans = [
        *life(0.0, 4.0),
        ("life/decode.0", "started", 6.0, 6.0),
        block(1.0, 3.0),
        block(7.0, 9.0),
    ]
    spans += [lap("batch", 0.0, 0.0), ("decode/decode.0", "wait", 0.5, 1.0), update(0.0, 10.0)]
    found = goodput(attempt_of(*spans))
    assert found.sched == pytest.approx(0.8)
    decode, train = found.factors("decode"), found.factors("train")
    assert decode["run"] == pytest.approx(4 / 8) and train["run"] == pytest.approx(1.0)
    assert all(one.off < 1e-9 for one in found.pools.values())


def test_steps_that_are_asked_for_are_looked_at_alone():
    spans = [
        s
        for i in (1, 2, 3)
        for s in (lap("step", 10.0 * i, 10.0 * i + 8, i), update(10.0 * i, 10.0 * i + 4, i - 1))
    ]
    attempt = attempt_of(*spans, train=pool(trains=True))
    assert goodput(attempt, steps=(2, 2)).wall_s == 10.0
    assert goodput(attempt, steps=(2, 3)).pools["train"].useful_s == pytest.approx(8.0)
    with pytest.raises(TraceFilesError, match="none of the steps 7:9; it has 1 to 3"):
        goodput(attempt, steps=(7, 9))


# --- the picture ----------------------------------------------------------------------------------


def test_arrows_go_from_the_prompt_over_the_episode_to_the_step():
    first = {"tokens": 9, "pairs": 45, "first": ["a/0#0", "c/0#0", "g/0#0"]}
    attempt = attempt_of(
        ("prefill/prefill.0", "chunk", 0.2, 0.4, first),
        update(-3.0, -2.0),  # of a warm start
        update(3.0, 4.0),
        lap("step", 0.0, 4.0),
        prefill=pool(servers=["prefill.0"]), train=pool(trains=True),
    )  # fmt: skip
    episodes = [
        Episode("a/0#0", "maze", 0.0, 0.1, 2.0, "TRAINED", 1),
        Episode("b/0#0", "maze", 0.0, 0.1, 2.5, "TRAINED", 1),  # its prompt's chunk is not known
        Episode("c/0#0", "maze", 0.0, 0.1, None, "RUNNING", None),
        Episode("d/0#0", "maze", 0.0, 0.3, 1.0, "DROPPED", None),
        Episode("g/1#0", "lake", 0.0, 0.1, 1.5, "TRAINED", 1),  # its prompt is g/0's
    ]
    slices, arrows = check_chrome(chrome_trace(attempt, (0.0, 4.0), [], episodes))
    assert [[stop["ph"] for stop in stops] for stops in arrows.values()] == [
        ["s", "t", "f"],
        ["s", "f"],
        ["s", "t", "f"],
    ]
    ends = {stops[-1]["ts"] for stops in arrows.values()}
    assert ends == {3.5e6}, "the step, not the warm start's update"
    assert names(slices)["maze"] == 3
    assert len([thread for thread in slices if slices[thread][0]["cat"] == "episode"]) == 4


def test_bubbles_are_slices_with_the_name_of_what_was_waited_for():
    attempt = attempt_of(*SYNCHRONOUS)
    window = (attempt.start_s, attempt.end_s)
    grid = Grid(attempt, window)
    bubbles = [b for u in units_of(attempt, window) for b in account(u, grid).bubbles]
    slices, _ = check_chrome(chrome_trace(attempt, window, bubbles, []))
    told = names(slices)
    assert told["waits for: environments"] == 1 and told["waits for: learner"] == 1
    assert told["the save of version 1"] == 1 and told["step 1"] == 1


def test_what_a_learner_compiles_on_a_servers_devices_is_painted_and_nothing_twice():
    attempt = attempt_of(
        lap("batch", 0.0, 8.0),
        ("decode/all.0", "compile", 0.0, 1.0),
        ("decode/all.0", "wait", 1.0, 7.0),
        update(1.5, 6.0),
        ("compile/MainThread", "compile", 2.0, 5.0),
        ("decode/all.0", "swap", 7.0, 8.0),
        all=pool(servers=["all.0"], trains=True),
    )
    window = (attempt.start_s, attempt.end_s)
    (unit,) = units_of(attempt, window)
    slices, _ = check_chrome(
        chrome_trace(attempt, window, account(unit, Grid(attempt, window)).bubbles, [])
    )
    seconds = {}
    for one in (one for many in slices.values() for one in many):
        seconds.setdefault(one["name"], []).append((one["ts"] / 1e6, one["dur"] / 1e6))
    assert seconds["waits for: compile"] == [(2.0, 3.0)]
    assert "waits for: sync" not in seconds


@pytest.mark.parametrize("word", ["3", "0:2", "5:3", "a:b", "1:2:3", "-1:2", "1:9999999999"])
def test_range_that_is_none_is_told_in_one_line(word, capsys, tmp_path):
    with pytest.raises(SystemExit):
        trace.main([str(tmp_path), f"--steps={word}"])
    assert "A:B with 1 <= A <= B" in capsys.readouterr().err.splitlines()[-1]


def test_directory_without_a_timeline_is_told_in_one_line(tmp_path, capsys):
    assert trace.main(["summarize", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no timeline" in line and "metrics.timeline_bytes=0" in line


def test_file_in_no_directory_is_told_before_anything_is_read_for_it(tmp_path):
    asked = trace._parser(False).parse_args([str(tmp_path), "-o", str(tmp_path / "no" / "x.json")])
    with pytest.raises(trace.TraceFilesError, match="there is no directory"):
        trace._export(asked, [])


def test_seconds_that_do_not_add_up_are_said_so():
    attempt = attempt_of(*SYNCHRONOUS)
    found = goodput(attempt)
    found.units[0].by_cause["learner"] += 1.0
    asked = SimpleNamespace(top=0, json=False, steps=None)
    assert "DOES NOT ADD UP" in trace.summary_lines(found, [], [attempt])[-1]
    assert trace._worst(found) > trace.MOST_OFF and asked.top == 0
