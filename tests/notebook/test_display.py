"""What a notebook shows of data that nobody trusts: inert, cut, and the same in a terminal."""

import math
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from rl_jax.config import parse
from rl_jax.mesh import MeshPlan
from rl_jax.notebook import display
from rl_jax.notebook.display import ConfigDiff, PlanView, coloured, escaped, spark, visible
from rl_jax.notebook.episodes import Episode, Episodes
from rl_jax.notebook.plot import MISSING, Plot
from rl_jax.rollout.traces import write_traces
from rl_jax.testing.trajectories import fake_trajectory
from rl_jax.types import FinishReason, Turn, VersionSpan

HOSTILE = '<script>alert(1)</script>\x1b[31m\x00\ud800\u202e\' onmouseover="x()" &lt;'


class Tags(HTMLParser):
    """Which elements and attributes a page has, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def trajectory(said=HOSTILE):
    base = fake_trajectory(0, length=9)
    turns, at = [], 0
    for num_seen, num_said in ((3, 2), (2, 2)):
        seen, end = base.tokens[at : at + num_seen], at + num_seen + num_said
        own = slice(at + num_seen, end)
        spans = (VersionSpan(0, num_said, 0),)
        turns.append(
            Turn(seen, base.tokens[own], base.logprobs[own], None, spans, base.context_mixed[own],
                 FinishReason.STOP, 0, "decode.0", "decode", {})
        )  # fmt: skip
        at = end
    return replace(base, turns=tuple(turns), tag=said)


def episode(said=HOSTILE, decode=lambda tokens: HOSTILE):
    return Episode(3, "train", trajectory(said), ((said, said), ("plain", "text")), decode)


def test_hostile_text_is_inert_in_a_page_and_in_a_terminal():
    page = Tags(episode()._repr_html_())
    assert page.tags == {"div", "b", "span"} and page.attributes == {"style", "title"}
    assert "<script>alert(1)</script>" in page.text and "\\x1b[31m\\x00\\ud800\\u202e" in page.text
    for text in (repr(episode()), episode()._repr_html_()):
        text.encode("utf-8")  # no surrogate is left
        assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert "<script>" not in escaped(HOSTILE) and visible("a\tb\nc") == "a\tb\nc"


def test_what_is_long_is_cut_and_says_by_how_much():
    page = episode("x" * 50_000_000)._repr_html_()
    assert len(page) < 200_000 and f"({50_000_000 - display.MAX_CHARS} more characters)" in page
    lines = repr(episode("\n".join("abc" * 900))).splitlines()
    assert len(lines) <= 41 and any("lines)" in line for line in lines)


def test_an_episode_says_whose_it_is_and_without_a_tokenizer_its_texts():
    shown = repr(Episode(3, "train", trajectory("lake"), (("seen", "said"), ("more", "end"))))
    assert shown.startswith(
        "train episode of step 3: lake, task task-0, reward 0, 2 turns, 4 tokens"
    )
    assert shown.splitlines()[1:] == [
        "  turn 0",
        "    seen",
        "  > said",
        "  turn 1",
        "    more",
        "  > end",
    ]
    page = Episode(
        3, "train", trajectory("lake"), (("seen", "said"), ("more", "end"))
    )._repr_html_()
    assert "span" not in Tags(page).tags and "said" in page


def test_less_likely_tokens_are_redder():
    page = coloured(["a", "b", "c", "d"], [0.0, -1.0, -50.0, -math.inf])
    shades = [float(part.split(")")[0]) for part in page.split("40,")[1:]]
    assert shades == [0.08, pytest.approx(0.17, abs=0.005), 0.7, 0.7]


def test_a_spark_line_shows_the_course_in_60_characters_at_most():
    assert spark([0, 1, 2, math.nan, 7]) == "▁▂▃█" and spark([]) == "" and spark([2.0]) == "▁"
    assert len(spark(list(range(1000)))) <= 60


def test_config_differences_are_by_key_and_run_id_is_none():
    ours = replace(parse([]).settings, run_id="a", steps=7)
    theirs = replace(parse([]).settings, run_id="<b>")
    diff = ConfigDiff.of(ours, theirs, ("a", "<i>"))
    assert len(diff) == 1 and repr(diff).splitlines() == [
        "key    a  <i>",
        f"steps  7  {theirs.steps}",
    ]
    assert "i" not in Tags(diff._repr_html_()).tags
    none = ConfigDiff.of(ours, ours, ("a", "b"))
    assert repr(none) == "no difference between a and b" and "no difference" in none._repr_html_()


def test_a_mesh_plan_names_each_server_and_what_trains():
    settings = parse([]).settings
    view = PlanView(MeshPlan.from_settings(settings.mesh, settings.model))
    page = Tags(view._repr_html_()).text
    for server in view.plan.servers:
        assert server.name in repr(view) and server.name in page
    assert "train" in page and f"{view.plan.num_devices} device(s)" in page


def test_episodes_are_read_one_by_one_in_the_order_of_steps(tmp_path):
    def render(tokens):
        return ",".join(map(str, tokens))

    for step in (10, 2):
        members = [fake_trajectory(step, sample, reward=sample) for sample in range(3)]
        write_traces(tmp_path / f"rollouts/step_{step}/train", members, render)
    found = Episodes(tmp_path)
    assert len(found) == 6 and found.steps == [2, 10]
    assert [e.step for e in found] == [2, 2, 2, 10, 10, 10]
    assert found[-1].trajectory.uid == found.of(10)[2].trajectory.uid and found[-1].reward == 2
    assert [e.reward for e in found[1:5:2]] == [1, 0]
    assert "6 train episodes of steps 2 to 10" in repr(found)
    write_traces(tmp_path / "rollouts/step_2/train", [fake_trajectory(9)], render)
    assert len(found) == 4, "a step that was made again is read again"
    with pytest.raises(IndexError, match=r"episode 4 of 4 \(train\)"):
        found[4]
    with pytest.raises(IndexError, match="none is saved yet, or metrics.rollouts_every is 0"):
        Episodes(tmp_path / "nothing")[-1]


def test_a_plot_is_a_picture_with_matplotlib_and_lines_without(monkeypatch, tmp_path):
    plot = Plot({"reward/$mean": ([1, 2, 3], [0.0, 0.5, 1.0])}, "a run")
    assert repr(plot).splitlines()[2].split() == ["reward/$mean", "0", "1", "0", "1", "▁▅█"]
    pytest.importorskip("matplotlib")
    assert plot._repr_png_().startswith(b"\x89PNG") and MISSING not in repr(plot)
    plot.save(tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot._repr_png_() is None and repr(plot).endswith(MISSING)
    with pytest.raises(ImportError, match="notebook"):
        plot.save(tmp_path / "q.png")


def test_nothing_to_plot_is_told():
    assert (
        repr(Plot({}, "a run")) == "a run: no step yet" and Plot({}, "a run")._repr_png_() is None
    )
