"""SmolLM2 itself takes a step of RL: the run that README names, cut to one step of eight short answers.

Half of what it costs is compiling; one size of chunk and half the slots leave programs out. Runs where the model is
(models/smollm2.py).
"""

import numpy as np
import pytest

from rl_jax import launch
from rl_jax.metrics import read_metrics
from tests.models.smollm2 import DIRECTORY, needs_smollm2

pytestmark = [
    pytest.mark.slow(seconds=70),
    pytest.mark.timeout(900),
    needs_smollm2,
]


def test_a_step_learns_and_trainer_and_sampler_agree(tmp_path):
    words = [
        f"--config=smollm2_reasoning:{DIRECTORY}", f"--run_dir={tmp_path / 'run'}", "--config.steps=1",
        "--config.eval.episodes=1", "--config.rollout.max_staleness=0", "--config.rollout.batch_groups=2",
        "--config.rollout.max_new_tokens=16", "--config.engine.slots=8", "--config.engine.chunk_sizes=(128,)",
    ]  # fmt: skip
    assert launch.main(words) == 0
    (row,) = [row for row in read_metrics(tmp_path / "run") if "policy/loss" in row]
    assert np.isfinite(row["policy/loss"])
    assert np.isfinite(row["optim/grad_norm"]) and row["optim/grad_norm"] > 0
    assert row["mismatch/abs_mean_lag0_pure"] < 1e-4
