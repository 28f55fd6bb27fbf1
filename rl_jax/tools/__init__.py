"""Programs beside launch: python -m rl_jax.tools.NAME."""
