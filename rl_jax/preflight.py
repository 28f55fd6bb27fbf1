"""What only the machine, the plugins and the environments can tell, checked before the run directory is made.

config.parse has read the config alone; here its names are loaded, its devices counted, its tokenizer's vocabulary laid
on the mesh, and its environments asked what they offer. Each finding is one line of a ConfigError.
Must not: write anything, or start what is not ended when the check returns.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from rl_jax.algorithms import ALGORITHMS
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshPlan
from rl_jax.models import MODELS
from rl_jax.rollout.scheduler import SCHEDULERS
from rl_jax.rollout.worker import EnvError, EnvPool
from rl_jax.settings import Settings
from rl_jax.tokens import TOKENIZERS, ChatRenderer
from rl_jax.validate import SUPPLIED

Resolve = Callable[[str, Mapping[str, Any]], Any]  # (name, literal table) -> the object


def present_devices(plan: MeshPlan) -> list[Any]:
    """jax.devices(), if the plan fits them. Raises ConfigError."""
    try:
        devices = jax.devices()
    except (
        RuntimeError
    ) as error:  # the boundary to JAX: the backend that was asked for is not there
        raise ConfigError([f"JAX finds no device: {error}; set mesh.platform=cpu"]) from None
    if plan.num_devices > len(devices):
        raise ConfigError(
            [
                f"mesh {plan.name} needs {plan.num_devices} devices but JAX finds {len(devices)}"
                f" ({devices[0].platform}); use a mesh that fits, such as --mesh=one_device, or simulate the devices"
                " on the CPU with --config.mesh.platform=cpu"
            ]
        )
    return devices


def load_names(settings: Settings, plan: MeshPlan, resolve: Resolve) -> ChatRenderer:
    """The tokenizer's renderer, once every name of the config can be loaded and its vocabulary lies on the mesh.

    Raises ConfigError, here and not when the name is used: then there is a run directory, and servers run.
    """
    resolve(settings.model.family, MODELS)
    resolve(settings.rollout.scheduler, SCHEDULERS)
    algorithm = resolve(settings.algorithm.name, ALGORITHMS)
    tokenizer = resolve(settings.model.tokenizer, TOKENIZERS)()
    errors = plan.check(
        settings.model, plan.num_devices, settings.learner, settings.engine, tokenizer.vocab_size
    )
    if needs := sorted(frozenset(getattr(algorithm, "needs", ())) - SUPPLIED):
        errors.append(
            f"algorithm.name={settings.algorithm.name} needs {', '.join(needs)}, which no pool computes"
        )
    if 0 < settings.model.vocab_size < tokenizer.vocab_size:
        errors.append(
            f"model.vocab_size={settings.model.vocab_size} is below the {tokenizer.vocab_size} tokens of"
            f" model.tokenizer={settings.model.tokenizer}; set it to 0 to take theirs"
        )
    if errors:
        raise ConfigError(errors)
    return ChatRenderer(tokenizer)


def prepare_tasks(settings: Settings, pool: EnvPool, mode: str) -> None:
    """Import the environments, list their tasks, and see that they offer what the config and the mode ask of them.

    Raises ConfigError: an environment that cannot even list its tasks is a wrong config, not a budget that ran out.
    """
    try:
        pool.prepare()
    except EnvError as error:
        raise ConfigError([str(error)]) from None
    errors, held_out = [], False
    for i, source in enumerate(settings.tasks.sources):
        where, splits = f"tasks.sources[{i}]", pool.splits(source.tag)
        held_out = held_out or any(split != "train" for split in splits)
        if "train" not in splits:
            errors.append(
                f"{where}.env={source.env} has no split train, only {', '.join(splits)}; add one to its tasks()"
            )
        plays = mode == "train" and settings.warm_start.steps and source.script_episodes
        if plays and not pool.has_script(source.tag):
            errors.append(
                f"{where}.script_episodes={source.script_episodes}, but environment {source.env} has no script();"
                " set it to 0, or warm_start.steps to 0"
            )
    if mode == "eval" and not held_out:
        errors.append(
            "--mode=eval: no environment has a split beside train; add one to its tasks()"
        )
    if errors:
        raise ConfigError(errors)
