"""What each backend starts, word by word where it matters, and what is said where it cannot isolate."""

import os
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rl_jax.sandbox import BACKENDS, host, identity, load, seccomp
from rl_jax.sandbox.bubblewrap import Bubblewrap
from rl_jax.sandbox.container import Container
from rl_jax.sandbox.nsjail import Nsjail
from rl_jax.sandbox.records import Ends, Job, Limits, SandboxMissing
from rl_jax.sandbox.run import Sandbox

LIMITS = Limits(wall_s=7.0, cpu_s=3, memory_bytes=64 << 20, processes=9, disk_bytes=5 << 20)
JOB = Job(("python3", "main.py"), limits=LIMITS)
ENDS = Ends(report=11, files_bytes=10240, keeps_files=True, tag="rl_jax-sandbox/1/2/3/4", num=4)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A machine that has them all."""
    for name in ("setpriv", "bwrap", "nsjail", "docker", "podman", "prlimit", "bash"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(host, "SEARCHED", str(tmp_path))
    monkeypatch.setattr(host.find_program, "__defaults__", (str(tmp_path),))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def pairs(argv):
    return set(zip(argv, argv[1:]))


def command_of(backend, job=JOB, ends=ENDS):
    command = backend.command(job, ends)
    for descriptor in command.closes:
        os.close(descriptor)
    return command


def test_bubblewrap_starts_without_an_environment_and_opens_nothing(programs):
    command = command_of(Bubblewrap())
    argv = command.argv
    assert argv[:2] == (str(programs / "setpriv"), "--no-new-privs")
    assert "--pdeathsig" not in argv, "a bwrap that ends too early leaves its first process behind"
    assert set(command.environment) == {"PATH"} and len(command.descriptors) == 2
    assert {
        "--unshare-all",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    } <= {*argv}
    assert {("--cap-drop", "ALL"), ("--uid", "65534"), ("--ro-bind", "/usr"),
            ("--seccomp", str(command.descriptors[1])), ("--size", str(5 << 20)),
            ("--remount-ro", "/"), ("--remount-ro", "/dev")} <= pairs(argv)  # fmt: skip
    assert not {"--bind", "--dev-bind", "--share-net", "--bind-try"} & {*argv}
    inner = argv[argv.index("--") + 1 :]
    assert inner[0] == "prlimit" and {"--nproc=9", f"--as={64 << 20}", "--cpu=3:4"} <= {*inner}
    assert inner[-6:] == (ENDS.tag, "11", "10240", "1", "python3", "main.py")


def test_root_drops_to_a_user_of_each_sandboxs_own(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ids = {identity.host_id(num) for num in range(identity.PER_PROCESS)}
    assert len(ids) == identity.PER_PROCESS and 0 not in ids
    assert f"--reuid={identity.host_id(3)}" in identity.words(3)
    # Root of a container has few ids.
    few = frozenset({(0, 1000)})
    assert 0 < identity._nearest(identity.FIRST, few) < 1000
    assert identity._nearest(identity.FIRST, frozenset({(0, 1)})) == identity.INSIDE
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert identity.host_id(3) is None
    assert not [word for word in identity.words(3) if word.startswith("--reuid")]


def test_nsjail_has_the_same_limits_in_its_own_words(programs):
    argv = command_of(Nsjail(str(programs / "nsjail"))).argv
    assert argv[0] == str(programs / "setpriv")
    start = argv.index(str(programs / "nsjail"))
    assert argv[start - 2 : start] == ("--pdeathsig", "KILL")
    assert {("--pass_fd", "11"), ("--time_limit", "37"), ("--bindmount_ro", "/usr"),
            ("--mount", f"none:/box:tmpfs:size={5 << 20},nr_inodes=4096,mode=0755")} <= pairs(argv)  # fmt: skip
    assert not [w for w in argv if w.startswith("--disable_clone") or w in ("--keep_env", "--rw")]
    policy = argv[argv.index("--seccomp_string") + 1]
    assert "ptrace" in policy and "clone3" in policy
    assert argv[-6:] == (ENDS.tag, "11", "10240", "1", "python3", "main.py")


def test_nsjail_forgets_two_folders_of_each_sandbox_which_go_with_it(
    programs, tmp_path, monkeypatch
):
    wanted = (str(tmp_path / "nsjail.{}.root"), str(tmp_path / "nsjail.{}.tmp"))
    monkeypatch.setattr("rl_jax.sandbox.nsjail.FOLDERS", wanted)
    monkeypatch.setattr(identity, "host_id", lambda num: 7000 + num)
    backend = Nsjail(str(programs / "nsjail"))
    assert command_of(backend).leaves == tuple(f.format(7000 + ENDS.num) for f in wanted)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    theirs, live = (
        identity.FIRST + pid * identity.PER_PROCESS + 3 for pid in (gone.pid, os.getpid())
    )
    for owner in (theirs, live, 1000):
        for folder in wanted:
            Path(folder.format(owner)).mkdir()
    (tmp_path / "nsjail.text.root").mkdir()
    backend.reap()
    assert {path.name.split(".")[1] for path in tmp_path.glob("nsjail.*")} == {
        str(live), "1000", "text"
    }  # fmt: skip
    monkeypatch.setattr(identity, "host_id", lambda num: None)
    assert command_of(backend).leaves == ()  # a plain user's sandboxes share theirs


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_is_bounded_labelled_and_removed(engine, programs, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    backend = Container(f"{engine}/python:3.12")
    backend.check()
    command = command_of(backend)
    argv = command.argv
    assert argv[:3] == (engine, "run", "--rm") and "python:3.12" in argv
    assert {("--network", "none"), ("--cap-drop", "ALL"), ("--user", "65534:65534"), ("--pids-limit", "9"),
            ("--memory", str(64 << 20)), ("--pull", "never"), ("--security-opt", "no-new-privileges"),
            ("--label", f"rl_jax.sandbox={ENDS.tag}"), ("--ulimit", "cpu=3:4")} <= pairs(argv)  # fmt: skip
    assert "--read-only" in argv and not {"--privileged", "--volume", "-v", "--env-file"} & {*argv}
    name = argv[argv.index("--name") + 1]
    assert command.cleanup == (engine, "rm", "--force", name)
    assert sorted(os.listdir(command.folder)) == ["owner", "report", "seccomp.json"]


def test_a_missing_program_is_one_line_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(host.find_program, "__defaults__", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, remedy in {
        "bubblewrap": "apt-get install bubblewrap",
        "nsjail": "install it",
        "container:python:3.12": "install docker or podman",
    }.items():
        with pytest.raises(SandboxMissing) as told:
            load.make_sandbox(name)
        said = str(told.value)
        assert remedy in said and "\n" not in said and said.endswith("without isolation")


def test_names_are_checked():
    with pytest.raises(ValueError, match=r"no sandbox 'bubble'; use one of bubblewrap, nsjail"):
        load.make_sandbox("bubble")
    with pytest.raises(ValueError, match="name the image"):
        load.make_sandbox("container")
    with pytest.raises(ValueError, match="takes nothing behind a colon"):
        load.make_sandbox("bubblewrap:x")
    assert set(BACKENDS) == {"bubblewrap", "nsjail", "container"}


class Leaky:
    """bubblewrap with one of its words left out, or another put in."""

    name = "leaky"

    def __init__(self, change):
        self._backend, self._change = Bubblewrap(), change

    def command(self, job, ends):
        command = self._backend.command(job, ends)
        return self._change(command)


def without(*words):
    """The words, and as many behind them as an option of theirs takes."""

    def change(command):
        argv = list(command.argv)
        at = next(i for i in range(len(argv)) if tuple(argv[i : i + len(words)]) == words)
        return replace(command, argv=tuple(argv[:at] + argv[at + len(words) :]))

    return change


def instead(word, *others):
    def change(command):
        at = command.argv.index(word)
        return replace(command, argv=command.argv[:at] + others + command.argv[at + 1 :])

    return change


def as_root(command):
    return replace(command, argv=command.argv[command.argv.index("--clear-groups") + 1 :])


LEAKS = {
    "there is a network interface": instead("--unshare-all", "--unshare-all", "--share-net"),
    "/ can be written": without("--remount-ro", "/"),
    "/dev can be written": without("--remount-ro", "/dev"),
    "the disk has no limit": without("--size", str(load.PROBE.disk_bytes)),
    "environment of another process": lambda c: replace(c, environment={**c.environment, "API_KEY": "x"}),
    "number of processes has no limit": without(f"--nproc={load.PROBE.processes}"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("said", LEAKS)
def test_the_probe_refuses_what_does_not_isolate(said, bubblewrap):
    with pytest.raises(SandboxMissing, match=f"does not isolate here: .*{said}"):
        load._probe("leaky", Sandbox(Leaky(LEAKS[said])))


@pytest.mark.slow
def test_the_probe_refuses_limits_that_do_not_hold_for_root(bubblewrap):
    if os.geteuid() != 0:
        pytest.skip("only root is exempt from the limit of processes")
    with pytest.raises(SandboxMissing, match="number of processes has no limit"):
        load._probe("leaky", Sandbox(Leaky(as_root)))


def answer(program, number, argument=0, arch=0xC000003E):
    """What a filter returns for a call: the kernel's machine, as far as the program uses it."""
    data = {0: number, 4: arch, 16: argument}
    steps, at, value = list(struct.iter_unpack("<HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, k = steps[at]
        at += 1
        if code == 0x20:
            value = data[k]
        elif code == 0x06:
            return k
        else:
            is_true = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += if_true if is_true else if_false


def test_the_filter_refuses_what_it_lists_and_lets_pass_the_rest():
    program = seccomp.program("x86_64")
    refused, unknown = 0x00050001, 0x00050026
    for name, (number, _) in seccomp.DENIED.items():
        assert answer(program, number) == refused, name
    assert answer(program, 56, 0x10000000) == refused  # clone(CLONE_NEWUSER)
    assert answer(program, 56, 0x01200011) == seccomp.ALLOW  # fork
    assert answer(program, 56, 0x003D0F00) == seccomp.ALLOW  # a thread
    assert answer(program, 435) == unknown
    assert answer(program, 0) == answer(program, 59) == answer(program, 41) == seccomp.ALLOW
    assert answer(program, 0x40000000 | 101) == answer(program, 26, arch=0x40000003) == seccomp.KILL
    arm = seccomp.program("aarch64")
    assert answer(arm, 117, arch=0xC00000B7) == refused
    assert answer(arm, 63, arch=0xC00000B7) == seccomp.ALLOW
    assert answer(arm, 220, 0x10000000, 0xC00000B7) == refused
