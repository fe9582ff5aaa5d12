"""What a CPU cannot ask: kernels for each family, and sums of half precision in place."""

import pytest
import torch
from model_families import FAMILIES, family_config

from async_grpo.model import lm_head as head
from async_grpo.model.attention import choose_attention
from async_grpo.model.loading import check_packing

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("wanted", ["packed", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_lets_each_family_pass_on_a_device(family, wanted):
    config = family_config(family, head_dim=64, hidden_size=256)
    for dtype in (torch.bfloat16, torch.float32):
        attention = choose_attention(DEVICE, dtype=dtype, wanted=wanted)
        check_packing(config, family, attention=attention, device=DEVICE, dtype=dtype)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older ones want three tensors of one type")
def test_products_of_half_precision_are_added_to_float32_in_place():
    assert head._adds_into_float32(DEVICE, torch.bfloat16)
    total = torch.ones(2000, 64, device=DEVICE)
    left, right = (torch.randn(s, device=DEVICE).bfloat16() for s in ((2000, 300), (300, 64)))
    expected = total.double() + left.double() @ right.double()
    head.add_product_(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
