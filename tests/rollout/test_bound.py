"""The adaptive staleness bound as a pure decision: against worlds whose best bound is known, and its arithmetic."""

import json
import random

import pytest

from rl_jax.metrics import Metric
from rl_jax.rollout.bound import Bound, Limits, Seen, Sums, fresher

LIMITS = Limits(4)


def world(step_s, ess, idle=0.5, noise=0.0, seed=0):
    """What a step sees under each bound. step_s, ess: by bound 1..; training takes 10 s."""
    rng = random.Random(seed)

    def seen(bound):
        seconds = step_s[bound - 1] * (1 + noise * rng.uniform(-1, 1))
        fresh = ess[max(0, bound - 2)] if bound > 1 else 1.0
        return Seen(seconds, max(0.0, seconds - 10), idle * seconds, ess[bound - 1], fresh)

    return seen


def bounds_of(seen, num_steps, limits=LIMITS):
    bound, found = Bound.first(limits), []
    for _ in range(num_steps):
        found.append(bound.now)
        bound = bound.saw(seen(bound.now), limits)
    return found


@pytest.mark.parametrize(
    ("step_s", "ess", "best"),
    [
        ((10, 10, 10, 10), (0.95, 0.85, 0.7, 0.5), 1),  # the learner never waits
        ((40, 20, 13, 10), (0.99, 0.97, 0.94, 0.9), 4),
        ((40, 25, 24, 23), (0.95, 0.88, 0.75, 0.6), 2),
        ((40, 25, 15, 14), (0.95, 0.88, 0.8, 0.6), 3),
    ],
)
def test_it_settles_on_the_best_bound_and_stays(step_s, ess, best):
    found = bounds_of(world(step_s, ess, noise=0.03), 160)
    assert found[0] == 2
    # A bound that was left is tried again when what it brought is forgotten, so not all of the rest.
    later = found[60:]
    assert later.count(best) >= 0.75 * len(later)
    assert sum(a != b for a, b in zip(found, found[1:])) <= 12


def test_no_slot_that_the_bound_keeps_free_means_that_a_higher_one_brings_nothing():
    busy = world((40, 40, 40, 40), (0.95, 0.9, 0.8, 0.7), idle=0.0)
    found = bounds_of(busy, 60, Limits(2))
    assert found == [1] * 60


@pytest.mark.parametrize("seed", range(20))
def test_it_never_leaves_its_limits_and_moves_one_version_at_a_time(seed):
    rng = random.Random(seed)
    limits = Limits(rng.randint(2, 6), window=rng.randint(1, 4))
    bound = Bound.first(limits)
    for _ in range(200):
        step_s = rng.lognormvariate(3, 1)
        wait_s, idle_s = (step_s * rng.random() for _ in range(2))
        seen = Seen(step_s, wait_s, idle_s, rng.uniform(0.01, 1), rng.uniform(0.01, 1))
        after = bound.saw(seen, limits)
        assert 1 <= after.now <= limits.most and abs(after.now - bound.now) <= 1
        tree = after.to_tree()
        assert Bound.from_tree(json.loads(json.dumps(tree)), limits) == after
        bound = after


def test_a_run_that_goes_on_with_a_lower_limit_begins_at_it():
    bound = Bound(4, window=Sums(2, 1, 1, 1, 1, 1), brought={4: Sums(6, 60, 0, 0, 5, 5)})
    lower = Bound.from_tree(bound.to_tree(), Limits(2))
    assert lower.now == 2 and lower.window == Sums() and lower.skip == 4
    assert lower.brought == bound.brought


def test_what_a_fresher_batch_is_worth():
    # Half at lag 1, half at lag 2: squares of 1 / 0.9 and 1 / 0.6 become 1 and 1 / 0.9.
    assert fresher({0: (0.0, 1.0), 1: (0.5, 0.9), 2: (0.5, 0.6)}) == pytest.approx(
        1 / (0.5 + 0.5 / 0.9)
    )
    assert fresher({0: (1.0, 0.98)}) == pytest.approx(0.98)
    # Nothing at lag 1: (1 / 2) ** 2 of the logarithm at lag 2.
    assert fresher({2: (1.0, 0.5)}) == pytest.approx(0.5**0.25)
    assert fresher({}) == 1.0


def test_a_step_is_read_from_its_metrics_or_left_out():
    metrics = {
        "time/step_s": Metric(20.0, 1), "time/wait_for_batch_s": Metric(5.0, 1), "is/ess": Metric(0.8, 1),
        "staleness/share_lag0": Metric(2.0, 10), "staleness/share_lag1": Metric(8.0, 10),
        "is/ess_lag0": Metric(1.0, 1), "is/ess_lag1": Metric(0.7, 1),
    }  # fmt: skip
    assert Seen.of(metrics, 30.0) == Seen(20.0, 5.0, 20.0, 0.8, pytest.approx(1.0))
    for ess in (float("nan"), 0.0):
        assert Seen.of({**metrics, "is/ess": Metric(ess, 1)}, 1.0) is None
    del metrics["is/ess"]
    assert Seen.of(metrics, 1.0) is None


def test_steps_that_differ_leave_more_doubt_and_more_of_them_less():
    sums = lambda *seconds: sum_of(Seen(s, 0.0, 0.0, 1.0, 1.0) for s in seconds)
    assert sums(10.0, 20.0).error == pytest.approx(5 / 15)  # sqrt(25 / (2 - 1)) over the mean
    assert sums(10.0, 10.0, 10.0).error == 0.0
    many = sums(*[10.0, 20.0] * 8)
    assert many.error == pytest.approx(5 / 15 / 15**0.5)
    assert many.faded(0.25).error == pytest.approx(5 / 15 / 3**0.5)


def sum_of(steps):
    total = Sums()
    for seen in steps:
        total = total.plus(seen)
    return total
