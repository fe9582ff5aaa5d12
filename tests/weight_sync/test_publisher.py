"""What may be published."""

import pytest
import torch

from async_grpo.cluster.cluster import Cluster
from async_grpo.types import WeightsVersion
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.publisher import Publisher


def weights(values):
    for index, value in enumerate(values):
        yield f"layers.{index}.weight", torch.tensor([1.0, value])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_published(bad):
    with pytest.raises(WeightSyncError, match=r"'layers.1.weight' of version 3.7"):
        Publisher(Cluster()).pack(weights([1.0, bad, 2.0, 3.0]), version=WeightsVersion(3, 7))


def test_weights_that_overflow_the_type_they_are_sent_in_are_not_finite():
    with pytest.raises(WeightSyncError, match=r"'layers.0.weight'"):
        Publisher(Cluster(), dtype=torch.float16).pack(weights([1e6]), version=WeightsVersion(0, 0))
