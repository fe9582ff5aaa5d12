"""`async-grpo`: one door to every command."""

from __future__ import annotations

import click

from async_grpo import __version__
from async_grpo.cli.generate import main as generate
from async_grpo.cli.launch_file import launch
from async_grpo.cli.plot import main as plot
from async_grpo.cli.quickstart import quickstart
from async_grpo.cli.serve import main as serve
from async_grpo.cli.train import main as train
from async_grpo.cli.worker import main as worker


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Train language models with GRPO while they generate."""


main.add_command(quickstart)
main.add_command(launch)
main.add_command(worker)
main.add_command(train)
main.add_command(generate)
main.add_command(serve)
main.add_command(plot, "plot")

if __name__ == "__main__":
    main(prog_name="async-grpo")
