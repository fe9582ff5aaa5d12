"""`async-grpo example`: the files of runs that came with the package, to begin with."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.origin import shared_folder
from async_grpo.util.errors import ConfigError


@click.command("example", context_settings=CONTEXT)
@click.argument("name", default="")
@command_boundary()
def example(*, name: str) -> None:
    """List the examples, or print the file of the example NAME.

    `async-grpo launch examples/NAME.toml` finds it in any folder; printed into a file of yours, it
    is the beginning of a run of your own.

    \b
    e.g. quickstart > run.toml
    """
    found = dict(examples())
    if not name:
        width = max(map(len, found))
        click.echo("\n".join(f"{each:<{width}}  {_title(file)}" for each, file in found.items()))
        return
    if name not in found:
        [nearest] = difflib.get_close_matches(name, found, n=1, cutoff=0.0)
        raise ConfigError(f"there is no example {name!r}, the nearest is {nearest}: correct it")
    click.echo(found[name].read_text(), nl=False)


def examples() -> Iterator[tuple[str, Path]]:
    """(name, file) of each that came with the package."""
    folder = shared_folder() / "examples"
    for file in sorted(folder.rglob("*.toml")):
        if file.name != "pyproject.toml":
            yield file.relative_to(folder).with_suffix("").as_posix().removesuffix("/run"), file


def _title(file: Path) -> str:
    """The first sentence of its comment."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), file.read_text().splitlines())
    sentence, *_ = re.split(r"(?<=\.)\s|\s{2,}", " ".join(line[2:] for line in lines), maxsplit=1)
    return sentence
