"""Decoupled PPO: the clip bounds against a proximal policy, a capped weight corrects from it to the one that sampled.

w = proximal / behaviour, 0 above 5, and w clip(p / proximal). The proximal policy is the trainer's at step start,
recomputed by default; old_policy = one_update spares the forward, loglinear guesses it from the token's age. All of it
is policy.py's options: this algorithm is their setting.
Source: AReaL arXiv:2505.24298; A-3PO arXiv:2512.06547.
"""

from rl_jax.algorithms.grpo import Grpo


class DecoupledPpo(Grpo):
    """Its line of ALGORITHMS is all that it is."""
