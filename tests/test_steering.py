"""A run steered by its control file: what comes through the file, what is obeyed, and a real run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_jax import launch
from rl_jax.checkpoint import Checkpointer
from rl_jax.control import CONTROL, MAX_LINE, Command, Reader, send
from rl_jax.settings import CheckpointSettings, LearnerSettings, RolloutSettings, Settings
from rl_jax.steering import FIXED, STEERABLE, Steering, changed_settings, kept_changes
from rl_jax.tools import steer
from rl_jax.validate import check

# --- the file --------------------------------------------------------------------------------------------------------


def test_commands_come_once_in_order_with_rising_numbers(tmp_path):
    reader = Reader(tmp_path, attempt=0)
    assert reader.poll() == []
    sent = [send(tmp_path, 0, "pause"), send(tmp_path, 0, "set", "eval.every", 5)]
    assert reader.poll() == sent and [c.seq for c in sent] == [1, 2] and reader.poll() == []
    assert sent[1].value == 5 and "@" in sent[1].who


def test_a_line_is_read_when_it_is_whole(tmp_path):
    reader = Reader(tmp_path, 0)
    whole = json.dumps({"seq": 1, "attempt": 0, "verb": "save", "who": "a@b"})
    (tmp_path / CONTROL).write_text(whole[:20])
    assert reader.poll() == []
    (tmp_path / CONTROL).write_text(whole + "\n")
    assert [c.verb for c in reader.poll()] == ["save"]


def test_a_writer_that_died_in_its_line_costs_that_line_alone(tmp_path):
    (tmp_path / CONTROL).write_text('{"seq": 4, "attempt": 0, "ver')
    command = send(tmp_path, 0, "pause")
    torn, mine = Reader(tmp_path, 0).poll()
    assert mine == command and torn.wrong == "not a command (not JSON)"


def test_many_writers_get_numbers_of_their_own(tmp_path):
    code = (
        f"from rl_jax.control import send; [send({str(tmp_path)!r}, 0, 'save') for _ in range(40)]"
    )
    root = Path(__file__).parents[1]
    writers = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert [(c.seq, c.wrong) for c in Reader(tmp_path, 0).poll()] == [
        (i, "") for i in range(1, 161)
    ]


def test_a_command_that_is_too_long_is_not_sent(tmp_path):
    with pytest.raises(ValueError, match="bytes; at most"):
        send(tmp_path, 0, "set", "eval.every", "x" * MAX_LINE)
    assert Reader(tmp_path, 0).poll() == []


def test_commands_of_another_attempt_are_not_obeyed(tmp_path):
    send(tmp_path, 0, "stop")  # of a run that ended before it read it
    send(tmp_path, 1, "save")
    send(tmp_path, 7, "pause")
    found = Reader(tmp_path, 1).poll()
    assert [(c.verb, c.wrong) for c in found] == [
        ("save", ""), ("pause", "it is for attempt 7, and this is attempt 1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not an object"),
        (b"[" * 3000, "not JSON"),
        (
            b'{"seq": 1, "attempt": 0, "verb": "set", "who": "x", "key": "a", "value": {}}',
            "value is",
        ),
        (b'{"seq": 1, "attempt": 0, "verb": "set", "who": "x", "value": NaN}', "not JSON"),
        (b'{"seq": true, "attempt": 0, "verb": "set", "who": "x"}', "seq is missing"),
        (b"x" * (MAX_LINE + 1), f"{MAX_LINE + 1} bytes"),
    ],
)
def test_hostile_lines_are_refused_and_those_behind_them_read(tmp_path, line, why):
    good = b'{"seq": 2, "attempt": 0, "verb": "save", "who": "\\u001b[31mx\\n"}\n'
    (tmp_path / CONTROL).write_bytes(line + b"\n" + good)
    bad, after = Reader(tmp_path, 0).poll()
    assert why in bad.wrong
    assert (after.verb, after.who, after.wrong) == ("save", "?[31mx?", "")


def test_a_file_of_one_endless_line_is_read_in_bounded_pieces(tmp_path):
    (tmp_path / CONTROL).write_bytes(b"x" * 300_000)
    reader = Reader(tmp_path, 0)
    assert [len(reader.poll()) for _ in range(5)] == [1, 1, 1, 1, 0]  # the rest may yet be a line


def test_a_number_that_was_read_is_refused(tmp_path):
    line = json.dumps({"seq": 1, "attempt": 0, "verb": "save", "who": "x"}) + "\n"
    (tmp_path / CONTROL).write_text(line * 2)
    assert ["seq is 1" in c.wrong for c in Reader(tmp_path, 0).poll()] == [False, True]


# --- what is obeyed --------------------------------------------------------------------------------------------------


class FakeDriver:
    def __init__(self, settings=Settings(), steered=None):
        self.settings = settings
        self.state = SimpleNamespace(version=3, steered=steered or {})
        self.saves, self.changed, self.signal = 0, [], False

    def save(self):
        self.saves += 1

    def change(self, settings, key):
        self.settings = settings
        self.changed.append(key)

    def is_stopping(self):
        return self.signal


class Script:
    """A reader: one list of commands a look, and a clock that each sleep moves."""

    def __init__(self, *polls, settings=Settings(), mode="train", on_sleep=lambda: None):
        self.polls, self.now, self.events, self.states = list(polls), 0.0, [], []
        self.told = []  # verb, and what STATUS.json said when it was answered
        recorder = SimpleNamespace(
            event=self.event,
            status=lambda state, **fields: self.states.append(state),
            doing=lambda what, status=None: nullcontext(),
            progress=SimpleNamespace(note=lambda text, **fields: None),
        )  # fmt: skip
        self.on_sleep = on_sleep
        self.steering = Steering(
            self, recorder, lambda s: check(s, mode), mode, settings.rollout.max_staleness,
            clock=lambda: self.now, sleep=self.sleep,
        )  # fmt: skip

    def poll(self):
        return self.polls.pop(0) if self.polls else []

    def event(self, kind, **fields):
        self.events.append({"kind": kind, **fields})
        self.told.append((fields["verb"], self.states[-1] if self.states else "running"))

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 1000, "nobody ended the pause"
        self.on_sleep()

    @property
    def answers(self):
        return [(e["verb"], e["answer"]) for e in self.events]


def asked(verb, key="", value=None, seq=1):
    return Command(seq, 1.0, "ann@host", 0, verb, key, value)


def test_a_pause_holds_until_it_is_resumed_and_saves_meanwhile():
    script = Script([asked("pause")], [asked("save")], [], [asked("resume")])
    driver = FakeDriver()
    assert script.steering.between(driver, 4)
    assert script.answers == [("pause", "done"), ("save", "done"), ("resume", "done")]
    assert driver.saves == 1 and 1.0 <= script.steering.paused_s < 3.0
    assert script.states[0] == "paused" and script.states[-1] == "running"


def test_the_status_says_what_was_asked_for_before_the_answer_does():
    script = Script([asked("pause"), asked("resume")], [], [])
    assert script.steering.between(FakeDriver(), 4) and script.steering.paused_s == 0
    assert script.told == [("pause", "paused"), ("resume", "running")]


def test_a_signal_or_a_stop_ends_a_pause():
    script, driver = Script([asked("pause")]), FakeDriver()
    script.on_sleep = lambda: setattr(driver, "signal", script.now > 5)
    assert script.steering.between(driver, 4)  # the driver saves and stops by the signal
    assert script.now > 5
    script = Script([asked("pause")], [asked("stop")])
    assert not script.steering.between(FakeDriver(), 4)


def test_the_file_is_looked_at_between_steps_however_fast_they_are():
    script = Script([], [asked("stop")])
    assert script.steering.between(FakeDriver(), 4) and script.steering.between(FakeDriver(), 4)
    script.now += 0.6
    assert script.steering.is_called() and not script.steering.between(FakeDriver(), 4)


def test_each_change_is_told_with_who_when_old_and_new():
    script, driver = Script([asked("set", "eval.every", 5, seq=9)]), FakeDriver()
    assert script.steering.between(driver, 4)
    assert driver.settings.eval.every == 5 and driver.state.steered == {"eval.every": [0, 5]}
    event = script.events[0]
    assert event | {"who": "ann@host", "sent": 1.0, "seq": 9, "old": 0, "new": 5} == event
    assert (event["kind"], event["answer"], event["step"]) == ("steer", "done", 3)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("learner.learning_rate", 0.1, "compiled into the learner's step"),
        ("algorithm.entropy_coef", 0.1, "compiled into the learner's step"),
        ("rollout.batch_groups", 4, "cannot change in a run"),
        ("nothing.here", 1, "no setting"),
        ("eval.every", -1, "eval.every=-1"),
        ("eval.every", "x", "eval.every"),
        ("eval.every", True, "eval.every"),
        ("guards.k3", "shout", "guards.k3=shout is not one of"),
        ("steps", 3, "step 3 is done already"),
        ("rollout.max_staleness", 2, "the run began with 1"),
    ],
)  # fmt: skip
def test_what_may_not_change_is_refused_with_why(key, value, why):
    script, driver = Script([asked("set", key, value)]), FakeDriver()
    assert script.steering.between(driver, 4)
    assert why in script.events[0]["why"] and script.answers == [("set", "refused")]
    assert driver.settings == Settings() and driver.changed == [] and driver.state.steered == {}


def test_what_depends_on_the_run_is_refused_there():
    cosine = replace(Settings(), learner=LearnerSettings(schedule="cosine"))
    adaptive = replace(
        Settings(), rollout=RolloutSettings(max_staleness=4, staleness_policy="adaptive")
    )
    for settings, mode, key in (
        (cosine, "train", "steps"), (adaptive, "train", "rollout.max_staleness"),
        (Settings(), "train_only", "steps"),
    ):  # fmt: skip
        script = Script([asked("set", key, 50)], settings=settings, mode=mode)
        script.steering.between(FakeDriver(settings), 4)
        assert script.answers == [("set", "refused")], key


def test_the_table_names_settings_that_exist_and_no_reason_is_empty():
    leaves = list(steer.schema.leaves(steer.schema.to_tree(Settings())))
    for name in (*STEERABLE, *FIXED):
        assert any(leaf == name or leaf.startswith(name) for leaf in leaves), name
    assert all(STEERABLE.values()) and all(FIXED.values())
    assert changed_settings(Settings(), "steps", 7)[0].steps == 7


def test_unanswerable_commands_are_told():
    script = Script([asked("dance"), asked("resume"), replace(asked("stop"), wrong="it is torn")])
    assert script.steering.between(FakeDriver(), 4)
    assert [e["why"][:12] for e in script.events] == ["no verb 'dan", "it is not pa", "it is torn"]
    script = Script([asked("save")])
    script.steering.refuse_rest("the run has ended")
    assert script.events[0]["why"] == "the run has ended"


def test_a_resume_keeps_what_was_steered_unless_the_config_was_changed_since():
    steered = {"eval.every": [0, 5], "steps": [100, 20]}
    settings, kept, lines = kept_changes(replace(Settings(), steps=200), steered, check)
    assert settings.eval.every == 5 and kept == {"eval.every": [0, 5]} and settings.steps == 200
    assert "steps=20 in place of 100, and no more: it is 200 now" in lines[1]


def test_a_value_that_is_set_back_is_no_change_any_more():
    script = Script([asked("set", "eval.every", 5), asked("set", "eval.every", 0)])
    driver = FakeDriver()
    script.steering.between(driver, 4)
    assert driver.state.steered == {} and len(driver.changed) == 2


# --- the tool --------------------------------------------------------------------------------------------------------


def test_the_tool_says_at_once_that_a_run_is_over_or_none(tmp_path, capsys):
    assert steer.main([str(tmp_path), "pause"]) == 2
    assert "no run directory" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "STATUS.json").write_text('{"state": "done", "attempt": 0}')
    assert steer.main([str(tmp_path), "pause"]) == 2
    assert "is over (done)" in capsys.readouterr().err
    (tmp_path / "STATUS.json").write_text('{"state": "running", "attempt": 0}')
    assert steer.main([str(tmp_path), "pause"]) == 2
    assert "is dead (its last state: running)" in capsys.readouterr().err
    assert not (tmp_path / CONTROL).exists()


# --- a run -----------------------------------------------------------------------------------------------------------


def run_steered(directory, act, *words):
    """The job's exit code; act(directory) is called beside it once its first step is done."""
    errors = []

    def beside():
        try:
            metrics = directory / "metrics.jsonl"
            wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, 200)
            act(directory)
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=beside)
    thread.start()
    config = f"--config={Path(__file__).parent / 'job_config.py'}"
    try:
        code = launch.main([config, f"--run_dir={directory}", *words])
    finally:
        thread.join()
    assert errors == []
    return code


def wait_for(true, seconds=60.0):
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def status(directory):
    return json.loads((directory / "STATUS.json").read_text())


def events(directory):
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "steer"]


@pytest.mark.slow(seconds=20)
def test_a_run_is_paused_changed_stopped_and_resumed(tmp_path, capfd):
    run = tmp_path / "run"
    say = lambda *words: steer.main([str(run), *words])

    def first(directory):
        assert say("pause") == 0
        assert status(run)["state"] == "paused"
        step = status(run)["step"]
        time.sleep(1.0)
        assert status(run)["step"] == step and status(run)["state"] == "paused"
        assert say("pause") == 1 and say("set", "learner.learning_rate=1") == 2
        assert say("set", "checkpoint.every=1") == 0
        assert say("set", "rollout.max_staleness=0") == 0
        assert say("resume") == 0
        wait_for(lambda: status(run)["step"] >= step + 2)
        assert say("stop") == 0

    assert run_steered(run, first, "--config.steps=1000", "--config.rollout.max_staleness=1") == 0
    assert status(run)["state"] == "done"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("time/paused_s" in row for row in rows) == 1
    assert max(row.get("time/paused_s", 0.0) for row in rows) >= 1.0
    bounds = [row["staleness/bound"] for row in rows if "staleness/bound" in row]
    assert bounds[0] == 1 and bounds[-1] == 0
    last = Checkpointer(run, CheckpointSettings()).latest()
    assert last == int(bounds and rows[-1]["step"]) < 1000
    assert [e["answer"] for e in events(run)] == ["done", "refused", *["done"] * 4]

    def second(directory):
        wait_for(lambda: status(run)["attempt"] == 1 and status(run).get("step", 0) > last)
        assert say("pause") == 0
        os.kill(os.getpid(), signal.SIGTERM)

    capfd.readouterr()
    words = ("--config.steps=1000", "--config.rollout.max_staleness=1", "--progress=plain")
    assert run_steered(run, second, *words) == 75
    out = capfd.readouterr().out
    assert "steered before: rollout.max_staleness=0 in place of 1, as then" in out
    assert status(run)["state"] == "preempted"
    assert Checkpointer(run, CheckpointSettings()).latest() > last
    assert say("resume") == 2
