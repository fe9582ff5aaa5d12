"""Products of the head in half precision: summed in float32, and in place where torch can."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_grpo.model import lm_head as head
from async_grpo.model.lm_head import add_product_

VOCAB, HIDDEN, CHUNK = 30, 16, 8


class Watched(TorchDispatchMode):
    """Records the largest tensor that is made, and additions that fake devices have no kernel for.

    What an operation returns was made by it, unless it was given to it.
    """

    def __init__(self):
        super().__init__()
        self.largest_made = 0
        self.added = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.addmm.dtype_out:
            self.added.append((*args, kwargs["out"]))
            return kwargs["out"]
        result = func(*args, **kwargs)
        if not any(result is given for given in tree_leaves((args, kwargs))):
            self.largest_made = max(self.largest_made, result.numel())
        return result


def factors(*, device="cpu", dtype=torch.bfloat16):
    """The total [V, H], a chunk's gradient by logits [V, C], its hidden states [C, H]."""
    summed = torch.promote_types(dtype, torch.float32)
    total = torch.ones(VOCAB, HIDDEN, device=device, dtype=summed)
    shapes = ((VOCAB, CHUNK), (CHUNK, HIDDEN))
    return total, *(torch.randn(shape, device=device).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_on_a_cpu_nothing_is_rounded_and_nothing_of_the_sum_s_size_is_made(dtype):
    total, left, right = factors(dtype=dtype)
    expected = total.double() + left.double() @ right.double()
    with Watched() as watched:
        add_product_(total, left, right)
    tolerance = 1e-14 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance)
    assert watched.largest_made == (0 if left.dtype == total.dtype else VOCAB * CHUNK)


@pytest.mark.parametrize("can", [True, False])
def test_on_a_device_torch_adds_in_place_where_it_can(can, monkeypatch):
    monkeypatch.setattr(head, "_adds_into_float32", lambda device, dtype: can)
    with FakeTensorMode():
        total, left, right = factors(device="cuda")
        with Watched() as watched:
            add_product_(total, left, right)
    assert watched.largest_made == (0 if can else VOCAB * HIDDEN)
    assert len(watched.added) == can
    for base, *operands, dtype, out in watched.added:
        assert base is out is total
        assert all(own is given for own, given in zip(operands, (left, right), strict=True))
        assert dtype == torch.float32


def test_whether_torch_can_is_asked_of_torch():
    """Its kernel is CUDA's alone."""
    assert not head._adds_into_float32(torch.device("cpu"), torch.bfloat16)
