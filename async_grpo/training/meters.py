"""What a rank measures of itself: seconds in collectives, peak memory, the peak of its device.

Nothing here waits for a device before the end of a step, where the metrics wait for it anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from async_grpo.config.training_options import MemoryOptions
from async_grpo.training.fsdp import compute_dtype

PRODUCTS_S = 0.2  # seconds for which matrix products are repeated to find the peak
DEVICE_SIZE, CPU_SIZE = 8192, 512  # rows and columns of their square factors
STATUS = Path("/proc/self/status")


class Collectives:
    """Seconds of one rank in FSDP's collectives (`gathering`) and in those of a step's end.

    On a CPU, the seconds for which the thread is blocked. On a device, FSDP's seconds are those of
    the streams that the collectives run on, mostly in parallel to computing. Both include the wait
    for ranks that join later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gathering_s = 0.0
        self._agreeing_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def watch(self, policy: torch.nn.Module) -> None:
        """Time the gathers and scatters of a sharded policy from now on."""
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_TimedAllGather(self))
                module.set_custom_reduce_scatter(_TimedReduceScatter(self))

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Time the block, in which FSDP runs a collective or enqueues it on the device."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._gathering_s += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # on FSDP's stream for collectives, which is the current one here
        yield
        end.record()
        self._events.append((begin, end))

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Time the block, in which ranks exchange counts at the end of a step."""
        started = time.perf_counter()
        yield
        self._agreeing_s += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """{name: seconds} since the last call; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        on_device = sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        seconds = {
            "gathering_seconds": self._gathering_s + on_device,
            "agreeing_seconds": self._agreeing_s,
        }
        self._gathering_s, self._agreeing_s, self._events = 0.0, 0.0, []
        return seconds


class _Timed:
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, *args: object, **options: object) -> object:
        with self._collectives.gathering():
            return super().__call__(*args, **options)  # type: ignore[misc]  # of what it times


class _TimedAllGather(_Timed, DefaultAllGather): ...


class _TimedReduceScatter(_Timed, DefaultReduceScatter): ...


def peak_memory(device: torch.device) -> dict[str, float]:
    """{name: bytes}: this process's peak so far, in the host, and on the device for tensors.

    What CUDA and NCCL themselves take of the device is not included.
    """
    lines = STATUS.read_text().splitlines()
    high_water = next(line for line in lines if line.startswith("VmHWM:"))
    memory = {"peak_process_bytes": 1024.0 * int(high_water.split()[1])}
    if device.type == "cuda":
        memory["peak_device_bytes"] = float(torch.cuda.max_memory_reserved(device))
    return memory


def peak_tflops(memory: MemoryOptions, device: torch.device) -> float | None:
    """TFLOP/s by which this rank's utilisation is computed; None: it is not computed."""
    if memory.peak_tflops not in ("auto", "measure"):
        return float(memory.peak_tflops)
    if memory.peak_tflops == "auto" and device.type == "cpu":
        return None
    return measured_tflops(device, dtype=compute_dtype(memory.mixed_precision, device))


def measured_tflops(device: torch.device, *, dtype: torch.dtype) -> float:
    """TFLOP/s of the fastest of many square products of random numbers; zeros would be faster."""
    size = DEVICE_SIZE if device.type == "cuda" else CPU_SIZE
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    fastest_s, until = float("inf"), time.perf_counter() + PRODUCTS_S
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - started)
    return 2.0 * size**3 / fastest_s / 1e12
