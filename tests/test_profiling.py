"""JAX's profiler by step range, and spans of what is compiled."""

import jax
import jax.numpy as jnp
import pytest

from rl_jax import profiling
from rl_jax.profiling import CompileSpans, Profiler
from rl_jax.settings import MetricsSettings
from rl_jax.timeline import Timeline


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda where: made.append(("start", where)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append(("stop",)))
    return made


def steps(profiler, *numbers):
    for step in numbers:
        profiler.begin(step)
        profiler.end(step)


def test_steps_of_the_range_are_profiled_once_and_no_other(calls, tmp_path):
    profiler = Profiler(MetricsSettings(profile_steps="3:4"), tmp_path)
    steps(profiler, 1, 2)
    assert calls == []
    steps(profiler, 3)
    assert calls == [("start", str(tmp_path))]
    steps(profiler, 4)
    assert len(calls) == 2, "it ends with the last step that is asked for"
    steps(profiler, 5)
    profiler.close()
    assert calls == [("start", str(tmp_path)), ("stop",)]


def test_run_that_begins_or_ends_within_the_range_has_what_it_did_of_it(calls, tmp_path):
    profiler = Profiler(MetricsSettings(profile_steps="3:9"), tmp_path)
    steps(profiler, 5, 6)
    profiler.close()
    assert [call[0] for call in calls] == ["start", "stop"]
    steps(Profiler(MetricsSettings(), tmp_path), 1, 2)
    assert len(calls) == 2, "none is asked for"


def test_profiler_that_is_taken_costs_a_warning_and_no_step(monkeypatch, tmp_path, caplog):
    def taken(where):
        raise RuntimeError("only one profile may be made at a time")

    monkeypatch.setattr(jax.profiler, "start_trace", taken)
    steps(Profiler(MetricsSettings(profile_steps="1:3"), tmp_path), 1, 2, 3)
    assert caplog.text.count("only one profile may be made at a time") == 1


def test_what_a_thread_compiles_is_a_span_of_its_name_until_it_is_closed(monkeypatch):
    monkeypatch.setattr(profiling, "LEAST_S", 0.0)
    timeline, given = Timeline(), []
    timeline.start(lambda spans, lost: given.extend(spans))
    spans = CompileSpans(timeline)

    def heard(x):
        return jnp.sin(x) + 3.25

    def unheard(x):
        return jnp.cos(x) + 7.25

    jax.jit(heard)(1.0)
    spans.close()
    spans.close()
    jax.jit(unheard)(1.0)
    timeline.close()
    kinds = {span[1] for span in given if "heard" in span[4]["program"]}
    assert kinds == {"trace", "lower", "compile"}
    assert {span[0] for span in given} == {"compile/MainThread"}
    assert not any("unheard" in span[4]["program"] for span in given)
