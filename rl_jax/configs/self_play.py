"""A small model plays Nim with itself: one policy plays both sides, and each side is credited with its own end.

    python -m rl_jax.launch --config=self_play

One seed: self-play rids the policy of moves against the rules (12 % of games in the first 25 steps, 1.5 % in the last)
and does not teach it, in 100 steps, to win against a player that makes no mistake (docs/environments.md).
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
                "tag": "nim",
                "env": "two_player",
                "script_episodes": 1024,
                "script_skill": 0.5,
                "config": {
                    "num_heaps": 3,
                    "max_heap": 4,
                    "num_tasks": 12,
                    "eval_size": 8,
                    "instructions": "",
                },
            }
        )
    ]
    config.model.qk_norm = True
    config.warm_start.update(steps=200, batch_episodes=64, learning_rate=6e-3)
    config.engine.update(slots=40, context=512, steps_per_block=4, chunk_sizes=(64, 320))
    config.rollout.update(batch_groups=8, group_size=8, max_staleness=1, max_new_tokens=6)
    config.algorithm.update(name="role_ema", entropy_coef=0.01)
    config.learner.update(
        learning_rate=6e-4, schedule="linear", adam_b2=0.99, row_tokens=512, microbatch_rows=4
    )
    config.weights.kv = "keep"
    config.eval.every = 25
    config.steps = 100
    return config
