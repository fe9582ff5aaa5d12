"""`async-grpo`: one door to every command."""

from __future__ import annotations

import click

from async_grpo.cli.check import check
from async_grpo.cli.control import main as control
from async_grpo.cli.first_steps import completion, example, quickstart
from async_grpo.cli.launch_file import launch
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.plan import plan
from async_grpo.cli.plot import main as plot
from async_grpo.cli.replay import main as replay
from async_grpo.cli.rollouts import main as rollouts
from async_grpo.cli.train import main as train
from async_grpo.cli.use_model import evaluate, generate, serve
from async_grpo.cli.worker import main as worker
from async_grpo.util import RELEASE

HEADINGS = {
    "Run": ("quickstart", "check", "plan", "launch"),
    "Run, one process after the other": ("worker", "train"),
    "Look at a run": ("control", "plot", "rollouts", "replay"),
    "Use a model": ("evaluate", "generate", "serve"),
    "Learn": ("example", "completion"),
}


class Commands(click.Group):
    """Shows its commands under headings, those that are under none at the end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = list(self.list_commands(ctx))
        for heading, names in (*HEADINGS.items(), ("Others", left)):
            found = [name for name in names if name in left]
            left = [name for name in left if name not in found]
            if found:
                with formatter.section(heading):
                    formatter.write_dl(
                        [(n, self.commands[n].get_short_help_str(120)) for n in found]
                    )


@click.group(cls=Commands, context_settings={"max_content_width": CONTEXT["max_content_width"]})
@click.version_option(RELEASE)
def main() -> None:
    """Train language models with GRPO while they generate.

    `async-grpo COMMAND --help` has its options, with their defaults.
    """


main.add_command(quickstart)
main.add_command(check)
main.add_command(plan)
main.add_command(launch)
main.add_command(worker)
main.add_command(train)
main.add_command(evaluate)
main.add_command(generate)
main.add_command(serve)
main.add_command(control)
main.add_command(plot, "plot")
main.add_command(rollouts)
main.add_command(example)
main.add_command(completion)
main.add_command(replay)

if __name__ == "__main__":
    main(prog_name="async-grpo")
