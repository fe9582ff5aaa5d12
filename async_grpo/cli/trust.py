"""Whose code a run's file may name: one that lies elsewhere is a stranger's until it is read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_grpo.cli.shared_files import PACKAGE, here_or_shared, shared_folder
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.cli.local_run import LocalRun

TRUST = "--trust"
OPENENV = "openenv:"  # names an address: nothing of it runs here
trust_option = click.option(
    TRUST, is_flag=True, help="run the code that FILE names, wherever it lies, and unconfined"
)


def is_near(file: str) -> bool:
    """Whether a file lies in this folder, or came with the package."""
    place = Path(here_or_shared(file)).resolve()
    near = (Path.cwd(), PACKAGE, shared_folder() / "examples")
    return any(place.is_relative_to(folder.resolve()) for folder in near)


def check_origin(run: LocalRun, *, file: str, typed: Sequence[str], trusted: bool) -> None:
    """Raise `ConfigError` for code that a file from elsewhere names, and that nobody `typed`."""
    if trusted or not file or is_near(file):
        return
    for option, named in _code_of(run):
        if any(named in word for word in typed):
            continue
        raise ConfigError(
            f"{file} lies outside this folder, and its {option} names code, {named!r}: read both, "
            f"then give {TRUST}, or go to a folder that holds the file"
        )


def _code_of(run: LocalRun) -> Iterator[tuple[str, str]]:
    """(option, value) of each that runs something."""
    for command in () if run.goes_on else run.prepare:
        yield "prepare", shlex.join(command)
    if ":" in run.train.algorithm:
        yield "algorithm", run.train.algorithm
    for name in sorted(run.train.environments):
        if ":" in name and not name.startswith(OPENENV):
            yield "environment", name
    for worker in run.workers:
        if worker.reward_registry != WorkerConfig.__dataclass_fields__["reward_registry"].default:
            yield "reward_registry", worker.reward_registry
        for name in worker.reward_names:
            if ":" in name:
                yield "reward_fns", name
