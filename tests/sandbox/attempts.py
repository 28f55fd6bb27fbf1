"""Attempts to break out of a sandbox or to use more than it gives: a program, run inside and, as a control, outside.

    python3 attempts.py NAME ARGUMENT...      prints "ESCAPED: how", or "contained: why"

Each is harmless where it succeeds. Standard library only, Python 3.8: it runs with whatever the sandbox has.
"""

import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWNS = 0x10000000, 0x00020000
MIB = 1 << 20


def call(name, *arguments):
    """A function of libc; its error as OSError."""
    if getattr(LIBC, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_file(*folders):
    """Leave a file where programs, settings or devices of the host lie."""
    done = []
    for folder in folders:
        path = os.path.join(folder, ".attempt")
        try:
            with open(path, "w") as file:
                file.write("x")
            os.remove(path)
            done.append(folder)
        except OSError:
            pass
    return f"wrote to {done}" if done else None


def read_file(path):
    """Read what only the host's root, or its users, may."""
    with open(path, "rb") as file:
        return f"read {len(file.read(64))} bytes of {path}"


def read_environments(secret):
    """Find a secret in the environment of any process, /proc/1/environ first."""
    for entry in sorted(os.listdir("/proc"), key=lambda e: (e != "1", e)):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if secret.encode() in file.read():
                        return f"/proc/{entry}/environ has it"
            except OSError:
                pass
    return None


def read_descriptors(secret):
    """Read what stands behind each descriptor that was inherited."""
    for number in range(3, 256):
        try:
            if secret.encode() in os.pread(number, 4096, 0):
                return f"descriptor {number} has it"
        except OSError:
            pass
    return None


def mount():
    call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
    return "mounted a file system"


def ptrace():
    """Take over another process of the same user."""
    child = os.fork()
    if child == 0:
        time.sleep(5)
        os._exit(0)
    try:
        call("ptrace", 16, child, 0, 0)  # PTRACE_ATTACH
        return "attached to a process"
    finally:
        os.kill(child, signal.SIGKILL)


def nested_namespace():
    """Become root of a user namespace, where much of the kernel can be reached."""
    call("unshare", NEWUSER)
    return "made a user namespace"


def symlink_out(path):
    """Have a link in the working directory lead to a file of the host."""
    os.symlink(path, "link")
    try:
        with open("link", "rb") as file:
            return f"read {len(file.read())} bytes through a link"
    finally:
        os.replace("link", "link_out")


def become_root():
    os.setuid(0)
    return "became root"


def run_setuid_program(path):
    """Gain another user's rights by a program with the setuid bit."""
    null = subprocess.DEVNULL
    child = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=null, stderr=null)
    try:
        for _ in range(
            20
        ):  # it has the rights from its first instruction, whatever it does with them
            with open(f"/proc/{child.pid}/status") as file:
                ids = next(line.split() for line in file if line.startswith("Uid:"))
            if ids[2] == "0" and os.getuid() != 0:
                return "it runs as root"
            time.sleep(0.005)
    finally:
        child.kill()
        child.wait()
    return None


def connect_tcp(address, port):
    socket.create_connection((address, int(port)), timeout=2).close()
    return f"connected to {address}"


def connect_abstract(name):
    """A socket of the host that has no file: only a network namespace keeps it apart."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2)
        client.connect("\0" + name)
    return "connected"


def route_to(address):
    """Find a route to an address; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((address, 80))
        return f"{address} is reached from {client.getsockname()[0]}"


def resolve(name):
    """Ask for an address by name; the host's own table of names is no answer of the network."""
    return f"{name} is {socket.getaddrinfo(name, 80)[0][4][0]}"


def fork_bomb(limit):
    """More processes than the limit, 200 at most, all alive at once."""
    children = []
    try:
        while len(children) < 200:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            children.append(child)
    except OSError as error:
        print(f"stopped at {len(children)}: {error}")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    return f"{len(children)} processes" if len(children) > int(limit) else None


def fill_disk(limit, *folders):
    """More bytes than the limit, over all places that can be written."""
    total, data = 0, b"x" * (MIB // 4)
    for folder in folders:
        for i in range(8):
            try:
                with open(os.path.join(folder, f"fill{i}"), "wb", buffering=0) as file:
                    for _ in range(4):
                        total += file.write(data)
            except OSError:
                pass
    return f"wrote {total} bytes" if total > int(limit) else None


def grow_file(limit):
    """One file larger than the limit, by its length alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open("sparse", "wb") as file:
        file.truncate(int(limit) + 1)
    return "made a large file"


def make_files(limit):
    """More files than the limit, all empty, which takes the kernel's memory and no disk."""
    for i in range(int(limit) + 1):
        open(f"f{i}", "w").close()
    time.sleep(0.3)
    return f"made {int(limit) + 1} files"


def take_memory(limit):
    """Address space beyond the limit, in one piece."""
    try:
        block = bytearray(int(limit))
    except MemoryError:
        return None
    return f"took {len(block)} bytes"


def share_memory(limit):
    """Memory beyond the limit, in processes that each stay below it."""
    num = 4
    for _ in range(num):
        if os.fork() == 0:
            block = bytearray(int(limit) // num + 8 * MIB)
            for i in range(0, len(block), 4096):
                block[i] = 1
            time.sleep(1)
            os._exit(0)
    failed = sum(os.wait()[1] != 0 for _ in range(num))
    return None if failed else "held it for a second"


def hide_memory():
    """Memory that belongs to no process: unnamed files and System V segments."""
    done = []
    try:
        os.close(os.memfd_create("attempt"))
        done.append("memfd")
    except OSError:
        pass
    identity = LIBC.shmget(0, MIB, 0o1600)
    if identity != -1:
        LIBC.shmctl(identity, 0, None)
        done.append("a System V segment")
    return f"made {' and '.join(done)}" if done else None


def burn_cpu(seconds):
    """Compute beyond the limit."""
    while time.process_time() < float(seconds):
        pass
    return f"computed for {seconds} s"


def ignore_cpu_limit(seconds):
    """The same, deaf to the signal."""
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    return burn_cpu(seconds)


def raise_limits(by):
    """Give itself more processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard + int(by)))
    return f"set {hard} to {hard + int(by)}"


def sleep(seconds):
    time.sleep(float(seconds))
    return f"slept {seconds} s"


def flood(num):
    """Print without end, here `num` bytes."""
    block = b"y\n" * 32768
    for _ in range(int(num) // len(block)):
        os.write(1, block)
    return "printed it all"


def daemon(mark):
    """Live on in a session of its own, without a parent, deaf to what ends sessions."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(20)", mark])
        os._exit(0)
    os.wait()
    return "left a daemon"


def signal_process(pid):
    """End a process of the host."""
    os.kill(int(pid), signal.SIGTERM)
    return f"signalled {pid}"


def see_process(pid, mark):
    """Find a process of the host in /proc."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return f"saw {pid}" if mark.encode() in file.read() else None


def open_devices(*paths):
    """The kernel's log, memory and disks."""
    done = []
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            done.append(path)
        except OSError:
            pass
    return f"opened {done}" if done else None


def make_device():
    os.mknod("device", 0o600 | 0o020000, os.makedev(1, 11))  # /dev/kmsg
    os.remove("device")
    return "made a device"


def set_kernel(path):
    """Write a setting of the kernel, to what it is."""
    with open(path) as file:
        value = file.read()
    with open(path, "w") as file:
        file.write(value)
    return f"wrote {path}"


def use_keyring():
    """Keys of the kernel are shared by all processes of a user."""
    if LIBC.syscall(248 if os.uname().machine == "x86_64" else 217, b"user", b"attempt", b"x", 1, -2) < 0:  # fmt: skip
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "stored a key"


def type_into_terminal():
    """Put characters into the terminal that the driver was started from."""
    import fcntl

    with open("/dev/tty", "wb", buffering=0) as terminal:
        fcntl.ioctl(terminal, 0x5412, b"#")  # TIOCSTI
    return "typed into a terminal"


def main(name, *arguments):
    try:
        how = globals()[name](*arguments)
    except (OSError, MemoryError, ValueError) as error:
        number = getattr(error, "errno", None)
        print(f"contained: {errno.errorcode.get(number, '')} {error}")
        return
    print(f"ESCAPED: {how}" if how else "contained: it did not succeed")


if __name__ == "__main__":
    main(*sys.argv[1:])
