"""What a rank says of its memory at the start, and what follows from it."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import tiny_model

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.devices.bill import GIB, Training, trainer_bill
from async_grpo.model.policy import PolicyModel
from async_grpo.planning.asked import PUBLISHED, shape_of_config
from async_grpo.training import learner
from async_grpo.training.billing import as_billed, too_large
from async_grpo.util.errors import ConfigError

FITS_TWO = 64_600_000  # bytes for the tiny model where two ranks share it
SEVEN_B = shape_of_config(PUBLISHED["qwen2.5-7b"], who="7B")


@pytest.fixture
def sharded(monkeypatch):
    """The options with which the policy would be sharded."""
    options = {}
    monkeypatch.setattr(learner, "shard", lambda *_, **given: options.update(given))
    return options


def shard_with(free, monkeypatch, *, others=0, share=2, device="cpu", lack=0, **options):
    """`others`, `lack`: what other ranks say of checkpointing, and whether they have too little."""
    monkeypatch.setattr(learner, "free_bytes", lambda device, share: free)
    said = [others] * (options.get("activation_checkpointing", "auto") == "auto") + [lack]
    ranks = SimpleNamespace(
        device=torch.device(device),
        world_size=2,
        mesh=SimpleNamespace(size=lambda dim: share),
        agree=lambda mine: max(mine, said.pop(0)),
    )
    config = TrainConfig(model_name_or_path="m", data_path="d", max_staleness=1, **options)
    learner.shard_as_billed(PolicyModel(tiny_model(tied=True)), config, ranks, compile=False)


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


def test_the_bill_is_logged_and_what_does_not_fit_is_refused(sharded, monkeypatch, caplog):
    caplog.set_level("DEBUG", "async_grpo")
    with pytest.raises(
        ConfigError, match=r"--max-tokens-per-gpu 16384, and has 0\.0 and .* GiB: lower --"
    ):
        shard_with(4 << 20, monkeypatch, device="cuda")
    assert not sharded
    assert "of 0.0 GiB that are free; activation checkpointing" in caplog.text
    assert "master weights: 4 P / 2 ranks" in caplog.text
    shard_with(1 << 20, monkeypatch, device="cuda", unchecked_memory=True, offload="parameters")
    assert sharded["offload"] is True


def test_a_rank_that_has_enough_is_refused_with_the_one_that_has_not(sharded, monkeypatch):
    shard_with(1 << 40, monkeypatch, device="cuda")
    with pytest.raises(ConfigError, match=r"and has 1024\.0 and"):
        shard_with(1 << 40, monkeypatch, device="cuda", lack=1)


def test_what_is_free_on_a_cpu_now_refuses_nothing(sharded, monkeypatch):
    shard_with(1 << 20, monkeypatch)
    assert sharded["activation_checkpointing"] == 1


@given(st.sampled_from([1, 2, 8]), st.integers(1024, 65_536), st.integers(20, 120))
def test_each_remedy_of_a_rank_is_enough_and_the_least(ranks, tokens, gib):
    training = Training(ranks, num_tokens=tokens, compute_bytes=2, checkpointing=1)
    free = gib * GIB
    assume(trainer_bill(SEVEN_B, training).total > free)
    said = str(too_large(SEVEN_B, training, free_bytes=free, host_bytes=200 * GIB))

    def fits(**changed):
        bill = trainer_bill(SEVEN_B, replace(training, **changed))
        return bill.total <= free and bill.on_host <= 200 * GIB

    if lower := re.search(r"lower --max-tokens-per-gpu to (\d+)", said):
        assert fits(num_tokens=int(lower[1])) and not fits(num_tokens=2 * int(lower[1]))
    else:
        assert not fits(num_tokens=1)
    if more := re.search(r"over (\d+) ranks", said):
        enough = int(more[1])
        assert fits(shard_ranks=enough) and not fits(shard_ranks=enough // 2)
    else:
        assert not fits(shard_ranks=128 * ranks)
    offload = re.search(r"--offload (\w+)", said)
    assert not offload or fits(offload=offload[1])
    alone = str(too_large(SEVEN_B, training, free_bytes=free, host_bytes=100 * GIB))
    assert ranks > 1 or "--offload" not in alone  # 16 bytes a parameter are 113 GiB
    assert "--lora-rank 16" in said and said.endswith("--unchecked-memory starts it all the same")


@pytest.mark.parametrize(
    ("strategy", "moments"), [("NO_SHARD", "8 P / 1 ranks"), ("ZERO1", "8 P / 2 ranks")]
)
def test_where_each_rank_holds_the_model_sharding_it_is_a_remedy(
    strategy, moments, sharded, monkeypatch, caplog
):
    caplog.set_level("DEBUG", "async_grpo")
    with pytest.raises(ConfigError, match="shard the model over 2 ranks"):
        shard_with(FITS_TWO, monkeypatch, share=1, device="cuda", fsdp_sharding_strategy=strategy)
    for held in ("master weights: 4 P / 1 ranks", "gradients: 4 P / 1", f"moments: {moments}"):
        assert held in caplog.text


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
