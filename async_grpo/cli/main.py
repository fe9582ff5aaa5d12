"""`async-grpo`: the group of all commands, and the first three that a newcomer runs.

`quickstart` runs examples/quickstart.toml, `example` prints the files of shipped runs, and
`completion` prints or installs the shell completion of every command.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.check import check
from async_grpo.cli.control import main as control
from async_grpo.cli.deep_check import trial
from async_grpo.cli.launch_file import launch, run_here
from async_grpo.cli.local_run import LocalRun, options_of_run, planned
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.plan import plan
from async_grpo.cli.run_file import shared_folder
from async_grpo.cli.train import main as train
from async_grpo.cli.train import resolved
from async_grpo.cli.use_model import dequantize, evaluate, generate, push, quantize, serve
from async_grpo.cli.use_run import plot_commands, replay, rollouts
from async_grpo.cli.worker import main as worker
from async_grpo.model.foreign_folders import families
from async_grpo.util import RELEASE
from async_grpo.util.errors import ConfigError
from async_grpo.util.files import replacing
from async_grpo.util.run_folder import PARAMETERS_FILE

FILE = "examples/quickstart.toml"
PROGRAM, VARIABLE = "async-grpo", "_ASYNC_GRPO_COMPLETE"  # as click derives it from the name


class Commands(click.Group):
    """Shows its commands under headings, and the others at the end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        headings = {heading: [each.name for each in own] for heading, own in HEADINGS.items()}
        for heading, names in (headings | {"Others": left}).items():
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


@click.command(context_settings=CONTEXT)
@click.option("--config", default=FILE, metavar="FILE", help="file of the run")
@click.option("--output-dir", default="runs/quickstart", help="folder of the run; replaced")
@click.option("--num-batches", default=90, help="batches to train")
@click.option("--seed", default=0, help="seed of the questions and of their order")
@click.option("--num-ranks", default=2, help="trainer ranks; fewer where devices are few")
@click.option("--max-staleness", default=1, help="batches that generation may run ahead")
@command_boundary()
def quickstart(
    *, config: str, output_dir: str, num_batches: int, seed: int, num_ranks: int, max_staleness: int
) -> None:
    """Train a tiny model on countdown puzzles, here and now.

    \b
    e.g. --num-batches 40 --output-dir runs/first
    """
    folder = Path(output_dir)
    questions, held_out = folder / "questions.jsonl", folder / "held_out.jsonl"
    given = {
        "overwrite": True, "data_path": str(questions), "eval_data_path": str(held_out),
        "output_dir": str(folder), "num_training_batches": num_batches,
        "nproc_per_node": num_ranks, "max_staleness": max_staleness, "infinite_sampler_seed": seed,
    }  # fmt: skip
    prepare_options = (f"--seed={seed}", f"--output={questions}", f"--held-out-output={held_out}")
    options = launch.make_context("launch", [config]).params
    options["prepare"] = f"{options['prepare']} {shlex.join(prepare_options)}"
    run = planned(**options_of_run(options), given=given)
    if folder.exists() and not _is_own(run):
        raise ConfigError(
            f"--output-dir {folder} exists and is not a quick start's: name another folder"
        )
    run_here(run)


def _is_own(run: LocalRun) -> bool:
    """Whether a quick start made the run's folder: only its own options may differ."""
    from async_grpo.checkpoint.resume import INCIDENTAL, differing_options  # not for --help

    if not (run.folder / PARAMETERS_FILE).exists():  # it ended before the trainer wrote that file
        return run.logs.is_dir()
    own = ("num_training_batches", "infinite_sampler_seed", "max_staleness")
    return not differing_options(resolved(run.train), run.folder, (*INCIDENTAL, *own))


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
    """(name, file) of each example that came with the package."""
    folder = shared_folder() / "examples"
    for file in sorted(folder.rglob("*.toml")):
        if file.name != "pyproject.toml":
            yield file.relative_to(folder).with_suffix("").as_posix().removesuffix("/run"), file


def _title(file: Path) -> str:
    """The first sentence of the comment at the file's top."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), file.read_text().splitlines())
    sentence, *_ = re.split(r"(?<=\.)\s|\s{2,}", " ".join(line[2:] for line in lines), maxsplit=1)
    return sentence


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shell looks for a program's completion, below the home folder."""

    file: str
    remark: str = ""  # printed after the installation: what else it needs


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


@click.command(context_settings=CONTEXT)
@click.argument("part", default="")
@command_boundary()
def models(*, part: str) -> None:
    """List the families of models whose type has PART in it: do they train, do engines serve them.

    As tiny random models showed with the versions that this release pins. Engines and trainer
    agree (yes), agree in bf16 alone, differ, or no engine on a CPU serves it. What is not in the
    list is checked when a run starts, and with each update.
    """
    for kind, _, trains, serves, how in families():
        if part in kind:
            click.echo(f"{kind:<20} {trains:<8} {serves:<8} {how}")


HEADINGS = {
    "Run": (quickstart, check, plan, launch),
    "Run, one process after the other": (worker, train),
    "Look at a run": (control, plot_commands, rollouts, replay),
    "Use a model": (models, evaluate, generate, serve, dequantize, quantize, push),
    "Learn": (example, completion),
}
for command in itertools.chain(*HEADINGS.values(), (trial,)):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name=PROGRAM)
