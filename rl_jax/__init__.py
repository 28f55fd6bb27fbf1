"""rl_jax: agentic RL post-training for language models on JAX meshes. Importing it does no work."""

__version__ = "0.1.0"
