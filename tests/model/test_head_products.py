"""Products of the head in half precision: summed in float32, and in place where torch can."""

import pytest
import torch
from tensor_watchers import LargestTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.model import head
from async_grpo.model.head import add_product_

VOCAB, HIDDEN, CHUNK = 30, 4, 8


def factors(*, device="cpu", dtype=torch.bfloat16):
    """The total [V, H], a chunk's gradient by logits [V, C], its hidden states [C, H]."""
    summed = torch.promote_types(dtype, torch.float32)
    total = torch.ones(VOCAB, HIDDEN, device=device, dtype=summed)
    shapes = ((VOCAB, CHUNK), (CHUNK, HIDDEN))
    return total, *(torch.randn(shape, device=device).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_added_without_rounding_it_to_half_precision(dtype):
    total, left, right = factors(dtype=dtype)
    expected = total.double() + left.double() @ right.double()
    with LargestTensor() as largest:
        add_product_(total, left, right)
    tolerance = 1e-14 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance)
    assert largest.num_elements == VOCAB * CHUNK or left.dtype == total.dtype


class Added(TorchDispatchMode):
    """Records the additions of products that fake devices have no kernels for."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.dtype_out:
            self.calls.append((*args, kwargs["out"]))
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("can", [True, False])
def test_on_a_device_the_sum_needs_no_second_tensor_of_its_size_where_torch_can(can, monkeypatch):
    monkeypatch.setattr(head, "_adds_into_float32", lambda device, dtype: can)
    with FakeTensorMode():
        total, left, right = factors(device="cuda")
        with Added() as added, LargestTensor() as largest:
            add_product_(total, left, right)
    assert len(added.calls) == can
    assert largest.num_elements == VOCAB * HIDDEN  # the result that it returns: the total or not
    for base, *operands, dtype, out in added.calls:
        assert base is out is total
        assert all(own is given for own, given in zip(operands, (left, right), strict=True))
        assert dtype == torch.float32


def test_whether_torch_can_is_asked_of_torch():
    """Its kernel is CUDA's alone."""
    assert not head._adds_into_float32(torch.device("cpu"), torch.bfloat16)
