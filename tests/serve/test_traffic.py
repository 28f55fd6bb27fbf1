"""The traffic of benchmarks/serve.py and its clients, on a FakeEngine: who asks what and when, and what is counted."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import serve
from benchmarks.instant_engine import InstantEngine
from benchmarks.serve_clients import Answered, Run, closed, opened
from benchmarks.serve_traffic import Conversation, Traffic, poisson
from rl_jax.serve import Router
from rl_jax.settings import EngineSettings

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 97  # of the FakeEngine
TURNS = Traffic("turns", num=4, own=9, output=4, turns=3, says=5)
SHARED = Traffic("shared", num=8, own=4, output=4, header=16, group=4)


def router_of(server):
    return Router([server], [], SimpleNamespace(pools_for=lambda tag: ()))


def test_conversations_follow_from_the_seed():
    first, again, other = (SHARED.conversations(50_000, seed) for seed in (1, 1, 2))
    for a, b in zip(first, again):
        assert a.name == b.name and a.seed == b.seed and a.max_new_tokens == b.max_new_tokens
        np.testing.assert_array_equal(a.opening, b.opening)
    assert not set(first[0].opening[:16].tolist()) & set(other[0].opening[:16].tolist())


def test_a_group_shares_its_header_and_nothing_else():
    talks = SHARED.conversations(50_000, 0)
    headers = [talk.opening[:16].tobytes() for talk in talks]
    assert headers == [headers[0]] * 4 + [headers[4]] * 4 and headers[0] != headers[4]
    assert len({talk.opening[16:].tobytes() for talk in talks}) == 8


def test_histories_stay_within_the_context_and_turns_differ_in_length():
    talks = Traffic("turns", num=64, own=9, output=20, turns=3, says=5).conversations(VOCAB, 0)
    assert max(talk.num_tokens for talk in talks) <= 9 + 3 * 30 + 2 * 5
    lengths = [n for talk in talks for n in talk.max_new_tokens]
    assert (min(lengths), max(lengths)) == (10, 30) and abs(np.mean(lengths) - 20) < 2
    assert all(len(talk.says) == 2 and len(talk.says[0]) == 5 for talk in talks)


def test_arrivals_are_a_poisson_process():
    at = poisson(50.0, 4000, 0)
    gaps = np.diff(at)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)  # exponential: as wide as long
    np.testing.assert_array_equal(at, poisson(50.0, 4000, 0))


def test_closed_loop_plays_every_turn_with_so_many_clients(kit):
    server = kit.decode().server
    talks = TURNS.conversations(VOCAB, 0)
    run = closed(router_of(server), [server], talks, clients=2)
    assert run.most_under_way == 2
    assert len(run.turns) == 12
    blocks = kit.SETTINGS.steps_per_block
    assert all(turn.late_tokens == max(0, turn.num_tokens - blocks) for turn in run.turns)
    assert sorted(t.num_tokens for t in run.turns) == sorted(
        n for talk in talks for n in talk.max_new_tokens
    )
    kit.until(lambda: server.stats()["sessions"] == 0, "the release of all sessions")


def test_multi_turn_finds_all_that_was_sent_before(kit):
    server = kit.decode().server
    talks = TURNS.conversations(VOCAB, 0)
    run = closed(router_of(server), [server], talks, clients=1)
    needed, found = [], []
    for talk in talks:
        history = len(talk.opening)
        cached = 0
        for i, sampled in enumerate(talk.max_new_tokens):
            needed.append(history - 1)
            found.append(cached)
            cached = history + sampled - 1  # the last sampled token has no KV yet
            history += sampled + (len(talk.says[i]) if i < 2 else 0)
    assert [turn.needed for turn in run.turns] == needed
    # Random openings may have a first token in common with another's, which is found too.
    extra = [turn.found - n for turn, n in zip(run.turns, found)]
    assert all(0 <= more <= 2 for more in extra) and sum(extra) <= 4
    assert run.notes()["hit_rate"] == pytest.approx(sum(found) / sum(needed), abs=0.05)


class LateClient:
    """A Router whose first request keeps the event loop for a while."""

    def __init__(self, router, late_s: float):
        self.router, self.late_s = router, late_s
        self.release = router.release

    async def generate(self, request):
        late_s, self.late_s = self.late_s, 0.0
        time.sleep(late_s)
        return await self.router.generate(request)


def test_open_loop_counts_from_when_a_turn_was_due(kit):
    server = kit.decode().server
    talks = SHARED.conversations(VOCAB, 0)[:2]
    late = LateClient(router_of(server), 0.2)
    run = opened(late, [server], talks, np.array([0.0, 0.01]))
    assert len(run.turns) == 2
    assert min(turn.ttft_s for turn in run.turns) >= 0.18, (
        "the second was due 0.19 s before it was sent"
    )


def test_a_failed_turn_ends_its_conversation_and_is_counted(kit):
    server = kit.decode().server
    fine = Conversation("fine", np.arange(10, 20, dtype=np.int32), (4,), (), 0)
    says = (np.zeros(60, np.int32), np.zeros(1, np.int32))
    long = Conversation("long", np.arange(10, 20, dtype=np.int32), (4, 4, 4), says, 0)
    run = closed(router_of(server), [server], [fine, long], clients=1)
    assert dict(run.failed) == {"context": 1}
    assert len(run.turns) == 2
    assert run.notes()["failed"] == {"context": 1}


def test_first_token_is_when_its_block_was_on_the_host(kit):
    world = kit.decode()
    world.gate.close()
    future = world.turns.start(kit.request(max_new_tokens=8))
    world.gate.arrive()
    world.gate.step()  # the first block of 4
    time.sleep(0.1)
    world.gate.open()
    times_s = future.result(kit.PATIENCE_S).times_s
    assert times_s["decode"] - times_s["first_token"] >= 0.09


def test_notes_are_the_numbers_of_the_turns():
    run = Run(seconds=2.0, used=[0.25, 0.75], listed=[0.0, 0.5], counted={"preempted": 3})
    # TTFT 1 s and 2 s; TPOT 0.1 s, and none where all tokens came at once
    run.turns = [
        Answered(0.0, 1.0, 1.6, num_tokens=10, late_tokens=6, needed=30, found=10),
        Answered(1.0, 3.0, 3.0, num_tokens=4, late_tokens=0, needed=10, found=0),
    ]
    notes = run.notes()
    assert notes["tokens_per_s"] == 7.0 and notes["turns_per_s"] == 1.0
    assert (notes["ttft_p50_ms"], notes["ttft_p99_ms"]) == (1500.0, 1990.0)
    assert notes["tpot_p50_ms"] == notes["tpot_p99_ms"] == 100.0
    assert notes["hit_rate"] == 0.25
    assert (notes["pages_used_mean"], notes["pages_used_peak"]) == (0.5, 0.75)
    assert notes["preempted"] == 3
    run.turns.clear()
    run.failed["closed"] = 1
    with pytest.raises(ValueError, match="no turn was answered; failed: {'closed': 1}"):
        run.notes()


def test_clients_of_prefill_servers_find_what_their_last_turn_left(kit):
    server, prefill = kit.decode().server, kit.prefill()
    router = Router([server], [prefill], SimpleNamespace(pools_for=lambda tag: ()))
    run = closed(router, [server], TURNS.conversations(VOCAB, 0), clients=1)
    assert not run.failed and len(run.turns) == 12
    assert prefill.stats()["finished"] == 4, "first turns are prefilled, later ones are appended"
    assert [turn.found > 0 for turn in run.turns] == [False, True, True] * 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--clients", "0"], "argument --clients: 0 must be above 0"),
        (["--loads", "0.5", "-1"], "argument --loads: -1 must be above 0"),
        (["--sections", "open", "--rates", "0"], "argument --rates: 0 must be above 0"),
        (["--decode", "0"], "argument --decode: 0 must be above 0"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--prefill", "-1"], "--prefill -1 must be 0 or more"),
        (["--sections", "open"], "an open loop without a closed one needs --rates"),
    ],
)
def test_the_benchmark_tells_what_it_cannot_play(words, line, capsys):
    with pytest.raises(SystemExit):
        serve.main(["--tiny", *words])
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_serve_benchmark_runs_tiny(tmp_path):
    out = tmp_path / "serve.json"
    command = [sys.executable, "benchmarks/serve.py", "--tiny", "--out", str(out)]
    command += ["--sections", "fixed", "closed", "open", "--clients", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert {"card", "date", "versions", "command", "rows"} <= set(report)
    rows = {row["name"]: row for row in report["rows"]}
    assert "4 x 24 + 16" in rows
    loops = ("closed, 4 clients", "open, load 0.5", "open, load 0.8")
    # Turns, and the share of needed tokens that are found: 9 of 12 find a header of 32 of 39 tokens.
    expected = {
        "random": (12, 0.0),
        "shared prefix": (12, 9 * 32 / (12 * 39)),
        "multi-turn": (18, 0.67),
    }
    for traffic, (turns, hit_rate) in expected.items():
        for loop in loops:
            row = rows[f"{loop}, {traffic}"]
            assert (row["turns"], row["failed"]) == (turns, {})
            assert row["hit_rate"] == pytest.approx(hit_rate, abs=0.04)
            assert 0 < row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
            assert 0 < row["tpot_p50_ms"] <= row["tpot_p90_ms"] <= row["tpot_p99_ms"]
            assert 0 < row["pages_used_mean"] <= row["pages_used_peak"] <= 1


@pytest.mark.slow
def test_serve_host_benchmark_runs_tiny(tmp_path):
    out = tmp_path / "serve_host.json"
    command = [
        sys.executable,
        "benchmarks/serve_host.py",
        "--tiny",
        "--out",
        str(out),
        "--profile",
        "5",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert {"card", "date", "versions", "command", "rows", "load_average"} <= set(report)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["wall, p50"]["turns"] == 2 * 16 * 3 and rows["wall, p50"]["failed"] == {}
    for clock in ("wall", "cpu"):
        p50, p90, p99 = (rows[f"{clock}, p{q}"]["ms"] for q in (50, 90, 99))
        assert 0 < p50 <= p90 <= p99
    assert "function calls" in done.stdout


def test_host_time_of_a_block_leaves_out_the_engine():
    settings = EngineSettings(slots=4, context=64, page_size=8, steps_per_block=4)
    engine = InstantEngine(settings)
    sampling = SimpleNamespace(
        epoch=np.arange(4), max_new_tokens=np.full(4, 64), token_index=np.zeros(4, np.int64)
    )
    engine.arm(None, np.arange(4), sampling)
    engine.append = engine._apart(lambda: time.sleep(0.15))
    engine.begin()
    for _ in range(2):
        engine.generate(None, None, None)
        engine.append()  # inside the engine
        time.sleep(0.02)  # the host's
    blocks = engine.end()
    assert blocks["active"].tolist() == [4]
    assert (blocks["wall"] >= 0.02).all() and (blocks["wall"] < 0.12).all()
    assert (blocks["cpu"] < 0.02).all() and (blocks["engine"] >= 0.15).all()
