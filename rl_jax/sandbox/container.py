"""A container a job, by docker's or podman's command line: "container:IMAGE", "container:podman/IMAGE".

    docker run (namespaces, mounts, seccomp, limits) -> launcher.sh -> the command

For machines where neither bubblewrap nor nsjail may make namespaces, but a daemon does. The image is one that is there
already (nothing is pulled) and has bash, tar and what programs need. The launcher reports through a fifo that lies in a
directory of the host's and is bound into the container, so the daemon must be of this host.

Its own limits differ in two: memory is that of all processes together (a cgroup's) and not of each, and the number of
files is bounded by that memory alone.

A container does not end with the process that asked for it: it carries its owner's tag as a label, `reap` removes those
whose owner is gone, and inside, `timeout` ends it at the end of its time.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rl_jax.sandbox import identity, owner, seccomp
from rl_jax.sandbox.host import PATH, find_program
from rl_jax.sandbox.launch import MAX_OPEN, launcher_words
from rl_jax.sandbox.records import TEMP, WORK, Command, Ends, Job, SandboxMissing

ENGINES = ("docker", "podman")
LABEL = "rl_jax.sandbox"
PREFIX = "rl_jax-sandbox-"  # of directories with a fifo
ASK_S = 30.0


class Container:
    name = "container"

    def __init__(self, arg: str = ""):
        """arg: an image, behind "docker/" or "podman/" where one of them is meant. Raises ValueError without one."""
        engine, _, image = arg.partition("/")
        self._engine, self._image = (engine, image) if engine in ENGINES else ("", arg)
        if not self._image:
            raise ValueError(
                "sandbox container: name the image, such as container:docker.io/library/python:3.12-slim"
            )

    def check(self) -> None:
        found = [e for e in ENGINES if self._engine in ("", e) and shutil.which(e)]
        if not found:
            find_program(self.name, self._engine or "docker", "install docker or podman")
        self._engine = found[0]
        asked = subprocess.run(
            [self._engine, "image", "inspect", "--format", "{{.Id}}", self._image],
            capture_output=True, text=True, timeout=ASK_S, check=False,
        )  # fmt: skip
        if asked.returncode:
            said = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise SandboxMissing(
                f"sandbox container: {self._engine} has no image {self._image}: {said[:200]}; start its daemon and"
                " pull the image, or use another backend"
            )

    def command(self, job: Job, ends: Ends) -> Command:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        fifo, name = folder / "report", f"{PREFIX}{os.getpid()}-{ends.num}"
        os.mkfifo(fifo)
        folder.chmod(0o711)
        fifo.chmod(0o622)
        (folder / "seccomp.json").write_text(json.dumps(seccomp.profile()), encoding="utf-8")
        (folder / "owner").write_text(ends.tag, encoding="utf-8")
        argv = [
            self._engine, "run", "--rm", "--interactive", "--name", name, "--label", f"{LABEL}={ends.tag}",
            *_isolation(job), "--security-opt", f"seccomp={folder}/seccomp.json",
            *(["--read-only-tmpfs=false"] if self._engine == "podman" else []),
            "--mount", f"type=bind,source={fifo},target=/report", self._image,
            "timeout", "--signal=KILL", str(int(job.limits.wall_s + owner.SPARE_S)),
            *launcher_words(job, ends, "/report"),
        ]  # fmt: skip
        return Command(
            tuple(argv),
            environment={"PATH": os.defpath + ":/usr/local/bin", "HOME": str(folder)},
            folder=str(folder),
            cleanup=(self._engine, "rm", "--force", name),
        )

    def reap(self) -> int:
        """Remove containers and directories whose owner is gone or whose time is over."""
        asked = subprocess.run(
            [self._engine, "ps", "--all", "--filter", f"label={LABEL}",
             "--format", "{{.ID}} {{.Label " + f'"{LABEL}"' + "}}"],
            capture_output=True, text=True, timeout=ASK_S, check=False,
        )  # fmt: skip
        over = [word.split()[0] for word in asked.stdout.splitlines() if owner.is_over(word[13:])]
        if over:
            subprocess.run(
                [self._engine, "rm", "--force", *over],
                capture_output=True,
                timeout=ASK_S,
                check=False,
            )
        for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/owner"):
            if owner.is_over(file.read_text(encoding="utf-8")):
                shutil.rmtree(file.parent, ignore_errors=True)
        return len(over)


def _isolation(job: Job) -> list[str]:
    limits, user = job.limits, f"{identity.INSIDE}:{identity.INSIDE}"
    limit = {
        "nproc": str(limits.processes),
        "cpu": f"{limits.cpu_s}:{limits.cpu_s + 1}",
        "fsize": str(limits.file_bytes),
        "nofile": str(MAX_OPEN),
        "core": "0",
    }
    box = f"/box:rw,nosuid,nodev,size={limits.disk_bytes},mode=1777"
    variables = {"PATH": PATH, "HOME": WORK, "TMPDIR": TEMP, "PYTHONHASHSEED": "0"}
    return [
        "--pull", "never", "--network", "none", "--read-only", "--user", user, "--workdir", "/box",
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private",
        "--pids-limit", str(limits.processes), "--memory", str(limits.memory_bytes),
        "--memory-swap", str(limits.memory_bytes), "--tmpfs", box, "--tmpfs", "/dev/shm:ro,size=65536",
        *(w for name, value in limit.items() for w in ("--ulimit", f"{name}={value}")),
        *(w for name, value in variables.items() for w in ("--env", f"{name}={value}")),
        "--entrypoint", "",
    ]  # fmt: skip
