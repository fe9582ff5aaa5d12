"""A run in Python is the run of its file."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from async_grpo import TrainConfig
from async_grpo.api.running import plan_run, tables_of
from async_grpo.util.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = ("quickstart", "three_types", "distil_two_teachers")
TRAIN = {"model_name_or_path": "m", "data_path": "d.jsonl", "output_dir": "runs/it"}


def plan(config, **options):
    return plan_run(config, **options)[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_file_and_its_tables_are_the_same_run(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    file = Path("examples", f"{name}.toml")
    tables = tomllib.loads(file.read_text())
    assert plan(tables) == plan(file) == plan(str(file))


def test_a_train_config_is_a_run_with_the_workers_that_it_needs():
    run = plan(TrainConfig(**TRAIN, preset="dapo", batch_size=5))
    assert run.train == TrainConfig(**TRAIN, preset="dapo", batch_size=5)
    assert [(each.mode, each.model_path) for each in run.workers] == [("generation", "m")]


def test_a_reference_worker_is_made_for_a_kl_term_and_none_for_pairs():
    modes = [each.mode for each in plan({"train": {**TRAIN, "kl_coefficient": 0.1}}).workers]
    assert modes == ["generation", "logprob"]
    assert plan({"train": {**TRAIN, "algorithm": "sft"}}).workers == ()


def test_no_worker_is_made_beside_a_cluster_that_may_have_them():
    assert plan({"train": TRAIN}, ray_address="host:1").workers == ()
    assert plan({"cluster": {"ray_address": "host:1"}, "train": TRAIN}).workers == ()


def test_values_may_be_those_of_python():
    config = {
        "worker": ({"model_path": Path("m"), "engine_option": ("a=1",)},),
        "train": {**TRAIN, "learning_rate": np.float64(1e-5), "eval_data_path": None},
    }
    assert tables_of(config)["worker"] == [{"model_path": "m", "engine_option": ["a=1"]}]
    assert plan(config).train.optimizer.learning_rate == 1e-5


def test_options_go_before_the_config():
    run = plan({"train": {**TRAIN, "batch_size": 4}}, batch_size=6, deterministic=True,
               max_staleness=0, num_cpus=9)  # fmt: skip
    assert (run.train.batching.batch_size, run.train.batching.deterministic, run.num_cpus) == (
        6,
        True,
        9,
    )


def test_a_reward_goes_to_whoever_grades():
    model = {"model_path": "m"}
    workers = [model, {**model, "mode": "logprob"}, {"mode": "verifier"}]
    config = {"train": TRAIN, "worker": workers}
    run, file = plan_run(config, reward=lambda sample: 1.0)
    wanted = f"{file.path}:reward"
    assert [each.reward_fns for each in run.workers] == [wanted, "math_verify", wanted]
    assert file.path.parent == run.folder == Path("runs/it") and not file.path.exists()


async def asks(question, episode, services):
    return await services["calculator"](episode.text)


def test_an_asynchronous_reward_is_the_environment_and_a_worker_plays_it(tmp_path):
    train = {**TRAIN, "output_dir": str(tmp_path)}
    mine = {"mode": f"{REPOSITORY}/examples/calculator_service.py:Calculator"}
    config = {"train": train, "worker": [{"model_path": "m"}, mine]}
    run, file = plan_run(config, reward=asks)
    assert run.train.data.environment == f"{file.path}:asks"
    assert [each.role for each in run.workers] == [
        "generation",
        "service:calculator",
        "environment",
    ]
    with pytest.raises(ConfigError, match=r"role service:calculator .* asks services\['calc"):
        plan({"train": train}, reward=asks)
    with pytest.raises(ConfigError, match="grades questions of one turn, got the environment open"):
        plan({"train": {**train, "environment": "openenv:http://x"}}, reward=asks)


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        ({"trains": TRAIN}, {}, "config: [trains] is no table of a run, the nearest is train"),
        ({"train": {**TRAIN, "batch_sise": 1}}, {}, "[train] batch_sise is no option"),
        ({"train": TRAIN}, {"batch_sise": 1}, "batch_sise is no option of `async-grpo train`"),
        ({"train": TRAIN}, {"batch_size": 0}, "--batch-size must be positive, got 0"),
        ({"train": TRAIN}, {"batch_size": "4"}, "batch_size must be an integer, got '4'"),
        ({"train": "m"}, {}, "config['train'] must be a dict, got 'm'"),
        ({"train": {**TRAIN, "algorithm": "sft"}}, {"reward": "mathd"}, "reward needs a "),
        ({"train": {**TRAIN, "teacher_for": ["x"], "gkd_coefficient": 1.0}}, {},
         "config needs a [[worker]] for the role teacher:x"),
        ("missing.toml", {}, "missing.toml cannot be read"),
        (7, {}, "must be the file of a run, a dict of its tables or a TrainConfig, got 7"),
    ],
)  # fmt: skip
def test_what_a_command_would_refuse_is_a_config_error(config, options, sentence):
    with pytest.raises(ConfigError) as error:
        plan_run(config, **options)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not Path("runs/it").exists()


def test_overwrite_holds_as_an_argument_and_not_in_a_config(tmp_path):
    config = {"train": {**TRAIN, "output_dir": str(tmp_path / "run"), "overwrite": True}}
    assert plan(config).train.recording.overwrite
    (tmp_path / "run" / "checkpoints" / "batch_3").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "batch_3" / "COMMITTED").touch()
    with pytest.raises(ConfigError, match=r"--overwrite must be typed to remove .*batch_3"):
        plan(config)
    for overwrite in (True, False):
        assert plan(config, overwrite=overwrite).train.recording.overwrite is overwrite


def test_code_of_a_file_from_elsewhere_is_taken_where_it_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("from async_grpo.algorithms.sft import Sft as Mine\n")
    named = f'algorithm = "{tmp_path}/own.py:Mine"'
    train = f'[train]\n{named}\nmodel_name_or_path = "m"\ndata_path = "d"\noutput_dir = "r"\n'
    (tmp_path / "run.toml").write_text(train)
    with pytest.raises(ConfigError, match="lies outside this folder, and its algorithm names"):
        plan_run(tmp_path / "run.toml")
    assert plan_run(tmp_path / "run.toml", trust=True)[0].train.objective.algorithm.endswith(
        "own.py:Mine"
    )
    monkeypatch.chdir(tmp_path)
    plan_run("run.toml")
