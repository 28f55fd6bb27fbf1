"""A small model learns to write expressions that pass hidden tests, run in a sandbox: the easiest tasks of code_tool.

    python -m rl_jax.launch --config=code_tool

Needs a sandbox: apt-get install bubblewrap. Success of 64 evaluation episodes on 64 problems that are not trained on,
at versions 0, 10, 20, 30, 40 (docs/code_tool.md): seed 0: 0.20 0.53 0.69 0.75 0.78; seed 1: 0.14 0.22 0.31 0.31 0.33.
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
                "tag": "code_tool",
                "env": "code_tool",
                "script_episodes": 1536,
                "script_skill": 0.25,
                "config": {
                    "num_tasks": 1000,
                    "eval_size": 64,
                    "max_digits": 2,
                    "max_calls": 0,
                    "num_tests": 4,
                    "instructions": "",
                },
            }
        )
    ]
    config.model.qk_norm = True
    config.warm_start.update(steps=300, batch_episodes=128, learning_rate=6e-3)
    config.engine.update(slots=40, context=64, steps_per_block=4, chunk_sizes=(64, 320))
    config.rollout.update(batch_groups=8, group_size=8, max_staleness=1, max_new_tokens=8)
    config.algorithm.update(name="dr_grpo", entropy_coef=0.01)
    config.algorithm.aggregation = "seq-mean-token-mean"
    config.learner.update(
        learning_rate=6e-4, schedule="linear", adam_b2=0.99, row_tokens=256, microbatch_rows=8
    )
    config.weights.kv = "keep"
    config.eval.every = 10
    config.steps = 40
    return config
