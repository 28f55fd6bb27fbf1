"""live_view.py and --progress=rich: the last steps as a table, notes above it, plain lines where that cannot be."""

import io
import re
import sys

import pytest

from rl_jax import launch
from rl_jax.live_view import MOST_STEPS, LiveView, missing
from rl_jax.metrics import Metric
from rl_jax.progress import Progress

pytest.importorskip("rich")  # an extra


class Terminal(io.StringIO):
    """Keeps what was written since `seen` last, as a person reads it."""

    def isatty(self):
        return True

    def seen(self):
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue()).replace("\r", "")
        self.seek(0)
        self.truncate()
        return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def row(reward):
    return {"reward/mean": Metric(reward * 4, 4), "goodput/sample": 0.5, "time/step_s": 2.0}


def test_steps_stand_side_by_side_with_the_figures_of_their_plain_lines(terminal):
    progress = Progress(20, "rich", stream=terminal)
    progress.step(1, row(0.25))
    terminal.seen()
    progress.step(2, {**row(0.75), "policy/entropy": 1.5})
    head, *figures = terminal.seen()
    assert head.split() == ["step", "1/20", "step", "2/20"]
    cells = {line.split()[0]: line.split()[1:] for line in figures}
    assert (cells["reward"], cells["G_sample"]) == (["0.250", "0.750"], ["50%", "50%"])
    assert cells["entropy"] == ["1.5"]  # of the second alone
    assert {"wait", "step"} <= cells.keys()
    progress.close()


def test_notes_scroll_above_and_what_is_awaited_stands_below_until_the_next_step(terminal):
    progress = Progress(20, "rich", heartbeat_s=0.0, stream=terminal)
    progress.step(1, row(0.25))
    terminal.seen()
    progress.note("ALARM [k3] is [bold]high[/bold]")  # no markup of ours
    assert terminal.seen()[0] == "ALARM [k3] is [bold]high[/bold]"
    progress.beat(lambda: "3 of 8 groups")
    assert terminal.seen()[-1].endswith("after step 1, waiting for 3 of 8 groups")
    progress.step(2, row(0.5))
    assert not any("waiting" in line for line in terminal.seen())
    progress.close()
    terminal.seen()
    progress.note("done")  # the table is over: lines again
    assert terminal.seen() == ["done"]


def test_as_many_steps_are_shown_as_fit(terminal, monkeypatch):
    for columns, num in (("200", MOST_STEPS), ("60", 2), ("24", 1)):
        monkeypatch.setenv("COLUMNS", columns)
        progress = Progress(99, "rich", stream=terminal)
        for step in range(1, 12):
            terminal.seen()
            progress.step(step, {})
        head = terminal.seen()[0]
        assert head.count("/99") == num and head.endswith("11/99")  # the last ones
        progress.close()


def test_what_is_no_terminal_gets_plain_lines(terminal, monkeypatch):
    plain = io.StringIO()
    Progress(9, "rich", stream=plain).step(1, row(0.25))
    assert plain.getvalue() == "step 1/9  reward 0.250  wait 0%  G_sample 50%  step 2.0 s\n"
    monkeypatch.setenv("TERM", "dumb")
    assert LiveView.open(terminal) is None
    Progress(9, "rich", stream=terminal).step(1, {})
    assert terminal.getvalue() == "step 1/9\n"


def test_a_terminal_that_was_closed_does_not_stop_the_run(terminal):
    progress = Progress(9, "rich", stream=terminal)
    terminal.close()
    progress.step(1, row(0.25))
    progress.note("lost")
    progress.close()


def test_a_table_that_cannot_be_drawn_becomes_lines(terminal, monkeypatch):
    progress = Progress(9, "rich", stream=terminal)

    def fail(self, figures):
        raise AssertionError("a bug")

    monkeypatch.setattr(LiveView, "step", fail)
    progress.step(1, {})
    monkeypatch.undo()  # it stays with lines
    terminal.seen()
    progress.step(2, {})
    assert terminal.seen()[0].startswith("step 2/9")
    progress.close()


def test_without_the_package_the_config_is_refused_with_what_helps(monkeypatch, capsys, tmp_path):
    assert missing() is None
    monkeypatch.setitem(sys.modules, "rich", None)
    words = ["--progress=rich", "--dry_run", f"--run_dir={tmp_path / 'r'}"]
    assert launch.main(words) == 2
    assert capsys.readouterr().err == f"error: {missing()}\n"
    assert "pip install rich" in missing() and "--progress=plain" in missing()
