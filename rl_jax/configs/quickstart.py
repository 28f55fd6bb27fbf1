"""The quickstart: a small model learns FrozenLake 4x4 and chain sums on separate prefill, decode and train meshes.

python -m rl_jax.launch
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
                "script_episodes": 512,
                "script_skill": 0.6,
                "config": {"num_maps": 16, "instructions": ""},
            }
        ),
        ConfigDict(
            {
                "tag": "chain_sum",
                "env": "reasoning_gym",
                "script_episodes": 1024,
                "script_skill": 0.6,
                "config": {
                    "dataset": "chain_sum",
                    "dataset_config": {
                        "min_terms": 2,
                        "max_terms": 2,
                        "min_digits": 1,
                        "max_digits": 1,
                    },
                    "bare": True,
                },
            }
        ),
    ]
    config.warm_start.steps = 120
    return config
