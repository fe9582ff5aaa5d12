"""Which ranks share a copy of the model."""

import pytest

from async_grpo.config.train_config import TrainConfig
from async_grpo.training import ranks
from async_grpo.training.ranks import make_mesh
from async_grpo.util.errors import ConfigError


@pytest.fixture
def made(monkeypatch):
    """The arguments of the mesh that torch would be asked for."""
    monkeypatch.setattr(
        ranks, "init_device_mesh", lambda device, shape, mesh_dim_names: (shape, mesh_dim_names)
    )


@pytest.mark.parametrize(
    ("num_ranks", "shard_ranks", "shape"),
    [(4, 0, (4,)), (4, 4, (4,)), (4, 2, (2, 2)), (6, 2, (3, 2)), (4, 1, (4, 1)), (1, 1, (1,))],
)
def test_groups_hold_all_ranks(num_ranks, shard_ranks, shape, made):
    names = ("replicate", "shard")[-len(shape) :]
    assert make_mesh("cpu", num_ranks=num_ranks, shard_ranks=shard_ranks) == (shape, names)


@pytest.mark.parametrize("shard_ranks", [3, 8])
def test_groups_that_do_not_hold_all_ranks_are_refused(shard_ranks, made):
    with pytest.raises(
        ConfigError, match=rf"--fsdp-shard-ranks must divide .*\(4\), got {shard_ranks}"
    ):
        make_mesh("cpu", num_ranks=4, shard_ranks=shard_ranks)


@pytest.mark.parametrize(
    ("options", "shard_ranks"),
    [
        ({}, 0),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 0),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, None),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 1),
        ({"fsdp_sharding_strategy": "ZERO1"}, 1),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_shard_ranks": 2}, 2),
    ],
)
def test_the_options_say_how_many_share(options, shard_ranks):
    config = TrainConfig(model_name_or_path="m", data_path="d", **options)
    assert config.memory.shard_ranks == shard_ranks
