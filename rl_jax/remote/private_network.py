"""A network of this process alone: a Linux network namespace that holds nothing but a loopback interface.

A Ray of one host listens on every address that the host has, whatever address it is told (2.60), and whoever reaches it
runs code. Inside a network of its own nobody does.
The namespace is the calling thread's, and of every thread and process that it starts from then on; sockets that were
open before stay where they were. Nothing outside is reached from inside: no reward service, no tracker.
Must not: be left on another thread than it was entered on.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
IFREQ = "16sh14x"  # struct ifreq with its flags


def is_private() -> bool:
    """Whether no interface but loopback is up for this thread."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack(IFREQ, name.encode(), 0)
            flags = struct.unpack(IFREQ, fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
            if flags & IFF_UP and not flags & IFF_LOOPBACK:
                return False
    return True


def refusal() -> str:
    """Why this host gives no private network, or "". Tried on a thread that ends with it."""
    found: list[str] = []

    def try_it() -> None:
        try:
            PrivateNetwork()
        except OSError as error:
            found.append(str(error))

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0] if found else ""


class PrivateNetwork:
    """Entered by the constructor, left by `close`; where the thread is in one already, nothing happens."""

    def __init__(self):
        """Raises: OSError where the host does not allow it."""
        self._outside = -1  # the namespace that was left
        if is_private():
            return
        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("unshare", CLONE_NEWNET)
        except OSError:
            os.close(outside)
            raise
        self._outside = outside
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack(IFREQ, b"lo", IFF_UP | IFF_RUNNING)
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)  # who may make the namespace may do this

    def close(self) -> None:
        """Back to where the thread was."""
        outside, self._outside = self._outside, -1
        if outside >= 0:
            try:
                _call("setns", outside, CLONE_NEWNET)
            finally:
                os.close(outside)


def _call(name: str, *args: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name}: no Linux")
    if function(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
