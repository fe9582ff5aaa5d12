"""`async-grpo launch run.toml`: a whole run on this machine, from its data to its picture.

A Ray head of its own (or the cluster of --ray-address), a dispatcher for each [[worker]], the ranks
of [train], the picture of [plot]; whatever it has started ends with it. Without workers, as for
supervised fine-tuning, no head is started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from async_grpo import deadlines, head
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.interrupts import Interrupted, interrupt_once, where_to_go_on
from async_grpo.cli.local_plan import LocalPlan, described, devices_in, plan_here
from async_grpo.cli.options import CONTEXT, OptionsCommand
from async_grpo.cli.plot import plot
from async_grpo.cli.processes import Process, free_port
from async_grpo.cli.run_file import flags_of, read_tables, values_of
from async_grpo.cli.train import check_algorithm, config_of
from async_grpo.cli.train import main as train
from async_grpo.cli.worker import main as worker
from async_grpo.config.train import TrainConfig
from async_grpo.config.worker import WorkerConfig
from async_grpo.devices.checks import usable_devices
from async_grpo.devices.inventory import Inventory
from async_grpo.errors import ConfigError, DeadlineError, WorkerError
from async_grpo.roles import GENERATION, VERIFIER

logger = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "async_grpo.cli.main")


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run of one machine as command lines, checked before anything is started."""

    prepare: tuple[tuple[str, ...], ...]  # commands, one after the other
    workers: tuple[tuple[WorkerConfig, tuple[str, ...]], ...]  # and the options of its dispatcher
    train: TrainConfig
    train_options: tuple[str, ...]
    plot_options: tuple[str, ...]  # empty: no picture
    num_cpus: int
    ray_address: str  # empty: a head of its own
    num_ranks: int
    plan_for: tuple[int, ...] = ()  # machines of so many devices: say it, and start nothing
    num_devices: int = 0  # that its own head counts
    placement: str = ""  # who gets which device, in a sentence

    @property
    def folder(self) -> Path:
        return Path(self.train.output_dir)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"


@click.command(
    "launch",
    cls=OptionsCommand,
    context_settings={**CONTEXT, "ignore_unknown_options": True},
)
@click.argument("config", metavar="FILE")
@click.argument("train_options", metavar="[TRAIN OPTIONS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--prepare", default="", help="what to run first, to make the data; && between several"
)
@click.option("--num-cpus", default=0, help="CPUs that Ray counts; 0: this machine's")
@click.option(
    "--plan-for",
    default="",
    metavar="8,8",
    help="say who would get which device of machines with so many, and start nothing",
)
@click.option("--ray-address", default="", help="cluster to run on; empty: one is made and ended")
@command_boundary()
def launch(**options: Any) -> None:
    """Run FILE on this machine: its data, workers, trainer and picture; then end what was started.

    Options of `async-grpo train` behind FILE go before those of its [train] table.

    \b
    e.g. examples/quickstart.toml --num-training-batches 40 --output-dir runs/short
    """
    run_here(planned(**options))


def planned(
    *,
    config: str,
    train_options: Sequence[str],
    prepare: str,
    num_cpus: int,
    ray_address: str,
    plan_for: str,
) -> LocalRun:
    """The run of a file, from the options of `launch`; raises what its commands would refuse."""
    shared, tables = read_tables(config)
    workers = []
    for table in tables.get("worker", []):
        values = values_of(table, command=worker, where=f"{config}: [worker]")
        flags = flags_of(values, command=worker)
        workers.append((WorkerConfig(**worker.make_context("worker", flags).params), tuple(flags)))
    values = values_of(tables.get("train", [shared])[0], command=train, where=f"{config}: [train]")
    flags = [*flags_of(values, command=train), *train_options]
    context = train.make_context("train", list(flags))
    trained = config_of(context)
    check_algorithm(trained)
    _check_environments(trained)
    if workers and not ray_address:
        _check_roles(trained, {each.role for each, _ in workers}, file=config)
    picture = values_of(tables.get("plot", [{}])[0], command=plot, where=f"{config}: [plot]")
    if picture:
        own = {"paths": [trained.output_dir], "output": f"{trained.output_dir}/reward.svg"}
        picture = {**own, **picture}
    return LocalRun(
        prepare=tuple(_commands(prepare)),
        workers=tuple(workers),
        train=trained,
        train_options=tuple(flags),
        plot_options=tuple(flags_of(picture, command=plot)),
        num_cpus=max(num_cpus or os.cpu_count() or 1, sum(each.num_workers for each, _ in workers)),
        ray_address=ray_address,
        num_ranks=context.params["nproc_per_node"],
        plan_for=devices_in(plan_for) if plan_for else (),
    )


def placed(run: LocalRun, inventory: Inventory) -> LocalRun:
    """The run with the options that give everybody a device of this machine, or a share of one.

    On another cluster than its own, and without workers, devices are Ray's or the ranks' to find.
    """
    if run.ray_address:
        return run
    found = _plan(run, [len(inventory.devices)])
    workers = zip(run.workers, found.worker_options, strict=True)
    return replace(
        run,
        workers=tuple((config, (*options, *added)) for (config, options), added in workers),
        train_options=(*run.train_options, *found.train_options),
        num_devices=found.num_devices,
        placement=f"{inventory} here; {found.plan.sentence}",
    )


def _plan(run: LocalRun, nodes: Sequence[int]) -> LocalPlan:
    workers = [config for config, _ in run.workers]
    return plan_here(nodes, workers, run.train, num_ranks=run.num_ranks)


def _check_environments(config: TrainConfig) -> None:
    from async_grpo.environments.find import users_environment  # imports numpy: not for --help

    for name in sorted(config.environments):
        users_environment(name)


def _check_roles(config: TrainConfig, roles: Collection[str], *, file: str) -> None:
    """Nobody else can join the cluster of a file that starts its own."""
    from async_grpo.run.recruitment import needed_roles  # imports Ray: not for --help

    found = {*roles, VERIFIER} if GENERATION in roles else roles  # it starts one beside it
    for role, why in needed_roles(config).items():
        if role not in found:
            raise ConfigError(f"{file} needs a [[worker]] for the role {role}{why}: add one")


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    """The commands of a text, in which && stands between two.

    >>> list(_commands("python make.py && async-grpo generate"))
    [('python', 'make.py'), ('async-grpo', 'generate')]
    """
    words = iter(shlex.split(text))
    while command := tuple(itertools.takewhile(lambda word: word != "&&", words)):
        yield command


def run_here(run: LocalRun) -> None:
    """Carry the run out; exits with the trainer's code where that is not 0."""
    if run.plan_for:
        click.echo(described(_plan(run, run.plan_for).plan))
        return
    logging.basicConfig(level="INFO", format="%(message)s")
    interrupt_once()
    run = placed(run, usable_devices())
    if run.num_devices:
        logger.info("%s", run.placement)
    started = time.monotonic()
    run.logs.mkdir(parents=True, exist_ok=True)
    for program, *options in run.prepare:
        logger.info("preparing: %s", " ".join((program, *options[:1])))
        own = {"python": (sys.executable,), "async-grpo": COMMAND}
        _finish(*own.get(program, (program,)), *options)
    try:
        _train(run)
    except KeyboardInterrupt as interrupt:
        if run.train.overwrite:
            raise
        number = getattr(interrupt, "number", signal.SIGINT)
        raise Interrupted(number, where_to_go_on(run.folder)) from None
    if run.plot_options:
        _finish(*COMMAND, "plot", *run.plot_options)
    _conclude(run, seconds=time.monotonic() - started)


def _train(run: LocalRun) -> None:
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(_cluster(run))
        modes = [config.mode for config, _ in run.workers]
        logger.info("starting workers (%s) and the trainer ...", ", ".join(modes))
        workers = [
            stack.enter_context(_dispatcher(run, number, environment))
            for number in range(len(run.workers))
        ]
        # At once: it waits for them itself, and what takes it longest is to import.
        trainer = Process(
            "the trainer",
            [*COMMAND, "train", *run.train_options],
            log=run.logs / "trainer.log",
            environment=environment,
            shows_output=True,
            stop_timeout_s=deadlines.TRAINER_ENDED_S,
        )
        code = stack.enter_context(trainer).exit_code(watched=workers)
    if code:
        click.echo(f"error: {trainer.failure}", err=True)
        sys.exit(code)


def _dispatcher(run: LocalRun, number: int, environment: Mapping[str, str]) -> Process:
    config, options = run.workers[number]
    modes = [other.mode for other, _ in run.workers]
    name = config.mode if modes.count(config.mode) == 1 else f"{config.mode}_{number}"
    command = [*COMMAND, "worker", *options]
    log = run.logs / f"{name}.log"
    return Process(f"the {name} worker", command, log=log, environment=environment)


@contextlib.contextmanager
def _cluster(run: LocalRun) -> Iterator[dict[str, str]]:
    """The environment that leads to the run's cluster, which ends with the `with` block."""
    common = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    if run.ray_address or not run.workers:
        yield common | ({"RAY_ADDRESS": run.ray_address} if run.ray_address else {})
        return
    port = free_port()
    # Short, because Ray keeps sockets there, whose paths must not exceed 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as session:
        environment = common | head.private_cluster(Path(session))
        environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        environment.pop("RAY_AUTH_TOKEN", None)  # it would go before the cluster's own
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", session),
            *("--num-cpus", str(run.num_cpus), "--num-gpus", str(run.num_devices)),
            *("--ray-client-server-port", str(free_port())),
            *("--include-dashboard=false", "--disable-usage-stats"),
            "--include-log-monitor=false",  # nobody listens, and it takes 3 % of a core
        ]
        logger.info("starting Ray ...")
        ray_head = Process(
            "the Ray head",
            command,
            log=run.logs / "ray.log",
            environment=environment,
            stop_signal=signal.SIGTERM,
        )
        try:
            with ray_head:
                ray_head.wait_for("Ray runtime started", timeout_s=deadlines.HEAD_READY_S)
                yield environment
        finally:
            _keep_logs(Path(session), run.logs / "ray")


def _keep_logs(session: Path, target: Path) -> None:
    """Ray's folder is deleted with the run; what its workers said may be needed."""
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(session / "session_latest" / "logs", target, ignore_dangling_symlinks=True)


def _conclude(run: LocalRun, *, seconds: float) -> None:
    """What a person wants to know, as far as the run has written it."""
    folder, lines = run.folder, [f"\n{seconds / 60:.1f} minutes in all"]
    with contextlib.suppress(OSError, LookupError, ValueError):
        rows = (folder / "evaluation_metrics.jsonl").read_text().splitlines()
        first, last = json.loads(rows[0]), json.loads(rows[-1])
        lines[0] = (
            f"\nheld-out accuracy {first['eval_accuracy']:.0%} before, {last['eval_accuracy']:.0%} "
            f"after {run.train.num_training_batches} batches "
            f"({last['total_samples_accumulated']} samples), {seconds / 60:.1f} minutes in all"
        )
    models = sorted((folder / "hf_format").glob("*"), key=os.path.getmtime)
    for what, file in (
        ("reward curve", folder / "reward.svg"),
        ("metrics", folder / "training_metrics.jsonl"),
        ("samples", folder / run.train.dump_samples_filename),
        *(("model", model) for model in models[-1:]),
    ):
        if file.exists() and file != folder:
            lines.append(f"{what:<14} {file}")
    click.echo("\n".join(lines))


def _finish(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=deadlines.SCRIPT_S
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{command[1]} was not done within {deadlines.SCRIPT_S:g} s") from None
    except OSError as error:
        raise ConfigError(f"[launch] prepare must name a program that is there: {error}") from None
    if done.returncode:
        raise WorkerError(f"{command[1]} failed: {done.stderr.strip() or done.stdout.strip()}")
