"""The device side of serving: one engine's programs and their state. No threads, queues or text."""

from rl_jax.engine.engine import JaxEngine

__all__ = ["JaxEngine"]
