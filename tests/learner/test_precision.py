"""L33: bfloat16 activations learn as float32 ones do, because masters, moments, head and losses are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.algorithms.sft import Sft
from rl_jax.learner.batch import pack, with_advantages
from rl_jax.learner.learner import Learner
from rl_jax.mesh import TRAIN_RULES, make_mesh
from rl_jax.settings import AlgorithmSettings, LearnerSettings
from rl_jax.testing.tiny_model import tiny_model
from rl_jax.testing.trajectories import fake_group

STEPS, ALGORITHM = 60, AlgorithmSettings(name="sft")
SETTINGS = LearnerSettings(row_tokens=24, microbatch_rows=2, learning_rate=0.01)


def curve(dtype):
    """Losses of learning four texts by heart, and the learner at the end."""
    model, params = tiny_model(num_layers=1, embed_size=32, dtype=dtype)
    learner = Learner(
        model, make_mesh({}, jax.devices()[:1]), TRAIN_RULES, Sft(ALGORITHM), SETTINGS,
        max_rows=4, temperature=1.0, total_steps=STEPS,
    )  # fmt: skip
    learner.reset(params)
    groups = [fake_group(0, [0.0] * 4, [20, 16, 24, 12])]
    batch = pack(groups, SETTINGS)
    batch, _ = with_advantages(batch, groups, {}, learner.algorithm, None, ALGORITHM)
    return [learner.step(batch)["policy/loss"].mean for _ in range(STEPS)], learner


@pytest.mark.slow
def test_a_tiny_model_overfits_in_bfloat16_as_in_float32():
    want, _ = curve("float32")
    got, learner = curve("bfloat16")
    floats = [a for a in jax.tree.leaves(learner.state) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert {str(a.dtype) for a in floats} == {"float32"}
    assert want[-1] < 0.2 * want[0]  # it does learn them
    np.testing.assert_allclose(got, want, atol=0.02 * want[0])
    assert np.mean(got) == pytest.approx(np.mean(want), rel=0.02)
