"""The commands of a page's bash block, read as the commands themselves read them; none is run.

Ours are parsed by their own click commands and config classes; `launch` is run, with `--dry-run`.
Of a script, the file and each option must be in its source. Of what is not ours (ray, pip, docker,
sbatch), the files that are named must be there.
"""

import re
import shlex
from collections.abc import Collection, Iterator
from functools import cache

import click
from click.testing import CliRunner
from pages import ROOT

from async_grpo.cli.main import main
from async_grpo.config.option import option_fields
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig

SCRIPTS = {
    "trainer_core.py": "train",
    "worker_dispatcher.py": "worker",
    "plot.py": "plot",
}
OF_A_FILE = ("launch", "check", "plan")
CONFIGS = {"train": TrainConfig, "worker": WorkerConfig}
# What is not ours, or only prepares the shell.
OTHERS = (
    *("ray", "pip", "docker", "sbatch", "export", "set", ".", "cd", "cp", "mkdir"),
    *("jupyter", "curl", "grep"),
)
OURS = ("async_grpo/", "benchmarks/", "docs/", "examples/", "requirements/", "tests/", "tools/")
PLACEHOLDER = re.compile(r"^[A-Z][A-Z_]*$|^path/to/|^models/")
ASSIGNMENT = re.compile(r"^[A-Z_]+=\S*$")
REST = "..."  # and whatever else the run needs


def commands(text: str) -> Iterator[list[str]]:
    """Its command lines, in words, without comments and assignments before them.

    >>> list(commands("A=1 make setup && . x  # first\\nray start \\\\\\n -h"))
    [['make', 'setup'], ['.', 'x'], ['ray', 'start', '-h']]
    """
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if command:
                    yield command
                command = []
            elif command or not ASSIGNMENT.match(word):
                command.append(word)


def check(command: list[str], *, own: Collection[str] = ()) -> None:
    """Raises what the command would say, or an AssertionError; `own` are files of the page."""
    program, *arguments = command
    if program == "torchrun" or command[:2] == ["accelerate", "launch"]:
        script = next(word for word in arguments if word.endswith(".py"))
        return check(["python", script, *arguments[arguments.index(script) + 1 :]])
    name = program.rpartition("/")[2]
    if program == "async-grpo":
        return _check_ours(*arguments)
    if name == "make":
        return _check_target(arguments)
    if own and not set(own).isdisjoint(arguments) and name.startswith("python"):
        return None
    if name.startswith("python"):
        return _check_script(arguments)
    assert name in OTHERS, (
        f"{program} is no known program: mark the block text, or teach {__file__}"
    )
    return _check_files(arguments)


def _check_ours(name: str, *typed: str) -> None:
    command = main.commands[name]
    is_whole = REST not in typed and not any(map(PLACEHOLDER.match, typed))
    arguments = [word for word in typed if word != REST]
    file = _option(arguments, "--config")
    if file is not None and not (ROOT / file).exists():  # the reader's own
        at = arguments.index("--config")
        arguments[at : at + 2], is_whole = [], False
    if name in OF_A_FILE and not (ROOT / arguments[0]).exists():
        arguments[0] = "examples/quickstart.toml"
    try:
        context = command.make_context(name, list(arguments))
    except click.MissingParameter:
        assert not is_whole, f"async-grpo {shlex.join([name, *typed])} lacks an option"
        return
    given = context.params
    if name in CONFIGS and is_whole:
        fields = option_fields(CONFIGS[name])
        values = {key: given[key] for key in given if key in fields}
        TrainConfig.from_options(values) if name == "train" else WorkerConfig(**values)
    if name == "launch":
        starts = not (given["plan_for"] or given["emit"] or given["dry_run"])
        ended = CliRunner().invoke(command, [*arguments, *(["--dry-run"] if starts else [])])
        assert (ended.exit_code, ended.stderr) == (0, ""), shlex.join([name, *typed])


def _option(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


def _check_target(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in arguments:
        if "=" not in target:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def _check_script(arguments: list[str]) -> None:
    if arguments[0] == "-P":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        module, *options = arguments[1:]
        if module in ("pytest", "venv", "pip"):
            return _check_files(options)
        return _check_options(_source(module.replace(".", "/")), options)
    script, *options = arguments
    if script in SCRIPTS:
        return _check_ours(SCRIPTS[script], *options)
    return _check_options(_source(script), options)


@cache
def _source(name: str) -> str:
    """The text of a script, or of a module with what it shares with those beside it."""
    if name.endswith(".py"):
        return (ROOT / name).read_text()
    files = [ROOT / f"{name}.py", *sorted((ROOT / name).glob("**/*.py"))]
    assert any(file.exists() for file in files), f"there is no {name}"
    shared = sorted((ROOT / name).parent.glob("*.py"))
    return "".join(file.read_text() for file in [*files, *shared] if file.exists())


def _check_options(source: str, typed: list[str]) -> None:
    for word in typed:
        if word.startswith("--"):
            option = word.split("=")[0]
            assert f'"{option}"' in source or f'"{option}/' in source, f"there is no {option}"
    _check_files(typed)


def _check_files(words: list[str]) -> None:
    for word in words:
        name = word.split("::")[0].split(":")[0]
        if name.startswith(OURS):
            assert (ROOT / name).exists(), f"there is no {name}"
