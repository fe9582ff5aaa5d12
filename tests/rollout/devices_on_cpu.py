"""Stand-ins for NCCL and CUDA IPC under vLLM's weight engines, on a machine that has neither.

A broadcast goes through a TCP store, a shared buffer is a file that both sides map. Everything else
of vLLM's engines is its own: rendezvous, order, shapes, chunks, loading.
"""

import os
import tempfile
from types import SimpleNamespace

import torch
from torch.multiprocessing import reductions
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

RENDEZVOUS_TIMEOUT_S = 20
DEVICE_ID = "GPU-of-trainer"
_empty = torch.empty
_files = []


class StoreCommunicator:
    disabled = False

    def __init__(self, info, rank):
        self.group = StatelessProcessGroup.create(
            info.master_address,
            info.master_port,
            rank,
            info.world_size,
            store_timeout=RENDEZVOUS_TIMEOUT_S,
        )

    def broadcast(self, tensor, src, stream=None):
        tensor.copy_(self.group.broadcast(tensor, src))

    def destroy(self):
        self.group = None


def join_as_worker(info, parallel_config):
    return StoreCommunicator(info, info.rank_offset + parallel_config.rank)


def join_as_trainer(info):
    return StoreCommunicator(info, 0)


def empty(*size, device=None, **options):
    """On "CUDA" a file that another process can map, by the name that `share` tells."""
    if device != "cuda":
        return _empty(*size, device=device, **options)
    descriptor, name = tempfile.mkstemp(prefix="shared-buffer-")
    os.close(descriptor)
    _files.append(name)
    buffer = torch.from_file(name, shared=True, size=size[0], dtype=torch.uint8)
    buffer.file_name = name
    return buffer


def forget_buffers():
    while _files:
        os.unlink(_files.pop())


def share(buffer):
    """As torch describes a shared CUDA tensor."""
    file = buffer.file_name.encode()
    described = (torch.Tensor, buffer.size(), buffer.stride(), 0, torch.storage.TypedStorage)
    where = (torch.uint8, 0, file, buffer.nbytes, 0, False, b"counter", 0, b"event", True)
    return None, described + where


def map_shared(*arguments):
    file, size_bytes = arguments[7].decode(), arguments[8]
    assert arguments[:6:4] == (torch.Tensor, torch.storage.TypedStorage)
    return torch.from_file(file, shared=True, size=size_bytes, dtype=torch.uint8)


def install(set_attribute):
    set_attribute(nccl_engine, "worker_init_process_group", join_as_worker)
    set_attribute(nccl_engine, "open_trainer_endpoint", join_as_trainer)
    set_attribute(packed_tensor, "reduce_tensor", share)
    set_attribute(reductions, "rebuild_cuda_tensor", map_shared)
    set_attribute(torch, "empty", empty)
    stream = SimpleNamespace(synchronize=lambda: None)
    set_attribute(torch.cuda, "current_stream", lambda device=None: stream)
    set_attribute(torch.cuda, "ipc_collect", forget_buffers)
    properties = SimpleNamespace(uuid=DEVICE_ID)
    set_attribute(torch.cuda, "get_device_properties", lambda device: properties)
