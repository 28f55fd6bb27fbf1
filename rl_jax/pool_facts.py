"""What the pools of a plan are and could do at best: the facts by which a timeline's spans become goodput.

Owns: `pool_facts`, written once an attempt as the timeline's mark "pools". A server's rooflines are those of its
devices, from the makers' data sheets; a device that is in no table (a CPU) has none. Of another process's devices that
process tells, by its mark "peaks".
Must not: measure anything.
"""

from typing import Any

import jax.numpy as jnp

from rl_jax.build_roles import Setting
from rl_jax.learner.flops import matrix_weights, peaks_of
from rl_jax.models.features import form_of
from rl_jax.models.model import Model
from rl_jax.plan_record import sharded_size


def pool_facts(setting: Setting, model: Model) -> dict[str, Any]:
    """JSON: {"pools": pool -> {devices, servers, trains}, "servers": server -> {weight_bytes, peak_flops, peak_bytes},
    "train": the same of the train mesh, "model": {flops_token, flops_pair, kv_bytes}}.

    weight_bytes: that one step of decoding reads, on all devices of the server. peak_*: a second, of all devices;
    null = not known. flops_token, flops_pair: forward, of a token and of a token with one that it sees in a layer
    without a window, all such layers together. kv_bytes: of a token.
    """
    plan, settings, here = setting.plan, setting.settings, setting.meshes
    served = jnp.dtype(settings.model.dtype).itemsize
    pools: dict[str, dict[str, Any]] = {}
    for server in plan.servers:
        pool = pools.setdefault(server.pool, {"devices": 0, "servers": [], "trains": False})
        pool["servers"].append(server.name)
        pool["devices"] += len(server.devices)
    train = plan.train
    if train is not None:
        unserved = {"devices": len(train.devices), "servers": [], "trains": False}
        pools.setdefault(train.pool, unserved)["trains"] = True
    elsewhere = settings.cluster.backend != "inproc"
    servers = {
        server.name: {
            "weight_bytes": sharded_size(model, server.rules, server.axes)
            * served
            * len(server.devices),
            **peaks_of(() if elsewhere else here.servers[server.name].devices.flat),
        }
        for server in plan.servers
    }
    trains_here = train is not None and not settings.cluster.learner_processes
    s = settings.model
    whole = sum(not form_of(s, layer).window for layer in range(s.num_layers))
    return {
        "pools": pools,
        "servers": servers,
        "train": peaks_of(
            here.train.devices.flat if trains_here and here.train is not None else ()
        ),
        "model": {
            "flops_token": 2 * (matrix_weights(model) + s.embed_size * model.vocab_size),
            "flops_pair": 4 * s.num_heads * s.head_dim * whole,
            "kv_bytes": 2 * s.num_layers * s.num_kv_heads * s.head_dim * served,
        },
    }
