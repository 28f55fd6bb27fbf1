"""A job whose task is to call a tool: one sum a task, worked out by the calculator, with the byte tokenizer.

The warm start teaches the form of a call; the policy's own turns are then parsed, answered and trained on.
"""

from ml_collections import ConfigDict

from tests import job_config


def get_config() -> ConfigDict:
    config = job_config.get_config()
    config.steps = 1
    config.model.update(embed_size=48, head_dim=12, mlp_size=96)
    config.engine.update(slots=8, context=384, chunk_sizes=(64, 256))
    config.learner.update(row_tokens=384, microbatch_rows=4)
    config.rollout.update(max_new_tokens=120, temperature=0.5, max_turns=3)
    config.eval.update(episodes=4, temperature=0.0)
    config.warm_start.update(steps=60, batch_episodes=8, learning_rate=1e-2)
    problems = {"min_steps": 1, "max_steps": 1, "max_digits": 1, "operators": "+"}
    own = {"instructions": "", "num_tasks": 40, "eval_size": 4, **problems}
    config.tasks.sources = [
        ConfigDict(
            {
                "tag": "calculator",
                "env": "calculator",
                "script_episodes": 128,
                "script_skill": 1.0,
                "config": own,
            }
        )
    ]
    return config
