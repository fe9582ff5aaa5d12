"""`async-grpo launch run.toml`: a whole run on this machine, from its data to its picture.

`launch` starts a Ray head of its own (or joins the cluster of --ray-address), a dispatcher for each
[[worker]] on every node that it needs, the ranks of [train], and draws the picture of [plot]; all
that it starts ends with it. Without workers, as for supervised fine-tuning, it starts no head.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from async_grpo.cli import assignment, local_run, run_processes
from async_grpo.cli.assignment import Node, described, dispatched, dispatches, in_words, placed
from async_grpo.cli.boundary import EXIT_ERROR, command_boundary
from async_grpo.cli.local_run import EMITTED, LocalRun, trust_words
from async_grpo.cli.memory import check_memory, fleet_here
from async_grpo.cli.options import CONTEXT, OptionsCommand
from async_grpo.cli.run_file import Table, as_toml, trust_option
from async_grpo.cli.train import main as train
from async_grpo.devices.inventory import usable_devices
from async_grpo.launch.child_processes import ChildProcess, RemoteProcess, Watched
from async_grpo.launch.interrupts import Interrupted, interrupt_once, stdin_option, where_to_go_on
from async_grpo.model.hub import local_folder
from async_grpo.run import output_folder
from async_grpo.telemetry.alarms import ALARMS_FILE
from async_grpo.telemetry.jsonl import NewRows
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, DeadlineError, WorkerError
from async_grpo.util.files import replacing
from async_grpo.util.run_folder import EVALUATIONS_FILE, METRICS_FILE, PARAMETERS_FILE, RUN_FILE
from async_grpo.util.waiting import poll

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster

logger = logging.getLogger(__name__)
HERE = Node("", "this machine", 0, 0.0)  # where a cluster of the run's own is


class LaunchCommand(OptionsCommand):
    """Completes the options of `train` too, which may follow FILE."""

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
@click.option(
    "--trainer-nodes",
    default=1,
    type=click.IntRange(min=1),
    help="machines of that cluster that train, each with --nproc-per-node ranks",
)
@click.option("--await-nodes", default=0, help="nodes that the cluster must have before the start")
@click.option("--dashboard", is_flag=True, help="start Ray's pages too, which `ray list` reads")
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
    "--emit",
    type=click.Choice([*EMITTED]),
    help="print the run as a script for such a queue, for the machines of --plan-for",
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
    starts = not (plan_for or dry_run or emit)
    run = local_run.planned(starts=starts, **options)
    if starts:
        run_here(run)
    elif emit:
        machines = assignment.of_a_job(run, plan_for) if plan_for else ()
        click.echo(EMITTED[emit](run, machines), nl=False)
    else:
        from async_grpo.check.described import users_code_confined

        with users_code_confined(trusted=options["trust"]):  # bills ask the algorithm
            _describe(run, plan_for)


def _describe(run: LocalRun, plan_for: str) -> None:
    if plan_for:
        click.echo(described(run, plan_for))
    else:
        commands = local_run.commands_of(placed(run, usable_devices(), starts=False))
        click.echo(local_run.resolved_text(run, commands=commands), nl=False)


def run_of(file: str, options: Sequence[str]) -> LocalRun:
    """The run of a file and options of the trainer, as `launch` reads them; the file may be ""."""
    if not file:
        return local_run.read_run(train_options=options)
    launch_options = launch.make_context("launch", [file, *options]).params
    return local_run.read_run(**local_run.options_of_run(launch_options))


def run_here(run: LocalRun) -> None:
    """Run it on this machine; exit with the trainer's code where that is not 0."""
    logging.basicConfig(level="INFO", format="%(message)s")
    interrupt_once()
    run_processes.stop_when_asked(run)
    output_folder.check_overwrite(run.train.recording, is_typed=run.types_overwrite)
    if run.is_finished:
        click.echo(finished(run))
        return
    given, run = run, placed(run, usable_devices())
    if run.num_devices:
        logger.info("%s", run.placement)
    output_folder.check_free(run.folder)
    if run.await_nodes:
        _nodes(run)  # the checks look at the room that all of them have
    run_processes.refuse_broken(run, say=logger.warning)
    with output_folder.lock(run.folder, byte=output_folder.LAUNCH):
        (run.folder / output_folder.CONNECTION_FILE).unlink(missing_ok=True)  # a killed one
        _carry_out(run, given)


def _carry_out(run: LocalRun, given: LocalRun) -> None:
    """Run it in its locked folder; `given`: the run before its devices were placed."""
    started = time.monotonic()
    run.logs.mkdir(exist_ok=True)
    if run.goes_on and run.prepare:
        logger.info("the run goes on with what was prepared for it")
    for program, *options in run.due:
        logger.info("preparing: %s", " ".join((program, *options[:1])))
        own = {"python": (sys.executable,), "async-grpo": run_processes.COMMAND}
        _finish(*own.get(program, (program,)), *options)
    if run.prepare and not run.goes_on:
        run_processes.refuse_broken(run, say=logger.warning, is_prepared=True)
        run = placed(given, usable_devices())  # by the sizes of what was made
    if run.train.places.draws_weights and run.workers:
        run = with_drawn_weights(run, output_dir=str(run.folder))
    try:
        with _file_kept(given):
            _train(run)
    except KeyboardInterrupt as interrupt:
        number = getattr(interrupt, "number", signal.SIGINT)
        raise Interrupted(number, f"interrupted; {how_to_go_on(run)}") from None
    if run.plot:
        _finish(*run_processes.COMMAND, *run.plot_words)
    click.echo(conclusion(run, seconds=time.monotonic() - started))


@contextlib.contextmanager
def _file_kept(run: LocalRun) -> Iterator[None]:
    """Write the file that resumes the run; restore the old one if the trainer refuses the run."""
    file, accepted = run.folder / RUN_FILE, run.folder / PARAMETERS_FILE
    before = file.read_bytes() if file.exists() else None
    began_at_ns = time.time_ns()
    with replacing(file) as new:
        new.write(as_toml(local_run.resuming(run).tables).encode())
    try:
        yield
    finally:
        is_refused = not accepted.exists() or accepted.stat().st_mtime_ns < began_at_ns
        if before is not None and is_refused:
            file.write_bytes(before)


def with_drawn_weights(run: LocalRun, *, output_dir: str) -> LocalRun:
    """The run of a folder whose weights --init random draws, for its trainer and workers alike."""
    name, seed = run.train.places.model_name_or_path, run.train.data.infinite_sampler_seed
    from async_grpo.checkpoint.export import initial_folder, write_initial  # imports torch

    source = local_folder(name, revision=run.train.places.model_revision)
    folder = initial_folder(source, output_dir=output_dir, seed=seed)
    write_initial(source, folder, seed=seed)
    workers = tuple(
        replace(each, model_path=folder, model_revision="") if each.model_path == name else each
        for each in run.workers
    )
    train = run.train.but(model_name_or_path=folder, model_revision="", init="pretrained")
    return replace(run, workers=workers, train=train)


def _train(run: LocalRun) -> None:
    with contextlib.ExitStack() as stack:
        beside = run_processes.CheckBeside(run, command=run_processes.COMMAND, say=logger.warning)
        stack.enter_context(beside)
        environment, heads = stack.enter_context(run_processes.cluster_of(run, watched=(beside,)))
        nodes = _nodes(run) if run.ray_address else (HERE,)
        found = dispatches(run, nodes)
        if run.ray_address and (fleet := fleet_here(usable_devices())).num_devices:
            own = tuple(node.devices for node in nodes if node.devices)
            check_memory(dispatched(run, found), replace(fleet, nodes=own or fleet.nodes))
        workers_too = f"workers ({in_words(run, found)}) and " if found else ""
        logger.info("starting %sthe trainer ...", workers_too)
        workers: list[Watched] = [beside]
        names = [run_processes.name_of(run, each.worker) for each in found]
        run = dispatched(run, found)
        run.write_file()
        for number, (each, name) in enumerate(zip(found, names, strict=True)):
            worker: ChildProcess | RemoteProcess = (
                run_processes.dispatcher_of(run, number, environment, name=name)
                if each.node == nodes[0]
                else run_processes.remote_dispatcher_of(run, number, name=name, node=each.node)
            )
            stack.enter_context(worker)
            workers.append(worker)
        # Start it without waiting: it waits for workers itself, after seconds of imports.
        trainer, others = run_processes.trainers_of(run, nodes, environment)
        for other in others:
            workers.append(stack.enter_context(other))
        stack.enter_context(trainer)  # it ends first, with a checkpoint of all ranks
        code, failure = _outcome(trainer, workers, heads)
    if code:  # after a stopped trainer has saved its checkpoint
        elsewhere = "".join(f", and {each.process.log}" for each in others)
        click.echo(f"error: {failure}{elsewhere}; {how_to_go_on(run)}", err=True)
        sys.exit(code)


def _outcome(
    trainer: ChildProcess, workers: Sequence[Watched], heads: Sequence[ChildProcess]
) -> tuple[int, str]:
    """The run's exit code, and the error that has ended it where that is not 0."""
    code, failure = EXIT_ERROR, ""
    try:
        code = trainer.exit_code(watched=workers)
        failure = trainer.failure if code else ""
    except WorkerError as error:
        failure = str(error)
    for ray_head in (
        heads if code else ()
    ):  # a process that lost its cluster may end before the head
        failure = ray_head.failure if ray_head.ends_within(deadlines.HEAD_SEEN_S) else failure
    return code, failure


def _nodes(run: LocalRun) -> tuple[Node, ...]:
    """Nodes of the cluster that the run joins, this machine first, once all are there."""
    from async_grpo.cluster.cluster import Cluster  # imports Ray

    cluster = Cluster.join(run.ray_address, namespace=run.train.places.namespace)
    return awaited_nodes(cluster, max(run.await_nodes, run.trainer_nodes))


def awaited_nodes(
    cluster: Cluster, number: int, *, within_s: float = deadlines.NODES_JOINED_S
) -> tuple[Node, ...]:
    """All nodes, this machine first, once there are so many; raises `DeadlineError` if not."""
    for _ in poll(every_s=1.0, within_s=within_s):
        rooms = cluster.nodes_with_room()
        if len(rooms) >= number:
            return tuple(
                Node(room.node_id, room.host, int(room.free.get("GPU", 0)), room.free.get("CPU", 0))
                for room in rooms
            )
    raise DeadlineError(
        f"the cluster must have {number} nodes within {within_s:g} s, got "
        f"{', '.join(room.host for room in rooms)}: see what `ray start` says on others, or lower "
        "--await-nodes or --trainer-nodes"
    )


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


def how_to_go_on(run: LocalRun) -> str:
    """Half a sentence that tells the user how to resume the run."""
    return where_to_go_on(run.folder, command=relaunch(run))


def relaunch(run: LocalRun, *options: str) -> str:
    """The command that resumes the run, or launches it again with these options."""
    file = str(run.folder / RUN_FILE)
    words = [file, *options, *trust_words(run, file=file)]
    return f"`async-grpo launch {shlex.join(words)}`"


def finished(run: LocalRun) -> str:
    """The message for a run that has trained all of its batches."""
    number = run.train.batching.num_training_batches
    longer = relaunch(run, "--num-training-batches", str(2 * number))
    return (
        f"{run.folder} is finished: all of its {number} batches are trained, nothing was started; "
        f"{longer} trains on, {relaunch(run, '--overwrite')} begins anew"
    )


def conclusion(run: LocalRun, *, seconds: float) -> str:
    """The last lines of a run: duration, accuracy, alarms, and its files."""
    folder = run.folder
    lines = ["", f"{seconds / 60:.1f} minutes in all"]
    if told := _held_out(NewRows(folder / EVALUATIONS_FILE).read()):
        lines[1] = f"{told}, {lines[1]}"
    rows = NewRows(folder / METRICS_FILE).read()
    batches = rows[-1]["iteration"] + 1 if rows else 0
    total = run.train.batching.num_training_batches
    if rows and batches < total:
        lines.append(f"stopped after batch {batches} of {total}: {how_to_go_on(run)}")
    lines += _alarms(run)
    models = sorted((folder / "hf_format").glob("*"), key=os.path.getmtime)
    for what, file in (
        ("reward curve", folder / "reward.svg"),
        ("metrics", folder / METRICS_FILE),
        ("samples", folder / run.train.recording.dump_samples_filename),
        *(("model", model) for model in models[-1:]),
    ):
        if file.exists() and file != folder:
            lines.append(f"{what:<14} {file}")
    return "\n".join(lines)


def _held_out(rows: Sequence[Table]) -> str:
    """Accuracy on held-out questions, of the first set that has one; empty without."""
    names = (key for row in rows for key in row if key.startswith("eval_accuracy"))
    name = next(names, "")
    measured = sorted(
        (row for row in rows if row.get(name) is not None), key=lambda row: row["step"]
    )
    if len(measured) < 2:
        return ""
    first, last = measured[0], measured[-1]
    whose = name.replace("eval_accuracy", "").replace("/", " of ")
    return (
        f"held-out accuracy{whose} {first[name]:.0%} {_sampled(first)}, {last[name]:.0%} after "
        f"{last['batch']} batches ({last['total_samples_accumulated']} samples)"
    )


def _sampled(first: Table) -> str:
    """When the first evaluation was sampled: an engine may get new weights during it.

    >>> _sampled({"weights": "7.0"}), _sampled({"weights": "7.0..7.4"}), _sampled({})
    ('before', 'in the first 4 batches', 'before')
    """
    _, is_span, last = first.get("weights", "").partition("..")
    return f"in the first {last.rpartition('.')[2]} batches" if is_span else "before"


def _alarms(run: LocalRun) -> Iterator[str]:
    """Lines with the number of alarms, and those that still stand at the end."""
    changes = NewRows(run.folder / ALARMS_FILE).read()
    standing = {each["alarm"]: each for each in changes}.values()
    told = [f"  {each['sentence']}" for each in standing if each["event"] == "raised"]
    if num_raised := sum(each["event"] == "raised" for each in changes):
        still = f"{len(told)} stand at the end" if told else "none stands at the end"
        yield f"{'alarms':<14} {num_raised} raised, {still} ({run.folder / ALARMS_FILE})"
        yield from told
