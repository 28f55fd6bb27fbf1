"""SmolLM2-135M-Instruct calls a calculator: multi-turn GRPO with tools on a CPU.

    python -m rl_jax.tools.fetch_smollm2 .cache/smollm2
    python -m rl_jax.launch --config=smollm2_tools

The model was not taught to call tools, and its template passes them over, so they are told in the system message, and
every task begins with three solved ones.
"""

from ml_collections import ConfigDict

from rl_jax.configs import smollm2_reasoning


def get_config(arg: str = "") -> ConfigDict:
    """arg: the model's directory (default .cache/smollm2 of the checkout)."""
    config = smollm2_reasoning.get_config(arg)
    config.tasks.sources = [
        ConfigDict(
            {
                "tag": "calculator",
                "env": "calculator",
                "script_episodes": 0,
                "config": {
                    "num_tasks": 2000,
                    "eval_size": 32,
                    "min_steps": 1,
                    "max_steps": 2,
                    "max_digits": 3,
                    "examples": 3,
                },
            }
        )
    ]
    config.engine.update(context=640, chunk_sizes=(128, 512))
    config.learner.row_tokens = 640
    config.rollout.update(max_new_tokens=48, temperature=0.7)
    config.eval.temperature = 0.7
    return config
