"""`async-grpo control RUN`: what may be changed of a run while it trains."""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
import uuid
from collections.abc import Awaitable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast, get_args

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.run_file import Table
from async_grpo.config.train_config import parse_settings, saved_config, with_settings
from async_grpo.types.runs import AT_ONCE, Control, ControlAction
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import PARAMETERS_FILE

T = TypeVar("T")
if TYPE_CHECKING:
    from async_grpo.types import RunStatus

ACTIONS = ("show", *get_args(ControlAction))


@click.command("control", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("action", type=click.Choice(ACTIONS))
@click.argument("what", nargs=-1)
@click.option("--ray-address", default="", show_default="the run's own",
              help="host:port of the Ray cluster in which the run trains")  # fmt: skip
@command_boundary()
def main(run: Path, action: str, what: tuple[str, ...], ray_address: str) -> None:
    """Have a run that trains do something else, from its next batch on.

    RUN is its folder. The actions: `show`; `set learning_rate=1e-6 max_staleness=2`; `evaluate`, at
    the end of the batch; `stop`, at the end of the batch and with a checkpoint; `drain WORKER`,
    which gets no new work, and `undrain WORKER`. All ranks do it between the same two batches.
    control.jsonl in RUN tells who asked for what, and from which batch on it holds; a run that is
    resumed or replayed does the same.

    \b
    e.g. runs/mine set learning_rate=5e-7
    """
    control = None if action == "show" else _request(action, what)
    options = _options(run)
    if control is not None:  # refuse bad values before the run is asked
        with_settings(saved_config(options), control.settings)
    from async_grpo.run.output_folder import way_to
    from async_grpo.util import deadlines

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    address = ray_address or way_to(run, by_options=options["ray_address"])
    from async_grpo.cluster.cluster import Cluster  # Ray reads what `way_to` sets
    from async_grpo.cluster.handles import CONTROLLER, WHO

    cluster = Cluster.join(
        address, namespace=options["namespace"], timeout_s=deadlines.RUN_JOINED_S
    )
    controller = cluster.find_actor(CONTROLLER)
    if controller is None:
        raise ConfigError(
            f"{run} must be the folder of a run that trains, the Ray cluster at {address} has no "
            f"controller in the namespace {options['namespace']}: it has ended, or --ray-address "
            "says where it is"
        )

    def ask(call: Awaitable[T]) -> T:
        return cluster.wait(call, timeout_s=deadlines.STATUS_S, who=WHO)

    folder = str(run.absolute())
    if control is not None:
        ask(controller.control.remote(folder, control))
    _tell(ask(controller.running.remote(folder)), control)


def _request(action: str, what: tuple[str, ...]) -> Control:
    """The request of an action; raises `ConfigError` for wrong arguments."""
    if action == "set" and not what:
        raise ConfigError("set needs what is set, got nothing: learning_rate=1e-6")
    if action in AT_ONCE and len(what) != 1:
        raise ConfigError(f"{action} needs the id of one worker, got {len(what)}: see show")
    if action in ("evaluate", "stop") and what:
        raise ConfigError(f"{action} takes nothing more, got {' '.join(what)}: leave it out")
    return Control(
        id=uuid.uuid4().hex[:12],
        action=cast(ControlAction, action),  # click has checked it
        by=f"{_user()}@{socket.gethostname()}, process {os.getpid()}",
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=parse_settings(what) if action == "set" else {},
        worker=what[0] if action in AT_ONCE else "",
    )


def _user() -> str:
    with suppress(OSError, KeyError):  # a container's user need not have a name
        return getpass.getuser()
    return str(os.getuid())


def _options(run: Path) -> Table:
    """The options of the run in a folder; raises `ConfigError` where there is no run."""
    path = run / PARAMETERS_FILE
    try:
        options: Table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run} must be the folder of a run, {path} cannot be read ({error}): name another"
        ) from error
    if options.get("algorithm") == "sft":
        raise ConfigError(
            f"{run} must be a run that samples outputs, it is a supervised one, which has no "
            "controller: stop it with Ctrl-C, and resume it with other options"
        )
    return options


def _tell(status: RunStatus, control: Control | None) -> None:
    """Print what was requested, or the state of the run."""
    if control is not None:
        later = f"asked in batch {status.batch}; control.jsonl tells from which batch on it holds"
        click.echo(f"{control}: {'done' if control.action in AT_ONCE else later}")
        return
    click.echo(f"batch {status.batch} of {status.num_batches} is being trained")
    for name, value in status.options.items():
        click.echo(f"{name} = {value:g}")
    for waiting in status.waiting:
        click.echo(f"waits for the end of the batch: {waiting}, asked by {waiting.by}")
    for worker, (role, is_draining) in status.workers.items():
        click.echo(f"{role} {worker}{', gets no new work' if is_draining else ''}")
