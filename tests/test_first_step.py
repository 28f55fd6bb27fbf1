"""first_step.py: a slow first step is explained once, by its laps and by what was compiled in it."""

import jax
import jax.numpy as jnp
import pytest

from rl_jax.first_step import COMPILES, FirstStep
from rl_jax.metrics import Metric


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def first():
    made = FirstStep(Clock())
    yield made
    made.close()


def laps(wait, batch, train, sync):
    names = ("time/wait_for_batch_s", "time/batch_s", "time/train_s", "time/sync_s")
    row = {name: Metric(s, 1) for name, s in zip(names, (wait, batch, train, sync))}
    return {**row, "time/step_s": Metric(wait + batch + train + sync, 1)}


def test_a_slow_first_step_says_what_took_the_time(first):
    lowering, compiling = COMPILES
    for at_s, event, seconds, program in (
        (870.0, compiling, 99.0, "jit(of_before)"),  # 130 s before the step's end, which took 125
        (880.0, lowering, 3.0, "jit(score)"),
        (885.0, compiling, 5.0, "jit(score)"),
        (960.0, compiling, 70.0, "jit(step)"),
        (961.0, compiling, 0.5, "jit(convert)"),  # not worth a word
        (962.0, "/jax/core/compile/jaxpr_trace_duration", 50.0, "step"),
    ):
        first._clock.now = at_s
        first._heard(event, seconds, fun_name=program)
    first._clock.now = 1000.0
    assert first.why(laps(24.0, 9.0, 91.0, 1.0)) == (
        "the first step took 2m05s: the update 91 s, waiting for a batch 24 s, packing, scoring and advantages 9.0 s"
        "; compiled meanwhile, for all steps: jit(step) 70 s, jit(score) 8.0 s"
    )
    assert first.why(laps(70.0, 0.0, 0.0, 0.0)) is None  # not the first


def test_a_quick_first_step_is_not_explained_and_a_slow_second_one_neither(first):
    assert first.why(laps(20.0, 10.0, 20.0, 10.0)) is None
    assert first.why(laps(100.0, 0.0, 0.0, 0.0)) is None


def test_a_slow_step_that_compiled_nothing_names_its_laps_alone(first):
    assert first.why({"time/step_s": 61.0, "time/wait_for_batch_s": 61.0}) == (
        "the first step took 61 s: waiting for a batch 61 s"
    )


def test_it_hears_what_jax_compiles_until_it_is_closed(first):
    @jax.jit
    def one_of_a_kind(x):
        return x * 2 + 1

    one_of_a_kind(jnp.ones(3))
    heard = [program for _, program, _ in first._compiled]
    assert any("one_of_a_kind" in program for program in heard)
    first.close()
    one_of_a_kind(jnp.ones(5))
    assert [program for _, program, _ in first._compiled] == heard
