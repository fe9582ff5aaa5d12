"""A run as its file describes it: every value, and the commands that it takes.

`async-grpo launch` runs it, `launch --dry-run` prints it, `async-grpo check` checks it. `launch
--emit` prints it as a script for a queue: the script holds the resolved file, which resumes, so
that a job that is requeued, or submitted again, resumes its run.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_grpo.check.finding import Setup
from async_grpo.cli import run_file
from async_grpo.cli.options import is_typed
from async_grpo.cli.run_file import TRUST, Table, as_toml, is_near, values_in, values_of
from async_grpo.cli.train import algorithm_of, config_of
from async_grpo.cli.train import main as train
from async_grpo.cli.use_run import plot
from async_grpo.cli.worker import main as worker
from async_grpo.config.worker_config import WorkerConfig, check_services
from async_grpo.devices.core_shares import num_cores, recorded_threads, thread_variables
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import RUN_FILE, newest_checkpoint

RUN_OPTIONS = (  # of `launch`
    "config", "train_options", "prepare", "num_cpus", "ray_address", "trainer_nodes", "await_nodes",
    "dashboard", "unconfined_rewards", "unconfined_code",
)  # fmt: skip
END_OF_FILE = "END_OF_RUN_FILE"  # in a script for a queue
SLURM_JOB, OF_EVERY_JOB = "examples/cluster/slurm.sh", "# What follows is the same in every job."
NOTHING: Table = {}
REGISTRY = "reward_registry"  # the package's own
OPENENV = "openenv:"  # an address, whose code does not run here


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun(Setup):
    """A run of one machine, checked before anything is started."""

    num_cpus: int
    trainer_nodes: int = 1  # machines that train, with equal shares of `num_ranks`
    await_nodes: int = 0  # that its cluster must have before anything is placed
    num_devices: int = 0  # that its own Ray head counts
    placement: str = ""  # who gets which device, in a sentence
    dashboard: bool = False  # of its own Ray head

    @property
    def folder(self) -> Path:
        return Path(self.train.recording.output_dir)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def goes_on(self) -> bool:
        """Whether there is a checkpoint that it resumes."""
        return self.train.recording.may_go_on and newest_checkpoint(self.folder) is not None

    @property
    def due(self) -> tuple[tuple[str, ...], ...]:
        """The commands of `prepare` that a start runs: none when the run resumes."""
        return () if self.goes_on else self.prepare

    @property
    def is_finished(self) -> bool:
        """Whether its folder holds a checkpoint of the last batch, and an exported model."""
        batches, _ = newest_checkpoint(self.folder) or (0, None)
        is_trained = self.goes_on and batches >= self.train.batching.num_training_batches
        return is_trained and any(self.folder.glob("hf_format/samples_*"))

    @property
    def thread_variables(self) -> dict[str, str]:
        """Of each process: ranks, engines and scorers share the cores of this machine."""
        workers = [each for each in self.workers if each.serves_model]
        processes = self.num_ranks // self.trainer_nodes
        processes += sum(each.num_workers * each.scorer_ranks for each in workers)
        recorded = recorded_threads(self.folder) if self.goes_on else 0
        return thread_variables(
            os.environ, processes=processes, cores=num_cores(), recorded=recorded
        )

    @property
    def resolved_file(self) -> Path:
        """The file with all of `tables`, from which the run's processes read their options."""
        return self.logs / "resolved.toml"

    def write_file(self) -> None:
        """Write `resolved_file`; `launch` does before it starts the processes."""
        self.resolved_file.write_text(as_toml(self.tables))

    def worker_words(self, number: int) -> list[str]:
        """The command line of the dispatcher of a [[worker]] table."""
        return ["worker", "--config", str(self.resolved_file), "--table", str(number)]

    @property
    def train_words(self) -> list[str]:
        """The command line of the trainer; --overwrite holds only where it is typed."""
        typed = ["--overwrite"] if self.train.recording.overwrite else []
        return ["train", "--config", str(self.resolved_file), *typed]

    @property
    def plot_words(self) -> list[str]:
        """The command line that draws the picture."""
        return ["plot", "--config", str(self.resolved_file)]

    @property
    def tables(self) -> dict[str, list[Table]]:
        """Every value, as tables of a file that launches the same run."""
        prepare = " && ".join(shlex.join(command) for command in self.prepare)
        launch = {
            "prepare": prepare,
            "num_cpus": self.num_cpus,
            "ray_address": self.ray_address,
            "trainer_nodes": self.trainer_nodes,
            "dashboard": self.dashboard,
        }
        ranks_here = self.num_ranks // self.trainer_nodes
        return {
            "launch": [launch],
            "worker": [values_in(config) for config in self.workers],
            "train": [{"nproc_per_node": ranks_here, **values_in(self.train)}],
            "plot": [self.plot] if self.plot else [],
        }


def options_of_run(launch_options: Table) -> dict[str, Any]:
    """The options of `launch` that describe the run; others say what to do with it."""
    return {name: launch_options[name] for name in RUN_OPTIONS}


def planned(*, trust: bool = False, starts: bool = True, **options: Any) -> LocalRun:
    """The run of a file, from the options of `launch`; raises what its commands would refuse.

    `starts`: the run will be started, so that an algorithm's code may be imported here.
    """
    # They import Ray and numpy: not for --help.
    from async_grpo.check.described import users_code_confined
    from async_grpo.environments.find import check_environments
    from async_grpo.run.recruitment import brought_by, check_roles

    run = read_run(**options)
    check_origin(run, file=options["config"], typed=options["train_options"], trusted=trust)
    with users_code_confined(trusted=trust or starts):
        algorithm_of(run.train)
        check_environments(run.train.environments)
        check_services(run.workers)
        if run.starts_head:
            check_roles(run.train, brought_by(run.workers), where=options["config"])
    return run


def read_run(
    *,
    config: str = "",
    train_options: Sequence[str] = (),
    given: Table = NOTHING,
    prepare: str = "",
    num_cpus: int = 0,
    ray_address: str = "",
    trainer_nodes: int = 1,
    await_nodes: int = 0,
    dashboard: bool = False,
    **of_workers: bool,
) -> LocalRun:
    """The run of a file, or without one that of the trainer's options alone.

    `given`: options of the trainer, as if typed. `of_workers`: switches that every worker gets
    where they are on.
    """
    permitted = {name: True for name, is_on in of_workers.items() if is_on}
    shared, tables = run_file.read_tables(config) if config else ({}, {})
    workers = []
    for table in tables.get("worker", []):
        values = values_of(table, command=worker, where=f"{config}: [worker]")
        options = worker.make_context("worker", [], default_map=values).params
        workers.append(WorkerConfig(**options | permitted))
    values = values_of(tables.get("train", [shared])[0], command=train, where=f"{config}: [train]")
    context = train.make_context("train", [*train_options], default_map={**values, **given})
    trained = config_of(context)
    [picture] = tables.get("plot", [{}])
    values_of(picture, command=plot, where=f"{config}: [plot]")
    _check_cluster(trained.places.ray_address, of_workers=ray_address if workers else None)
    if dashboard and (ray_address or not workers):
        raise ConfigError(
            "--dashboard is of a cluster that launch starts, and this run starts none: "
            + ("start its head with --include-dashboard=true" if ray_address else "leave it out")
        )
    folder = trained.recording.output_dir
    own = {"paths": [folder], "output": f"{folder}/reward.svg"}
    drawn = {key: picture[key] for key in picture if key not in run_file.SHARED_OPTIONS}
    return LocalRun(
        prepare=tuple(commands_in(prepare)),
        workers=tuple(workers),
        train=trained,
        num_ranks=context.params["nproc_per_node"] * trainer_nodes,
        plot={**own, **drawn} if "plot" in tables else {},
        num_cpus=max(num_cpus or os.cpu_count() or 1, sum(each.num_workers for each in workers)),
        ray_address=ray_address,
        trainer_nodes=trainer_nodes,
        await_nodes=await_nodes,
        types_overwrite=is_typed(context, "overwrite") or "overwrite" in given,
        given_cpus=num_cpus,
        dashboard=dashboard,
    )


def _check_cluster(of_trainer: str, *, of_workers: str | None) -> None:
    """Raise `ConfigError` where workers would start on another cluster than the trainer's."""
    if of_workers is not None and of_trainer not in ("auto", of_workers):
        where = f"on {of_workers}" if of_workers else "on a cluster of their own"
        raise ConfigError(
            f"--ray-address of the trainer must be auto where workers start {where}, got "
            f"{of_trainer!r}: put the address under [launch], or leave it out"
        )


def commands_in(text: str) -> Iterator[tuple[str, ...]]:
    """The commands of a text, in which && stands between two.

    >>> list(commands_in("python make.py && async-grpo generate"))
    [('python', 'make.py'), ('async-grpo', 'generate')]
    """
    words = iter(shlex.split(text))
    while command := tuple(itertools.takewhile(lambda word: word != "&&", words)):
        yield command


def commands_of(run: LocalRun) -> list[str]:
    """Every command that a run takes, in order."""
    commands = [shlex.join(command) for command in run.prepare]
    if run.starts_head:
        devices = f" --num-gpus {run.num_devices}" if run.num_devices else ""
        pages = " --include-dashboard=true" if run.dashboard else ""
        commands.append(f"ray start --head --block --num-cpus {run.num_cpus}{devices}{pages}")
    own = [run.worker_words(number) for number in range(len(run.workers))]
    own += [run.train_words, *([run.plot_words] if run.plot else [])]
    return [*commands, *(f"async-grpo {shlex.join(words)}" for words in own)]


def resolved_text(run: LocalRun, *, commands: Sequence[str]) -> str:
    """The resolved file, and below it as comments the commands, which read it in its place."""
    lines = [
        "What runs, in this order; each ends with the run:",
        *(f"    {command}" for command in commands),
        f"They read this text as {run.resolved_file}, which launch writes before it starts them.",
    ]
    text = re.sub(r"[\0-\x09\x0b-\x1f\x7f]", "?", "\n".join(lines))  # no comment may hold them
    return f"{as_toml(run.tables)}\n{textwrap.indent(text, '# ')}\n"


def resuming(run: LocalRun) -> LocalRun:
    """The run as its folder keeps it: launched again, it resumes."""
    resume = "auto" if run.train.recording.resume == "never" else run.train.recording.resume
    train = run.train.but(overwrite=False, resume=resume)
    return replace(run, train=train)


def slurm(run: LocalRun, machines: Sequence[int]) -> str:
    """For `sbatch`: the whole run on machines of so many devices; on one if none is given."""
    machines = machines or (num_devices(run),)
    if len(machines) > 1:
        run = replace(run, ray_address="auto")  # `launch` writes the same file then
    asked = [
        f"--job-name={shlex.quote(run.folder.name)}",
        f"--nodes={len(machines)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={run.num_cpus}",
        *([f"--gpus-per-node={machines[0]}"] if machines[0] else []),
        "--mem=0",
        "--time=24:00:00",
        f"--signal=B:USR1@{deadlines.JOB_ENDED_S:.0f}",
        "--requeue",
        "--open-mode=append",
    ]
    header = "".join(f"#SBATCH {option}\n" for option in asked)
    job = (run_file.shared_folder() / SLURM_JOB).read_text()
    return (
        f"#!/usr/bin/env bash\n{header}{_written(run)}"
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"\n'
        f"set -- {_launched(run)}\n\n{job[job.index(OF_EVERY_JOB) :]}"
    )


def ray_job(run: LocalRun, _: Sequence[int]) -> str:
    """For a shell: a job of a Ray cluster that is there, whose entry point launches the run."""
    address = '"${RAY_API_SERVER_ADDRESS:?name the dashboard, http://HOST:8265}"'
    here = 'cd $(printf %q "$PWD")'
    launch = f"async-grpo launch {_launched(run)} --ray-address auto"
    command = f'exec ray job submit --address {address} -- bash -c "{here} && exec {launch}"'
    run = replace(run, ray_address="auto")
    return f"#!/usr/bin/env bash\n{_written(run)}{command}\n"


EMITTED: dict[str, Callable[[LocalRun, Sequence[int]], str]] = {"slurm": slurm, "ray-job": ray_job}


def num_devices(run: LocalRun) -> int:
    """The devices that ranks and workers take on a machine that has devices."""
    shares = [each.num_workers * each.num_devices * each.gpus_per_worker for each in run.workers]
    memory = run.train.memory
    return math.ceil(sum(shares) + run.num_ranks * memory.gpus_per_rank * (not memory.colocated))


def _launched(run: LocalRun) -> str:
    file = str(run.folder / RUN_FILE)
    return shlex.join((file, *trust_words(run, file=file)))


def _written(run: LocalRun) -> str:
    """Shell lines that write the run's file, and keep one that differs."""
    file, folder = shlex.quote(str(run.folder / RUN_FILE)), shlex.quote(str(run.folder))
    return (
        "# Submit it in the folder that the paths of the run are relative to, which all machines\n"
        f"# see; submitted again, the run goes on. Its options are those below, also in {file}.\n"
        "set -euo pipefail\n"
        "# shellcheck disable=SC2174 # the folders above it are as they would be anyway\n"
        f"mkdir -p -m 700 {folder}\n"
        f"cat >{file}.new <<'{END_OF_FILE}'\n"
        f"{as_toml(resuming(run).tables)}{END_OF_FILE}\n"
        f"if [ -e {file} ] && ! cmp -s {file}.new {file}; then\n"
        f"  cp {file} {file}.before\n"
        f"  echo {file} had other options, now in {file}.before: those of this script hold >&2\n"
        "fi\n"
        f"mv {file}.new {file}\n"
    )


def check_origin(run: LocalRun, *, file: str, typed: Sequence[str], trusted: bool) -> None:
    """Raise `ConfigError` for code that a file from elsewhere names and the user has not typed."""
    if trusted or not file or is_near(file):
        return
    for option, named in _code_of(run):
        if any(named in word for word in typed):
            continue
        raise ConfigError(
            f"{file} lies outside this folder, and its {option} names {named!r}: read both, then "
            f"give {TRUST}, or go to a folder that holds the file"
        )


def trust_words(run: LocalRun, *, file: str) -> tuple[str, ...]:
    """The words, --trust or none, that must follow a run's written file when it is launched."""
    return () if is_near(file) or not _code_of(run) else (TRUST,)


def _code_of(run: LocalRun) -> list[tuple[str, str]]:
    """(option, value) of each option that runs code, or is sent a secret."""
    found = [("prepare", shlex.join(command)) for command in run.due]
    named = [("environment", name) for name in sorted(run.train.environments)]
    named += [("algorithm", run.train.objective.algorithm)]
    for each in run.workers:
        named += [("mode", each.mode), *(("reward_fns", name) for name in each.reward_names)]
        found += [("judge_url", each.judge_url)] if each.judge_url else []  # which is sent a key
        if each.reward_registry != REGISTRY:
            found.append(("reward_registry", each.reward_registry))
    return found + [(o, name) for o, name in named if ":" in name and not name.startswith(OPENENV)]
