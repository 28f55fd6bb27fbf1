"""The schedule's values, and what weight decay touches."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_jax.learner.optimizer import learning_rate, make_optimizer
from rl_jax.settings import LearnerSettings


def rates(num, total, **changes):
    schedule = learning_rate(LearnerSettings(learning_rate=1.0, **changes), total)
    return [float(schedule(n)) for n in range(num)]


def test_schedules_by_hand():
    assert rates(3, 10) == [1.0, 1.0, 1.0]
    assert rates(4, 10, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(6, 5, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    want = [0.5, 1.0, *(0.5 * (1 + np.cos(np.pi * n / 4)) for n in range(5))]
    assert rates(7, 6, schedule="cosine", warmup_steps=2) == pytest.approx(want, abs=1e-7)


def test_impossible_schedules_are_refused():
    with pytest.raises(ValueError, match="'step' is unknown; one of constant, linear, cosine"):
        rates(1, 10, schedule="step")
    with pytest.raises(ValueError, match="warmup_steps=10 leaves nothing of 10 steps"):
        rates(1, 10, schedule="linear", warmup_steps=10)


def test_update_is_adamw_and_decay_spares_vectors():
    settings = LearnerSettings(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(settings, learning_rate(settings, 10))
    params = {"matrix": jnp.full((2, 2), 2.0), "scale": jnp.full((2,), 2.0)}
    grads = {"matrix": jnp.full((2, 2), 3.0), "scale": jnp.full((2,), -3.0)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    # Adam's first step is the gradient's sign; decay adds learning_rate * 0.5 * 2 to matrices.
    np.testing.assert_allclose(after["matrix"], 2.0 - 0.1 - 0.1, rtol=1e-5)
    np.testing.assert_allclose(after["scale"], 2.0 + 0.1, rtol=1e-5)
