"""REWARDS: the scorers by name. Importing it imports none of them.

A scorer is one file here: a stateless class with the Scorer protocol (docs/rewards.md), made with the keyword arguments
that rewards.options has for it. It runs in a worker process with a deadline, so it may hang or raise. A task source
names it in `reward`; "env" means the sum of the environment's own step rewards instead.
"""

# name -> "module:attribute"; any other name is taken as "package.module:attribute" itself.
REWARDS: dict[str, str] = {
    "answer_format": "rl_jax.rewards.answer_format:AnswerFormat",
    "brevity": "rl_jax.rewards.brevity:Brevity",
    "code": "rl_jax.rewards.code:Code",
    "exact_match": "rl_jax.rewards.exact_match:ExactMatch",
    "json_schema": "rl_jax.rewards.json_schema:JsonSchema",
    "judge": "rl_jax.rewards.judge:Judge",
    "math": "rl_jax.rewards.math_answer:MathAnswer",
    "reasoning_gym": "rl_jax.rewards.reasoning_gym_answer:ReasoningGymAnswer",
    "regex_match": "rl_jax.rewards.regex_match:RegexMatch",
}
