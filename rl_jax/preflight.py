"""What only the machine can tell, checked before the run directory is made: are the plan's devices there?

Must not: write anything, or start what is not ended when the check returns.
"""

from typing import Any

import jax

from rl_jax.config import ConfigError
from rl_jax.mesh import MeshPlan


def present_devices(plan: MeshPlan) -> list[Any]:
    """jax.devices(), if the plan fits them. Raises ConfigError, one line."""
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
