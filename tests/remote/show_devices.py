"""A process that prints what it was given to find its devices by."""

import os

for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS", "NCCL_DEBUG"):
    if name in os.environ:
        print(f"{name}={os.environ[name]}")
