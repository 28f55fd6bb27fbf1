"""MeshPlan: which devices prefill, decode and train, how meshes are cut, where logical axes go.

Owns: the resolved placement of pools on devices, the sharding rules (data, not code), and the task
tags' preferred pools. Logical axis names stand beside the weights (models/) and the KV cache
(kernels/kv.py); rules map them to mesh axes.
Invariants: a plan is frozen and always describes what was asked, even where that cannot be;
`check` then says everything that is wrong at once. Every jax Mesh has all five axes of AXES, of
size 1 where unused, so any rule is legal on any mesh. A dimension that a mesh axis does not divide
is an error, never a silent replication; `kv_heads: replicate` on a pool is the one stated exception
and is written into that server's rules. A mesh axis above 1 that no rule uses is an error too.
Life: 1 `MeshPlan.from_settings` places pools: device lists first, then counts on the next free
devices. 2 `check` (pure Python, before jax is imported). 3 `build_meshes` makes the jax meshes.
4 `shardings` turns logical axes into NamedShardings on one of them.
Must not: import jax outside the functions of build.py; look at devices while checking.
"""

from rl_jax.mesh.build import (
    Meshes,
    abstract_mesh,
    build_meshes,
    constrainer,
    make_mesh,
    named_sharding,
    partition_spec,
    server_meshes,
    shardings,
)
from rl_jax.mesh.plan import MeshPlan, ServerPlan, TrainPlan
from rl_jax.mesh.rules import (
    AXES,
    SERVE_RULES,
    TRAIN_RULES,
    Rules,
    RulesLike,
    as_tuple,
    full_axes,
    merge_rules,
    mesh_axes,
)

__all__ = [
    "AXES",
    "SERVE_RULES",
    "TRAIN_RULES",
    "MeshPlan",
    "Meshes",
    "Rules",
    "RulesLike",
    "ServerPlan",
    "TrainPlan",
    "abstract_mesh",
    "as_tuple",
    "build_meshes",
    "constrainer",
    "full_axes",
    "make_mesh",
    "merge_rules",
    "mesh_axes",
    "named_sharding",
    "partition_spec",
    "server_meshes",
    "shardings",
]
