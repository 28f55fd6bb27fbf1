"""Latencies: their means, their bounds, and what is refused."""

import random

import numpy as np
import pytest

from envs.latency import read_latency


def drawn(num=20_000, **config):
    rng, latency = random.Random(0), read_latency(config)
    return np.array([latency.draw_s(rng) for _ in range(num)])


def test_mean_and_deviation_are_those_of_the_distribution():
    assert set(drawn(num=5, mean_s=0.3)) == {0.3}
    gaussian = drawn(kind="gaussian", mean_s=1.0, std_s=0.2)
    assert gaussian.mean() == pytest.approx(1.0, abs=0.01)
    assert gaussian.std() == pytest.approx(0.2, abs=0.01)
    tail = drawn(kind="lognormal", mean_s=0.2, std_s=0.4)
    assert tail.mean() == pytest.approx(0.2, abs=0.01) and np.median(tail) == pytest.approx(
        0.2 / 5**0.5, abs=0.01
    )  # exp(mu) = mean / sqrt(1 + std^2 / mean^2)
    assert tail.std() == pytest.approx(0.4, abs=0.06)


def test_no_wait_is_below_zero_or_above_the_most():
    waits = drawn(kind="gaussian", mean_s=0.1, std_s=1.0, max_s=0.5)
    assert waits.min() == 0.0 and waits.max() == 0.5


def test_no_latency_does_not_sleep(monkeypatch):
    monkeypatch.setattr("envs.latency.time.sleep", lambda s: pytest.fail("it slept"))
    read_latency({}).wait(random.Random(0))


@pytest.mark.parametrize(
    "config, told",
    [
        ({"kind": "pareto"}, "kind='pareto' is not one of constant, gaussian, lognormal"),
        ({"mean_s": -1}, "mean_s=-1 must be a number of at least 0"),
        ({"mean_s": float("nan")}, "mean_s=nan must be"),
        ({"mean_s": float("inf")}, "mean_s=inf must be finite"),
        ({"mean_s": "1"}, "mean_s='1' must be a number"),
        ({"mean_s": True}, "mean_s=True must be a number"),
        ({"mean_s": 1, "std_s": 1}, "std_s=1 has no effect with kind=constant"),
        ({"kind": "lognormal"}, "mean_s=0 has no lognormal distribution"),
        ({"mean": 1}, "unknown config keys of Latency: 'mean' (use mean_s)"),
        (0.5, "0.5 is no mapping"),
    ],
)
def test_what_is_no_latency_is_told(config, told):
    with pytest.raises(ValueError) as error:
        read_latency(config)
    assert told in str(error.value)
