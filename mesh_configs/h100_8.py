"""One host of eight 80 GB GPUs: one prefill server, three decode servers, train on four (fsdp 4).

For models up to about 7B: a served copy in bfloat16 (15 GB at 7B) and its KV fit one GPU, so no
server pays for tensor-parallel collectives; float32 master weights, gradients and Adam state
(16 bytes a parameter, 122 GB at 7B) are split over four. Decode gets three GPUs because it is the
memory-bound side of multi-turn rollouts; the shares are an estimate, not a measurement.

Needs: 8 GPUs of one host in one process. Model: embed_size divisible by 4. Rows of a microbatch: a
multiple of 4.

    python -m rl_jax.launch --mesh=mesh_configs/h100_8.py
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    if arg:
        raise ValueError(f"mesh_configs/h100_8.py takes no argument but got {arg!r}; drop it")

    def pool(name: str, devices: int, replicas: int, axes: dict[str, int]) -> ConfigDict:
        return ConfigDict(
            {
                "name": name,
                "kind": name,
                "devices": devices,
                "replicas": replicas,
                "axes": axes,
                "hardware": "h100",
            }
        )

    return ConfigDict(
        {
            "name": "h100_8",
            "platform": "",
            "pools": [
                pool("prefill", 1, 1, {}),
                pool("decode", 3, 3, {}),
                pool("train", 4, 1, {"fsdp": 4}),
            ],
            "rules_train": (),
            "rules_serve": (),
        }
    )
