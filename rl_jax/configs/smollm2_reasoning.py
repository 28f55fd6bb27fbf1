"""SmolLM2-135M-Instruct learns sums by GRPO on a CPU: a real model, its own chat template, one turn an episode.

    python -m rl_jax.tools.fetch_smollm2 .cache/smollm2
    python -m rl_jax.launch --config=smollm2_reasoning

Measured on two shared cores (float32, jax 0.12.0): servers ready after 20 to 40 s; the first step 80 to 97 s with its
compile, then 28 to 37 s for 16 episodes (about 500 sampled and 1,200 trained tokens; 15 and 35 a second, generation
and training beside each other); 7.4 GB of memory; a checkpoint 1.4 GB. Success starts at 0.12 to 0.38 a batch at
temperature 0.5; |trainer - sampler| at lag 0 is 5.4e-6.
"""

from pathlib import Path

from ml_collections import ConfigDict

from mesh_configs import split_2
from rl_jax.config import default_config

DIRECTORY = Path(__file__).parents[2] / ".cache" / "smollm2"


def get_config(arg: str = "") -> ConfigDict:
    """arg: the model's directory (default .cache/smollm2 of the checkout)."""
    config = default_config()
    config.model.source = arg or str(DIRECTORY)
    config.mesh = split_2.get_config()
    config.tasks.sources = [
        ConfigDict(
            {
                "tag": "chain_sum",
                "env": "reasoning_gym",
                "config": {
                    "dataset": "chain_sum",
                    "dataset_config": {
                        "min_terms": 2,
                        "max_terms": 2,
                        "min_digits": 1,
                        "max_digits": 1,
                    },
                    "size": 2000,
                    "eval_size": 32,
                    "bare": True,
                    "question_pattern": r"problem: (.*?) =",
                    "prompt": "What is {question}?",
                    "answer_pattern": r"(-?\d+)",  # the last number
                },
            }
        )
    ]
    config.warm_start.steps = 0
    config.engine.update(slots=16, context=128, steps_per_block=4, chunk_sizes=(128, 512))
    config.rollout.update(
        batch_groups=4, group_size=4, max_staleness=1, max_new_tokens=32, temperature=0.5
    )
    config.learner.update(
        learning_rate=2e-6, row_tokens=256, microbatch_rows=2, remat="layer", logprob_chunk=128
    )
    config.weights.kv = "keep"
    config.eval.update(every=0, episodes=32, temperature=0.5)
    config.checkpoint.every = 0
    config.steps = 20
    return config
