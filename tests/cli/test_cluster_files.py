"""The files of many machines, with a Slurm, a Ray and a launch of a few lines in their places."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from async_grpo.cli.assignment import Node, dispatches
from async_grpo.cli.launch_file import launch
from async_grpo.cli.local_run import options_of_run, planned

REPOSITORY = Path(__file__).parents[2]
CLUSTER = REPOSITORY / "examples" / "cluster"
SLURM = CLUSTER / "slurm.sh"
SCRIPTS = [*REPOSITORY.glob("tools/*.sh"), *REPOSITORY.glob("examples/**/*.sh")]
NOTE = """#!/bin/sh
printf '%s\\n' "$(echo $(basename $0) "$*" | tr "\\n" " ")" >>noted  # at once: others write too
"""
PROGRAMS = {
    # Runs a command in the place of a node, as Slurm does.
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "[ $1 = requeue ] || printf '%s\\n' 127.0.0.1 node2 node3",
    "ip": '[ "$5" = ib0 ] && echo "ib0@ib0   UP   10.0.0.7/24 fe80::1/64"',
    # A head listens as long as it is there; another node ends at once.
    "ray": """case "$*" in *--head*) exec python -c '
import re, socket, sys, time
port = int(re.search("--port=([0-9]+)", str(sys.argv))[1])
listener = socket.create_server(("127.0.0.1", port))
time.sleep(60)' "$@" ;; esac
""",
    "async-grpo": """exec python -c '
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(int(os.environ["ENDS_WITH"])))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with open("ready", "w") as ready:  # a signal while a file is finalized would be swallowed
    ready.write(str(os.getpid()))
end = time.monotonic() + 30
while time.monotonic() < end and open("noted").read().count("ray start") < int(os.environ["RAYS"]):
    time.sleep(0.05)
time.sleep(float(os.environ["LASTS_S"]))'
""",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_one_for_bash(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "-x", script], check=True, timeout=60)


@pytest.fixture
def submit(tmp_path):
    """Runs the Slurm script in a folder like a clone; a signal comes when the run is ready."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(NOTE + text)
        (programs / name).chmod(0o755)
    (programs / "python").symlink_to(sys.executable)

    def run(*typed, nodes=1, number=0, **variables):
        environ = os.environ | {
            "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "all", "ENDS_WITH": "0",
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_CPUS_PER_TASK": "64", "LASTS_S": "30" if number else "0",
            "RAYS": str(nodes if nodes > 1 else 0), **variables,
        }  # fmt: skip
        job = subprocess.Popen(
            ["bash", SLURM, *typed], env=environ, cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 30
        ready = tmp_path / "ready"
        while number and not (ready.exists() and ready.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if number:
            job.send_signal(number)
        if number == signal.SIGTERM:  # scancel: to the steps' tasks too
            os.kill(int(ready.read_text()), number)
        _, said = job.communicate(timeout=60)
        noted = tmp_path / "noted"
        return job.returncode, [each.strip() for each in noted.open()] if noted.exists() else [said]

    return run


def test_one_machine_launches_the_file_with_all_cpus_of_the_job(submit):
    code, [step, launched] = submit("run.toml", "--num-cpus", "8")
    assert code == 0 and launched == "async-grpo launch run.toml --num-cpus 8"
    assert step.startswith("srun --overlap --cpu-bind=none --cpus-per-task=64 ")


def test_several_machines_are_a_cluster_with_a_token_whose_nodes_the_launch_awaits(
    submit, tmp_path
):
    code, noted = submit("run.toml", nodes=3)
    assert code == 0, noted
    places = [re.search(r"--nodelist=(\S+)", line)[1] for line in noted if "exec ray" in line]
    assert sorted(places) == ["127.0.0.1", "node2", "node3"]
    started = [line for line in noted if line.startswith("ray start")]
    assert all("--block --num-cpus=64" in line for line in started) and len(started) == 3
    assert not any("--node-ip-address" in line for line in started)  # Ray finds its own
    assert sum("--head" in line for line in started) == 1
    port = int(re.search(r"--port=(\d+)", str(started))[1])
    assert 20000 <= port < 30000, "an ephemeral port, or one of Ray's workers, may be taken"
    [launched] = [line for line in noted if line.startswith("async-grpo")]
    assert launched == "async-grpo launch run.toml --ray-address=auto --await-nodes=3"
    [step] = [line for line in noted if line.startswith("srun") and "launch" in line]
    assert "--nodelist=127.0.0.1 " in step
    assert not list(tmp_path.glob("runs/*/ray-token")), "a token is left behind"


def test_ray_takes_the_network_that_is_named(submit):
    code, noted = submit("run.toml", nodes=3, NETWORK="ib0")
    started = [line for line in noted if line.startswith("ray start")]
    assert code == 0 and len(started) == 3
    assert all(" --node-ip-address=10.0.0.7 " in line for line in started)


def test_a_job_whose_head_does_not_start_says_where_to_look(submit, tmp_path):
    (tmp_path / ".venv" / "bin" / "ray").write_text("#!/bin/sh\nexit 1")
    code, noted = submit("run.toml", nodes=3)
    assert code == 1 and not any("launch" in line for line in noted)


@pytest.mark.parametrize(
    ("number", "ends_with", "code", "is_queued"),
    [
        (signal.SIGUSR1, 0, 0, True),  # the batch was done
        (signal.SIGUSR1, 143, 143, True),  # it took too long
        (signal.SIGUSR1, 1, 1, False),  # it would fail again
        (signal.SIGTERM, 0, 143, False),  # scancel
    ],
)
def test_a_job_whose_time_is_up_ends_its_run_and_is_queued_again(
    number, ends_with, code, is_queued, submit
):
    ended, noted = submit("run.toml", number=number, ENDS_WITH=str(ends_with))
    assert ended == code, noted
    assert (f"scontrol requeue {os.getpid()}" in noted) == is_queued


@pytest.fixture(scope="module")
def ray_job():
    return yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())["spec"]


def pods_of(ray_job):
    """The pods of each machine: the head's, then the others'."""
    cluster = ray_job["rayClusterSpec"]
    groups = cluster["workerGroupSpecs"]
    assert all(each["replicas"] == each["minReplicas"] == each["maxReplicas"] for each in groups)
    others = [each["template"]["spec"] for each in groups for _ in range(each["replicas"])]
    return [cluster["headGroupSpec"]["template"]["spec"], *others]


def test_a_ray_job_launches_an_example_that_fits_on_its_machines(ray_job, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    env, _, folder, *command = shlex.split(ray_job["entrypoint"])
    assert (env, folder, command[:2]) == ("env", "/async-grpo", ["async-grpo", "launch"])
    assert f"WORKDIR {folder}\n" in (CLUSTER / "Dockerfile").read_text()
    run = planned(**options_of_run(launch.make_context("launch", command[2:]).params))
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods_of(ray_job)]
    assert (run.ray_address, run.await_nodes) == ("auto", len(limits))
    nodes = [
        Node(str(number), "", int(each["nvidia.com/gpu"]), float(each["cpu"]))
        for number, each in enumerate(limits)
    ]
    assert {each.node.node_id for each in dispatches(run, nodes)} == {"1", "2"}
    assert all(float(each["cpu"]) == run.num_cpus for each in limits)


def test_pods_of_a_ray_job_have_our_image_shared_memory_and_the_run_s_folder(ray_job):
    [ray] = re.findall(
        r"^ray\[.*\]==(\S+)", (REPOSITORY / "requirements/base.txt").read_text(), re.M
    )
    assert ray_job["rayClusterSpec"]["rayVersion"] == ray
    assert ray_job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for pod in pods_of(ray_job):
        [container] = pod["containers"]
        assert container["image"] == "async-grpo"
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert set(mounts.values()) == {"/dev/shm", "/async-grpo/runs"}
        assert set(mounts) == {each["name"] for each in pod["volumes"]}


def test_the_image_has_what_machines_need_of_each_other():
    text = (CLUSTER / "Dockerfile").read_text()
    installed = text.partition("--no-install-recommends")[2].partition("&&")[0].split()
    assert {"libibverbs1", "ibverbs-providers", "iproute2", "wget", "python3-dev"} <= set(installed)
