"""The tests' job: the quickstart's parts, tiny, on an environment that an untrained policy succeeds at now and then."""

from ml_collections import ConfigDict

from rl_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.steps = 3
    config.model.update(embed_size=32, head_dim=8, mlp_size=64)
    # One request a chunk: on some processors and versions of XLA a row's bits depend on its place in a product.
    config.engine.update(slots=8, context=128, chunk_sizes=(64,), chunk_requests=1)
    config.rollout.update(
        batch_groups=2, group_size=2, max_staleness=0, max_new_tokens=3, max_turns=3
    )
    config.learner.update(row_tokens=128, microbatch_rows=4, logprob_chunk=128)
    config.eval.episodes = 2
    config.metrics.progress = "none"
    config.tasks.sources = [
        ConfigDict({"tag": "even", "env": "rl_jax.testing.envs:EvenEnv", "config": {}})
    ]
    return config
