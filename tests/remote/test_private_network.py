"""A thread in a network of its own reaches its own loopback and nothing of the host's, and comes back."""

import socket
import subprocess
import sys
import threading

import pytest

from rl_jax.remote.private_network import PrivateNetwork, is_private, refusal

why = refusal()
pytestmark = pytest.mark.skipif(bool(why), reason=f"no private network on this host: {why}")
ECHO = "import socket; socket.create_connection(('127.0.0.1', {}), 5).close()"


def on_a_thread(function):
    """What it returned; its network ends with its thread."""
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join(30.0)
    return out[0]


def test_inside_is_loopback_of_ones_own_and_nothing_else():
    outside = socket.create_server(("127.0.0.1", 0))
    port = outside.getsockname()[1]

    def inside():
        network = PrivateNetwork()
        private = is_private()
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            reached = True
        except ConnectionRefusedError:
            reached = False
        with socket.create_server(("127.0.0.1", 0)) as own:  # a child is inside too
            code = ECHO.format(own.getsockname()[1])
            child = subprocess.run([sys.executable, "-c", code], timeout=30).returncode
        network.close()
        socket.create_connection(("127.0.0.1", port), 5).close()
        return private, reached, child

    assert on_a_thread(inside) == (True, False, 0)
    outside.close()


def test_other_threads_stay_outside_and_the_second_entry_is_none():
    def inside():
        network = PrivateNetwork()
        PrivateNetwork().close()
        still = is_private()
        network.close()
        return still

    before = is_private()
    assert on_a_thread(inside)
    assert is_private() == before
