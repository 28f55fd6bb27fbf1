"""SmolLM2 itself calls a calculator: its text is parsed, answered and read again, through the whole system.

One group on one slot each, sums of one step, at a temperature at which it rarely errs. Runs where the
model is (models/smollm2.py).
"""

import json
from itertools import pairwise

import numpy as np
import pytest

from rl_jax import launch
from rl_jax.rollout.traces import read_traces
from tests.models.smollm2 import DIRECTORY, needs_smollm2

pytestmark = [
    pytest.mark.slow(seconds=60),
    pytest.mark.timeout(900),
    needs_smollm2,
]


def test_the_models_text_is_parsed_and_answered(tmp_path):
    words = [
        f"--config=smollm2_tools:{DIRECTORY}", "--mode=rollout_only", f"--run_dir={tmp_path}", "--config.steps=1",
        "--config.rollout.batch_groups=1", "--config.rollout.group_size=4", "--config.rollout.max_staleness=0",
        "--config.rollout.max_new_tokens=40", "--config.rollout.temperature=0.2", "--config.engine.slots=4",
        "--config.engine.chunk_sizes=(512,)", "--config.tasks.sources[0].config.max_steps=1",
    ]  # fmt: skip
    assert launch.main(words) == 0
    directory = tmp_path / "rollouts" / "step_1" / "train"
    trajectories = read_traces(directory)
    assert len(trajectories) == 4 and all(t.failure is None for t in trajectories)
    solved = [t for t in trajectories if t.reward.value == 1.0]
    assert len(solved) >= 2, [t.reward.value for t in trajectories]
    texts = {}
    for line in (directory / "traces.jsonl").read_text().splitlines():
        record = json.loads(line)
        texts[record["uid"]] = [(turn["prompt_text"], turn["text"]) for turn in record["turns"]]
    num_answered = 0
    for t in trajectories:
        sampled = np.concatenate([turn.tokens for turn in t.turns])
        np.testing.assert_array_equal(
            t.tokens[t.versions >= 0], sampled
        )  # trained ids are the sampled ones
        for (_, said), (answer, _) in pairwise(texts[t.uid]):
            num_answered += "<tool_call>" in said and "<|im_start|>tool" in answer
    assert num_answered >= 2
