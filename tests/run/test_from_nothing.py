"""Runs whose weights are drawn: the same for any ranks, found by a resume, refused when changed."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from supervised_ranks import trained
from transformers import GPT2Config, GPT2LMHeadModel

from async_grpo.check.facts import read_model
from async_grpo.check.finding import Setup
from async_grpo.checkpoint.export import initial_folder, write_initial
from async_grpo.cli.launch_file import with_drawn_weights
from async_grpo.cli.local_run import read_run
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.model_folder import check_model_folder, hash_model, stated_facts
from async_grpo.util.errors import ConfigError, UnfitModel

sys.path.insert(0, str(Path(__file__).parents[2] / "sample-data"))
write_model = importlib.import_module("create_small_gpt2").write_model
EXPORT = "hf_format/samples_{}/model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """config.json and a tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    write_model(folder, layers=2, width=32, positions=64)
    return folder


@pytest.fixture
def options(source, tmp_path):
    """Of two steps on four pairs, whose checkpoint is kept."""
    lines = ({"input_token_ids": [n, n + 1], "completion_token_ids": [n, 7, 9]} for n in range(4))
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "model_name_or_path": str(source), "data_path": str(tmp_path / "pairs.jsonl"),
        "output_dir": str(tmp_path / "run"), "algorithm": "sft", "init": "random",
        "infinite_sampler_seed": 5, "batch_size": 4, "num_training_batches": 2,
        "max_tokens_per_gpu": 64, "learning_rate": 1e-3, "trackers": "", "replay_max_gib": 0.0,
    }  # fmt: skip


def written(source, output, *, seed):
    folder = initial_folder(str(source), output_dir=str(output), seed=seed)
    write_initial(str(source), folder, seed=seed)
    return folder


def test_weights_are_those_that_transformers_draws_from_the_seed(source, tmp_path):
    before = torch.get_rng_state()
    folder = written(source, tmp_path, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    expected = GPT2LMHeadModel(GPT2Config.from_pretrained(source))
    found, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    for (name, got), want in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(got, want), name
    spread = found.transformer.h[0].mlp.c_fc.weight.std().item()
    assert spread == pytest.approx(found.config.initializer_range, rel=0.05)
    assert check_model_folder(folder).tokenizer_hash


def test_it_is_made_once_and_another_seed_or_config_is_another_model(source, tmp_path):
    first = written(source, tmp_path / "a", seed=5)
    again = written(source, tmp_path / "b", seed=5)
    assert hash_model(first) == hash_model(again)
    (tmp_path / "a" / "kept").touch()
    at = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert written(source, tmp_path / "a", seed=5) == first
    assert at == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert hash_model(written(source, tmp_path / "a", seed=6)) != hash_model(first)
    changed = tmp_path / "changed"
    write_model(changed, layers=2, width=32, positions=32)
    assert initial_folder(str(changed), output_dir=str(tmp_path / "a"), seed=5) != first


def test_a_folder_without_weights_is_refused_with_the_option_that_takes_it(source):
    with pytest.raises(UnfitModel, match=r"has none: finish .* train from nothing with --init"):
        check_model_folder(str(source))
    assert check_model_folder(str(source), needs_weights=False).max_positions == 64


def test_a_disk_that_refuses_the_weights_is_told(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --output-dir"):
        written(source, tmp_path / "file", seed=0)


@pytest.mark.integration
def test_two_ranks_begin_with_the_weights_of_the_folder(source, options, tmp_path):
    still = options | {"learning_rate": 0.0, "num_training_batches": 1}
    assert run_ranks(trained, num_ranks=2, folder=tmp_path, lives=[still]) == [[""], [""]]
    found = load_file(tmp_path / "run" / EXPORT.format(4))
    expected = load_file(f"{written(source, tmp_path, seed=5)}/model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.integration
def test_a_run_goes_on_from_its_weights_and_refuses_others(source, options, tmp_path):
    changed = tmp_path / "changed"
    write_model(changed, layers=2, width=32, positions=64)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"initializer_range": 0.5}))
    more = options | {"num_training_batches": 3}
    lives = [
        options,
        more | {"infinite_sampler_seed": 6},
        more | {"model_name_or_path": str(changed)},
        more,
        options | {"output_dir": str(tmp_path / "whole"), "num_training_batches": 3},
    ]
    [errors] = run_ranks(trained, num_ranks=1, folder=tmp_path, lives=lives)
    assert errors[0] == errors[3] == errors[4] == ""
    assert "ConfigError: --infinite-sampler-seed must be 5" in errors[1]
    assert "CheckpointError: the model of" in errors[2]
    resumed, whole = (load_file(tmp_path / run / EXPORT.format(12)) for run in ("run", "whole"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_check_reads_a_folder_without_weights(options):
    setup = Setup(train=TrainConfig(**options))
    for look in (check_model_folder, stated_facts):
        assert read_model(setup, look).max_positions == 64
    refused = read_model(Setup(train=setup.train.but(init="pretrained")))
    assert "must hold weights" in str(refused)


def test_a_launched_run_s_workers_serve_the_weights_that_it_draws(source, tmp_path):
    file = tmp_path / "run.toml"
    worker = f'[[worker]]\nmode = "generation"\nmodel_path = "{source}"\n'
    train = f'[train]\nmodel_name_or_path = "{source}"\ninit = "random"\ndata_path = "d.jsonl"\n'
    file.write_text(f"{worker}{worker.replace(str(source), 'other')}{train}")
    run = with_drawn_weights(read_run(config=str(file)), output_dir=str(tmp_path))
    drawn = initial_folder(str(source), output_dir=str(tmp_path), seed=37)
    assert [each.model_path for each in run.workers] == [drawn, "other"]
    assert (run.train.places.model_name_or_path, run.train.places.init) == (drawn, "pretrained")
    assert check_model_folder(drawn)
