"""How a run is joined by its folder: what it leaves there, and what is refused in one sentence."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from test_folder_lock import another_trainer

from async_grpo.cluster import cluster as module
from async_grpo.run.output_folder import CONNECTION_FILE, way_to
from async_grpo.util.errors import ClusterError

TRAINER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from async_grpo.run.output_folder import leave_connection
from async_grpo.run.output_folder import lock

cluster = SimpleNamespace(
    head_address=lambda: "127.0.0.1:7", metrics_url=lambda: "http://127.0.0.1:8/metrics"
)
file = lock(Path("run"))
leave_connection(Path("run"), cluster)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def elsewhere(monkeypatch):
    """The environment of somebody who uses another cluster."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "of another cluster")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that trains, and its trainer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "auth_token").write_text("secret")
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "tokens/auth_token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    (tmp_path / "trainer.py").write_text(TRAINER)
    with subprocess.Popen(
        [sys.executable, "trainer.py"], env={"PATH": os.defpath, **own}, stdout=subprocess.PIPE
    ) as trainer:
        try:
            trainer.stdout.readline()
            yield tmp_path / "run", trainer
        finally:
            trainer.kill()


def way(folder):
    return way_to(folder, by_options="elsewhere:1")


def test_a_run_leaves_all_that_a_client_of_its_cluster_needs_but_the_secret(run, tmp_path):
    file = run[0] / CONNECTION_FILE
    assert file.stat().st_mode & 0o777 == 0o600 and "secret" not in file.read_text()
    assert json.loads(file.read_text()) == {
        "ray_address": "127.0.0.1:7",
        "metrics_url": "http://127.0.0.1:8/metrics",
        "variables": {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"{tmp_path}/tokens/auth_token",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        },
    }


def test_whoever_joins_a_run_has_its_address_and_its_variables(run, elsewhere, tmp_path):
    assert way(run[0]) == "127.0.0.1:7"
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == f"{tmp_path}/tokens/auth_token"
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == (
        "token", "0",
    )  # fmt: skip
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_connection_that_a_killed_run_has_left_is_not_tried(run, elsewhere):
    folder, trainer = run
    trainer.kill()
    trainer.wait()
    with pytest.raises(ClusterError, match="it has ended, or has not begun yet: start it again"):
        way(folder)


def test_a_token_that_is_gone_is_said(run, elsewhere, tmp_path):
    (tmp_path / "tokens" / "auth_token").unlink()
    with pytest.raises(ClusterError, match="the token of the run's cluster must be in"):
        way(run[0])


def test_a_run_without_a_connection_is_looked_for_where_its_options_say(elsewhere, tmp_path):
    with another_trainer(tmp_path):
        assert way(tmp_path) == "elsewhere:1"


def test_a_run_of_another_machine_may_live(elsewhere, tmp_path):
    """Its lock cannot be seen from here."""
    (tmp_path / "trainer.lock").write_text(json.dumps({"host": f"not-{socket.gethostname()}"}))
    assert way(tmp_path) == "elsewhere:1"


def test_a_cluster_that_never_lets_in_is_given_up(monkeypatch):
    import ray

    monkeypatch.setattr(module, "find_head", lambda address: address)
    monkeypatch.setattr(ray, "init", lambda **_: time.sleep(30))
    started = time.monotonic()
    with pytest.raises(ClusterError, match=r"must let this process in within 0\.2 s, it did not"):
        module.Cluster.join("127.0.0.1:7", namespace="n", timeout_s=0.2)
    assert time.monotonic() - started < 20
