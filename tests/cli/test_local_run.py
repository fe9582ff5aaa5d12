"""The resolved file of a run: all its values, the same run when it is launched in its turn."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli.launch_file import _file_kept, launch
from async_grpo.cli.local_run import commands_of, read_run, resolved_text, resuming
from async_grpo.cli.options import is_typed
from async_grpo.cli.run_file import as_toml
from async_grpo.cli.train import config_of
from async_grpo.cli.train import main as train
from async_grpo.cli.worker import main as worker
from async_grpo.config.option import option_fields
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.core_shares import MOST_THREADS, num_cores
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import RUN_FILE

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = [
    str(path.relative_to(REPOSITORY))
    for path in sorted(REPOSITORY.glob("examples/**/*.toml"))
    if path.name != "pyproject.toml"
]
TRICKY = """
[launch]
prepare = "sh -c 'echo \\"a\\" && true' && python make.py --text 'it''s'"
num_cpus = 3

[train]
model_name_or_path = "m\\u007f\\t\\\\"
preset = "dapo"
aggregation = "sample-mean"
clip_high = 0.2
learning_rate = 5e-7
resume = "never"
teacher_for = ["a=x", "b=y"]
gkd_coefficient = 1
nproc_per_node = 4

[[data]]
type = "a"
path = "a;b,c.jsonl"

[[data]]
type = "b"
path = "b.jsonl"
"""


def read(file, *typed):
    return read_run(config=str(file), train_options=typed, prepare="", num_cpus=0, ray_address="")


def dry_run(*arguments):
    result = CliRunner().invoke(
        launch, [*map(str, arguments), "--dry-run", "--trust"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def tricky(tmp_path):
    file = tmp_path / "tricky.toml"
    file.write_text(TRICKY)
    return file


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_resolved_file_of_an_example_is_the_same_run(example, monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dry_run(example))
    assert dry_run(resolved) == resolved.read_text()
    saved = tomllib.loads(resolved.read_text())
    named = set(option_fields(TrainConfig))
    assert named | {"nproc_per_node"} == set(saved["train"])
    given = tomllib.loads(Path(example).read_text())
    assert len(saved.get("worker", ())) == len(given.get("worker", ()))


def test_quotes_presets_and_lists_survive_being_resolved(tricky, tmp_path):
    run = read(tricky, "--num-warmup-steps", "2")
    assert run.train.optimizer.num_warmup_steps == 2 and run.train.objective.clip_high == 0.2
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(resolved_text(run, commands=commands_of(run)))
    again = read(resolved)
    assert again.train == run.train and again.num_ranks == 4
    assert [file.source.path for file in again.train.data.data_files] == ["a;b,c.jsonl", "b.jsonl"]
    assert resolved_text(again, commands=commands_of(again)) == resolved.read_text()


def processes_of(run):
    """What the dispatchers and the trainer make of the commands by which they are started."""
    run.logs.mkdir(parents=True)
    run.write_file()
    words = [run.worker_words(number)[1:] for number in range(len(run.workers))]
    made = [WorkerConfig(**worker.make_context("worker", each).params) for each in words]
    context = train.make_context("train", run.train_words[1:])
    return tuple(made), config_of(context), context.params["nproc_per_node"]


def test_processes_read_quotes_presets_and_lists_as_they_are(tricky, tmp_path):
    run = read(tricky, "--output-dir", str(tmp_path / "run"), "--overwrite")
    assert processes_of(run) == ((), run.train, 4)
    context = train.make_context("train", run.train_words[1:])
    assert is_typed(context, "overwrite")


@pytest.mark.parametrize("example", EXAMPLES)
def test_processes_read_the_configs_of_an_example(example, monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    run = read(example, "--output-dir", str(tmp_path / "run"))
    assert processes_of(run) == (run.workers, run.train, run.num_ranks)


def test_every_command_is_listed_in_order(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    lines = dry_run("examples/quickstart.toml", "--num-training-batches", "3").splitlines()
    commands = [line.split()[1:4] for line in lines if line.startswith("#     ")]
    assert [" ".join(words[:2]) for words in commands] == [
        "python sample-data/create_count_down.py", "ray start", "async-grpo worker",
        "async-grpo worker", "async-grpo train", "async-grpo plot",
    ]  # fmt: skip
    assert "num_training_batches = 3" in lines


def test_a_dashboard_is_started_and_kept_with_the_run_and_refused_on_a_cluster_of_others():
    run = read_run(config="examples/quickstart.toml", dashboard=True)
    head, *_ = commands_of(run)
    assert head.startswith("ray start --head") and head.endswith("--include-dashboard=true")
    assert run.tables["launch"][0]["dashboard"]
    for kept in ({"ray_address": "127.0.0.1:6379"}, {"config": ""}):
        given = {"config": "examples/quickstart.toml", "dashboard": True} | kept
        options = () if given["config"] else ("--model-name-or-path", "m", "--data-path", "d")
        with pytest.raises(ConfigError, match="--dashboard is of a cluster that launch starts"):
            read_run(**given, train_options=options)


def test_the_file_in_the_run_s_folder_goes_on_with_the_run(tricky, tmp_path):
    run = read(tricky, "--output-dir", str(tmp_path / "run"), "--overwrite")
    run.folder.mkdir()
    with _file_kept(run):
        (run.folder / "training_params.json").touch()
    kept = read(run.folder / RUN_FILE)
    assert (kept.train.recording.overwrite, kept.train.recording.resume) == (False, "auto")
    assert resuming(run).train == kept.train
    changed = run.train.but(overwrite=False, resume="auto")
    assert changed == kept.train


def test_a_refused_run_leaves_the_file_of_the_run_that_is_there(tricky, tmp_path):
    run = read(tricky, "--output-dir", str(tmp_path))
    (tmp_path / RUN_FILE).write_text("of another")
    with pytest.raises(SystemExit), _file_kept(run):
        assert (tmp_path / RUN_FILE).read_text() != "of another"
        raise SystemExit(1)
    assert (tmp_path / RUN_FILE).read_text() == "of another"


def test_a_run_with_a_checkpoint_goes_on_unless_it_is_to_be_replaced(tricky, tmp_path):
    run = read(tricky, "--output-dir", str(tmp_path), "--resume", "auto")
    assert not run.goes_on
    (tmp_path / "checkpoints" / "batch_4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "batch_4" / "COMMITTED").touch()
    assert run.goes_on
    assert not dataclasses.replace(run, train=run.train.but(overwrite=True)).goes_on


def test_processes_that_compute_share_the_cores_and_a_resumed_run_keeps_its_threads(
    monkeypatch, tmp_path
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ("--output-dir", str(tmp_path))
    run = read("examples/quickstart.toml", *options, "--nproc-per-node", "1")
    computing = run.num_ranks + sum(each.num_workers for each in run.workers if each.serves_model)
    threads = str(min(max(1, num_cores() // computing), MOST_THREADS))
    assert computing > 1 and run.thread_variables["OMP_NUM_THREADS"] == threads
    assert run.thread_variables["OMP_WAIT_POLICY"] == "PASSIVE"
    (tmp_path / "checkpoints" / "batch_4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "batch_4" / "COMMITTED").touch()
    (tmp_path / "training_params.json").write_text(json.dumps({"threads": 7}))
    assert run.thread_variables["OMP_NUM_THREADS"] == "7"
    again = dataclasses.replace(run, train=run.train.but(overwrite=True))
    assert again.thread_variables["OMP_NUM_THREADS"] == threads


def test_each_table_that_may_repeat_is_written_as_such():
    text = as_toml({"worker": [{"a": 1}], "train": [{"b": [1.5, True, "x"]}], "plot": []})
    assert text == '[[worker]]\na = 1\n\n[train]\nb = [1.5, true, "x"]\n'
    assert tomllib.loads(text) == {"worker": [{"a": 1}], "train": {"b": [1.5, True, "x"]}}
