"""A cluster as the quick start makes it: asked with every token, and looked at from outside."""

import os
import subprocess
import sys

import ports
import pytest
from commands import REPOSITORY
from private_cluster import PrivateCluster, environment, sessions_of

from async_grpo import head

pytestmark = pytest.mark.integration
CONNECT = """
{first}
from async_grpo import cluster
cluster.connect({address!r}, namespace="n")
print("in")
"""


@pytest.fixture(scope="module")
def private():
    """(its address, the path of its token, the process that leads it)"""
    with head.private_cluster() as variables:
        cluster = PrivateCluster(env=environment() | variables)
        try:
            yield cluster.address, variables["RAY_AUTH_TOKEN_PATH"], cluster._head.pid
        finally:
            cluster.stop()


def connect(address, folder, *, first="", **variables):
    """Of a client whose home is `folder`: exit code, last line."""
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # as whoever launched the run has it
    env = environment() | loopback | {"HOME": str(folder)} | variables
    if not variables.get("RAY_AUTH_MODE"):
        env.pop("RAY_AUTH_MODE")
    done = subprocess.run(
        [sys.executable, "-c", CONNECT.format(address=address, first=first)],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()[-1]


def test_only_whoever_has_the_token_is_let_in(private, tmp_path):
    address, token, _ = private
    for first in ("", "import ray"):  # which reads the mode when it is imported
        assert connect(address, tmp_path, first=first, RAY_AUTH_TOKEN_PATH=token) == (0, "in")
    for variables, sentence in (
        ({}, f"wants a token, and none was sent, for there is none in {tmp_path}/.ray/auth_token"),
        ({"RAY_AUTH_TOKEN": "0" * 64}, "refuses the token of RAY_AUTH_TOKEN"),
    ):
        code, last = connect(address, tmp_path, **variables)
        assert code == 1
        assert f"the Ray cluster at {address} {sentence}" in last


def test_its_resources_are_told_to_whoever_does_not_join(private):
    address, token, _ = private
    code = f"from async_grpo import head; print(*head.resources_of(head.locate({address!r})))"
    env = environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=env, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "8.0", "8.0", "0.0", "0.0"], done.stderr


def test_a_token_does_no_harm_where_none_is_wanted(ray_cluster, private, tmp_path):
    assert connect(ray_cluster, tmp_path, RAY_AUTH_TOKEN_PATH=private[1]) == (0, "in")


def test_the_token_is_its_owners_alone_and_in_no_command_line(private):
    _, token, leader = private
    assert os.stat(token).st_mode & 0o777 == 0o600
    with open(token) as file:
        secret = file.read()
    assert len(secret) == 64
    for pid in sessions_of({leader}):
        with open(f"/proc/{pid}/cmdline") as file:
            assert secret not in file.read()


def test_nothing_of_it_can_be_reached_from_outside(private):
    found = ports.scan(sessions_of({private[2]}), outside=ports.outside_address())
    assert len(found) >= 5
    assert {port.bound_to for port in found} == {"127.0.0.1"}
    assert {port.outside for port in found} <= {"refused", "another"}  # clusters of other tests
    assert {port.without_token for port in found} == {"", "UNAUTHENTICATED"}
