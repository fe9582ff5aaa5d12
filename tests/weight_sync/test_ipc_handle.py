"""A shared buffer's name made of plain values, and made whole again.

Mutations seen to fail: size and stride stay lists (vLLM's importer hashes them); a class is put at
a neighbour's place; a buffer of floats is accepted.
"""

import inspect

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from async_grpo.weight_sync.ipc_handle import full_handle, plain_handle

# As torch's reduce_tensor gives them for `torch.empty(1000, dtype=torch.uint8, device="cuda")`.
ARGUMENTS = {
    "tensor_cls": torch.Tensor,
    "tensor_size": torch.Size([1000]),
    "tensor_stride": (1,),
    "tensor_offset": 0,
    "storage_cls": type(torch.empty(1)._typed_storage()),
    "dtype": torch.uint8,
    "storage_device": 0,
    "storage_handle": b"\x00" + bytes(range(63)),
    "storage_size_bytes": 1000,
    "storage_offset_bytes": 512,
    "requires_grad": False,
    "ref_counter_handle": b"/torch_12_34_5",
    "ref_counter_offset": 3,
    "event_handle": bytes(64),
    "event_sync_required": True,
}


def test_the_arguments_are_those_that_this_torch_rebuilds_with():
    assert list(inspect.signature(rebuild_cuda_tensor).parameters) == list(ARGUMENTS)


def test_a_handle_survives_a_message_that_carries_no_classes():
    sent = tuple(ARGUMENTS.values())
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(plain_handle(sent)))
    received = full_handle(plain)
    assert received == sent
    assert [type(value) for value in received] == [type(value) for value in sent]
    assert hash(received) == hash(sent), "vLLM keeps an opened buffer by its handle"


@pytest.mark.parametrize("other", [{"dtype": torch.float32}, {"tensor_cls": torch.nn.Parameter}])
def test_another_kind_of_tensor_is_refused(other):
    with pytest.raises(TypeError, match="shared buffer"):
        plain_handle(tuple({**ARGUMENTS, **other}.values()))
