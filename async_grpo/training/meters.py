"""What a rank measures of itself: where its seconds go, peak memory, the peak of its device.

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
GATHERING = ("all_gather_seconds", "reduce_scatter_seconds")


class Timers:
    """Seconds of one rank in FSDP's collectives, in those of a step's end, in AdamW and in copies.

    On a CPU, the seconds for which the thread is blocked. On a device, those of the streams that
    the work runs on: FSDP's mostly in parallel to computing. Collectives include the wait for ranks
    that join later. Copies of minibatches are those to a device: a CPU has none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        names = (*GATHERING, "agreeing_seconds", "updating_seconds")
        self._names = (*names, "copying_seconds") if device.type == "cuda" else names
        self._seconds = dict.fromkeys(self._names, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def watch(self, policy: torch.nn.Module) -> None:
        """Time the gathers and scatters of a sharded policy from now on."""
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_TimedAllGather(self))
                module.set_custom_reduce_scatter(_TimedReduceScatter(self))

    @contextmanager
    def enqueuing(self, name: str) -> Iterator[None]:
        """Time the block, which runs work, or enqueues it on the device's current stream."""
        if self._device.type != "cuda":
            with self._blocked(name):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # in FSDP's collectives, on its stream for them
        yield
        end.record()
        self._events.append((name, begin, end))

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Time the block, in which ranks exchange counts at the end of a step."""
        with self._blocked("agreeing_seconds"):
            yield

    @contextmanager
    def _blocked(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if name in self._seconds:
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """{name: seconds} since the last call; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds, events = self._seconds, self._events
        self._seconds, self._events = dict.fromkeys(self._names, 0.0), []
        for name, begin, end in events:
            seconds[name] += begin.elapsed_time(end) / 1e3
        return {**seconds, "gathering_seconds": sum(seconds[name] for name in GATHERING)}


class _Timed:
    name: str

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def __call__(self, *args: object, **options: object) -> object:
        with self._timers.enqueuing(self.name):
            return super().__call__(*args, **options)  # type: ignore[misc]  # of what it times


class _TimedAllGather(_Timed, DefaultAllGather):
    name = "all_gather_seconds"


class _TimedReduceScatter(_Timed, DefaultReduceScatter):
    name = "reduce_scatter_seconds"


def peak_memory(device: torch.device) -> dict[str, float]:
    """{name: bytes}: this process's peak so far, in the host, and on the device for tensors.

    `peak_device_bytes` is what torch has reserved for them, `peak_allocated_bytes` what they hold.
    What CUDA and NCCL themselves take of the device is not included.
    """
    lines = STATUS.read_text().splitlines()
    high_water = next(line for line in lines if line.startswith("VmHWM:"))
    memory = {"peak_process_bytes": 1024.0 * int(high_water.split()[1])}
    if device.type == "cuda":
        memory["peak_device_bytes"] = float(torch.cuda.max_memory_reserved(device))
        memory["peak_allocated_bytes"] = float(torch.cuda.max_memory_allocated(device))
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
