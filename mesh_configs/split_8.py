"""Eight devices, three kinds of mesh: two prefill servers, two decode servers, train on four.

The quickstart's topology. Servers have one device each: on CPU only one-device programs overlap
with others in one process, so a server does not wait behind the train step. The argument is the
number of devices that train, 4 (data 2 x fsdp 2) unless given: `split_8.py:train2` or
`split_8.py:2` trains on two (fsdp 2), `:train1` on one. Two cores simulate two devices at about
half the speed of one, so a small machine is faster with fewer.

Needs: nothing, as platform "cpu" simulates its devices (4 + the number that train), also where JAX
would find an accelerator; `--config.mesh.platform=` asks for that many real ones instead. Model: an
even embed_size; rows of a microbatch divisible by the number of devices that train.

    python -m rl_jax.launch --mesh=mesh_configs/split_8.py:train2
"""

from ml_collections import ConfigDict

TRAIN_AXES = {
    "1": {},
    "2": {"fsdp": 2},
    "4": {"data": 2, "fsdp": 2},
}


def get_config(arg: str = "") -> ConfigDict:
    count = arg.removeprefix("train") or "4"
    if count not in TRAIN_AXES:
        raise ValueError(
            f"mesh_configs/split_8.py:{arg}: cannot train on {count!r} devices; "
            f"use train1, train2 or train4"
        )
    servers = {"devices": 2, "replicas": 2, "axes": {}}
    return ConfigDict(
        {
            "name": "split_8",
            "platform": "cpu",
            "pools": [
                ConfigDict({"name": "prefill", "kind": "prefill", **servers}),
                ConfigDict({"name": "decode", "kind": "decode", **servers}),
                ConfigDict(
                    {
                        "name": "train",
                        "kind": "train",
                        "devices": int(count),
                        "replicas": 1,
                        "axes": TRAIN_AXES[count],
                    }
                ),
            ],
            "rules_train": (),
            "rules_serve": (),
        }
    )
