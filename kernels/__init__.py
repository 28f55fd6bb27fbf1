"""Device code below the system: KV layout and array digests. Imports jax and numpy only."""
