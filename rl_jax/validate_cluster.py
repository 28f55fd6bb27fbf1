"""What may not stand together in `cluster`, and in what other sections say of the processes of a run; without jax.

Two things are refused that the learner's processes could come to do. Rows of data train in the driver's process
(supervised.py says why). A role on a pool of its own would need a group of processes beside the learner's, with a
journal, a save and a restart of its own: its figures are part of a step, so a loss of either is a loss of both.

Must not: know a value alone (validate.py).
"""

from collections.abc import Iterator

from rl_jax.mesh import MeshPlan
from rl_jax.settings import Settings

HERE = ("packed", "reshard")  # values of weights.transport, to servers of the driver's process
ELSEWHERE = ("shared", "store", "channel", "transfer")  # and to others
STORING = ("local", "external", "ray")  # values of cluster.backend that start stores
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LISTENING = ("external", "ray")  # values of cluster.backend whose processes come over TCP


def drives_from_cpu(s: Settings) -> bool:
    """Whether all that needs a GPU is a process of its own, so that the driver takes none."""
    is_elsewhere = s.cluster.backend != "inproc" and s.cluster.learner_processes > 0
    return s.mesh.platform == "gpu" and is_elsewhere


def _is_head(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return address == "auto" or (bool(host) and "/" not in host and port.isdecimal())


def _transport(s: Settings) -> Iterator[str]:
    c, transport = s.cluster, s.weights.transport
    if c.backend == "inproc" and transport in ELSEWHERE:
        yield (
            f"weights.transport={transport} is to servers of other processes, and cluster.backend=inproc has none; use"
            f" auto, {' or '.join(HERE)}"
        )
    if c.backend != "inproc" and transport in HERE:
        yield (
            f"weights.transport={transport} is to servers of the driver's process, and cluster.backend={c.backend} has"
            f" none; use auto, {', '.join(ELSEWHERE[:-1])} or {ELSEWHERE[-1]}"
        )
    if c.backend == "inproc" and c.learner_processes and transport in HERE:
        yield (
            f"weights.transport={transport} is from a train mesh of the driver's process, and"
            f" cluster.learner_processes={c.learner_processes} trains elsewhere; use auto"
        )
    if c.stores and c.backend not in STORING:
        yield f"cluster.stores={c.stores} is not used by backend {c.backend}; leave it 0"
    if transport == "store" and not c.stores and c.backend in STORING:
        yield "weights.transport=store needs a store; set cluster.stores to the number of hosts, or use auto"
    if c.stores and transport in ("shared", "channel", "transfer"):
        yield (
            f"cluster.stores={c.stores} is not used by weights.transport={transport}; leave it 0, or use auto or store"
        )


def cluster_errors(s: Settings) -> Iterator[str]:
    c = s.cluster
    if c.address and c.backend != "ray":
        yield f"cluster.address={c.address} is not used by backend {c.backend}; leave it empty"
    if c.address and c.backend == "ray" and not _is_head(c.address):
        yield (
            f"cluster.address={c.address} is no address of a Ray head; give HOST:PORT as `ray start --head` tells it"
            " (not ray://, which is Ray's client), auto, or nothing for a Ray of this host alone"
        )
    if c.stores > 1 and c.backend == "local":
        yield f"cluster.stores={c.stores}: backend local is one host, which needs one; use 1 or 0"
    if c.port and c.backend not in LISTENING:
        yield f"cluster.port={c.port} is not used by backend {c.backend}, which listens nowhere; leave it 0"
    if c.host in ("", "0.0.0.0", "::") and c.backend in LISTENING:
        yield (
            f"cluster.host={c.host!r} is no address that a process could connect to; give the driver's own one in a"
            " private network"
        )
    is_alone = c.backend == "ray" and not c.address and c.private_network
    if is_alone and c.host not in LOOPBACK:
        yield (
            f"cluster.host={c.host} is not in the private network of a Ray that the run starts itself; leave it"
            f" {LOOPBACK[0]}, give a cluster by cluster.address, or set cluster.private_network=False"
        )
    if is_alone and s.rewards.url:
        yield (
            f"rewards.url={s.rewards.url} is not reached from the private network of a Ray that the run starts itself;"
            " give a cluster by cluster.address, or set cluster.private_network=False"
        )
    for key in ("env_hardware", "scorer_hardware"):
        name = getattr(c, key)
        if name != "cpu" and not (c.backend == "ray" and c.moves_workers):
            yield (
                f"cluster.{key}={name} is where Ray puts workers, with cluster.backend=ray and cluster.workers=cluster;"
                " leave it cpu"
            )
    if s.rewards.keep_alive_s and c.backend == "external" and c.moves_workers:
        yield (
            f"rewards.keep_alive_s={s.rewards.keep_alive_s:g} starts scorers when they are needed, and with"
            " cluster.backend=external nobody but a person starts any; use 0, or cluster.workers=driver"
        )
    yield from _transport(s)
    if c.learner_processes:
        yield from _learner_processes(s)
    elif c.backend == "inproc":
        return
    if s.mesh.platform != "cpu" and not drives_from_cpu(s):
        what = f"backend={c.backend}" if c.backend != "inproc" else "learner_processes"
        yield (
            f"cluster.{what} gives each process devices of its own: simulated ones with mesh.platform=cpu, or GPUs with"
            " mesh.platform=gpu, where the driver must have none: cluster.backend other than inproc and"
            " cluster.learner_processes of at least 1; use one of these, or cluster.backend=inproc and"
            " cluster.learner_processes=0"
        )
    if c.lease_s < 3 * c.heartbeat_s:
        yield (
            f"cluster.lease_s={c.lease_s:g} is less than three times cluster.heartbeat_s={c.heartbeat_s:g}: a sign of"
            " life that is a little late would be a death; raise it"
        )


def _learner_processes(s: Settings) -> Iterator[str]:
    num = s.cluster.learner_processes
    train = MeshPlan.from_settings(s.mesh, s.model).train
    if train is not None and len(train.devices) % num:
        yield (
            f"cluster.learner_processes={num} does not divide the {len(train.devices)} devices of the train mesh; use"
            " a divisor, or 0 to train in the driver's process"
        )
    for where in ("critic", "reference", "teacher", "reward_model"):
        if pool := getattr(s, where).pool:
            yield (
                f"{where}.pool={pool}: with cluster.learner_processes every model that trains or scores lies on the"
                " train mesh; leave it empty, or use cluster.learner_processes=0"
            )
