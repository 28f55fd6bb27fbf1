"""Two GPUs: one serves, prefill and decode alike, and one trains.

For models that fit one GPU twice over: where they train, float32 master weights, gradients and Adam
state (16 bytes a parameter, 25 GB at 1.5B) and activations; where they are served, a copy in
bfloat16, its shadow during a sync, and KV. Without a prefill pool the decode server computes
prefixes itself, between two blocks: give engine.chunk_requests as many as engine.slots, so that a
new batch of prompts takes few chunks. An asynchronous run is fastest where sampling a batch and
training on it take equally long; rollout.batch_groups moves that, as decoding pays for its weights
once a batch, and training pays for every episode alike.

Needs: 2 GPUs of one host in one process. Model: nothing is split, so any.

    python -m rl_jax.launch --mesh=mesh_configs/gpu_2.py
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    if arg:
        raise ValueError(f"mesh_configs/gpu_2.py takes no argument but got {arg!r}; drop it")

    def pool(kind: str) -> ConfigDict:
        return ConfigDict(
            {
                "name": kind,
                "kind": kind,
                "devices": 1,
                "replicas": 1,
                "axes": {},
                "hardware": "gpu",
            }
        )

    return ConfigDict(
        {
            "name": "gpu_2",
            "platform": "",
            "pools": [pool("decode"), pool("train")],
            "rules_train": (),
            "rules_serve": (),
        }
    )
