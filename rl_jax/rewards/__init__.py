"""REWARDS: the scorers by name. Importing it imports none of them.

A scorer is one file here: a stateless class with the Scorer protocol of rl_jax.types, made without arguments. It runs
in a worker process with a deadline, so it may hang or raise. A task source names it in `reward`; "env" means the sum of
the environment's own step rewards instead.
"""

# name -> "module:attribute"; any other name is taken as "package.module:attribute" itself.
REWARDS: dict[str, str] = {
    "code": "rl_jax.rewards.code:Code",
    "exact_match": "rl_jax.rewards.exact_match:ExactMatch",
}
