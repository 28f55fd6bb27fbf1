"""Servers round engines, and the router that rollout samples through."""

from rl_jax.serve.decode_server import DecodeServer
from rl_jax.serve.prefill_server import PrefillServer
from rl_jax.serve.router import Router

__all__ = ["DecodeServer", "PrefillServer", "Router"]
