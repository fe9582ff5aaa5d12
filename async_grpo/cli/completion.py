"""`async-grpo completion bash|zsh|fish`: what Tab knows of every command, printed or installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT
from async_grpo.util.errors import ConfigError
from async_grpo.util.files import replacing

PROGRAM, VARIABLE = "async-grpo", "_ASYNC_GRPO_COMPLETE"  # as click derives it from the name


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shell looks for a program's completion, below the home folder."""

    file: str
    remark: str = ""  # what else it needs, to be told


PLACES = {
    "bash": Place(f".local/share/bash-completion/completions/{PROGRAM}",
                  "it needs the package bash-completion, as most systems have it"),
    "zsh": Place(f".zfunc/_{PROGRAM}",
                 "~/.zshrc needs `fpath+=~/.zfunc` above its `autoload -Uz compinit && compinit`"),
    "fish": Place(f".config/fish/completions/{PROGRAM}.fish"),
}  # fmt: skip


@click.command("completion", context_settings=CONTEXT)
@click.argument("shell", type=click.Choice([*PLACES]))
@click.option("--install", is_flag=True, help="write it to where new shells look for it")
@command_boundary()
def completion(*, shell: str, install: bool) -> None:
    """Print the completion of commands and options for SHELL, or install it.

    \b
    e.g. source <(async-grpo completion bash)
    """
    root = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    assert found is not None, "click knows the three"
    script = found(root, {}, PROGRAM, VARIABLE).source()
    if not install:
        click.echo(script)
        return
    place = PLACES[shell]
    file = Path.home() / place.file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            new.write(script.encode())
    except OSError as error:
        raise ConfigError(
            f"cannot write {file} ({error.strerror or error}): print it, and put it elsewhere"
        ) from error
    click.echo(f"wrote {file}; new shells complete {PROGRAM}")
    if place.remark:
        click.echo(place.remark)
