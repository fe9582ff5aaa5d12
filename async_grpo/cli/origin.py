"""Where a run's file, and what it names, come from: the package, this folder, or elsewhere.

Examples and sample data lie in the top folder of a clone, and inside an installed package. A path
below `examples/` or `sample-data/` that is not here means the one that came with the package, so
that `async-grpo launch examples/quickstart.toml` works in any folder. A file that lies elsewhere is
a stranger's, and so is the code that it names, until somebody has read it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.cli.local_run import LocalRun

PACKAGE = Path(__file__).parents[1]
PATH = re.compile(r"(?<![\w./-])(?:examples|sample-data)(?:/[\w.-]+)+")
COMMANDS = ("prepare", "environment")  # keys whose values are words of a shell
TRUST = "--trust"
REGISTRY = "reward_registry"  # which is the package's
OPENENV = "openenv:"  # names an address: nothing of it runs here
trust_option = click.option(
    TRUST, is_flag=True, help="run the code that FILE names, wherever it lies, and unconfined"
)


def shared_folder() -> Path:
    """Where the examples and the sample data lie."""
    installed = PACKAGE / "share"
    return installed if installed.is_dir() else PACKAGE.parent


def here_or_shared(path: str) -> str:
    """The path as it is, unless it is only there with the package.

    >>> here_or_shared("runs/mine.toml"), Path(here_or_shared("examples/quickstart.toml")).is_file()
    ('runs/mine.toml', True)
    """
    shared = shared_folder() / path
    is_shared = PATH.fullmatch(path) and not Path(path).exists() and shared.exists()
    return str(shared) if is_shared else path


def with_shared(value: object, *, key: str = "") -> Any:
    """The content of a run's file, or a part of it, with every such path in its texts.

    >>> with_shared({"train": {"batch_size": 4, "data": ["a=sample-data/none.jsonl"]}})
    {'train': {'batch_size': 4, 'data': ['a=sample-data/none.jsonl']}}
    """
    if isinstance(value, dict):
        return {name: with_shared(each, key=name) for name, each in value.items()}
    if isinstance(value, list):
        return [with_shared(each, key=key) for each in value]
    if not isinstance(value, str):
        return value
    quoted = shlex.quote if key in COMMANDS else str
    return PATH.sub(lambda match: quoted(here_or_shared(match[0])), value)


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
    named += [("algorithm", run.train.objective.algorithm)]
    for each in run.workers:
        named += [("mode", each.mode), *(("reward_fns", name) for name in each.reward_names)]
        found += [("judge_url", each.judge_url)] if each.judge_url else []  # which is sent a key
        if each.reward_registry != REGISTRY:
            found.append(("reward_registry", each.reward_registry))
    return found + [(o, name) for o, name in named if ":" in name and not name.startswith(OPENENV)]
