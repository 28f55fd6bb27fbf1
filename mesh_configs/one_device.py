"""One device that serves and trains in turn: a laptop, a debugger, the reference for sharded runs.

Needs: any one device. Generation and training share it, so asynchronous runs gain nothing here.

    python -m rl_jax.launch --mesh=mesh_configs/one_device.py
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    if arg:
        raise ValueError(f"mesh_configs/one_device.py takes no argument but got {arg!r}; drop it")
    return ConfigDict(
        {
            "name": "one_device",
            "platform": "",
            "pools": [
                ConfigDict(
                    {"name": "all", "kind": "colocated", "devices": 1, "replicas": 1, "axes": {}}
                )
            ],
            "rules_train": (),
            "rules_serve": (),
        }
    )
