"""The scripts of many machines, with a Slurm and a Ray of a few lines in the place of real ones."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.cli.train import config_of
from async_grpo.cli.train import main as train
from async_grpo.cli.worker import main as worker
from async_grpo.config.worker_config import WorkerConfig

REPOSITORY = Path(__file__).parents[2]
SLURM = REPOSITORY / "examples" / "cluster" / "slurm.sh"
SCRIPTS = [*REPOSITORY.glob("tools/*.sh"), *REPOSITORY.glob("examples/**/*.sh")]
# Says what it was asked to run, and where. A Ray head listens on its port as long as it is there;
# the trainer does not end before all others have begun.
SRUN = f"""#!/bin/sh
echo "$*" >> srun.log
case "$*" in *"ray start --head"*) exec {sys.executable} -c '
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
time.sleep(30)' "$@" ;;
*torchrun*) n=0; while [ $(wc -l <srun.log) -lt $NUM_STEPS ] && [ $n -lt 200 ]; do
    /bin/sleep 0.1; n=$((n + 1)); done ;; esac
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_one_for_bash(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "-x", script], check=True, timeout=60)


@pytest.fixture
def submit(tmp_path):
    """Runs the Slurm script on some nodes, in a folder that looks like a clone."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()

    def run(*nodes, **variables):
        texts = {"srun": SRUN, "sleep": "#!/bin/sh\n"}
        texts["scontrol"] = f"#!/bin/sh\nprintf '%s\\n' {' '.join(nodes)}\n"
        texts["python"] = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        for name, text in texts.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        environ = {
            "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_NODELIST": "all", "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_GPUS_ON_NODE": "8", "NUM_STEPS": "7", **variables,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", SLURM, "run.toml"], env=environ, cwd=tmp_path, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        log = tmp_path / "srun.log"
        return done, log.read_text().splitlines() if log.exists() else []

    return run


def test_the_first_machines_train_and_the_others_generate(submit, tmp_path):
    done, commands = submit(
        "127.0.0.1", "node2", "node3", "node4", TRAINER_NODES="2", TENSOR_PARALLEL="4"
    )
    assert done.returncode == 0, done.stderr
    where = {
        re.search(r"--nodelist=(\S+)", line)[1]: line for line in commands if "ray start" in line
    }
    assert set(where) == {"127.0.0.1", "node2", "node3", "node4"}  # all are nodes of Ray
    workers = [line for line in commands if "async-grpo worker" in line]
    assert {re.search(r"--nodelist=(\S+)", line)[1] for line in workers} == {"node3", "node4"}
    assert all("--num-workers 2 --tensor-parallel-size 4" in line for line in workers)
    [trainer] = [line for line in commands if "torchrun" in line]
    assert "--nodes=2 --ntasks=2 --nodelist=127.0.0.1,node2" in trainer
    assert "--nnodes 2 --nproc-per-node 8" in trainer and trainer.endswith("--nproc-per-node 8")
    assert not list(tmp_path.glob("runs/*/ray-token")), "a token is left behind"


def test_a_job_of_one_machine_is_sent_to_launch(submit):
    done, commands = submit("127.0.0.1")
    assert done.returncode == 1 and "use async-grpo launch on one machine" in done.stderr
    assert commands == []


def test_its_command_lines_are_those_of_the_example():
    file = f"--config={REPOSITORY}/examples/qwen_7b.toml"
    typed = [file, "--mode", "generation", "--num-workers", "8", "--tensor-parallel-size", "1"]
    config = WorkerConfig(**worker.make_context("worker", typed).params)
    assert (config.num_workers, config.max_num_seqs) == (8, 256)
    assert config.engine_options == {"max_num_batched_tokens": "8192"}
    trainer = train.make_context("train", [file, "--nproc-per-node", "8"])
    assert trainer.params["nproc_per_node"] == 8
    assert config_of(trainer).places.model_name_or_path == config.model_path
