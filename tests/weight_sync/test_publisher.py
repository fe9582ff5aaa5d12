"""What may be published, and who stays in step when it may not."""

import pytest
import torch

from async_grpo.errors import WeightSyncError
from async_grpo.types import WeightsVersion
from async_grpo.weight_sync.publisher import Publisher


def gather(values, taken):
    """Parameters as rank 0 gathers them; every step is a collective operation in a real run."""
    for index, value in enumerate(values):
        taken.append(index)
        yield f"layers.{index}.weight", torch.tensor([1.0, value])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_published(bad):
    taken = []
    with pytest.raises(WeightSyncError, match=r"'layers.1.weight' of version 3.7"):
        Publisher().collect(gather([1.0, bad, 2.0, 3.0], taken), version=WeightsVersion(3, 7))
    assert taken == [0, 1, 2, 3], "other ranks would wait for ever in the next gather"


def test_weights_that_overflow_the_type_they_are_sent_in_are_not_finite():
    with pytest.raises(WeightSyncError, match=r"'layers.0.weight'"):
        Publisher(dtype=torch.float16).collect(gather([1e6], []), version=WeightsVersion(0, 0))
