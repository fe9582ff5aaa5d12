"""`async-grpo launch FILE --emit slurm | ray-job`: the run as a script for whoever has a queue.

The script brings the resolved file with it, which resumes: a job that is requeued, or submitted
again, goes on with its run. Paths stay relative to the folder in which it is submitted.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import replace

from async_grpo.cli.local_run import RUN_FILE, LocalRun, as_toml, resuming
from async_grpo.util import deadlines

END_OF_FILE = "END_OF_RUN_FILE"


def slurm(run: LocalRun) -> str:
    """For `sbatch`: the whole run on one machine of a cluster."""
    devices = num_devices(run)
    asked = [
        f"--job-name={shlex.quote(run.folder.name)}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={run.num_cpus}",
        *([f"--gpus-per-node={devices}"] if devices else []),
        "--time=24:00:00",
        f"--signal=INT@{deadlines.JOB_ENDED_S}",
        "--requeue",
        "--open-mode=append",
    ]
    header = "".join(f"#SBATCH {option}\n" for option in asked)
    command = f"srun async-grpo launch {_file(run)}"
    return f"#!/usr/bin/env bash\n{header}{_body(run, command)}"


def ray_job(run: LocalRun) -> str:
    """For a shell: a job of a Ray cluster that is there, whose entry point launches the run."""
    address = '"${RAY_API_SERVER_ADDRESS:?name the dashboard, http://HOST:8265}"'
    here = 'cd $(printf %q "$PWD")'
    launch = f"async-grpo launch {_file(run)} --ray-address auto"
    command = f'ray job submit --address {address} -- bash -c "{here} && exec {launch}"'
    run = replace(run, ray_address="auto")  # so `launch` will write the same file
    return f"#!/usr/bin/env bash\n{_body(run, command)}"


EMITTED: dict[str, Callable[[LocalRun], str]] = {"slurm": slurm, "ray-job": ray_job}


def num_devices(run: LocalRun) -> int:
    """That ranks and workers take, where there are any."""
    shares = [each.num_workers * each.num_devices * each.gpus_per_worker for each in run.workers]
    return math.ceil(sum(shares) + run.num_ranks * run.train.gpus_per_rank)


def _file(run: LocalRun) -> str:
    return shlex.quote(str(run.folder / RUN_FILE))


def _body(run: LocalRun, command: str) -> str:
    """Write the run's file, keep an older one that says otherwise, and go on with it."""
    file, folder = _file(run), shlex.quote(str(run.folder))
    return (
        "# Submit it in the folder that the paths of the run are relative to, which all machines\n"
        f"# see; submitted again, the run goes on. Its options are those below, also in {file}.\n"
        "set -euo pipefail\n"
        f"mkdir -p -m 700 {folder}\n"
        f"cat >{file}.new <<'{END_OF_FILE}'\n"
        f"{as_toml(resuming(run).tables)}{END_OF_FILE}\n"
        f"if [ -e {file} ] && ! cmp -s {file}.new {file}; then\n"
        f"  cp {file} {file}.before\n"
        f"  echo {file} had other options, now in {file}.before: those of this script hold >&2\n"
        "fi\n"
        f"mv {file}.new {file}\n"
        f"exec {command}\n"
    )
