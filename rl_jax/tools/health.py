"""What a machine must have for a run, as pure functions of its facts (facts.py).

Owns: CHECKS. A finding is ok, `missing` (a feature that is not there, and what it would be for) or `problem` (a run
fails or goes wrong); each that is not ok has one remedy.
Must not: look at the machine.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rl_jax.tools.facts import GB, PORTS, Facts, name_of

OK, MISSING, PROBLEM = "ok", "missing", "problem"
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")

# Extra of pyproject.toml -> what is not there without it.
EXTRAS = {
    "cuda": "NVIDIA GPUs",
    "tpu": "TPUs",
    "serve": "tools.serve: a model behind OpenAI's HTTP interface",
    "uvicorn": "tools.reward_server: scorers as a service",
    "ray": "cluster.backend=ray",
    "rich": "--progress=rich",
    "notebook": "plots and executed notebooks",
    "tensorboard": "metrics.trackers=tensorboard",
    "wandb": "metrics.trackers=wandb",
    "mlflow": "metrics.trackers=mlflow",
    "jsonschema": "the scorer json_schema",
    "math_verify": "the scorer math_answer",
    "textarena": "the environment textarena",
    "jetstream": "our engine behind google-jetstream's interface",
    "dev": "the tests",
}


@dataclass(frozen=True)
class Finding:
    check: str
    state: str  # OK | MISSING | PROBLEM
    detail: str
    remedy: str = ""


def fits(version: str, requirement: str) -> bool:
    """Whether a version is in the range of `name[extra]>=a,<b`; only releases' numbers are compared."""
    here = _numbers(version)
    tests: Mapping[str, Callable[[tuple, tuple], bool]] = {
        ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b, "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b, ">": lambda a, b: a > b, "<": lambda a, b: a < b,
    }  # fmt: skip
    for sign, asked in re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", requirement):
        there = _numbers(asked)
        size = max(len(here), len(there))
        pad = lambda numbers, size=size: numbers + (0,) * (size - len(numbers))
        if not tests[sign](pad(here), pad(there)):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-zA-Z+]", version)[0]))


def check_python(f: Facts) -> Iterator[Finding]:
    asked = f.project.get("requires-python", "")
    if not fits(f.python, asked):
        yield Finding(
            "python", PROBLEM, f"{f.python} is outside {asked}", "make PYTHON=python3.12 quickstart"
        )
    else:
        yield Finding("python", OK, f.python)


def check_packages(f: Facts) -> Iterator[Finding]:
    """Dependencies of pyproject.toml, and what they have to agree on."""
    wrong = 0
    for line in f.project.get("dependencies", ()):
        name = name_of(line)
        have = f.versions.get(name)
        if have is None or not fits(have, line):
            wrong += 1
            said = f"{name} {have} is outside {line}" if have else f"{name} is not installed"
            yield Finding("packages", PROBLEM, said, f"pip install '{line}'")
    jax, jaxlib = f.versions.get("jax"), f.versions.get("jaxlib")
    if jax and jaxlib and _numbers(jax)[:2] != _numbers(jaxlib)[:2]:
        wrong += 1
        yield Finding(
            "packages", PROBLEM, f"jax {jax} with jaxlib {jaxlib}", f"pip install jaxlib=={jax}"
        )
    if not wrong:
        shown = ", ".join(
            f"{n} {f.versions[n]}" for n in ("jax", "jaxlib", "flax", "optax") if n in f.versions
        )
        yield Finding("packages", OK, shown)


def check_extras(f: Facts) -> Iterator[Finding]:
    for extra, lines in f.project.get("optional-dependencies", {}).items():
        lacks = [name_of(line) for line in lines if name_of(line) not in f.versions]
        is_plugin = extra in ("cuda", "tpu")  # of jax itself: seen by the devices
        if lacks or (is_plugin and not _has(f, {"cuda": "gpu", "tpu": "tpu"}[extra])):
            what = f"lacks {', '.join(lacks)}" if lacks else "JAX sees none"
            told = f"{extra} ({what}), for {EXTRAS.get(extra, extra)}"
            yield Finding("extras", MISSING, told, f"pip install -e '.[{extra}]' in the checkout")
        else:
            yield Finding("extras", OK, extra)


def _has(f: Facts, platform: str) -> bool:
    return any(device["platform"] == platform for device in f.devices.get("devices", ()))


def check_devices(f: Facts) -> Iterator[Finding]:
    if f.devices_error:
        remedy = "python -c 'import jax; print(jax.devices())' shows why; JAX_PLATFORMS=cpu goes without accelerators"
        yield Finding("devices", PROBLEM, f.devices_error, remedy)
        return
    found = f.devices.get("devices", [])
    kinds = sorted({(d["platform"], d["kind"]) for d in found})
    told = "; ".join(
        f"{sum((d['platform'], d['kind']) == k for d in found)} x {k[1]} ({k[0]})" for k in kinds
    )
    if f.gpus and not _has(f, "gpu"):
        yield Finding(
            "devices", PROBLEM, f"this host has {len(f.gpus)} x {f.gpus[0]}, and JAX sees only {told or 'nothing'}",
            "pip install -e '.[cuda]'; look at JAX_PLATFORMS and CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    else:
        limits = [d["limit"] for d in found if d.get("limit")]
        yield Finding(
            "devices", OK, told + (f", {min(limits) / GB:.0f} GiB each" if limits else "")
        )


def check_gpu_users(f: Facts) -> Iterator[Finding]:
    if f.gpu_users:
        told = ", ".join(f"process {pid} {mib} MiB" for pid, mib in f.gpu_users[:5])
        yield Finding(
            "gpu users", PROBLEM, f"GPUs are in use: {told}", "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        )  # fmt: skip
    elif f.gpus:
        yield Finding("gpu users", OK, "none")


def check_memory(f: Facts) -> Iterator[Finding]:
    told = f"{f.memory_bytes / GB:.1f} GiB can be had, {f.cores} cores"
    if f.memory_bytes < 3 * GB:
        yield Finding(
            "memory",
            PROBLEM,
            told,
            "the quickstart takes 3 GiB: end other programs, or raise the container's limit",
        )
    elif f.cores < 2:
        yield Finding(
            "memory", MISSING, f"{told}: servers and learner take turns", "give it 2 cores or more"
        )
    else:
        yield Finding("memory", OK, told)


def check_disk(f: Facts) -> Iterator[Finding]:
    for what, (path, free, may_write) in f.disk.items():
        told = f"{what}: {path}, {free / GB:.1f} GiB free"
        if not may_write:
            yield Finding("disk", PROBLEM, f"{what}: {path} is not writable", REMEDY_OF[what])
        elif free < GB:
            yield Finding("disk", PROBLEM, told, f"free some space, or: {REMEDY_OF[what]}")
        else:
            yield Finding("disk", OK, told)


REMEDY_OF = {
    "runs": "use --run_dir on another disk",
    "compile cache": "set RL_JAX_CACHE to a directory on another disk",
    "temporary files": "set TMPDIR to a directory on another disk",
}


def check_cache(f: Facts) -> Iterator[Finding]:
    num, size = f.cache
    told = f"{num} files, {size / GB:.2f} GiB"
    if size > 20 * GB:
        yield Finding(
            "compile cache", PROBLEM, told, "delete it: it is made again; RL_JAX_CACHE moves it"
        )
    elif not num:
        yield Finding(
            "compile cache",
            MISSING,
            "empty: the first run compiles every program",
            "let a run end once",
        )
    else:
        yield Finding("compile cache", OK, told)


def check_shm(f: Facts) -> Iterator[Finding]:
    if f.shm_bytes is None or f.shm_bytes < GB // 2:
        told = "none" if f.shm_bytes is None else f"{f.shm_bytes / GB:.2f} GiB free"
        remedy = "docker run --shm-size=8g; servers' own weights do not need it (memfd), NCCL between GPUs and Ray do"
        yield Finding("shared memory", MISSING, f"/dev/shm: {told}", remedy)
    else:
        yield Finding("shared memory", OK, f"/dev/shm: {f.shm_bytes / GB:.1f} GiB free")


def check_files(f: Facts) -> Iterator[Finding]:
    soft, hard = f.open_files
    is_low = 0 <= soft < 1024
    remedy = f"ulimit -n {min(65_536, hard) if hard > 0 else 65_536}"
    yield Finding(
        "open files", PROBLEM if is_low else OK, f"at most {soft}", remedy if is_low else ""
    )


def check_ports(f: Facts) -> Iterator[Finding]:
    if f.loopback_error:
        yield Finding(
            "ports", PROBLEM, f"127.0.0.1 cannot be bound: {f.loopback_error}", "ip link set lo up"
        )
    for port in f.ports_taken:
        yield Finding(
            "ports", MISSING, f"{port} is taken, the default of {PORTS[port]}", "use --port=N there"
        )
    if not f.loopback_error and not f.ports_taken:
        yield Finding("ports", OK, f"{', '.join(map(str, PORTS))} are free")


def check_isolation(f: Facts) -> Iterator[Finding]:
    if f.sandbox_error:
        detail, _, remedy = f.sandbox_error.partition("; ")
        told = f"{detail}: code that a policy writes is refused"
        yield Finding(
            "isolation", MISSING, told, remedy or "apt-get install bubblewrap (docs/code_tool.md)"
        )
    else:
        yield Finding("isolation", OK, "bubblewrap isolates here")


def check_clock(f: Facts) -> Iterator[Finding]:
    told = f"{f.clock}, {f.clock_step_s:.0e} s"
    if f.clock_step_s > 1e-3:
        yield Finding(
            "clock",
            PROBLEM,
            f"{told}: deadlines are coarser than a turn",
            "use another clock source",
        )
    elif f.clock in SLOW_CLOCKS:
        yield Finding(
            "clock",
            MISSING,
            f"{told}: each reading costs microseconds",
            "boot with clocksource=tsc",
        )
    elif f.clock_year < 2025:
        yield Finding(
            "clock",
            PROBLEM,
            f"the year is {f.clock_year}",
            "set the wall clock: certificates and logs need it",
        )
    else:
        yield Finding("clock", OK, told)


CHECKS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    check_python, check_packages, check_devices, check_gpu_users, check_memory, check_disk, check_cache,
    check_shm, check_files, check_ports, check_isolation, check_clock, check_extras,
)  # fmt: skip


def examine(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]
