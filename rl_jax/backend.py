"""What JAX must be told before it is imported: the backend, simulated CPU devices and the persistent compile cache.

Owns no state: the functions write environment variables that JAX reads at its import, so launch and the tests call
them first. Must not import jax: a config error has to be told before the 3 s that costs.
"""

import os
import sys
from importlib import metadata
from pathlib import Path

DEVICE_FLAG = "--xla_force_host_platform_device_count"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
BACKENDS = {"gpu": "cuda"}  # mesh.platform -> JAX's name, where they differ
FUSION_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
SOUND_FUSIONS = (0, 11, 2)  # jaxlib


class BackendError(RuntimeError):
    """JAX cannot be what the config asks for; one line; exit code 2."""


def default_cache_dir() -> Path:
    """$RL_JAX_CACHE, else $XDG_CACHE_HOME/rl_jax, else ~/.cache/rl_jax."""
    if chosen := os.environ.get("RL_JAX_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rl_jax"


def enable_compile_cache(directory: Path | str | None = None) -> Path:
    """Keep every compiled program on disk (about 10x faster than compiling it again); returns the directory.

    A directory chosen through JAX_COMPILATION_CACHE_DIR wins. An entry that cannot be read is compiled again by JAX.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    path = Path(chosen or directory or default_cache_dir() / "xla")
    values = {
        "jax_compilation_cache_dir": str(path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    for name, value in values.items():
        os.environ[name.upper()] = str(value)
    if jax := sys.modules.get("jax"):  # a notebook imported it already: the variables come too late
        for name, value in values.items():
            jax.config.update(name, value)
    return path


def avoid_broken_fusions() -> None:
    """Turn off fusions of the CPU backend that compute wrong numbers or crash; what XLA_FLAGS says of them wins.

    jaxlib 0.10.2 returns silently wrong sums of products, as gradients under vmap (github.com/jax-ml/jax/issues/39103);
    it and 0.11.0 crash on some (.../39257). XLA reads the flag when the first program is compiled, not at JAX's import.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    version = tuple(int(part) for part in metadata.version("jaxlib").split(".")[:3])
    if version < SOUND_FUSIONS and FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}=".strip()


def use_platform(platform: str) -> None:
    """Make JAX use this backend; "" leaves the choice to JAX_PLATFORMS and to JAX.

    Raises: BackendError if JAX_PLATFORMS names another one, or JAX uses another one already.
    """
    if not platform:
        return
    asked = os.environ.get("JAX_PLATFORMS", "").replace(" ", "").lower()
    name = BACKENDS.get(platform, platform)
    # JAX takes the first one as its default.
    if asked and asked.partition(",")[0] not in (platform, name):
        raise BackendError(
            f"mesh.platform={platform} contradicts JAX_PLATFORMS={asked}: unset JAX_PLATFORMS, or let it choose with"
            " --config.mesh.platform= and a mesh that fits its devices"
        )
    os.environ["JAX_PLATFORMS"] = asked or name
    if jax := sys.modules.get("jax"):  # a notebook imported it already: the variable comes too late
        jax.config.update("jax_platforms", asked or name)
        if (found := jax.default_backend()) != platform:
            raise BackendError(
                f"mesh.platform={platform}, but JAX was started on {found} in this process before; start another one,"
                " or use --config.mesh.platform= and a mesh that fits its devices"
            )


def child_variables(num_devices: int, platform: str = "cpu") -> dict[str, str]:
    """What a process that this one starts must find in its environment, so that its programs are compiled as ours, and
    kept in the same cache: for `num_devices` simulated CPU devices of its own, or for the GPUs that it sees."""
    names = ("JAX_", "XLA_") if platform == "cpu" else ("JAX_", "XLA_", "NCCL_")
    out = {name: value for name, value in os.environ.items() if name.startswith(names)}
    flags = [f for f in out.get("XLA_FLAGS", "").split() if not f.startswith(DEVICE_FLAG)]
    if platform == "cpu":
        flags.append(f"{DEVICE_FLAG}={num_devices}")
    return out | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": BACKENDS.get(platform, platform)}


def given_gpus() -> dict[str, str]:
    """The variable that says which GPUs whoever started this process gave it, if any."""
    named = os.environ.get(VISIBLE_GPUS)
    return {} if named is None else {VISIBLE_GPUS: named}


def host_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES could name: what it names, else the numbers of this host's GPUs."""
    if (named := os.environ.get(VISIBLE_GPUS)) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    found = sorted(
        int(path.name[6:]) for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()
    )
    return [str(number) for number in found]


def only_simulate(num_devices: int) -> None:
    """Simulated CPU devices and no other backend, whatever the machine has and JAX_PLATFORMS names: for shapes alone.

    Where JAX was imported before it keeps its other backends. Raises: BackendError as simulate_cpu_devices.
    """
    simulate_cpu_devices(num_devices)
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"


def simulate_cpu_devices(num_devices: int) -> None:
    """Make the CPU backend show at least `num_devices` devices; other backends are not touched.

    Raises: BackendError if JAX was imported before with another number.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    wanted = f"{DEVICE_FLAG}={num_devices}"
    asked = [f.partition("=")[2] for f in flags if f.startswith(f"{DEVICE_FLAG}=")]
    if asked and not asked[-1].isdecimal():
        raise BackendError(f"XLA_FLAGS has {DEVICE_FLAG}={asked[-1]}, which is no number; unset it")
    if asked and int(asked[-1]) >= num_devices:
        return
    if "jax" in sys.modules:
        raise BackendError(
            f"{num_devices} CPU devices must be asked for before jax is imported; "
            f"set XLA_FLAGS={wanted} and start again"
        )
    others = [flag for flag in flags if not flag.startswith(DEVICE_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*others, wanted])
