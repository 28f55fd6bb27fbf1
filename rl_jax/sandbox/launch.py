"""The words behind a backend's own: limits of the kernel, and launcher.sh."""

from functools import cache
from pathlib import Path

from rl_jax.sandbox.records import Ends, Job, Limits

MAX_OPEN = 128  # descriptors of a process


def limit_words(limits: Limits) -> list[str]:
    return [
        "prlimit",
        f"--nproc={limits.processes}",
        f"--as={limits.memory_bytes}",
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",  # SIGXCPU, then SIGKILL
        f"--fsize={limits.file_bytes}",
        f"--nofile={MAX_OPEN}",
        "--core=0",
        "--memlock=0",
    ]


def launcher_words(job: Job, ends: Ends, report: str) -> list[str]:
    """report: a descriptor, or the path of a fifo inside."""
    keeps = str(int(ends.keeps_files))
    shell = ["bash", "--noprofile", "--norc", "-c", _script(), ends.tag]
    return [*shell, report, str(ends.files_bytes), keeps, *job.argv]


@cache
def _script() -> str:
    return Path(__file__).with_name("launcher.sh").read_text(encoding="utf-8")
