import os
import socket

import pytest
from ray._private import services

from async_grpo.cluster import head
from async_grpo.cluster.cluster import Cluster
from async_grpo.util.errors import ClusterError


@pytest.fixture(autouse=True)
def no_cluster_by_chance(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    os.environ.pop("RAY_AUTH_MODE", None)  # what was set before is put back after this


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at 127.0.0.1:1 \(Connection refused\): start one"),
        ("no.such.host.invalid:6379", r"no Ray cluster answers at no.such.host.invalid:6379"),
        ("localhost", r"must be host:port or auto, got 'localhost'"),
        ("ray://127.0.0.1:10001", r"must be host:port or auto, got 'ray://127.0.0.1:10001'"),
        (":6379", r"must be host:port or auto"),
    ],
)
def test_an_address_where_no_cluster_is_told_at_once(address, sentence):
    with pytest.raises(ClusterError, match=sentence):
        Cluster.join(address, namespace="n")


@pytest.mark.parametrize(
    ("running", "sentence"),
    [
        ((), "no Ray cluster runs on this machine: start one with `ray start"),
        (("10.0.0.1:2", "10.0.0.1:1"), "choose one with --ray-address, of 10.0.0.1:1, 10.0.0.1:2"),
        (("127.0.0.1:1",), "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_auto_takes_the_only_cluster_of_the_machine(running, sentence, monkeypatch):
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: set(running))
    with pytest.raises(ClusterError, match=sentence):
        Cluster.join("auto", namespace="n")


def test_auto_obeys_ray_address(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    with pytest.raises(ClusterError, match=r"answers at 127.0.0.1:2"):
        Cluster.join("auto", namespace="n")
    with pytest.raises(ClusterError, match=r"answers at 127.0.0.1:1"):
        Cluster.join("127.0.0.1:1", namespace="n")


@pytest.fixture
def a_head(monkeypatch):
    """Something listens, and is taken for Ray's head; yields its port."""
    monkeypatch.setattr(head, "_probe", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_cluster_open_to_everyone_is_told_and_one_with_a_token_is_not(
    a_head, monkeypatch, caplog
):
    head.find_head(f"127.0.0.1:{a_head}")
    assert "asks for no token: run `ray get-auth-token --generate`" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    head.find_head(f"127.0.0.1:{a_head}")
    assert caplog.text == ""
