"""Algorithms: what a group's rewards make of each token, and the loss of a token.

ALGORITHMS is a literal table, name -> ("module:attribute", needs). `needs` stands beside the name
so that config can refuse an algorithm the mesh plan cannot feed before anything is compiled; this
file imports no jax. The attribute is called with AlgorithmSettings and gives an `Algorithm`
(algorithm.py).

To add one: a file with a class of the Algorithm protocol, one line here; it then runs in
tests/algorithms/test_common.py.
"""

ALGORITHMS: dict[str, tuple[str, frozenset[str]]] = {
    "grpo": ("rl_jax.algorithms.grpo:Grpo", frozenset()),
    "dr_grpo": ("rl_jax.algorithms.dr_grpo:DrGrpo", frozenset()),
    "rloo": ("rl_jax.algorithms.rloo:Rloo", frozenset()),
    "sft": ("rl_jax.algorithms.sft:Sft", frozenset()),
}
