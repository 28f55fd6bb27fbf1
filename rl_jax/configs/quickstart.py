"""The quickstart: a small model learns FrozenLake 4x4 and chain sums on separate prefill, decode and train meshes.

    python -m rl_jax.launch

Success of 64 evaluation episodes at versions 0, 20, 40, 60 (docs/quickstart.md has more):
seed 0: frozen_lake 0.23 0.95 0.94 0.97, unseen maps 0.13 0.56 0.59 0.63, held-out sums 0.16 0.34 0.47 0.47;
seed 1: frozen_lake 0.31 0.80 0.81 0.81, unseen maps 0.11 0.34 0.36 0.36, held-out sums 0.19 0.36 0.31 0.47;
seed 2: frozen_lake 0.22 0.77 0.81 0.81, unseen maps 0.23 0.63 0.70 0.66, held-out sums 0.22 0.39 0.50 0.53.
"""

from ml_collections import ConfigDict

from mesh_configs import split_8
from rl_jax.config import default_config


def get_config(arg: str = "") -> ConfigDict:
    """arg: what split_8 takes, the number of devices that train (default 1)."""
    config = default_config()
    config.mesh = split_8.get_config(arg or "1")
    config.tasks.sources = [
        ConfigDict(
            {
                "tag": "frozen_lake",
                "env": "frozen_lake",
                "script_episodes": 1024,
                "script_skill": 0.3,
                "config": {"num_maps": 16, "max_turns": 8, "instructions": ""},
            }
        ),
        ConfigDict(
            {
                "tag": "chain_sum",
                "env": "reasoning_gym",
                "script_episodes": 6144,
                "script_skill": 0.25,
                "config": {
                    "dataset": "chain_sum",
                    "dataset_config": {
                        "min_terms": 2,
                        "max_terms": 3,
                        "min_digits": 1,
                        "max_digits": 1,
                    },
                    "bare": True,
                    "size": 8000,
                    "eval_size": 64,
                    "script_miss": "{answer} ?",
                },
            }
        ),
    ]
    config.model.qk_norm = True
    config.warm_start.update(steps=450, batch_episodes=160, learning_rate=6e-3)
    config.engine.update(slots=40, context=256, steps_per_block=4, chunk_sizes=(64, 320))
    config.rollout.update(batch_groups=8, group_size=8, max_staleness=1, max_new_tokens=6)
    config.algorithm.update(name="dr_grpo", entropy_coef=0.01)
    config.algorithm.aggregation = "seq-mean-token-mean"
    config.learner.update(
        learning_rate=6e-4, schedule="linear", adam_b2=0.99, row_tokens=256, microbatch_rows=8
    )
    config.weights.kv = "keep"
    config.eval.every = 20
    config.steps = 60
    return config
