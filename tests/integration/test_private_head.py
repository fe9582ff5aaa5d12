"""A cluster as `launch` makes it: asked with every token, seen from outside and by a reward."""

import os
import shlex
import subprocess
import sys
import tempfile

import ports
import pytest
from commands import REPOSITORY
from private_cluster import environment, sessions_of

from async_grpo.cli.local_run import LocalRun
from async_grpo.cli.run_processes import cluster_of, command_to_ask
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.verification.usage import descendants

pytestmark = pytest.mark.integration
CONNECT = """
{first}
from async_grpo.cluster.cluster import Cluster
Cluster.join({address!r}, namespace="n")
print("in")
"""


SPY = """
import glob, os
def look(sample):
    tokens = glob.glob({place!r} + "/ray-tokens-*/*/auth_token", recursive=True)
    others = {{pid for pid in os.listdir("/proc") if pid.isdigit()}} - {{str(os.getpid())}}
    seen = [path for path in [{token!r}, *tokens] if os.path.exists(path) and open(path).read()]
    return float(bool(seen or others or os.access({place!r}, os.W_OK)))
"""
POOL = """
import ray, sys
import numpy as np
from async_grpo.cluster.cluster import Cluster
from async_grpo.types import GradingRequest, Question, Turn, VerificationRequest
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.pool import VerifierPool

Cluster.join({address!r}, namespace="n")
pool = ray.remote(VerifierPool).options(num_cpus=0).remote(
    VerifierConfig(reward_names=(sys.argv[1],)), worker_id="v"
)
none = np.zeros(0, np.int32)
output = VerificationRequest(0, 0, Question(none, "", "", {{}}), Turn(none, none, (), "stop", ""))
info = ray.get(pool.info.remote(), timeout=60)
(verdict,) = ray.get(pool.verify.remote(GradingRequest((output,))), timeout=60)
status = ray.get(pool.status.remote(), timeout=60)
confinement = dict(status.confinement)
print(not any(confinement.values()), confinement == dict(info.confinement), verdict.reward)
"""


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """(its address, the path of its token, the process that leads it)"""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "logs").mkdir()
    train = TrainConfig(model_name_or_path="m", data_path="d", output_dir=str(folder))
    run = LocalRun(
        prepare=(), workers=(WorkerConfig(mode="verifier"),), train=train, num_ranks=0, plot={},
        num_cpus=8, ray_address="", dashboard=True,
    )  # fmt: skip
    with cluster_of(run) as (variables, _):
        address = variables["RAY_ADDRESS"]
        yield address, variables["RAY_AUTH_TOKEN_PATH"], leader_of(address)
    assert "Draining" not in (folder / "logs" / "ray.log").read_text()  # which takes 30 s


def leader_of(address):
    """`ray start` of the head that listens there."""
    for pid in descendants(os.getpid()):
        with open(f"/proc/{pid}/cmdline") as file:
            words = file.read().split("\0")
        if "--head" in words and address.rpartition(":")[2] in words:
            return pid
    raise AssertionError(f"nobody has started {address}")


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
    first = "import ray"  # which reads the mode when it is imported
    assert connect(address, tmp_path, first=first, RAY_AUTH_TOKEN_PATH=token) == (0, "in")
    for variables, sentence in (
        ({}, f"wants a token, and none was sent, for there is none in {tmp_path}/.ray/auth_token"),
        ({"RAY_AUTH_TOKEN": "0" * 64}, "refuses the token of RAY_AUTH_TOKEN"),
    ):
        code, last = connect(address, tmp_path, **variables)
        assert code == 1
        assert f"the Ray cluster at {address} {sentence}" in last


@pytest.mark.slow  # nothing of it answers without a token: below
def test_its_dashboard_lists_actors_for_whoever_has_the_token(private, tmp_path):
    _, token, leader = private
    with open(f"/proc/{leader}/cmdline") as file:
        words = file.read().split("\0")
    pages = f"http://127.0.0.1:{words[words.index('--dashboard-port') + 1]}"
    said = command_to_ask(pages, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token})
    *variables, _, kind, what, option, url = shlex.split(said)
    ray = [sys.executable, "-m", "ray.scripts.scripts", kind, what, option, url]
    refusal = "oken authentication is enabled"
    for given, answer in ((variables, "No resource in the cluster"), ((), refusal)):
        env = environment() | dict(word.split("=", 1) for word in given) | {"HOME": str(tmp_path)}
        done = subprocess.run(ray, env=env, capture_output=True, text=True, timeout=60)
        assert answer in done.stdout + done.stderr


def test_its_resources_are_told_to_whoever_does_not_join(private):
    address, token, _ = private
    code = (
        f"from async_grpo.cluster import head; print(*head.resources_of(head.locate({address!r})))"
    )
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


def test_a_reward_sees_no_token_and_no_process_and_its_pool_knows(private, tmp_path):
    address, token, _ = private
    spy = tmp_path / "spy.py"
    spy.write_text(SPY.format(place=tempfile.gettempdir(), token=token))
    env = environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
    env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", POOL.format(address=address), f"{spy}:look"],
        cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True", "0.0"], done.stderr


def test_nothing_of_it_can_be_reached_from_outside(private):
    found = ports.scan(sessions_of({private[2]}), outside=ports.outside_address())
    assert len(found) >= 5
    assert {port.bound_to for port in found} == {"127.0.0.1"}
    assert {port.outside for port in found} <= {"refused", "another"}  # clusters of other tests
    assert {port.without_token for port in found} == {"", "UNAUTHENTICATED"}
