"""What a rank says of its memory at the start, and what follows from it."""

from types import SimpleNamespace

import pytest
import torch
from oracle import tiny_model

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.policy import PolicyModel
from async_grpo.training import learner
from async_grpo.training.billing import as_billed


@pytest.fixture
def sharded(monkeypatch):
    """The options with which the policy would be sharded."""
    options = {}
    monkeypatch.setattr(learner, "shard", lambda *_, **given: options.update(given))
    return options


def shard_with(free, monkeypatch, *, others=0, share=2, **options):
    monkeypatch.setattr(learner, "free_bytes", lambda device, share: free)
    ranks = SimpleNamespace(
        device=torch.device("cpu"),
        world_size=2,
        mesh=SimpleNamespace(size=lambda dim: share),
        agree=lambda mine: max(mine, others),
    )
    config = TrainConfig(model_name_or_path="m", data_path="d", max_staleness=1, **options)
    learner.shard_as_billed(PolicyModel(tiny_model(tied=True)), config, ranks)


@pytest.mark.parametrize(
    ("options", "free", "others", "one_in"),
    [
        ({}, 1 << 40, 0, 0),
        ({}, 1 << 20, 0, 1),
        ({}, 1 << 40, 1, 2),  # another rank has less: the first of two layers
        ({}, 1 << 40, 2, 1),
        ({"activation_checkpointing": "off"}, 1 << 20, 1, 0),
        ({"activation_checkpointing": "on"}, 1 << 40, 0, 1),
    ],
)
def test_checkpointing_follows_the_bill_unless_it_is_given(
    options, free, others, one_in, sharded, monkeypatch
):
    shard_with(free, monkeypatch, others=others, **options)
    assert sharded["activation_checkpointing"] == one_in


def test_the_bill_is_logged_and_what_does_not_fit_has_a_remedy(sharded, monkeypatch, caplog):
    caplog.set_level("DEBUG", "async_grpo")
    shard_with(1 << 20, monkeypatch, offload="parameters")
    assert sharded["offload"] is True
    assert "of 0.0 GiB that are free; activation checkpointing" in caplog.text
    assert "master weights in the host: 4 P / 2 ranks" in caplog.text
    assert (
        "minibatches of --max-tokens-per-gpu 16384, and 0.0 GiB are free: lower it" in caplog.text
    )


@pytest.mark.parametrize(
    ("strategy", "moments"), [("NO_SHARD", "8 P / 1 ranks"), ("ZERO1", "8 P / 2 ranks")]
)
def test_where_each_rank_holds_the_model_more_of_them_are_no_remedy(
    strategy, moments, sharded, monkeypatch, caplog
):
    caplog.set_level("DEBUG", "async_grpo")
    shard_with(1 << 20, monkeypatch, share=1, fsdp_sharding_strategy=strategy)
    for held in ("master weights: 4 P / 1 ranks", "gradients: 4 P / 1", f"moments: {moments}"):
        assert held in caplog.text
    assert "lower it, give --fsdp-sharding-strategy FULL_SHARD, or give --offload" in caplog.text


@pytest.mark.parametrize(
    ("options", "keeps"),
    [({"num_passes": 2}, False), ({"num_passes": 2, "train_minibatch_size": 8}, True)],
)
def test_passes_of_one_step_are_billed_no_copy_of_the_old_policy(options, keeps):
    config = TrainConfig(model_name_or_path="m", data_path="d", **options)
    billed = as_billed(
        config.memory, find_algorithm(config), tokens=64, num_ranks=1, shard_ranks=1,
        number_bytes=4,
    )  # fmt: skip
    assert billed.keeps_old_policy is keeps
