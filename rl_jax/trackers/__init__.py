"""Where else a run's figures go, beside metrics.jsonl. TRACKERS: name -> (class, package, how it is installed)."""

import importlib.util
from collections.abc import Iterable

TRACKERS = {
    "tensorboard": "rl_jax.trackers.tensorboard:TensorBoardTracker",
    "wandb": "rl_jax.trackers.wandb:WandbTracker",
    "mlflow": "rl_jax.trackers.mlflow:MlflowTracker",
}
PACKAGES = {
    "tensorboard": ("tensorboardX", "pip install 'rl_jax[tensorboard]'"),
    "wandb": ("wandb", "pip install 'rl_jax[wandb]'"),
    "mlflow": ("mlflow", "pip install 'rl_jax[mlflow]'"),
}


def missing(names: Iterable[str]) -> list[str]:
    """One line for each tracker whose package is not installed; nothing is imported."""
    lines = []
    for name in names:
        package, remedy = PACKAGES.get(name, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            lines.append(f"metrics.trackers: {name} needs the package {package}; {remedy}")
    return lines
