"""Two devices, as gpu_2 has them, simulated on the CPU: one serves, prefill and decode alike, and one trains.

For a small machine and a real model: two copies of its weights and no more. Both devices have one device's programs, so
that generation goes on while a batch is trained.

Needs: nothing, as platform "cpu" simulates its devices. Model: nothing is split, so any.

    python -m rl_jax.launch --mesh=mesh_configs/split_2.py
"""

from ml_collections import ConfigDict

from mesh_configs import gpu_2


def get_config(arg: str = "") -> ConfigDict:
    if arg:
        raise ValueError(f"mesh_configs/split_2.py takes no argument but got {arg!r}; drop it")
    config = gpu_2.get_config()
    config.update(name="split_2", platform="cpu")
    for pool in config.pools:
        pool.hardware = "cpu"
    return config
