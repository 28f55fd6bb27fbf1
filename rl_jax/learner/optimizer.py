"""AdamW with a learning-rate schedule, from settings. The gradient is clipped where its norm is taken (step.py).

The schedule counts updates that were applied (a skipped one does not advance it): warmup rises
linearly to learning_rate over warmup_steps, its first update included, then constant, or falling to
0 by total_steps. Moments are float32 as the master weights are. Weight decay acts on matrices only:
norm scales and biases have no scale to shrink.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from rl_jax.settings import LearnerSettings

SCHEDULES = ("constant", "linear", "cosine")
Schedule = Callable[[jax.Array], jax.Array]


def learning_rate(settings: LearnerSettings, total_steps: int) -> Schedule:
    """Rate of update number n (from 0).

    Raises: ValueError for an unknown schedule, or a falling one that is not longer than its warmup.
    """
    if settings.schedule not in SCHEDULES:
        raise ValueError(
            f"learner.schedule={settings.schedule!r} is unknown; one of {', '.join(SCHEDULES)}"
        )
    falling = total_steps - settings.warmup_steps
    if settings.schedule != "constant" and falling < 1:
        raise ValueError(
            f"learner.warmup_steps={settings.warmup_steps} leaves nothing of {total_steps} steps for "
            f"schedule {settings.schedule}; lower it or use schedule=constant"
        )

    def schedule(count):
        count = jnp.asarray(count, jnp.float32)
        rise = jnp.minimum((count + 1.0) / max(settings.warmup_steps, 1), 1.0)
        done = jnp.clip((count - settings.warmup_steps) / max(falling, 1), 0.0, 1.0)
        fall = {
            "constant": 1.0,
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
        }[settings.schedule]
        return settings.learning_rate * rise * fall

    return schedule


def make_optimizer(settings: LearnerSettings, schedule: Schedule) -> optax.GradientTransformation:
    """Source: AdamW arXiv:1711.05101."""
    return optax.adamw(
        schedule,
        b1=settings.adam_b1,
        b2=settings.adam_b2,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        mask=lambda params: {name: array.ndim >= 2 for name, array in params.items()},
    )
