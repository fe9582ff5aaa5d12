"""Variables of the environment that decide how libraries use devices, and who passes them on."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

# A number must mean the same device to torch as to the driver and to Ray.
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # two names of one setting
FORWARDED = re.compile(r"(NCCL|VLLM|TORCH|PYTORCH|HF|CUDA_DEVICE)_")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


def prepare_for_devices(environ: MutableMapping[str, str]) -> None:
    """Set what is not set yet, before torch first meets a device, in a trainer rank.

    Rows of ever different lengths would leave its memory in pieces.

    >>> environ = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    >>> prepare_for_devices(environ)
    >>> sorted(environ)
    ['CUDA_DEVICE_ORDER', 'PYTORCH_ALLOC_CONF']
    """
    for name, value in DEVICE_ORDER.items():
        environ.setdefault(name, value)
    if not any(name in environ for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = "expandable_segments:True"


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """What a dispatcher passes on to its workers, which inherit the environment of `ray start`.

    Secrets stay behind, for Ray writes the environment of its actors into logs.

    >>> forwarded({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_1", "HOME": "/root"})
    {'CUDA_DEVICE_ORDER': 'PCI_BUS_ID', 'NCCL_DEBUG': 'INFO'}
    """
    return DEVICE_ORDER | {
        name: value
        for name, value in environ.items()
        if FORWARDED.match(name) and not SECRET.search(name)
    }
