"""run_dir.py and resume.py: one process holds a directory, and no half-made one ever confuses a resume."""

import fcntl
import json
import logging
import os
import threading
from dataclasses import replace

import pytest

from rl_jax.console import FirstOfAKind, WithCount
from rl_jax.resume import auto_path, check_replay, check_template, decide, encode
from rl_jax.run_dir import RunDir, RunDirError, check_usable
from rl_jax.settings import EvalSettings, LearnerSettings, Settings

SETTINGS = Settings()


def opened(path, settings=SETTINGS, resume="auto"):
    """Open and close: what a process that dies at once leaves behind."""
    run = RunDir.open(path, settings, resume)
    run.close()
    return run


def with_checkpoints(path, *steps):
    opened(path)
    for step in steps:
        (path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return path


def snapshot(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_new_directory_says_what_the_run_is(tmp_path):
    run = RunDir.open(tmp_path / "r", SETTINGS, files={"config.resolved.py": "x = 1\n"})
    assert (run.attempt, run.decision.resume_from, run.decision.resume_step) == (0, None, 0)
    stored = json.loads((run.path / "config.json").read_text())
    assert stored["run_id"] == run.run_id and stored["learner"]["learning_rate"] == 1e-3
    assert (run.path / "config.resolved.py").read_text() == "x = 1\n"
    env = json.loads((run.path / "ENV.json").read_text())
    assert env["versions"]["jax"] and env["python"] and env["argv"]
    assert (run.path / "logs" / "latest").resolve() == run.logs.resolve()
    assert run.rollouts(3, "train") == run.path / "rollouts" / "step_3" / "train"
    run.close()


def test_second_process_is_refused_by_the_pid_of_the_first(tmp_path):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    with pytest.raises(RunDirError, match=f"in use by pid {os.getpid()} on "):
        RunDir.open(tmp_path / "r", SETTINGS)
    run.close()
    assert opened(tmp_path / "r").attempt == 1


def test_looking_whether_a_directory_is_free_writes_nothing_and_holds_nothing(tmp_path):
    check_usable(tmp_path / "new" / "r")
    assert snapshot(tmp_path) == []
    run = RunDir.open(tmp_path / "r", SETTINGS)
    with pytest.raises(RunDirError, match=f"in use by pid {os.getpid()} on "):
        check_usable(tmp_path / "r")
    check_usable(tmp_path / "r", is_held=False)
    run.close()
    check_usable(tmp_path / "r")
    assert opened(tmp_path / "r").attempt == 1


def test_a_glance_of_another_process_does_not_refuse_a_start(tmp_path):
    opened(tmp_path / "r")
    with open(tmp_path / "r" / "LOCK", encoding="utf-8") as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        threading.Timer(0.01, fcntl.flock, (glance, fcntl.LOCK_UN)).start()
        assert opened(tmp_path / "r").attempt == 1


def test_auto_starts_fresh_without_checkpoint_and_sets_the_old_records_aside(tmp_path):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    for name in ("ledger.jsonl", "metrics.jsonl", "summary.json"):
        (run.path / name).write_text("old\n")
    (run.path / "rollouts" / "step_1" / "train").mkdir(parents=True)
    run.event("x")
    run.close()
    again = opened(tmp_path / "r")
    assert (again.attempt, again.decision.resume_from, again.run_id) == (1, None, run.run_id)
    aside = again.path / "quarantine" / "before_attempt_1"
    assert sorted(p.name for p in aside.iterdir()) == [
        "events.jsonl",
        "ledger.jsonl",
        "metrics.jsonl",
        "rollouts",
        "summary.json",
    ]
    assert not (again.path / "ledger.jsonl").exists()


def test_auto_resumes_from_the_last_checkpoint_and_keeps_its_records(tmp_path):
    path = with_checkpoints(tmp_path / "r", 2, 10)
    (path / "checkpoints" / "step_12.tmp-9").mkdir()  # half-written
    (path / "ledger.jsonl").write_text("old\n")
    run = opened(path)
    assert run.decision.resume_from == path / "checkpoints" / "step_10"
    assert run.decision.resume_step == 10
    assert (path / "ledger.jsonl").read_text() == "old\n"


def test_resume_of_a_step_sets_later_steps_aside(tmp_path):
    path = with_checkpoints(tmp_path / "r", 2, 4, 6)
    (path / "rollouts" / "step_5").mkdir(parents=True)
    (path / "rollouts" / "step_3").mkdir(parents=True)
    run = opened(path, resume="4")
    assert run.decision.resume_step == 4
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step_2", "step_4"]
    aside = path / "quarantine" / "before_attempt_1"
    assert (aside / "checkpoints" / "step_6").is_dir() and (aside / "rollouts" / "step_5").is_dir()
    assert (path / "rollouts" / "step_3").is_dir()


@pytest.mark.parametrize(
    "resume, message",
    [
        ("never", "holds a run already; --resume=never needs an empty"),
        ("strict", "has no checkpoint; use --resume=auto"),
        ("7", "has no such checkpoint; it has none"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_nothing_is_written(tmp_path, resume, message):
    opened(tmp_path / "r")
    before = snapshot(tmp_path)
    with pytest.raises(RunDirError, match=message):
        RunDir.open(tmp_path / "r", SETTINGS, resume)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("resume", ["strict", "3"])
def test_nothing_to_resume_makes_no_directory(tmp_path, resume):
    with pytest.raises(RunDirError, match="holds no run to resume"):
        RunDir.open(tmp_path / "r", SETTINGS, resume)
    assert snapshot(tmp_path) == []


def test_directory_where_nothing_came_of_the_run_takes_another_config(tmp_path):
    """The remedy of the error that ended it is typed with the same --run_dir."""
    run = RunDir.open(
        tmp_path / "r", SETTINGS, files={"config.resolved.py": "old", "plan.json": "{}"}
    )
    run.close()
    config = (run.path / "config.json").read_text()
    (run.path / "ledger.jsonl").write_text('{"state": "ISSUED"}\n{"state": "EVALUATED"}\n')
    (run.path / "metrics.jsonl").write_text('{"sft/loss": 1.0}\n{"eval/success.a": 0.5}\n')
    (run.path / "rollouts" / "step_0" / "eval").mkdir(parents=True)  # of the first evaluation
    other = replace(SETTINGS, learner=LearnerSettings(learning_rate=0.5), seed=7)
    again = RunDir.open(
        tmp_path / "r", other, files={"config.resolved.py": "new", "plan.json": "{}"}
    )
    again.close()
    changes = ("learner.learning_rate: 0.001 -> 0.5", "seed: 0 -> 7")
    assert (sorted(again.decision.changes), again.run_id) == (sorted(changes), run.run_id)
    assert json.loads((again.path / "config.json").read_text())["seed"] == 7
    aside = again.path / "quarantine" / "before_attempt_1"
    assert (aside / "ledger.jsonl").exists() and (aside / "metrics.jsonl").exists()
    assert (aside / "rollouts" / "step_0" / "eval").exists()
    assert (aside / "config.json").read_text() == config
    assert (aside / "config.resolved.py").read_text() == "old"
    assert (again.path / "config.resolved.py").read_text() == "new"
    assert not (aside / "plan.json").exists()  # it did not change
    with pytest.raises(RunDirError, match="run_id .* there, mine here"):
        RunDir.open(tmp_path / "r", replace(SETTINGS, run_id="mine"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("checkpoints/quarantine/step_2.1/x", ""),
        ("rollouts/step_1/train/traces.jsonl", ""),
        ("ledger.jsonl", '{"state": "ISSUED"}\n{"state": "TRAINED"}\n'),
        ("metrics.jsonl", '{"time/step_s": 1.0}\n'),
        ("summary.json", "{}"),  # of an evaluation that came to its end
    ],
)
def test_directory_that_holds_anything_made_is_of_its_config_only(tmp_path, name, text):
    run = opened(tmp_path / "r")
    (run.path / name).parent.mkdir(parents=True, exist_ok=True)
    (run.path / name).write_text(text)
    with pytest.raises(RunDirError, match="another config: seed 0 there, 7 here"):
        RunDir.open(tmp_path / "r", replace(SETTINGS, seed=7))


def test_directory_of_another_config_is_refused_with_the_keys(tmp_path):
    with_checkpoints(tmp_path / "r", 1)
    other = replace(SETTINGS, learner=LearnerSettings(learning_rate=0.5), seed=7)
    with pytest.raises(
        RunDirError,
        match=r"another config: learner.learning_rate 0.001 there, 0.5 here; seed 0 there, 7 here",
    ):
        RunDir.open(tmp_path / "r", other)
    with pytest.raises(RunDirError, match="run_id .* there, mine here"):
        RunDir.open(tmp_path / "r", replace(SETTINGS, run_id="mine"))


def test_length_and_cadence_may_change_and_are_listed(tmp_path):
    opened(tmp_path / "r")
    longer = replace(SETTINGS, steps=999, eval=EvalSettings(every=5))
    run = opened(tmp_path / "r", longer)
    assert run.decision.changes == ("steps: 100 -> 999", "eval.every: 0 -> 5")
    assert json.loads((run.path / "config.json").read_text())["steps"] == 999


def test_key_newer_than_the_run_has_its_default_there(tmp_path):
    opened(tmp_path / "r")
    config = tmp_path / "r" / "config.json"
    stored = json.loads(config.read_text())
    del stored["learner"]["remat"]
    config.write_text(json.dumps(stored))
    assert opened(tmp_path / "r").attempt == 1
    config.write_text(json.dumps({**stored, "gone": 1}))
    with pytest.raises(
        RunDirError, match="config.json, the stored config of a run: gone is not a key"
    ):
        RunDir.open(tmp_path / "r", SETTINGS)


def test_fork_starts_an_empty_directory_from_another_runs_checkpoint(tmp_path):
    source = with_checkpoints(tmp_path / "a", 3, 8)
    run = opened(tmp_path / "b", resume=str(source))
    assert run.decision.resume_from == source / "checkpoints" / "step_8"
    at_3 = opened(tmp_path / "c", resume=str(source / "checkpoints" / "step_3"))
    assert at_3.decision.resume_step == 3
    with pytest.raises(RunDirError, match="a fork .* needs an empty --run_dir"):
        RunDir.open(tmp_path / "b", SETTINGS, str(source))
    with pytest.raises(RunDirError, match="has no checkpoint to start from"):
        RunDir.open(tmp_path / "d", SETTINGS, str(tmp_path / "b"))


def test_foreign_files_are_never_written_into(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirError, match="holds thesis.tex but no run"):
        RunDir.open(tmp_path, SETTINGS)
    with pytest.raises(RunDirError, match="is a file"):
        RunDir.open(tmp_path / "thesis.tex", SETTINGS)
    assert snapshot(tmp_path) == ["thesis.tex"]


def test_killed_before_config_json_counts_as_empty(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "LOCK").write_text("pid 1\n")
    (tmp_path / "r" / ".config.json.1").write_text("{")
    (tmp_path / "r" / "plan.json").write_text("{}")  # of a dry run
    assert opened(tmp_path / "r", resume="never").attempt == 0


def test_unwritable_place_is_one_line():
    with pytest.raises(RunDirError, match="cannot write the run directory /dev/null/r"):
        RunDir.open("/dev/null/r", SETTINGS)


def test_auto_path_names_tasks_and_model(tmp_path):
    path, run_id = auto_path(SETTINGS, tmp_path)
    assert path.name == f"frozen_lake--decoder-2x96--{run_id}"
    named = replace(SETTINGS, run_id="mine")
    opened(auto_path(named, tmp_path)[0], named)
    with pytest.raises(RunDirError, match="resume it with --run_dir="):
        auto_path(named, tmp_path)


def test_a_directory_that_gets_its_name_here_has_the_run_id_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = opened("")
    assert run.path.name.endswith(f"--{run.run_id}")


def test_status_is_replaced_at_most_once_a_second_unless_the_state_changes(tmp_path):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    for step in range(5):
        run.status("running", step=step)
    assert json.loads((run.path / "STATUS.json").read_text())["step"] == 0
    run.status("done", step=5)
    status = json.loads((run.path / "STATUS.json").read_text())
    assert (status["state"], status["step"], status["run_id"]) == ("done", 5, run.run_id)
    run.close()


def test_lost_events_are_counted_and_do_not_stop_the_run(tmp_path):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    run.event("sync", seconds=float("nan"))
    assert json.loads((run.path / "events.jsonl").read_text())["seconds"] is None
    run.close()
    run.event("late")
    assert run.num_lost == 1


def test_log_file_holds_what_the_parts_log(tmp_path):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    run.start_logging()
    logging.getLogger("rl_jax.serve").info("slot 3 now belongs to r/0/1/2")
    run.close()
    assert "slot 3 now belongs to r/0/1/2" in (run.logs / "driver.log").read_text()
    logging.getLogger("rl_jax.serve").info("after")
    assert "after" not in (run.logs / "driver.log").read_text()


def test_status_is_overwritten_where_the_disk_has_no_room_for_another_file(tmp_path):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    run.status("running", text="x" * 100)
    (run.path / f".STATUS.json.{os.getpid()}").symlink_to("/dev/full")
    run.status("failed")
    assert json.loads((run.path / "STATUS.json").read_text())["state"] == "failed"
    assert run.num_lost == 0
    run.close()


def test_a_full_disk_costs_lines_of_logs_and_one_line_in_the_terminal(tmp_path, capsys):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    run.start_logging()
    with open("/dev/full", "w") as full:
        for file in (run._events, run._handlers[0].stream):
            os.dup2(full.fileno(), file.fileno())
    for i in range(3):
        logging.getLogger("rl_jax.serve").info("slot %d", i)
        run.event("alarm", step=i)
    run.close()
    assert run._events.closed and run._lock.closed
    (line,) = capsys.readouterr().err.splitlines()
    assert "driver.log of" in line and "No space left on device" in line and run.num_lost >= 6


def test_a_repeated_warning_is_shown_once_and_counted_and_the_log_keeps_all(tmp_path, capsys):
    run = RunDir.open(tmp_path / "r", SETTINGS)
    run.start_logging()
    log = logging.getLogger("rl_jax.rollout")
    for i in range(192):
        log.warning("episode ERRORED: r/0/%d", i, extra={"kind": "ERRORED (env_error)"})
    log.warning("of no kind")
    run.close()
    assert capsys.readouterr().err.splitlines() == [
        "warning: episode ERRORED: r/0/0",
        "warning: of no kind",
        "warning: 191 more of ERRORED (env_error); the log file has them all",
    ]
    assert (run.logs / "driver.log").read_text().count("episode ERRORED: r/0/") == 192


def test_a_warning_that_repeats_for_long_is_told_again_with_the_count():
    now_s = 0.0
    repeated = FirstOfAKind(clock=lambda: now_s)
    record = logging.makeLogRecord({"msg": "broken", "kind": "env_error"})
    assert [repeated.filter(record) for _ in range(3)] == [True, False, False]
    now_s = 31.0
    assert repeated.filter(record) and repeated.rest() == []
    assert WithCount().format(record) == "broken (and 2 more of its kind before it)"


def test_decide_writes_nothing(tmp_path):
    decide(tmp_path / "r", SETTINGS)
    assert snapshot(tmp_path) == []


def test_encode_is_ascii_json_whatever_comes():
    assert encode({"a": "\ud835é", "b": [float("inf")], "c": (1, 2)}) == (
        '{"a": "\\ud835\\u00e9", "b": [null], "c": [1, 2]}'
    )


def test_a_replay_is_of_its_own_chat_template_only(tmp_path):
    path = tmp_path / "r"
    check_replay(path, "b")  # no run: its traces alone are there
    path.mkdir()
    opened(path)
    check_replay(path, "b")  # of a version that did not write it
    (path / "plan.json").write_text('{"template_sha256": "a"}')
    check_replay(path, "a")
    with pytest.raises(RunDirError) as caught:
        check_replay(path, "b")
    told = str(caught.value)
    assert told.startswith(f"rollout.replay_dir={path} was sampled with") and "\n" not in told
    assert "template a, and this run has b" in told and "set model.tokenizer" in told


def test_a_run_goes_on_with_its_own_chat_template_only(tmp_path):
    path = tmp_path / "r"
    check_template(path, "b")  # nothing is there yet
    (path).mkdir()
    (path / "plan.json").write_text('{"template_sha256": "a"}')
    check_template(path, "b")  # what a dry run left
    opened(path)
    check_template(path, "b")  # nothing came of the run, so nothing knows the template
    (path / "rollouts" / "step_0" / "eval").mkdir(parents=True)
    check_template(path, "b")
    with pytest.raises(RunDirError, match="begun with the chat template a"):
        check_template(path, "b", "3")  # a step is asked for
    (path / "rollouts" / "step_1" / "train").mkdir(parents=True)
    check_template(path, "a")
    with pytest.raises(
        RunDirError, match="begun with the chat template a, and this one is b: the files"
    ):
        check_template(path, "b")
    (path / "plan.json").write_text("{}")
    check_template(path, "b")  # of a version that did not write it
    (path / "plan.json").write_text("{")
    with pytest.raises(RunDirError, match="plan.json cannot be read"):
        check_template(path, "a")
