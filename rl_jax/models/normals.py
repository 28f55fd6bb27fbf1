"""Normal numbers by name, for initial weights.

A name's numbers depend on the key and the name only, not on what else is drawn, on order or on
sharding: they are chunks of CHUNK numbers, chunk i from fold_in(fold_in(key, crc32(name)), i).
Chunks of many names are drawn by one operation, since XLA takes about 0.3 s to compile each
`jax.random.normal` on CPU: 1.1 s instead of 6.5 s for a two-layer model.
"""

import math
import zlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

CHUNK = 4096
GROUP_CHUNKS = 1024  # drawn at once: 16 MB of float32, little beside any model that has so many


def normals(key: jax.Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """float32 standard normal arrays of these shapes."""
    chunks = {name: -(-math.prod(shape) // CHUNK) for name, shape in shapes.items()}
    drawn: dict[str, jax.Array] = {}
    for names in _groups(chunks):
        hashes = [zlib.crc32(name.encode()) for name in names for _ in range(chunks[name])]
        indices = [i for name in names for i in range(chunks[name])]
        flat = _draw(key, jnp.array(hashes, jnp.uint32), jnp.array(indices, jnp.uint32))
        start = 0
        for name in names:
            own = flat[start : start + chunks[name]].reshape(-1)
            drawn[name] = own[: math.prod(shapes[name])].reshape(shapes[name])
            start += chunks[name]
    return drawn


def _draw(key: jax.Array, hashes: jax.Array, indices: jax.Array) -> jax.Array:
    """f32[len(hashes), CHUNK]"""
    fold = lambda a, b: jax.random.fold_in(jax.random.fold_in(key, a), b)
    keys = jax.vmap(fold)(hashes, indices)
    flat = jax.vmap(lambda k: jax.random.normal(k, (CHUNK,), jnp.float32))(keys)
    # Or XLA fuses the generator into each reader, and compiles it as often as before.
    return jax.lax.optimization_barrier(flat)


def _groups(chunks: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in order, cut so that a group has at most GROUP_CHUNKS chunks, or one name."""
    group: list[str] = []
    total = 0
    for name, count in chunks.items():
        if group and total + count > GROUP_CHUNKS:
            yield group
            group, total = [], 0
        group.append(name)
        total += count
    if group:
        yield group
