"""DecodeState: everything a decode server keeps on its devices between two dispatches.

Owns: the pytree's fields and the codes by which a block says why a slot ended. Invariants: one KV
buffer per layer and per k and v (donated together, so k and v are never the same array); the KV of
a slot covers its context without the last token, which is the next input of generate: every token
is sampled at one site. A slot that is not `active` neither advances nor writes KV.
Must not: hold host arrays, or anything the host could know by itself (sessions, versions,
deadlines).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.settings import EngineSettings
from rl_jax.types import FinishReason, SlotSampling

KEY_DATA = 2  # 32-bit words of a threefry key
# BlockTokens.finish holds 1 + the reason's place in FinishReason; 0 = the slot still runs (or never did).
RUNNING = 0
FINISH_CODES = {reason: 1 + i for i, reason in enumerate(FinishReason)}
FINISH_REASONS = {code: reason for reason, code in FINISH_CODES.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """What generate must know of each slot besides KV; written by insert, advanced by generate."""

    last_token: jax.Array  # i32[S] next input of generate; its KV is not in the cache yet
    context_length: jax.Array  # i32[S] tokens of the context, last_token included; 0 = never used
    key: jax.Array  # u32[S, 2] threefry key data: (high, low) 32 bits of the request's seed
    token_index: jax.Array  # i32[S] tokens of this turn already sampled
    max_new_tokens: jax.Array  # i32[S] of the whole turn
    temperature: jax.Array  # f32[S] 0 = greedy
    top_p: jax.Array  # f32[S]
    top_k: jax.Array  # i32[S] 0 = off
    stop_token_ids: jax.Array  # i32[S, num_stop] -1 padding; the first counts as the end-of-turn id
    epoch: jax.Array  # i32[S] which request the slot's tokens belong to
    active: jax.Array  # bool[S]


# Layer -> (k, v), each in the shape of KVSpec.shape.
Cache = tuple[tuple[jax.Array, jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    kv: Cache
    slots: SlotState


def empty_slots(settings: EngineSettings) -> SlotState:
    """Slots that were never used; built inside jit, so each field is an array of its own."""
    S = settings.slots
    ints = {
        name: jnp.zeros(S, jnp.int32)
        for name in ("last_token", "context_length", "token_index", "max_new_tokens", "top_k")
    }
    return SlotState(
        **ints,
        key=jnp.zeros((S, KEY_DATA), jnp.uint32),
        temperature=jnp.ones(S, jnp.float32),
        top_p=jnp.ones(S, jnp.float32),
        stop_token_ids=jnp.full((S, settings.num_stop_tokens), -1, jnp.int32),
        epoch=jnp.full(S, -1, jnp.int32),
        active=jnp.zeros(S, bool),
    )


def empty_sampling(num_stop_tokens: int) -> SlotSampling:
    """SlotSampling of no slots."""
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return SlotSampling(
        last_token=ints,
        context_length=ints,
        seed=np.zeros(0, np.uint64),
        token_index=ints,
        max_new_tokens=ints,
        temperature=floats,
        top_p=floats,
        top_k=ints,
        stop_token_ids=np.zeros((0, num_stop_tokens), np.int32),
        epoch=ints,
    )
