"""One device that an engine and a rank have in turns: what each leaves of it is free for the other.

Never run so far. Run with `pytest -m gpu tests/gpu`.
"""

import gc

import pytest
import torch

pytest.importorskip("vllm", reason="an engine of vLLM sleeps")

from engine_stack import FIRST, SECOND, Stack
from tiny_models import make_model

from async_grpo.training.fsdp import Parked

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
LEFT_BYTES = 3 << 30  # CUDA's context and graphs
TOLERANCE = 0.02  # of bfloat16, as in test_device_transports


def free_bytes():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.integration
def test_an_engine_asleep_leaves_its_device_and_serves_the_next_weights_when_it_wakes(tmp_path):
    before = free_bytes()
    stack = Stack(make_model(tmp_path, tied=True), gpu_memory_utilization=0.6, colocated=True)
    try:
        for version in (FIRST, SECOND):
            stack.serve(version)
            assert before - free_bytes() > LEFT_BYTES
            stack.run(stack.engine.sleep())
            assert before - free_bytes() < LEFT_BYTES
            assert stack.run(stack.engine.wake())
            for completion in stack.generate():  # by the weights from before it slept
                assert stack.error_of(completion, version) <= TOLERANCE
    finally:
        stack.close()


def test_parked_tensors_leave_the_device_and_come_back_to_the_bit():
    tensors = [torch.randn(1 << 28, device="cuda") for _ in range(2)]
    expected = [tensor.cpu() for tensor in tensors]
    held = torch.cuda.memory_allocated()
    parked = Parked(tensors)
    assert torch.cuda.memory_allocated() <= held - (2 << 30)
    parked.restore()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(tensors, expected, strict=True))
