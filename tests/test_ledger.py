"""The ledger's state machine, its conservation law, replay and void."""

import json
import os
import random

import pytest

from rl_jax.disk import disk_full
from rl_jax.ledger import NEXT, EpisodeFacts, EpisodeRef, Ledger, LedgerError


def ref(uid="r/0/0/0", attempt=0):
    return EpisodeRef(uid, attempt, uid.rsplit("/", 1)[0], 0, 0, 0, "echo")


def advance(ledger, episode, *states, **kwargs):
    for state in states:
        ledger.write(
            episode,
            state,
            reason="why" if state in ("DROPPED", "ERRORED", "CANCELLED") else None,
            **kwargs,
        )


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", "r")
    yield ledger
    ledger.close()


def test_record_has_the_fields_of_the_interface(ledger, tmp_path):
    episode = ref()
    advance(ledger, episode, "ISSUED", "RUNNING")
    ledger.write(episode, "COMPLETED", facts=EpisodeFacts(16, (16, 17), 85, "abc"))
    ledger.write(episode, "TRAINED", step=18)
    ledger.flush()
    record = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])
    assert record.pop("t_mono_s") > 0
    assert record == {
        "seq": 3,
        "uid": "r/0/0/0",
        "attempt": 0,
        "group": "r/0/0",
        "epoch": 0,
        "index": 0,
        "sample": 0,
        "tag": "echo",
        "state": "TRAINED",
        "reason": None,
        "step": 18,
        "start_version": 16,
        "versions": [16, 17],
        "num_tokens": 85,
        "sha256": "abc",
    }


@pytest.mark.parametrize("now", [s for s in NEXT if s])
def test_only_the_listed_transitions_are_legal(tmp_path, now):
    ways = {
        "ISSUED": ["ISSUED"],
        "RUNNING": ["ISSUED", "RUNNING"],
        "COMPLETED": ["ISSUED", "RUNNING", "COMPLETED"],
        "TRUNCATED": ["ISSUED", "RUNNING", "TRUNCATED"],
    }
    for after in [s for s in NEXT if s]:
        ledger = Ledger(tmp_path / f"{now}-{after}.jsonl", "r")
        path = ways.get(now) or ["ISSUED", "RUNNING", "COMPLETED", now]
        if now in ("ERRORED", "CANCELLED"):
            path = ["ISSUED", now]
        advance(ledger, ref(), *path, step=1)
        if after in NEXT[now]:
            advance(ledger, ref(), after, step=1)
        else:
            before = ledger.counts()
            with pytest.raises(LedgerError):
                advance(ledger, ref(), after, step=1)
            assert ledger.counts() == before
        ledger.close()


def test_lost_episode_breaks_the_law(ledger):
    advance(ledger, ref("r/0/0/0"), "ISSUED", "RUNNING")
    advance(ledger, ref("r/0/0/1"), "ISSUED")
    ledger.check(in_flight=2)
    with pytest.raises(LedgerError, match=r"rollout holds 1.*r/0/0/0#0 RUNNING"):
        ledger.check(in_flight=1)


def test_uid_is_trained_at_most_once(ledger):
    advance(ledger, ref(attempt=0), "ISSUED", "RUNNING", "COMPLETED", "TRAINED", step=1)
    advance(ledger, ref(attempt=1), "ISSUED", "RUNNING", "COMPLETED")
    with pytest.raises(LedgerError, match="already at step 1"):
        ledger.write(ref(attempt=1), "TRAINED", step=2)


def test_attempts_increase_and_terminal_records_need_their_facts(ledger):
    assert ledger.next_attempt("r/0/0/0") == 0
    advance(ledger, ref(attempt=0), "ISSUED", "ERRORED")
    assert ledger.next_attempt("r/0/0/0") == 1
    with pytest.raises(LedgerError, match="issued twice"):
        ledger.write(ref(attempt=0), "ISSUED")
    ledger.write(ref(attempt=1), "ISSUED")
    with pytest.raises(LedgerError, match="needs a reason"):
        ledger.write(ref(attempt=1), "ERRORED")
    advance(ledger, ref(attempt=1), "RUNNING", "COMPLETED")
    with pytest.raises(LedgerError, match="needs the step"):
        ledger.write(ref(attempt=1), "TRAINED")


def random_history(ledger, rng, num):
    """A legal history; returns the attempts that are still open, by state."""
    live = {}
    for i in range(num):
        if live and rng.random() < 0.75:
            key = rng.choice(list(live))
            state = rng.choice(NEXT[live[key]])
            advance(ledger, ref(*key), state, step=i)
            if NEXT[state]:
                live[key] = state
            else:
                del live[key]
        else:
            key = (f"r/0/{i}/0", 0)
            advance(ledger, ref(*key), "ISSUED")
            live[key] = "ISSUED"
    return live


@pytest.mark.parametrize("seed", range(5))
def test_reopened_ledger_equals_the_closed_one(tmp_path, seed):
    ledger = Ledger(tmp_path / "l.jsonl", "r")
    live = random_history(ledger, random.Random(seed), 300)
    ledger.check(in_flight=len(live))
    ledger.close()
    again = Ledger(tmp_path / "l.jsonl", "r")
    assert again.counts() == ledger.counts() and again.seq == ledger.seq
    again.check(in_flight=len(live))
    again.close()


def test_void_covers_later_training_and_what_had_not_ended(tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl", "r")
    for step in (1, 2, 3):
        advance(
            ledger, ref(f"r/0/{step}/0"), "ISSUED", "RUNNING", "COMPLETED", "TRAINED", step=step
        )
    advance(ledger, ref("r/0/4/0"), "ISSUED", "RUNNING")
    advance(ledger, ref("r/0/5/0"), "ISSUED", "ERRORED")
    ledger.close()
    ledger = Ledger(tmp_path / "l.jsonl", "r")
    assert ledger.void(1) == 3
    ledger.check(in_flight=0)
    assert {s: n for s, n in ledger.counts().items() if n} == {
        "TRAINED": 1,
        "ERRORED": 1,
        "VOID": 3,
    }
    advance(ledger, ref("r/0/2/0", 1), "ISSUED", "RUNNING", "COMPLETED", "TRAINED", step=2)
    ledger.close()
    again = Ledger(tmp_path / "l.jsonl", "r")
    again.check(in_flight=0)
    assert again.counts()["TRAINED"] == 2
    again.close()


def test_torn_last_line_is_cut_and_a_broken_middle_refused(tmp_path):
    path = tmp_path / "l.jsonl"
    ledger = Ledger(path, "r")
    advance(ledger, ref(), "ISSUED", "RUNNING")
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq": 2, "uid"')
    ledger = Ledger(path, "r")
    assert ledger.seq == 2 and path.read_bytes() == whole
    ledger.close()
    path.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(LedgerError, match="line 1"):
        Ledger(path, "r")


def test_a_full_disk_is_told_with_the_ledgers_name(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", "r")
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), ledger._file.fileno())
    ledger.void(0)
    with pytest.raises(OSError, match="No space left on device: .*ledger.jsonl") as caught:
        ledger.flush()
    assert disk_full(caught.value) is caught.value
    with pytest.raises(OSError, match="ledger.jsonl"):
        ledger.close()
    assert (
        ledger._file.closed
    )  # left open, it would be flushed again, and complained of, by the interpreter
