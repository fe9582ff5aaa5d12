"""Packed weights and bitsandbytes' AdamW on an NVIDIA device, as a CPU computes them.

Never run on a device so far.
"""

import pytest
import torch
from oracle import tiny_model

from async_grpo.config.training_options import MemoryOptions, OptimizerOptions
from async_grpo.model.packed_linear import PackedLinear, packed, rounded, unpacked
from async_grpo.model.policy import PolicyModel
from async_grpo.training.step import make_optimizer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_folder_rounded_on_a_cpu_is_packed_on_a_device_to_the_bit(kind, dtype):
    torch.manual_seed(0)
    weight = rounded(torch.randn(96, 80).to(dtype), kind).to(DEVICE)
    assert torch.equal(unpacked(*packed(weight, kind), kind, like=weight), weight)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_packed_layer_is_the_linear_one(kind):
    torch.manual_seed(0)
    linear = torch.nn.Linear(80, 96).to(DEVICE, torch.bfloat16)
    linear.weight.data = rounded(linear.weight.data, kind)
    layer = PackedLinear(linear, kind).to_empty(device=DEVICE)
    layer.bias = linear.bias
    layer.fill(linear.weight.data, "weight")
    inputs = torch.randn(2, 5, 80, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gradients = [torch.autograd.grad(f(inputs).square().sum(), inputs)[0] for f in (linear, layer)]
    assert torch.equal(linear(inputs), layer(inputs)) and torch.equal(*gradients)


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_a_step_is_a_cpu_s_but_for_rounding(optim):
    moved = []
    for device, name in (("cpu", "adamw"), (DEVICE, optim)):
        policy = PolicyModel(tiny_model(tied=True).float()).to(device)
        before = [each.detach().clone() for each in policy.parameters()]
        options = OptimizerOptions(optim=name, learning_rate=1e-3)
        optimizer = make_optimizer(policy, options, MemoryOptions())
        generator = torch.Generator().manual_seed(3)
        for each in policy.parameters():
            each.grad = torch.randn(each.shape, generator=generator).to(device)
        optimizer.step()
        pairs = zip(policy.parameters(), before, strict=True)
        moved.append(torch.cat([(now - then).detach().flatten().cpu() for now, then in pairs]))
    assert (moved[0] - moved[1]).norm() <= 0.1 * moved[0].norm()
