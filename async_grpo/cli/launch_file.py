"""`async-grpo launch run.toml`: a whole run on this machine, from its data to its picture.

A Ray head of its own (or the cluster of --ray-address), a dispatcher for each [[worker]] on every
node that it needs, the ranks of [train], the picture of [plot]; whatever it has started ends with
it. Without workers, as for supervised fine-tuning, no head is started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from async_grpo.cli.assignment import (
    Node,
    described,
    devices_in,
    dispatches,
    in_words,
    placed,
    plan_on,
    with_share,
)
from async_grpo.cli.boundary import EXIT_ERROR, command_boundary
from async_grpo.cli.launch_file import conclusion, finished, how_to_go_on
from async_grpo.cli.local_run import (
    EMITTED,
    RUN_FILE,
    LocalRun,
    as_toml,
    commands_of,
    planned,
    resolved_text,
    resuming,
)
from async_grpo.cli.options import CONTEXT, OptionsCommand
from async_grpo.cli.origin import trust_option
from async_grpo.cli.run_processes import CheckBeside, refuse_broken
from async_grpo.cli.train import main as train
from async_grpo.cluster import head
from async_grpo.devices.inventory import usable_devices
from async_grpo.launch.child_processes import ChildProcess, RemoteProcess, Watched
from async_grpo.launch.interrupts import Interrupted, interrupt_once, stdin_option
from async_grpo.run.first_checks import check_overwrite
from async_grpo.run.output_folder import CONNECTION_FILE, LAUNCH, LAUNCH_LOGS, check_free, lock
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, DeadlineError, WorkerError
from async_grpo.util.files import replacing
from async_grpo.util.ports import free_port
from async_grpo.util.run_folder import PARAMETERS_FILE

logger = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "async_grpo.cli.main")
MAX_RESTARTS = 3  # of a dispatcher that was killed
HERE = Node("", "this machine", 0, 0.0)  # where a cluster of the run's own is


class LaunchCommand(OptionsCommand):
    """Tab knows the options of `train` too, which may stand behind FILE."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        own, of_train = super().shell_complete(ctx, incomplete), []
        if incomplete.startswith("-") and ctx.params.get("config"):
            of_train = train.shell_complete(
                train.make_context("train", [], resilient_parsing=True), incomplete
            )
        known = {item.value for item in own}
        return [*own, *(item for item in of_train if item.value not in known)]


@click.command(
    "launch",
    cls=LaunchCommand,
    context_settings={**CONTEXT, "ignore_unknown_options": True},
)
@click.argument("config", metavar="FILE", type=click.Path())
@click.argument("train_options", metavar="[TRAIN OPTIONS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--prepare", default="", help="what to run first, to make the data; && between several"
)
@click.option("--num-cpus", default=0, help="CPUs that Ray counts; 0: this machine's")
@click.option("--ray-address", default="", help="cluster to run on; empty: one is made and ended")
@click.option("--unconfined-rewards", is_flag=True, help="as if every worker had this option")
@click.option("--unconfined-code", is_flag=True, help="as if every worker had this option")
@click.option(
    "--plan-for",
    default="",
    metavar="8,8",
    help="say who would get which device of machines with so many, and start nothing",
)
@click.option("--dry-run", is_flag=True, help="print the whole file and every command, start none")
@click.option(
    "--emit", type=click.Choice([*EMITTED]), help="print the run as a script for such a queue"
)
@trust_option
@stdin_option
@command_boundary()
def launch(*, plan_for: str, dry_run: bool, emit: str | None, **options: Any) -> None:
    """Run FILE on this machine: its data, workers, trainer and picture; then end what was started.

    Options of `async-grpo train` behind FILE go before those of its [train] table. The run's folder
    keeps run.toml, every value of the run: launched in its turn, it goes on with it.

    \b
    e.g. examples/quickstart.toml --num-training-batches 40 --output-dir runs/short
    """
    run = planned(starts=not (plan_for or dry_run or emit), **options)
    if plan_for:
        click.echo(described(plan_on(devices_in(plan_for), run)))
    elif emit:
        click.echo(EMITTED[emit](run), nl=False)
    elif dry_run:
        commands = commands_of(placed(run, usable_devices()))
        click.echo(resolved_text(run, commands=commands), nl=False)
    else:
        run_here(run)


def run_here(run: LocalRun) -> None:
    """Carry the run out; exits with the trainer's code where that is not 0."""
    logging.basicConfig(level="INFO", format="%(message)s")
    interrupt_once()
    check_overwrite(run.train, is_typed=run.types_overwrite)
    if run.is_finished:
        click.echo(finished(run))
        return
    given, run = run, placed(run, usable_devices())
    if run.num_devices:
        logger.info("%s", run.placement)
    check_free(run.folder)
    refuse_broken(run, say=logger.warning)
    with lock(run.folder, byte=LAUNCH):
        (run.folder / CONNECTION_FILE).unlink(missing_ok=True)  # of one that was killed
        _carry_out(run, given)


def _carry_out(run: LocalRun, given: LocalRun) -> None:
    """In a folder that is locked; `given`: the run before its devices were placed."""
    started = time.monotonic()
    run.logs.mkdir(exist_ok=True)
    if run.goes_on and run.prepare:
        logger.info("the run goes on with what was prepared for it")
    for program, *options in () if run.goes_on else run.prepare:
        logger.info("preparing: %s", " ".join((program, *options[:1])))
        own = {"python": (sys.executable,), "async-grpo": COMMAND}
        _finish(*own.get(program, (program,)), *options)
    if run.prepare and not run.goes_on:
        refuse_broken(run, say=logger.warning, is_prepared=True)
    try:
        with _file_kept(given):
            _train(run)
    except KeyboardInterrupt as interrupt:
        number = getattr(interrupt, "number", signal.SIGINT)
        raise Interrupted(number, f"interrupted; {how_to_go_on(run)}") from None
    if run.plot:
        _finish(*COMMAND, "plot", *run.plot_options)
    click.echo(conclusion(run, seconds=time.monotonic() - started))


@contextlib.contextmanager
def _file_kept(run: LocalRun) -> Iterator[None]:
    """Within, the folder holds the file that resumes the run; after a refusal, what it held."""
    file, accepted = run.folder / RUN_FILE, run.folder / PARAMETERS_FILE
    before = file.read_bytes() if file.exists() else None
    began_at_ns = time.time_ns()
    with replacing(file) as new:
        new.write(as_toml(resuming(run).tables).encode())
    try:
        yield
    finally:
        is_refused = not accepted.exists() or accepted.stat().st_mtime_ns < began_at_ns
        if before is not None and is_refused:
            file.write_bytes(before)


def _train(run: LocalRun) -> None:
    with contextlib.ExitStack() as stack:
        beside = CheckBeside(run, command=COMMAND, say=logger.warning)
        stack.enter_context(beside)
        environment, heads = stack.enter_context(cluster_of(run, watched=(beside,)))
        nodes = _nodes(run) if run.ray_address else (HERE,)
        found = dispatches(run, nodes)
        logger.info("starting workers (%s) and the trainer ...", in_words(run, found))
        workers: list[Watched] = [beside]
        for each in found:
            start = dispatcher_of if each.node == nodes[0] else partial(_remote, node=each.node)
            worker = start(with_share(run, each), each.worker, environment)
            stack.enter_context(worker)
            workers.append(worker)
        # At once: it waits for them itself, and what takes it longest is to import.
        trainer = ChildProcess(
            "the trainer",
            [*COMMAND, "train", *run.train_options],
            log=run.logs / "trainer.log",
            environment=environment | {LAUNCH_LOGS: str(run.logs)},
            shows_output=True,
            stop_timeout_s=deadlines.TRAINER_ENDED_S,
        )
        stack.enter_context(trainer)
        code, failure = _outcome(trainer, workers, heads)
    if code:  # said last, when a trainer that was asked to end has saved what it had
        click.echo(f"error: {failure}; {how_to_go_on(run)}", err=True)
        sys.exit(code)


def _outcome(
    trainer: ChildProcess, workers: Sequence[Watched], heads: Sequence[ChildProcess]
) -> tuple[int, str]:
    """The run's exit code, and what has ended it where that is not 0."""
    code, failure = EXIT_ERROR, ""
    try:
        code = trainer.exit_code(watched=workers)
        failure = trainer.failure if code else ""
    except WorkerError as error:
        failure = str(error)
    for ray_head in heads if code else ():  # who loses its cluster may be seen to end before it
        failure = ray_head.failure if ray_head.ends_within(deadlines.HEAD_SEEN_S) else failure
    return code, failure


def _nodes(run: LocalRun) -> tuple[Node, ...]:
    """Of the cluster that the run joins: this machine first."""
    from async_grpo.cluster import cluster  # imports Ray

    cluster.connect(run.ray_address, namespace=run.train.namespace)
    return tuple(
        Node(each.node_id, each.host, int(each.free.get("GPU", 0)), each.free.get("CPU", 0.0))
        for each in cluster.nodes_with_room()
    )


def dispatcher_of(run: LocalRun, number: int, environment: Mapping[str, str]) -> ChildProcess:
    """One of the run's dispatchers, to be started."""
    name, command = _name_of(run, number), [*COMMAND, "worker", *run.worker_options[number]]
    log = run.logs / f"{name}.log"
    return ChildProcess(
        f"the {name} worker", command, log=log, environment=environment, max_restarts=MAX_RESTARTS
    )


def _remote(run: LocalRun, number: int, _: Mapping[str, str], *, node: Node) -> RemoteProcess:
    """The same on another node."""
    name = _name_of(run, number)
    return RemoteProcess(
        f"the {name} worker on {node.host}",
        [*COMMAND[1:], "worker", "--ends-with-stdin", *run.worker_options[number]],
        node_id=node.node_id,
        log=run.logs / f"{name}@{node.host}.log",
        environment={"OMP_NUM_THREADS": "1", "RAY_ADDRESS": run.ray_address},
        max_restarts=MAX_RESTARTS,
    )


def _name_of(run: LocalRun, number: int) -> str:
    modes = [config.mode for config in run.workers]
    mode = modes[number]
    return mode if modes.count(mode) == 1 else f"{mode}_{number}"


@contextlib.contextmanager
def cluster_of(
    run: LocalRun, *, watched: Sequence[Watched] = ()
) -> Iterator[tuple[dict[str, str], list[ChildProcess]]]:
    """The environment that leads to the run's cluster; its head, if it is its own, to the end."""
    common = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    if not run.starts_head:
        yield common | ({"RAY_ADDRESS": run.ray_address} if run.ray_address else {}), []
        return
    port = free_port()
    # Short, because Ray keeps sockets there, whose paths must not exceed 107 characters; below a
    # folder of this user's alone, because Ray opens its own to everybody.
    with (
        head.private_cluster() as private,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
    ):
        session = f"{folder}/s"
        environment = common | private
        environment["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        environment.pop("RAY_AUTH_TOKEN", None)  # it would go before the cluster's own
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", session),
            *("--num-cpus", str(run.num_cpus), "--num-gpus", str(run.num_devices)),
            *("--ray-client-server-port", str(free_port())),
            *("--include-dashboard=false", "--disable-usage-stats"),
            "--include-log-monitor=false",  # nobody listens, and it takes 3 % of a core
        ]
        logger.info("starting Ray ...")
        ray_head = ChildProcess(
            "the Ray head",
            command,
            log=run.logs / "ray.log",
            environment=environment,
            stop_signal=signal.SIGTERM,
        )
        try:
            with ray_head:
                ray_head.wait_for(
                    "Ray runtime started", timeout_s=deadlines.HEAD_READY_S, watched=watched
                )
                yield environment, [ray_head]
        finally:
            _keep_logs(Path(session), run.logs / "ray")


def _keep_logs(session: Path, target: Path) -> None:
    """Ray's folder is deleted with the run; what its workers said may be needed."""
    shutil.rmtree(target, ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(session / "session_latest" / "logs", target, ignore_dangling_symlinks=True)


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
