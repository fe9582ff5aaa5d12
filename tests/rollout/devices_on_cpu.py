"""A stand-in for NCCL under vLLM's weight engines, on a machine that has no device.

A broadcast goes through a TCP store, and streams are none. Everything else of vLLM's engines is its
own: rendezvous, order, shapes, packing into buffers, loading.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

RENDEZVOUS_TIMEOUT_S = 20
DEVICE_ID = "GPU-of-trainer"


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


def install(set_attribute):
    set_attribute(nccl_engine, "worker_init_process_group", join_as_worker)
    set_attribute(nccl_engine, "open_trainer_endpoint", join_as_trainer)
    stream = SimpleNamespace(synchronize=lambda: None)
    set_attribute(torch.cuda, "current_stream", lambda device=None: stream)
    set_attribute(torch.cuda, "stream", lambda stream: nullcontext())
    set_attribute(torch.accelerator, "current_device_index", lambda: 0)
    set_attribute(packed_tensor, "_get_streams", lambda device, number: (stream,) * number)
    properties = SimpleNamespace(uuid=DEVICE_ID)
    set_attribute(torch.cuda, "get_device_properties", lambda device: properties)
