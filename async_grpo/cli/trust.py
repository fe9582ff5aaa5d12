"""Whose code a run's file may name: one that lies elsewhere is a stranger's until it is read."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_grpo.launch.shared_files import PACKAGE, here_or_shared, shared_folder
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.cli.local_run import LocalRun

TRUST = "--trust"
REGISTRY = "reward_registry"  # which is the package's
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
            f"{file} lies outside this folder, and its {option} names {named!r}: read both, then "
            f"give {TRUST}, or go to a folder that holds the file"
        )


def trust_words(run: LocalRun, *, file: str) -> tuple[str, ...]:
    """What must be typed behind a file that this machine has written of a run."""
    return () if is_near(file) or not _code_of(run) else (TRUST,)


def _code_of(run: LocalRun) -> list[tuple[str, str]]:
    """(option, value) of each that runs something, or is sent a secret."""
    prepare = () if run.goes_on else run.prepare
    found = [("prepare", shlex.join(command)) for command in prepare]
    named = [("environment", name) for name in sorted(run.train.environments)]
    named += [("algorithm", run.train.algorithm)]
    for each in run.workers:
        named += [("reward_fns", name) for name in each.reward_names]
        found += [("judge_url", each.judge_url)] if each.judge_url else []  # which is sent a key
        if each.reward_registry != REGISTRY:
            found.append(("reward_registry", each.reward_registry))
    return found + [(o, name) for o, name in named if ":" in name and not name.startswith(OPENENV)]
