"""Scripts for queues: they are bash, ask for what the run takes, and go on when run again."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli.launch_file import _file_kept, launch
from async_grpo.cli.local_run import OF_EVERY_JOB, num_devices, options_of_run, read_run
from async_grpo.util import deadlines

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = str(REPOSITORY / "examples" / "quickstart.toml")


def emitted(kind, *typed):
    done = CliRunner().invoke(launch, [EXAMPLE, *typed, "--emit", kind], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.fixture
def submit(tmp_path):
    """Runs a script where `srun` and `ray` only note what they were asked to do."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "ray"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> noted\n')
        (programs / name).chmod(0o755)

    def run(script, **variables):
        (tmp_path / "job.sh").write_text(script)
        subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True, timeout=20)
        if shellcheck := shutil.which("shellcheck"):
            subprocess.run([shellcheck, "job.sh"], cwd=tmp_path, check=True, timeout=60)
        environ = {"PATH": f"{programs}:{os.environ['PATH']}", **variables}
        done = subprocess.run(
            ["bash", "job.sh"], cwd=tmp_path, env=environ, capture_output=True, text=True,
            timeout=20, check=False,
        )  # fmt: skip
        noted = tmp_path / "noted"
        return done, noted.read_text().splitlines() if noted.exists() else []

    return run


def test_a_slurm_job_launches_the_file_that_it_brings(submit, tmp_path):
    script = emitted("slurm", "--output-dir", "runs/a b", "--learning-rate", "2e-4")
    asked = {line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert asked >= {"--nodes=1", "--gpus-per-node=4", "--cpus-per-task=8", "--mem=0", "--requeue"}
    done, [noted] = submit(script, SLURM_CPUS_PER_TASK="8")
    assert done.returncode == 0, done.stderr
    assert "--cpu-bind=none --cpus-per-task=8" in noted
    assert noted.endswith("--ntasks=1 async-grpo launch runs/a b/run.toml")
    saved = tomllib.loads((tmp_path / "runs" / "a b" / "run.toml").read_text())
    assert saved["train"]["learning_rate"] == 2e-4 and saved["train"]["overwrite"] is False


@pytest.mark.parametrize(("kind", "typed"), [("slurm", []), ("ray-job", ["--ray-address=auto"])])
def test_a_job_that_is_submitted_again_finds_the_file_as_the_run_has_left_it(
    kind, typed, submit, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    script, folder = emitted(kind), Path("runs/quickstart")
    submit(script, RAY_API_SERVER_ADDRESS="http://head:8265")
    options = launch.make_context("launch", [str(folder / "run.toml"), *typed]).params
    with _file_kept(read_run(**options_of_run(options))):
        (folder / "training_params.json").touch()
    done, _ = submit(script, RAY_API_SERVER_ADDRESS="http://head:8265")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in folder.iterdir()} == {"run.toml", "training_params.json"}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_job_with_other_options_keeps_an_older_file_under_another_name_and_says_so(
    submit, tmp_path
):
    submit(emitted("slurm"))
    file = tmp_path / "runs" / "quickstart" / "run.toml"
    file.write_text("as it was changed")
    done, _ = submit(emitted("slurm", "--learning-rate", "2e-4"))
    assert tomllib.loads(file.read_text())["train"]["learning_rate"] == 2e-4
    assert file.with_name("run.toml.before").read_text() == "as it was changed"
    assert done.stderr.startswith("runs/quickstart/run.toml had other options, now in")


def test_a_ray_job_joins_the_cluster_and_needs_its_address(submit, tmp_path):
    script = emitted("ray-job")
    done, noted = submit(script)
    assert done.returncode != 0 and "name the dashboard" in done.stderr and not noted
    done, [noted] = submit(script, RAY_API_SERVER_ADDRESS="http://head:8265")
    assert done.returncode == 0, done.stderr
    assert noted == (
        f"ray job submit --address http://head:8265 -- bash -c cd {tmp_path} && "
        "exec async-grpo launch runs/quickstart/run.toml --ray-address auto"
    )


def test_a_job_of_several_machines_joins_them_and_is_the_same_shell_as_the_example(
    submit, tmp_path
):
    script = emitted("slurm", "--plan-for", "4,4", "--trainer-nodes", "2", "--nproc-per-node", "2")
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --gpus-per-node=4\n" in script
    example = (REPOSITORY / "examples" / "cluster" / "slurm.sh").read_text()
    assert script.endswith(example[example.index(OF_EVERY_JOB) :])
    submit(script)
    saved = tomllib.loads((tmp_path / "runs" / "quickstart" / "run.toml").read_text())
    assert (saved["launch"]["trainer_nodes"], saved["train"]["nproc_per_node"]) == (2, 2)
    assert saved["launch"]["ray_address"] == "auto"


def test_machines_of_a_job_are_equal_and_too_small_ones_are_refused():
    assert "#SBATCH --gpus-per-node=4\n" in emitted("slurm", "--plan-for", "8,4")
    typed = ("--plan-for", "1", "--gpus-per-rank", "0.9", "--emit", "slurm")
    done = CliRunner().invoke(launch, [EXAMPLE, *typed])
    assert done.exit_code == 1 and "device" in done.stderr and not done.stdout


def test_the_example_asks_for_what_an_emitted_job_does():
    def asked(text):
        return {line.partition("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")}

    example = (REPOSITORY / "examples" / "cluster" / "slurm.sh").read_text()
    script = emitted("slurm", "--plan-for", "8,8,8")
    assert asked(example) == asked(script)
    assert f"--signal=B:USR1@{deadlines.JOB_ENDED_S:.0f}\n" in example


def test_devices_are_those_of_ranks_and_workers():
    run = read_run(
        config=EXAMPLE, train_options=("--nproc-per-node", "3"), prepare="", num_cpus=0,
        ray_address="",
    )  # fmt: skip
    assert num_devices(run) == 5
