import dataclasses
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from async_grpo.cli.options import CONTEXT, OptionsCommand, options_of
from async_grpo.cli.train import main as train
from async_grpo.cli.worker import main as worker
from async_grpo.config.option import Options, Several, flag, option, option_docs, required
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "vllm", "transformers", "datasets", "accelerate", "numpy")


@dataclasses.dataclass(kw_only=True)
class Asked(Options):
    some_path: str = required(group="Things")
    """where it is"""
    num_things: int = option(3)
    """how many"""
    rate: float = option(0.5, group="Manner")
    """how fast"""
    with_care: bool = option(False)
    """take care"""
    colour_of_it: str = option("dark_red", choices=("dark_red", "blue"))
    """how it looks"""
    limit: int = option(7, none=0, aliases=("how_far",))
    """how far; 0: no limit"""
    dump: str = option("file", none="")
    """where to; empty: nowhere"""
    colours: tuple[str, ...] = option((), several=Several(","))
    """which of them"""


def parse(*arguments):
    found = []

    @click.command(cls=OptionsCommand, context_settings=CONTEXT)
    @options_of(Asked)
    def command(**options):
        found.append(Asked(**options))

    return CliRunner().invoke(command, arguments), *found


def test_dashes_and_underscores_are_the_same():
    _, dashed = parse("--some-path", "p_q", "--num-things", "4", "--with-care")
    _, underscored = parse("--some_path", "p_q", "--num_things", "4", "--with_care")
    assert dashed == underscored == Asked(some_path="p_q", num_things=4, with_care=True)


def test_defaults_are_those_of_the_class_and_values_keep_their_underscores():
    _, options = parse("--some-path=x", "--no-with-care", "--colour-of-it", "dark_red")
    assert options == Asked(some_path="x")


@pytest.mark.parametrize(
    ("arguments", "with_care"),
    [
        (("--with_care", "True"), True),
        (("--with-care", "true"), True),
        (("--with-care=FALSE",), False),
        (("--with-care", "--with_care", "false"), False),
        (("--no-with-care",), False),
        (("--with-care",), True),
    ],
)
def test_a_switch_takes_the_value_that_scripts_write_behind_it(arguments, with_care):
    _, options = parse(*arguments, "--some-path", "True")
    assert options == Asked(some_path="True", with_care=with_care)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("", "auto"),
        ("--activation-checkpointing", "on"),
        ("--activation-checkpointing --overwrite", "on"),
        ("--activation_checkpointing True", "on"),
        ("--activation-checkpointing false", "off"),
        ("--activation-checkpointing=OFF", "off"),
    ],
)
def test_what_was_a_switch_is_understood_as_one(typed, value):
    arguments = ["--model-name-or-path", "m", "--data-path", "d", *typed.split()]
    assert train.make_context("train", arguments).params["activation_checkpointing"] == value


def test_none_is_what_an_option_says_it_is_and_nothing_elsewhere():
    _, options = parse("--some-path", "None", "--limit", "None", "--dump=None")
    assert options == Asked(some_path="None", limit=0, dump="")
    (result,) = parse("--some-path", "x", "--num-things", "None")
    assert "'None' is not a valid integer" in result.stderr


def test_what_may_be_given_several_times_is_a_tuple_and_kept_as_one_text():
    assert parse("--some-path", "x")[1].colours == ()
    _, options = parse("--some-path", "x", "--colours", "a=b,c", "--colours=d")
    assert options.colours == ("a=b", "c", "d") and options.options()["colours"] == "a=b,c,d"


def test_an_alias_and_a_choice_in_another_case_are_understood():
    _, options = parse("--some-path", "x", "--how_far", "3", "--colour-of-it", "BLUE")
    assert options == Asked(some_path="x", limit=3, colour_of_it="blue")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing option '--some-path'"),
        (("--num-things", "many"), "'many' is not a valid integer"),
        (("--rate", "high"), "'high' is not a valid float"),
        (("--colour-of-it", "green"), "'green' is not one of dark_red, blue"),
        (("--unknown", "1"), "No such option '--unknown'"),
        (("--some-path", "x", "--with-care", "maybe"), "unexpected extra argument (maybe)"),
    ],
)
def test_what_cannot_be_parsed_is_a_usage_error(arguments, complaint):
    (result,) = parse(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(("command", "config"), [(train, TrainConfig), (worker, WorkerConfig)])
def test_every_option_is_explained(command, config):
    result = CliRunner().invoke(command, ["--help"], terminal_width=100)
    assert result.exit_code == 0
    shown = "".join(result.stdout.split())  # lines are wrapped at dashes too
    for name, text in option_docs(config).items():
        assert flag(name) in shown
        assert "".join(text.split()) in shown, name


def headings(text):
    """{heading of a help page: first words of the options below it}."""
    groups = {}
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            groups[line[:-1]] = []
        elif line.startswith("  -"):
            groups[list(groups)[-1]].append(line.split()[0])
    return groups


def test_an_option_stands_under_the_heading_declared_at_it_or_before_it():
    @dataclasses.dataclass(kw_only=True)
    class Derived(Asked):
        own: int = option(1, group="Own")
        """comes first"""

    @click.command(cls=OptionsCommand, context_settings=CONTEXT)
    @options_of(Derived)
    def command(**options):
        pass

    assert headings(CliRunner().invoke(command, ["--help"]).stdout) == {
        "Own": ["--own"],
        "Things": ["--some-path", "--num-things"],
        "Manner": ["--rate", "--with-care", "--colour-of-it", "--limit,", "--dump", "--colours"],
        "Other options": ["--help"],
    }


def test_the_usual_ten_come_first_and_no_option_is_without_a_heading():
    found = headings(CliRunner().invoke(train, ["--help"]).stdout)
    first = next(iter(found.items()))
    assert (first[0], len(first[1])) == ("Usual options", 10)
    assert found["Other options"] == ["--config", "--help"]


def test_options_of_one_role_of_workers_stand_apart():
    found = headings(CliRunner().invoke(worker, ["--help"]).stdout)
    assert "--max-num-seqs" in found["Only with --mode generation"]
    assert found["Only with --mode logprob or teacher"] == [
        "--max-tokens-per-gpu", "--scorer-ranks",
    ]  # fmt: skip


@pytest.mark.parametrize("script", ["trainer_core.py", "worker_dispatcher.py"])
def test_help_answers_at_once_because_nothing_heavy_is_imported(script):
    code = (
        f"import runpy, sys; sys.argv = [{script!r}, '--help']\n"
        f"try: runpy.run_path({script!r}, run_name='__main__')\n"
        f"finally: print('heavy:', sorted(set(sys.modules) & set({HEAVY!r})))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert finished.stdout.startswith("Usage:")
    assert finished.stdout.endswith("heavy: []\n")
    # Of the processor, not of the clock: the machine may be busy.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["--num-generations", "8"], "Did you mean '--samples-per-question'?"),
        (["--actor_rollout_ref.rollout.n=8"], "Did you mean '--samples-per-question'?"),
        (["actor_rollout_ref.actor.kl_loss_coef=0.1"], "Did you mean '--kl-coefficient'?"),
        (["--vllm-max-model-length", "8"], "Here it is --max-model-len of `async-grpo worker`"),
        (["--num-iterations", "2"], "Did you mean '--num-passes'?"),
        (["--top-k", "2"], "There is no such option here: remove it"),
    ],
)
def test_a_name_of_trl_or_verl_is_told_by_ours(typed, told):
    done = CliRunner().invoke(train, typed)
    assert done.exit_code == 2 and told in " ".join(done.stderr.split())
