"""What servers in other processes need, checked before anything is written: what is installed, and the addresses.

Must not: start or keep anything (a socket that was opened to look is closed again).
"""

import importlib.util
import socket

from rl_jax.backend import VISIBLE_GPUS, host_gpus
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshPlan
from rl_jax.remote.private_network import refusal
from rl_jax.settings import ClusterSettings, Settings
from rl_jax.validate_cluster import drives_from_cpu

CONNECT_S = 5.0  # for a Ray cluster's head to accept a connection


def check_backend(backend: str) -> None:
    """Raises ConfigError where cluster.backend needs what is not installed."""
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            [
                "cluster.backend=ray needs Ray, which is not installed; pip install -e '.[ray]', or use another backend"
            ]
        )


def check_gpus(plan: MeshPlan, settings: Settings) -> None:
    """Raises ConfigError where processes of this host are to take GPUs that it has not."""
    is_here = settings.cluster.backend == "local" and drives_from_cpu(settings)
    if is_here and plan.num_devices > (num := len(host_gpus())):
        raise ConfigError(
            [
                f"mesh {plan.name} takes {plan.num_devices} GPUs, and this host has {num} ({VISIBLE_GPUS} and"
                " /dev/nvidia*); use a mesh that fits, mesh.platform=cpu for simulated devices, or cluster.backend=ray"
                " or external for several hosts"
            ]
        )


def check_addresses(cluster: ClusterSettings) -> None:
    """Raises ConfigError where nobody answers at cluster.address, a Ray of this host cannot have a network of its own,
    or cluster.host:port cannot be listened on."""
    if cluster.backend == "ray" and ":" in cluster.address:
        _check_ray(cluster.address)
    if cluster.backend == "ray" and not cluster.address and cluster.private_network:
        _check_private_network()
    if cluster.backend in ("external", "ray"):
        _check_listen(cluster.host, cluster.port)


def _check_ray(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                f"cluster.address={address}: nobody answers there within {CONNECT_S:g} s ({error}); start a cluster"
                " (ray start --head), give the address that it tells, or leave it empty for a Ray of this host alone"
            ]
        ) from None


def _check_private_network() -> None:
    if why := refusal():
        raise ConfigError(
            [
                f"cluster.private_network: this host gives no network namespace to this process ({why}), and a Ray"
                " without one listens on every address of the host; start the run as `unshare --net --map-root-user sh"
                " -c 'ip link set lo up && exec python -m rl_jax.launch ...'`, use an existing cluster by"
                " cluster.address, or allow it with cluster.private_network=False"
            ]
        )


def _check_listen(host: str, port: int) -> None:
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(
            [
                f"cluster.host={host} with cluster.port={port} cannot be listened on ({error.strerror or error});"
                " give an address of this machine that the servers' processes reach, and a port that is free (0 = any)"
            ]
        ) from None
