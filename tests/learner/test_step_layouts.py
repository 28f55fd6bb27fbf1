"""L13 for a loss that is traced into the step, its rows sharded: what a sequence sums must not see where it lies.

test_layouts.py takes every loss by its slopes, which one device computes. Here the step's own loss and accumulation run
on each mesh, for a ratio a sequence (gspo), a ratio a turn (turn_ppo) and a token-level loss whose aggregation is the
mean over sequences (sapo). All three are branches of one program a mesh; which one is data. Meshes: each of data 1, 2
and 4 and of tensor 1 and 2, alone or together; the others are in test_layouts.py.
"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from rl_jax.learner.step import accumulate, policy_loss
from tests.learner.test_layouts import FAST, NAMES, algorithms, batches, layout, spread

CHOSEN = ("gspo", "turn_ppo", "sapo")
MESHES = ((1, 2), (2, 1), (4, 2))


class OneOf:
    """The loss that `selected` numbers."""

    def token_loss(self, x):
        losses = [algorithms()[NAMES.index(name)] for name in CHOSEN]
        which = x.selected.max().astype(int)
        return jax.lax.switch(which, [lambda a=a: a.token_loss(x)[0] for a in losses]), {}


@cache
def program(data, tensor):
    rows = layout(data, tensor).rows
    forward = rows.log_probs(0.9)
    loss = policy_loss(forward, OneOf())

    def run(params, batch):
        out = accumulate(loss, forward.cast(params), batch)
        return out["loss"], out["grads"]

    return jax.jit(run, compiler_options=FAST)


def gradient(name, data, tensor, num_microbatches, is_packed):
    """(loss, {weight: gradient})"""
    batch = batches(is_packed)[NAMES.index(name)]
    which = np.full(batch.tokens.shape, CHOSEN.index(name), np.float32)
    batch = replace(batch, extras={**batch.extras, "selected": which})
    place = layout(data, tensor)
    batch = place.rows.put(spread(batch, num_microbatches), 0)
    return jax.device_get(program(data, tensor)(place.params[0], batch))


@cache
def reference(name):
    """One device, one microbatch, a trajectory a row."""
    return gradient(name, 1, 1, 1, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_the_reference_has_the_losses_own_slopes(name):
    """Each branch is another loss, and its gradient is that of the named class alone."""
    place, i = layout(1, 1), NAMES.index(name)
    batch = place.rows.put(spread(batches(False)[i], 1), 0)
    forward = place.rows.log_probs(0.9)
    alone = policy_loss(forward, algorithms()[i])
    micro = {n: a[0] for n, a in batch.items() if n != "num_microbatches"}
    own = jax.jit(lambda p: alone(forward.cast(p), micro)[0], compiler_options=FAST)
    loss, grads = reference(name)
    assert loss == pytest.approx(float(own(place.params[0])), abs=1e-6)
    others = [reference(other)[0] for other in CHOSEN if other != name]
    assert all(abs(loss - other) > 1e-4 for other in others)
    assert max(np.abs(g).max() for g in grads.values()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize(("data", "tensor"), ((1, 1), *MESHES))
def test_a_sharded_step_has_the_gradient_of_one_device(name, data, tensor):
    want_loss, want = reference(name)
    for num_microbatches in (1, 2, 8):
        for is_packed in (False, True):
            loss, grads = gradient(name, data, tensor, num_microbatches, is_packed)
            assert loss == pytest.approx(float(want_loss), abs=1e-5)
            for weight, value in want.items():
                where = f"{weight}: {num_microbatches=} {is_packed=}"
                scale = max(1.0, np.abs(value).max())
                np.testing.assert_allclose(
                    grads[weight], value, rtol=0, atol=1e-5 * scale, err_msg=where
                )
