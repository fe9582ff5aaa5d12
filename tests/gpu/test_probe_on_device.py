"""What a CPU cannot ask: kernels for each family, and sums of half precision in place."""

import pytest
import torch
from model_families import FAMILIES, family_config

from async_grpo.model import attention
from async_grpo.model import lm_head as head
from async_grpo.model.attention import choose_attention
from async_grpo.model.fused import computed, fault
from async_grpo.model.loading import check_packing, small_model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("wanted", ["packed", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_lets_each_family_pass_on_a_device(family, wanted):
    config = family_config(family, head_dim=64, hidden_size=256)
    for dtype in (torch.bfloat16, torch.float32):
        attention = choose_attention(DEVICE, dtype=dtype, wanted=wanted)
        check_packing(config, family, attention=attention, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_liger_s_kernels_compute_the_same_forward_and_backward(family, dtype):
    pytest.importorskip("liger_kernel")
    config = family_config(family, head_dim=64, hidden_size=256)
    assert fault(config, device=DEVICE, dtype=dtype) == ""


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_flash_attention_gives_the_gradient_of_torch_s_own(name):
    majors, is_installed = attention.FLASH[name]
    if torch.cuda.get_device_capability(DEVICE)[0] not in majors or not is_installed():
        pytest.skip(f"{name} is not for this device, or not installed")
    config = family_config("llama", head_dim=64, hidden_size=256)
    found = []
    for impl in ("", name):
        if impl:
            torch.nn.attention.activate_flash_attention_impl(impl)
        model = small_model(config, attention="packed")
        found.append(computed(model, DEVICE, torch.bfloat16)[1])
        attention.drop_flash()
    assert (found[0] - found[1]).norm() <= 0.02 * found[0].norm()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older ones want three tensors of one type")
def test_products_of_half_precision_are_added_to_float32_in_place():
    assert head._adds_into_float32(DEVICE, torch.bfloat16)
    total = torch.ones(2000, 64, device=DEVICE)
    left, right = (torch.randn(s, device=DEVICE).bfloat16() for s in ((2000, 300), (300, 64)))
    expected = total.double() + left.double() @ right.double()
    head.add_product_(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)
