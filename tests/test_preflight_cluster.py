"""An address that nobody answers at, or that is not this machine's, is one line before anything is written."""

import socket

import pytest

from rl_jax import preflight_cluster
from rl_jax.config import ConfigError
from rl_jax.preflight_cluster import check_addresses
from rl_jax.settings import ClusterSettings


def refused(**settings):
    with pytest.raises(ConfigError) as caught:
        check_addresses(ClusterSettings(**settings))
    (error,) = caught.value.errors
    return error


@pytest.fixture
def taken():
    """A port of this host that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_ray_that_does_not_answer_is_told_with_what_to_start(taken):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    error = refused(backend="ray", address=f"127.0.0.1:{port}")
    assert f"cluster.address=127.0.0.1:{port}: nobody answers there" in error
    assert "Connection refused" in error and "ray start --head" in error
    assert "nobody answers there" in refused(backend="ray", address="127.0.0.1:none")
    check_addresses(ClusterSettings(backend="ray", address=f"127.0.0.1:{taken}"))
    check_addresses(ClusterSettings(backend="ray", address="auto"))


def test_ray_of_this_host_without_a_network_of_its_own_is_refused_with_three_ways_out(monkeypatch):
    monkeypatch.setattr(preflight_cluster, "refusal", lambda: "unshare: Operation not permitted")
    error = refused(backend="ray")
    assert "cluster.private_network: this host gives no network namespace" in error
    for way in ("unshare --net", "cluster.address", "cluster.private_network=False"):
        assert way in error
    check_addresses(ClusterSettings(backend="ray", private_network=False))
    check_addresses(ClusterSettings(backend="ray", address="auto"))


@pytest.mark.parametrize("backend", ["external", "ray"])
def test_address_that_cannot_be_listened_on_is_told(backend, taken):
    address = "auto" if backend == "ray" else ""
    error = refused(backend=backend, address=address, host="192.0.2.1")  # of documentation
    assert "cluster.host=192.0.2.1 with cluster.port=0 cannot be listened on" in error
    assert "an address of this machine" in error
    error = refused(backend=backend, port=taken)
    assert f"cluster.port={taken} cannot be listened on (Address already in use" in error
    check_addresses(ClusterSettings(backend=backend))
    check_addresses(ClusterSettings(backend="local", host="192.0.2.1"))  # it listens nowhere
