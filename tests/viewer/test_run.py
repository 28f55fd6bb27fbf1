"""Files of a run as the viewer reads them: while they grow, when they are torn or broken, and what curves keep."""

import json

import pytest

from rl_jax.metrics import read_metrics
from rl_jax.viewer import run as run_module
from rl_jax.viewer.lines import MAX_LINE, LineFile, read_object
from rl_jax.viewer.run import Run, family, label, thin


@pytest.fixture(autouse=True)
def look_each_time(monkeypatch):
    monkeypatch.setattr(run_module, "REFRESH_S", 0.0)


def reader(path):
    taken = []
    return LineFile(path, taken.append, taken.clear), taken


def test_a_line_is_taken_once_its_end_is_there(tmp_path):
    path = tmp_path / "x.jsonl"
    file, taken = reader(path)
    file.read()  # not there yet
    path.write_text('{"a": 1}\n{"a": 2')
    file.read()
    assert taken == [{"a": 1}] and file.fault() == ""
    with open(path, "a") as more:
        more.write('2}\n{"a": 3}\n')
    file.read()
    file.read()
    assert taken == [{"a": 1}, {"a": 22}, {"a": 3}] and file.fault() == ""


def test_a_broken_line_is_told_by_its_number_and_the_rest_is_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\nno json\n[1]\n\xff\xfe\n{"a": 2}\n' + b"[" * 5000 + b"\n")
    file, taken = reader(path)
    file.read()
    assert taken == [{"a": 1}, {"a": 2}]
    assert file.fault().startswith("x.jsonl: 4 of 6 lines cannot be read (first line 2: ")


def test_a_line_without_bounds_is_passed_over_and_memory_is_not_filled_with_it(tmp_path):
    path = tmp_path / "x.jsonl"
    with open(path, "wb") as out:
        out.write(b'{"a": "' + b"x" * (MAX_LINE + (3 << 20)))
    file, taken = reader(path)
    file.read()
    assert taken == [] and len(file._held) == 0 and "longer than" in file.fault()
    with open(path, "ab") as out:
        out.write(b'"}\n{"a": 1}\n')
    file.read()
    assert taken == [{"a": 1}] and file.num_bad == 1


@pytest.mark.parametrize("how", ["shorter", "another file"])
def test_a_file_that_was_replaced_is_read_anew(tmp_path, how):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    file, taken = reader(path)
    file.read()
    if how == "another file":
        (tmp_path / "y").write_text('{"a": 7}\n{"a": 8}\n{"a": 9}\n')
        (tmp_path / "y").rename(path)
    else:
        path.write_text('{"a": 7}\n')
    file.read()
    assert [one["a"] for one in taken] == ([7, 8, 9] if how == "another file" else [7])


def test_a_small_file_that_cannot_be_read_says_so(tmp_path):
    assert read_object(tmp_path / "none.json") == ({}, "")
    (tmp_path / "a.json").write_text("[1]")
    assert read_object(tmp_path / "a.json") == ({}, "a.json is a list, not an object")
    (tmp_path / "a.json").write_text('{"a": ' + "1" * 200)
    assert "a.json is longer than 100 bytes" in read_object(tmp_path / "a.json", 100)[1]


def test_rows_are_those_that_survived(copy):
    with open(copy / "metrics.jsonl", "a") as out:
        for step in (9, 10):  # a second attempt, from the checkpoint of step 8
            out.write(
                json.dumps({"step": step, "time": 1.0, "attempt": 1, "reward/mean": 7.0, "x": "y"})
                + "\n"
            )
    run = Run(copy)
    assert [row["step"] for row in run.rows()] == [row["step"] for row in read_metrics(copy)]
    assert run.rows()[-1]["reward/mean"] == 7.0 and run.head()["attempts"] == 2


def test_rows_come_while_the_run_goes_on(copy):
    run = Run(copy)
    assert run.head()["step"] == 12
    with open(copy / "metrics.jsonl", "a") as out:
        out.write(
            json.dumps({"step": 13, "time": 1.0, "attempt": 0, "time/step_s": 1.0, "is/ess": 0.2})
            + "\n"
        )
        out.write(
            json.dumps({"step": 14, "time": 2.0, "attempt": 0, "time/step_s": 1.0, "is/ess": 0.2})
            + "\n"
        )
        out.write('{"step": 15, ')
    head = run.head()
    assert head["step"] == 14 and run.faults() == []
    assert [one["rule"] for one in head["advice"]] == ["ess"]
    assert run.curves(["is/ess"], 100)["is/ess"]["alarms"][-1] == [13, 14, "ess", "correctness"]


def test_what_holds_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="no directory; give a run directory"):
        Run(tmp_path / "none")
    with pytest.raises(ValueError, match="holds nothing of a run"):
        Run(tmp_path)


def test_a_run_without_most_of_its_files_is_shown(tmp_path):
    (tmp_path / "STATUS.json").write_text('{"state": "fai')
    run = Run(tmp_path)
    head = run.head()
    assert head["state"] == "unknown" and head["step"] is None and head["advice"] == []
    assert run.catalogue() == [] and run.curves(["a"], 10) == {} and run.events()["events"] == []
    assert any(fault.startswith("STATUS.json cannot be read") for fault in run.faults())


def test_only_a_running_run_can_stall(copy):
    rows = (copy / "metrics.jsonl").read_text().splitlines()
    old = [json.dumps({**json.loads(line), "time": 1e9}) for line in rows]
    (copy / "metrics.jsonl").write_text("\n".join(old) + "\n")
    assert Run(copy).head()["advice"] == []
    (copy / "STATUS.json").write_text('{"state": "running", "time": 1e9}')
    head = Run(copy).head()
    assert [one["rule"] for one in head["advice"]] == ["stalled"] and head["silent_s"] > 1e6


def test_a_family_is_one_chart_of_tags_and_lags(api):
    assert family("reward/mean.maze") == "reward/mean" and label("reward/mean.maze") == "maze"
    assert (
        family("staleness/share_lag12") == "staleness/share_lag{n}"
        and label("staleness/share_lag12") == "12"
    )
    assert label("reward/mean") == "all" and label("reward/pass_at4.x") == "4 x"
    families = {one["family"]: one for one in api.run.catalogue()}
    assert [s["label"] for s in families["reward/mean"]["series"]] == ["all", "maze", "sums"]
    assert [s["label"] for s in families["staleness/share_lag{n}"]["series"]] == ["0", "1", "2"]
    assert "share of the trained tokens" in families["staleness/share_lag{n}"]["meaning"]


def test_a_curve_that_is_shortened_keeps_its_extremes():
    points = [(step, float(step % 7)) for step in range(10_000)]
    points[4321] = (4321, 99.0)
    points[77] = (77, -99.0)
    kept = thin(points, 200)
    assert len(kept) <= 202 and kept == sorted(kept)
    assert (4321, 99.0) in kept and (77, -99.0) in kept and kept[-1] == points[-1]
    assert thin(points[:50], 200) == points[:50]


def test_events_are_bounded_by_kind_and_counted(copy, monkeypatch):
    monkeypatch.setattr(run_module, "MAX_EVENTS", 5)
    with open(copy / "events.jsonl", "a") as out:
        out.writelines(f'{{"kind": "x", "n": {n}}}\n' for n in range(40))
        out.writelines(f'{{"kind": "published", "n": {n}}}\n' for n in range(40))
    run = Run(copy)
    found = run.events(3)
    assert [one["n"] for one in found["events"]] == [
        39,
        38,
        37,
    ]  # what each step writes does not hide the rest
    assert (
        found["kinds"] == {"saved": 12, "alarm": 1, "x": 40, "published": 40} and found["num"] == 93
    )
    assert [one["kind"] for one in run.events(kind="alarm")["events"]] == ["alarm"]
    assert [one["n"] for one in run.events(kind="published")["events"]] == [39, 38, 37, 36, 35]
