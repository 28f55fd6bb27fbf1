"""Attempts to break out of a sandbox or to use more than it gives: each is contained inside, and succeeds outside.

`attempts.py` is what runs. A control shows that an attempt can succeed: the same program without a sandbox, or with the
limit raised. Where it needs root or a route to the network that the machine lacks, the control alone is left out.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_jax.sandbox.records import Job, Limits

ATTEMPTS_PATH = str(Path(__file__).with_name("attempts.py"))
SOURCE = Path(ATTEMPTS_PATH).read_bytes()
MIB = 1 << 20
LIMITS = Limits(
    wall_s=10.0, cpu_s=2, memory_bytes=192 * MIB, processes=24, file_bytes=2 * MIB,
    disk_bytes=3 * MIB, files=500, output_bytes=64 << 10,
)  # fmt: skip
PLACES = ("/box/work", "/box/tmp", "/tmp", "/dev/shm", "/dev", "/run", "/var/tmp", "/", "/proc")
IS_ROOT = os.geteuid() == 0


@dataclass(frozen=True)
class Attempt:
    """What it is given inside and outside, as texts in which {name} is of the `world`."""

    inside: str = ""
    outside: str = ""  # of the control
    limit: str = ""  # that may end it (any of several words), if it does not end by itself and say that it is contained
    limits: Limits = field(default=LIMITS)
    # outside | root: outside, as root | user: outside, as a plain user | terminal: outside, on a terminal of its own |
    # raised: inside, under `raised`
    control: str = "outside"
    raised: Limits = field(default=LIMITS)


SHORT = replace(LIMITS, wall_s=0.4)
ATTEMPTS = {
    "write_file": Attempt("/usr /usr/bin / /etc /dev /dev/shm /proc /lib /sys", "{folder}"),
    "read_file": Attempt("/etc/shadow", "{secret_file}"),
    "read_environments": Attempt("{secret}", "{secret}"),
    "read_descriptors": Attempt("{secret}", "{secret}"),
    "mount": Attempt(control="root"),
    "ptrace": Attempt(),
    "nested_namespace": Attempt(),
    "symlink_out": Attempt("{secret_file}", "{secret_file}"),
    "become_root": Attempt(control="root"),
    "run_setuid_program": Attempt("{setuid}", "{setuid}", control="user"),
    "connect_tcp": Attempt("127.0.0.1 {port}", "127.0.0.1 {port}"),
    "connect_abstract": Attempt("{socket}", "{socket}"),
    "route_to": Attempt("169.254.169.254", "127.0.0.1"),
    "resolve": Attempt("example.com", "127.0.0.1"),
    "fork_bomb": Attempt("24", "24"),
    "fill_disk": Attempt(f"{3 * MIB} {' '.join(PLACES)}", f"{3 * MIB} {{folder}}"),
    "grow_file": Attempt(str(2 * MIB), str(2 * MIB)),
    "make_files": Attempt("1500", "1500", "files"),
    "take_memory": Attempt(str(192 * MIB), str(192 * MIB), "kill"),
    "share_memory": Attempt(
        str(192 * MIB), limit="memory", control="raised", raised=replace(LIMITS, memory_bytes=400 * MIB)
    ),
    "hide_memory": Attempt(),
    "burn_cpu": Attempt("1.5", "1.5", "cpu", replace(LIMITS, cpu_s=1, wall_s=60.0)),
    "ignore_cpu_limit": Attempt("2.5", "0.1", "kill", replace(LIMITS, cpu_s=1, wall_s=60.0)),
    "raise_limits": Attempt("1", "0"),
    "sleep": Attempt("5", "0.5", "wall", SHORT),
    "flood": Attempt(str(64 * MIB), str(MIB), "output"),
    "signal_process": Attempt("{victim}", "{victim}"),
    "see_process": Attempt("{victim} {mark}", "{victim} {mark}"),
    "open_devices": Attempt("/dev/kmsg /dev/mem /dev/vda /dev/sda /dev/kvm", "/dev/null"),
    "make_device": Attempt(control="root"),
    "set_kernel": Attempt("/proc/sys/kernel/printk", "/proc/sys/kernel/printk", control="root"),
    "use_keyring": Attempt(),
    "type_into_terminal": Attempt(control="terminal"),
}  # fmt: skip
SECRET = "planted-0f3a9c"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Things of the host that an attempt could reach."""
    secret_file, folder = tmp_path / "secret", tmp_path / "folder"
    secret_file.write_text(SECRET)
    folder.mkdir()
    monkeypatch.setenv("FAKE_API_KEY", SECRET)
    inherited = os.open(secret_file, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    name = f"rl_jax-attempt-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + name)
        local.listen()
        victim = subprocess.Popen(["sleep", "60"])
        yield SimpleNamespace(
            secret=SECRET, secret_file=secret_file, folder=folder, port=server.getsockname()[1], socket=name,
            victim=victim.pid, mark="sleep", setuid=shutil.which("su") or "/usr/bin/su", process=victim,
        )  # fmt: skip
        victim.kill()
        victim.wait()
    os.close(inherited)


def inside(sandbox, name, words, limits, keeps_files=False):
    job = Job(
        ("python3", "attempts.py", name, *words),
        files={"attempts.py": SOURCE}, limits=limits, keeps_files=keeps_files,
    )  # fmt: skip
    return sandbox.run(job)


def outside(name, words, folder):
    """What the attempt says without a sandbox; it has this process's environment and descriptors."""
    told = subprocess.run(
        [sys.executable, Path(__file__).with_name("attempts.py"), name, *words],
        cwd=folder, stdout=subprocess.PIPE, close_fds=False, check=False, timeout=30,
    ).stdout  # fmt: skip
    return told[-200:].decode("utf-8", "replace")


def filled(text, world):
    return text.format(**vars(world)).split()


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_contained(name, backend, world):
    attempt = ATTEMPTS[name]
    if (backend.name, name) == ("container", "make_files"):
        pytest.skip("a container bounds files by its memory alone")
    result = inside(backend, name, filled(attempt.inside, world), attempt.limits)
    said = result.stdout.decode("utf-8", "replace")
    assert "ESCAPED" not in said, said
    by_itself = said.splitlines()[-1:] and said.splitlines()[-1].startswith("contained: ")
    ended_by = result.limit or ("kill" if result.signal == signal.SIGKILL else "")
    assert by_itself or (ended_by and ended_by in attempt.limit.split()), result
    assert len(result.stdout) <= LIMITS.output_bytes
    assert world.process.poll() is None  # nobody's process was ended


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_attempt_succeeds_without_what_contains_it(name, world, request):
    attempt = ATTEMPTS[name]
    if attempt.control == "raised":
        sandbox = request.getfixturevalue("bubblewrap")
        said = inside(sandbox, name, filled(attempt.inside, world), attempt.raised).stdout.decode()
    else:
        if attempt.control == "root" and not IS_ROOT:
            pytest.skip("the control needs root")
        words = filled(attempt.outside, world)
        if attempt.control == "user":
            said = as_user(name, words)
        elif attempt.control == "terminal":
            said = on_terminal(f"runpy.run_path({ATTEMPTS_PATH!r}, run_name='__main__')", name)
            if "EIO" in said:
                pytest.skip("this kernel lets no one but root type into a terminal")
        else:
            said = outside(name, words, world.folder) if name != "mount" else unshared(world)
    assert "ESCAPED" in said, said


def unshared(world):
    """`mount`, in a mount namespace of its own, so that nothing of the host changes."""
    script = Path(__file__).with_name("attempts.py")
    told = subprocess.run(
        ["unshare", "--mount", sys.executable, script, "mount"], capture_output=True, text=True, timeout=30, check=False
    )  # fmt: skip
    return told.stdout


def as_user(name, words):
    """What the attempt says as a user who is not root, and who may gain rights by running programs."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None or not Path(words[0]).is_file():
        pytest.skip(f"there is no {'python3 for every user' if python is None else words[0]}")
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if IS_ROOT else []
    command = [*user, python, "-", name, *words]
    told = subprocess.run(
        command, input=SOURCE, stdout=subprocess.PIPE, cwd="/", timeout=30, check=False
    )
    if b"NoNewPrivs:\t1" in Path("/proc/self/status").read_bytes():
        pytest.skip("this process may gain no rights itself")
    return told.stdout.decode()


def on_terminal(code, name):
    """What Python code with argv (attempts.py, name) prints, run as the owner of a terminal of its own."""
    ours, theirs = os.openpty()
    own = f"fcntl.ioctl(0, termios.TIOCSCTTY, 0); sys.argv[1:] = [{name!r}]"
    program = f"import fcntl, runpy, sys, termios; {own}; {code}"
    try:
        told = subprocess.run(
            [sys.executable, "-c", program], stdin=theirs, stdout=subprocess.PIPE, start_new_session=True,
            cwd=Path(__file__).parents[2], timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    return told.stdout.decode()


@pytest.mark.slow
def test_the_terminal_that_the_driver_was_started_from_is_not_reached(backend):
    """As the control, but the attempt is inside, and the terminal is that of the process which opens the sandbox."""
    code = (
        "from rl_jax.sandbox.load import open_sandbox; from rl_jax.sandbox.records import Job;"
        f" job = Job(('python3', 'attempts.py', sys.argv[1]),"
        f" files={{'attempts.py': open({ATTEMPTS_PATH!r}, 'rb').read()}});"
        f" print(open_sandbox({backend.name!r}).run(job).stdout.decode())"
    )
    said = on_terminal(code, "type_into_terminal")
    assert said.startswith("contained: "), said


def processes_with(mark):
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                out.append(int(path.parent.name))
        except OSError:
            pass
    return out


@pytest.mark.slow
def test_a_daemon_ends_with_its_sandbox(backend, world):
    mark = f"daemon-{os.getpid()}"
    # Outside it lives on.
    assert "ESCAPED" in outside("daemon", [mark], world.folder)
    deadline_s = time.monotonic() + 5
    while not (left := processes_with(f"time.sleep(20)\0{mark}")) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(left) == 1
    os.kill(left[0], 9)
    mark += "-inside"
    result = inside(backend, "daemon", [mark], LIMITS)
    assert "left a daemon" in result.stdout.decode() and result.status == 0  # it was made, there
    assert processes_with(mark) == []


@pytest.mark.slow
def test_files_come_back_without_what_links_lead_to(backend, world):
    from rl_jax.sandbox.files import read_files

    result = inside(backend, "symlink_out", [str(world.secret_file)], LIMITS, keeps_files=True)
    assert result.snapshot and SECRET.encode() not in result.snapshot
    assert set(read_files(result.snapshot, MIB)) == {"attempts.py"}  # the link itself is no file


def test_a_setuid_program_of_the_host_is_there_to_be_tried():
    path = shutil.which("su")
    if path is None:
        pytest.skip("there is no su")
    assert os.stat(path).st_mode & stat.S_ISUID


def test_there_are_twenty_attempts_and_more():
    assert len(ATTEMPTS) >= 20
