"""One TOML file for a run: what each command takes of it, and what is refused in which words."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from async_grpo.cli.options import given_options
from async_grpo.cli.train import config_of
from async_grpo.cli.train import main as train
from async_grpo.cli.use_run import plot
from async_grpo.cli.worker import main as worker
from async_grpo.util.errors import ConfigError

EXAMPLE = """
[cluster]
namespace = "shared"

[[worker]]
mode = "generation"
model_path = "m"
max-num-seqs = 5
enable_prefix_caching = false

[[worker]]
mode = "logprob"
model_path = "m"
namespace = "own"

[train]
model_name_or_path = "m"
data_path = "d.jsonl"
learning_rate = 1
deterministic = true
max_staleness = 0
trackers = "None"

[plot]
paths = ["runs/a"]
variable = ["avg_reward", "entropy"]
smooth_window = 3
"""


@pytest.fixture
def parsed(tmp_path):
    """What a command makes of a file and of what is typed: its context."""
    file = tmp_path / "run.toml"

    def parse(command, *typed, text=EXAMPLE):
        file.write_text(text)
        return command.make_context(command.name, ["--config", str(file), *typed])

    return parse


def test_a_command_reads_its_own_table_and_the_one_that_all_share(parsed):
    params = parsed(train, "--learning-rate", "1e-6").params
    assert (params["namespace"], params["data_path"]) == ("shared", "d.jsonl")
    assert params["deterministic"] is True and params["max_staleness"] == 0
    params = parsed(plot).params
    assert params["variables"] == ("avg_reward", "entropy") and params["paths"] == ("runs/a",)
    assert params["smooth_window"] == 3


def test_the_command_line_goes_before_the_file(parsed):
    params = parsed(train, "--learning_rate=1e-6", "--no-deterministic", "--data-path", "x").params
    assert (params["learning_rate"], params["deterministic"]) == (1e-6, False)
    assert params["data_path"] == "x"


def test_what_the_file_says_counts_as_given_and_goes_before_a_preset(parsed):
    text = '[train]\nmodel_name_or_path = "m"\ndata_path = "d"\npreset = "gspo"\nclip_low = 0.1\n'
    context = parsed(train, text=text)
    assert given_options(context).keys() == {
        "model_name_or_path", "data_path", "preset", "clip_low",
    }  # fmt: skip
    config = config_of(context)
    assert (
        config.objective.clip_low,
        config.objective.clip_high,
        config.objective.ratio_level,
    ) == (0.1, 4e-4, "sequence")


def test_the_mode_or_the_number_chooses_among_the_tables_of_workers(parsed):
    params = parsed(worker, "--mode", "generation").params
    assert (params["max_num_seqs"], params["namespace"]) == (5, "shared")
    assert params["enable_prefix_caching"] is False
    assert parsed(worker, "--mode=logprob").params["namespace"] == "own"
    with pytest.raises(click.UsageError, match=r"has 2 .* choose one with --mode, of gen"):
        parsed(worker)
    assert parsed(worker, "--table", "1").params["mode"] == "logprob"


TRAIN = "[train]\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TRAIN + "learnign_rate = 1", r"\[train\] learnign_rate is no option of `async-grpo train`,"
         " the nearest is learning_rate: correct or remove it"),
        ("[train]\nactor_rollout_ref.rollout.n = 8",
         "rollout.n is no option of `async-grpo train`, the nearest is samples_per_question"),
        ("[train]\ntop_k = 2", "there is no such option here: remove it"),
        ("[train]\nvllm_max_model_length = 2", "here it is --max-model-len of `async-grpo worker`"),
        ("[trian]\nx = 1", r"run.toml: \[trian\] is no table of a run, the nearest is train"),
        ("batch_size = 1", r"batch_size must stand in a table, got 1: write \[train\]"),
        ("train = 1", r"train must stand in a table"),
        ("[[train]]\n[[train]]", r"\[train\] must stand once, got 2"),
        ("[cluster]\nnamespce = ''", r"\[cluster\] namespce is not shared, .* namespace"),
        (TRAIN + "batch_size = '32'", r"\[train\] batch_size must be an integer, got '32': write"),
        (TRAIN + "batch_size = true", "batch_size must be an integer, got True"),
        (TRAIN + "batch_size = 3.5", "batch_size must be an integer, got 3.5"),
        (TRAIN + "learning_rate = '1'", "learning_rate must be a number, got '1'"),
        (TRAIN + "deterministic = 1", "deterministic must be true or false, got 1"),
        (TRAIN + "data_path = 7", "data_path must be a text, got 7"),
        (TRAIN + "policy_loss = 'ppo'", r"\[train\] policy_loss: 'ppo' is not one of clip, cispo"),
        (TRAIN + "nproc_per_node = 0", r"nproc_per_node: 0 is not in the range x>=1"),
        (TRAIN + "a b = 1", r"run.toml is no TOML: .*line 2, column 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_key_and_remedy(parsed, text, sentence):
    with pytest.raises(click.UsageError, match=sentence):
        parsed(train, text=text)


@pytest.mark.parametrize(
    ("value", "typed", "trackers"),
    [
        ('"tensorboard,wandb"', [], ("tensorboard", "wandb")),
        ('["tensorboard", "wandb"]', [], ("tensorboard", "wandb")),
        ('""', [], ()),
        ("[]", [], ()),
        ('"None"', [], ()),
        ('"wandb"', ["--tracker", "mlflow", "--tracker", "trackio"], ("mlflow", "trackio")),
        ('"wandb"', ["--trackers", ""], ()),
    ],
)
def test_several_are_a_list_or_a_text_that_holds_them_all(parsed, value, typed, trackers):
    text = f"{TRAIN}model_name_or_path = 'm'\ndata_path = 'd'\ntrackers = {value}"
    assert config_of(parsed(train, *typed, text=text)).recording.trackers == trackers


def test_a_list_is_asked_for_where_an_option_may_repeat(parsed):
    with pytest.raises(click.UsageError, match=r"variable must be a list, got 'x': write \['x'\]"):
        parsed(plot, text="[plot]\nvariable = 'x'")


def test_a_file_that_is_not_there_is_a_usage_error():
    result = CliRunner().invoke(worker, ["--config", "no/such.toml"])
    assert result.exit_code == 2
    assert "--config no/such.toml cannot be read: [Errno 2] No such file" in result.stderr


def test_what_is_missing_in_both_is_asked_for(parsed):
    with pytest.raises(click.MissingParameter, match="model_name_or_path"):
        parsed(train, text=TRAIN + "data_path = 'd'\n")


def test_a_table_of_another_command_is_left_to_it(parsed):
    text = TRAIN + "model_name_or_path = 'm'\ndata_path = 'd'\n[worker]\nmodel = 1\n"
    assert parsed(train, text=text).params["data_path"] == "d"
    assert Path(parsed(train, text=text).params["output_dir"]) == Path("runs/latest")


DATA = """
[train]
model_name_or_path = "m"

[[data]]
type = "sums"
path = "s.jsonl"
weight = 2
rewards = ["countdown", "mathd"]
column_mapping = "input=question,answer=solution"

[[data]]
type = "odes"
path = "o.csv"
columns = {level = "int", share = "float"}
"""


def test_types_of_columns_may_be_a_table_of_train(parsed):
    text = '[train]\nmodel_name_or_path = "m"\ndata_path = "d.csv"\ncolumns = {level = "int"}'
    [file] = config_of(parsed(train, text=text)).data.data_files
    assert file.source.columns == {"level": "int"}


def test_tables_of_data_are_the_trainer_s_data_files(parsed):
    config = config_of(parsed(train, text=DATA))
    sums, odes = config.data.data_files
    assert (sums.type, sums.source.path, sums.weight) == ("sums", "s.jsonl", 2)
    assert sums.rewards == ("countdown", "mathd")
    assert sums.columns == {"input": "question", "answer": "solution"}
    assert (odes.type, odes.weight, odes.rewards) == ("odes", 1, ())
    assert odes.source.columns == {"level": "int", "share": "float"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            DATA + "wieght = 2",
            "--data of odes has an unknown key, got 'wieght': choose from weight",
        ),
        (DATA + "weight = 0", "--data of odes must have a positive weight, got '0'"),
        ('[[data]]\npath = "s.jsonl"', "--data needs a type, got "),
        (
            DATA.replace('"m"', '"m"\ndata = ["a=b"]'),
            r"data must be in \[\[data\]\] or in \[train\]",
        ),
        (DATA.replace('"m"', '"m"\ndata_path = "d"'), "--data-path must be given, or --data for"),
    ],
)
def test_tables_of_data_that_cannot_be_meant_are_refused(parsed, text, said):
    with pytest.raises((click.UsageError, ConfigError), match=said):
        config_of(parsed(train, text=text))


def test_tables_of_eval_are_the_trainer_s_sets(parsed):
    text = (
        DATA
        + """
[[eval]]
name = "math"
path = "m.jsonl"
samples = 8
k = [1, 8]
temperature = 0.6
rewards = ["mathd"]

[[eval]]
name = "hard"
path = "h.jsonl"
"""
    )
    math, hard = config_of(parsed(train, text=text)).evaluation_sets
    assert (math.name, math.samples, math.ks, math.temperature) == ("math", 8, (1, 8), 0.6)
    assert (math.rewards, hard.source.path, hard.pass_ks) == (("mathd",), "h.jsonl", (1, 4))
    with pytest.raises(click.UsageError, match="--eval needs a name, got "):
        parsed(train, text=DATA + '[[eval]]\npath = "m.jsonl"')
