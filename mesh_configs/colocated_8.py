"""Eight devices that all serve and all train: four servers of tensor 2, and one mesh over them.

For synchronous runs, where a device would otherwise idle while others work. The four servers, side
by side, are the data axis of the train mesh; its weights and optimizer state are split over that
axis too (`embed -> data`), as each device would otherwise hold a whole copy per server.

Needs: 8 devices of one host; where JAX finds the CPU only, or with --config.mesh.platform=cpu, they
are simulated. Model: even heads, kv heads, mlp and vocabulary; an embed_size divisible by 4. Rows
of a microbatch: a multiple of 4.

    python -m rl_jax.launch --mesh=mesh_configs/colocated_8.py
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    if arg:
        raise ValueError(f"mesh_configs/colocated_8.py takes no argument but got {arg!r}; drop it")
    pool = ConfigDict(
        {"name": "all", "kind": "colocated", "devices": 8, "replicas": 4, "axes": {"tensor": 2}}
    )
    return ConfigDict(
        {
            "name": "colocated_8",
            "platform": "",
            "pools": [pool],
            "rules_train": (("embed", ("data", "fsdp")),),
            "rules_serve": (),
        }
    )
