"""Facts of a machine that decide whether it can run what is here, gathered once by `gather`.

Invariants: nothing is changed, no GPU memory is taken but what a context needs, and nothing waits longer than LIMIT_S:
what may hang (a device's driver, a sandbox) is asked in a process or thread of its own, all at once.
Must not: judge (health.py), or import jax in this process.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rl_jax.asgi import cannot_listen
from rl_jax.backend import default_cache_dir
from rl_jax.disk import existing
from rl_jax.resume import RUNS
from rl_jax.sandbox.load import SandboxMissing, open_sandbox

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 25.0  # for JAX to list its devices
QUICK_S = 5.0  # for nvidia-smi
GB = 1 << 30

PORTS = {8000: "tools.serve", 8001: "tools.serve's admin plane", 8080: "tools.reward_server"}

ASK_JAX = """
import json
import jax
found = [{"kind": d.device_kind, "platform": d.platform,
          "limit": (d.memory_stats() or {}).get("bytes_limit")} for d in jax.local_devices()]
print(json.dumps({"jax": jax.__version__, "devices": found}))
"""


@dataclass(frozen=True)
class Facts:
    """Defaults are those of a machine on which all is well."""

    python: str = "3.13.0"
    project: Mapping[str, Any] = field(default_factory=dict)  # [project] of pyproject.toml
    versions: Mapping[str, str] = field(default_factory=dict)  # distribution -> installed version
    devices: Mapping[str, Any] = field(default_factory=dict)  # what ASK_JAX prints
    devices_error: str = ""
    gpus: tuple[str, ...] = ()  # names, as nvidia-smi says
    gpu_users: tuple[tuple[int, int], ...] = ()  # (process, MiB) on any of them
    cores: int = 8
    memory_bytes: int = 32 * GB  # that can be had now, cgroup included
    # what -> (path, free bytes, whether it may be written)
    disk: Mapping[str, tuple[str, int, bool]] = field(default_factory=dict)
    shm_bytes: int | None = 8 * GB  # None: there is none
    open_files: tuple[int, int] = (65_536, 65_536)  # soft and hard limit
    ports_taken: tuple[int, ...] = ()  # of PORTS
    loopback_error: str = ""
    clock: str = "tsc"
    clock_step_s: float = 1e-9  # resolution of the monotonic clock
    clock_year: int = 2026
    sandbox_error: str = ""
    cache: tuple[int, int] = (0, 0)  # files and bytes of the compile cache


def gather() -> Facts:
    """Facts of this machine, in under LIMIT_S."""
    with ThreadPoolExecutor(4) as threads:
        asked = threads.submit(_devices)
        smi = threads.submit(_nvidia_smi)
        isolation = threads.submit(_sandbox_error)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        cache = default_cache_dir()
        places = {
            "runs": RUNS.absolute(),
            "compile cache": cache,
            "temporary files": Path(tempfile.gettempdir()),
        }
        taken, loopback = _ports()
        devices, devices_error = asked.result()
        gpus, users = smi.result()
        return Facts(
            python=".".join(map(str, sys.version_info[:3])),
            project=project,
            versions=_versions(project),
            devices=devices,
            devices_error=devices_error,
            gpus=gpus,
            gpu_users=users,
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=_memory_bytes(),
            disk={what: _place(path) for what, path in places.items()},
            shm_bytes=_free("/dev/shm"),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            ports_taken=taken,
            loopback_error=loopback,
            clock=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
            or "unknown",
            clock_step_s=time.get_clock_info("monotonic").resolution,
            clock_year=time.gmtime().tm_year,
            sandbox_error=isolation.result(),
            cache=_sizes(cache),
        )


def _versions(project: Mapping[str, Any]) -> dict[str, str]:
    extras = project.get("optional-dependencies", {}).values()
    asked = {name_of(line) for line in [*project["dependencies"], *sum(extras, [])]}
    found = {}
    for name in [*asked, "jaxlib"]:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _devices() -> tuple[dict[str, Any], str]:
    try:
        done = subprocess.run(
            ["env", "XLA_PYTHON_CLIENT_PREALLOCATE=false", sys.executable, "-c", ASK_JAX],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return {}, f"JAX did not list its devices within {LIMIT_S:g} s"
    try:
        return json.loads(done.stdout.splitlines()[-1]), ""
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {}, f"JAX does not start: {said[:300]}"


def _nvidia_smi() -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    gpus = tuple(line[0] for line in _smi("--query-gpu=name"))
    users = [
        (int(pid), int(used) if used.isdigit() else 0)
        for pid, used in (
            line[:2] for line in _smi("--query-compute-apps=pid,used_memory") if len(line) > 1
        )
        if pid.isdigit()
    ]
    return gpus, tuple(users)


def _smi(query: str) -> Iterator[list[str]]:
    if shutil.which("nvidia-smi") is None:
        return
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=QUICK_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode == 0:
        yield from (
            [cell.strip() for cell in line.split(",")]
            for line in done.stdout.splitlines()
            if line.strip()
        )


def _sandbox_error() -> str:
    try:
        open_sandbox("bubblewrap")
    except SandboxMissing as error:
        return " ".join(str(error).split())
    return ""


def _ports() -> tuple[tuple[int, ...], str]:
    taken = tuple(port for port in PORTS if cannot_listen("127.0.0.1", port))
    return taken, cannot_listen("127.0.0.1", 0)


def _memory_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    free = [int(found[1]) << 10] if found else []
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, now = _read(limit), _read(used)
        if most.isdigit() and now.isdigit() and int(most) < 1 << 60:
            free.append(int(most) - int(now))
    return min(free, default=0)


def _place(path: Path) -> tuple[str, int, bool]:
    there = existing(path)
    return str(path), _free(str(there)) or 0, os.access(there, os.W_OK | os.X_OK)


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _sizes(cache: Path) -> tuple[int, int]:
    num = size = 0
    for path in cache.rglob("*") if cache.is_dir() else ():
        with suppress(OSError):
            if path.is_file():
                num, size = num + 1, size + path.stat().st_size
    return num, size


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def name_of(requirement: str) -> str:
    """jax[cuda13]>=0.10.2,<0.13 -> jax."""
    return re.split(r"[<>=!\[ ;]", requirement)[0]
