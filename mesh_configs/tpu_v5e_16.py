"""Sixteen TPU v5e chips: prefill on two, three decode servers of two, train on eight (fsdp 8).

For models of 1 to 3B: a chip has 16 GB, so a server spans two chips (tensor 2) and the float32
training state (16 bytes a parameter) is split over eight. Pools take the chips in the order of
jax.devices(). The shares are an estimate, not a measurement.

Needs: 16 chips visible to one process. A v5e-16 slice is spread over several hosts, and one run
over several hosts is not in this version: there this config is for plans (`--dry_run`) and for the
tests. Model: even heads, kv heads, mlp and vocabulary; embed_size divisible by 8. Rows of a
microbatch: a multiple of 8.

    python -m rl_jax.launch --mesh=mesh_configs/tpu_v5e_16.py --dry_run
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    if arg:
        raise ValueError(f"mesh_configs/tpu_v5e_16.py takes no argument but got {arg!r}; drop it")

    def pool(name: str, devices: int, replicas: int, axes: dict[str, int]) -> ConfigDict:
        return ConfigDict(
            {
                "name": name,
                "kind": name,
                "devices": devices,
                "replicas": replicas,
                "axes": axes,
                "hardware": "tpu_v5e",
            }
        )

    return ConfigDict(
        {
            "name": "tpu_v5e_16",
            "platform": "",
            "pools": [
                pool("prefill", 2, 1, {"tensor": 2}),
                pool("decode", 6, 3, {"tensor": 2}),
                pool("train", 8, 1, {"fsdp": 8}),
            ],
            "rules_train": (),
            "rules_serve": (),
        }
    )
