"""Qwen2.5-7B-Instruct on one host of eight GPUs: the tasks of qwen25_1_5b, three decode servers, train on four.

python -m rl_jax.launch --config=rl_jax/configs/qwen25_7b.py:DIR       # a Hugging Face directory
python -m rl_jax.launch --config=qwen25_7b                             # its shapes, random weights: for timing
"""

from ml_collections import ConfigDict

from mesh_configs import h100_8
from rl_jax.configs import qwen25_1_5b

SHAPE = {
    "vocab_size": 152_064, "num_layers": 28, "embed_size": 3584, "num_heads": 28, "num_kv_heads": 4, "head_dim": 128,
    "mlp_size": 18_944, "tie_embeddings": False,
}  # fmt: skip


def get_config(arg: str = "") -> ConfigDict:
    """arg: as of qwen25_1_5b."""
    config = qwen25_1_5b.get_config(arg)
    if not arg:
        config.model.update(SHAPE)
    config.mesh = h100_8.get_config()
    config.learner.update(microbatch_rows=4, remat="layer")
    config.engine.slots = 96
    config.rollout.batch_groups = 32
    return config
