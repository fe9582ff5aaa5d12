"""An emitted Slurm job on two machines that train, both here, with a Slurm of a few lines."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from commands import REPOSITORY, Command, wait_until
from loops import read_lines
from private_cluster import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]
READY_S, ENDED_S = 400, 180  # of a machine that is full
SLURM = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": '[ $1 = requeue ] && echo "$*" >>queued || { hostname; echo other; }',
}
FILE = """
[launch]
num_cpus = 3
prepare = "python prepare.py runs/it/questions.jsonl"

[[worker]]
model_path = "model"
max_model_len = 128
max_num_seqs = 16
reward_fns = "countdown"

[train]
model_name_or_path = "model"
data_path = "runs/it/questions.jsonl"
output_dir = "runs/it"
num_training_batches = 1000
batch_size = 4
samples_per_question = 4
max_generation_tokens = 16
max_tokens_per_gpu = 1024
trackers = ""
"""
PREPARE = """
import json, sys
rows = [{"input": f"use {a} 2 1 to make {a + 1}\\n", "nums": [a, 2, 1], "target": a + 1}
        for a in range(3, 60)]
open(sys.argv[1], "w").write("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copytree(REPOSITORY / "sample-data" / "tiny-countdown", tmp_path / "model")
    (tmp_path / "run.toml").write_text(FILE)
    (tmp_path / "prepare.py").write_text(PREPARE)
    command = [*(sys.executable, "-m", "async_grpo.cli.main", "launch", "run.toml"),
               *("--trainer-nodes", "2", "--plan-for", "0,0", "--emit", "slurm")]  # fmt: skip
    job = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, check=True)
    (tmp_path / "job.sh").write_bytes(job.stdout)
    return tmp_path


def batches_of(folder):
    file = folder / "runs" / "it" / "training_metrics.jsonl"
    return [row["iteration"] for row in read_lines(file)] if file.exists() else []


def test_a_job_whose_time_is_up_ends_with_a_batch_and_goes_on_when_it_runs_again(folder):
    short = tempfile.mkdtemp(prefix="ag-")  # sockets below it may have names of 107 bytes
    of_slurm = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "both", "SLURM_CPUS_PER_TASK": "3",
        "RAY_TMPDIR": short, "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(256 << 20),
    }  # fmt: skip

    def run_until(*, num_batches):
        with Command("job.sh", program="bash", cwd=folder, env=environment(**of_slurm)) as job:

            def is_trained():
                assert not job.has_ended(), job.out + job.err
                return len(batches_of(folder)) >= num_batches

            wait_until(is_trained, timeout_s=READY_S)
            job.send(signal.SIGUSR1)
            return job.wait(timeout_s=ENDED_S), job.out + job.err

    code, said = run_until(num_batches=2)
    trained = batches_of(folder)
    assert code == 0 and f"stopped after batch {len(trained)} of 1000" in said, said
    assert (folder / "queued").read_text() == f"requeue {os.getpid()}\n"
    assert list(folder.glob("runs/it/logs/trainer@*.log")), "the second machine did not train"
    code, said = run_until(num_batches=len(trained) + 2)
    assert code == 0 and "had other options" not in said, said
    assert "the run goes on with what was prepared for it" in said, said
    assert batches_of(folder)[: len(trained) + 2] == [*range(len(trained) + 2)]
    assert len((folder / "queued").read_text().splitlines()) == 2
    shutil.rmtree(short, ignore_errors=True)
