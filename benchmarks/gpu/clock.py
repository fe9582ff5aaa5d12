"""Time and memory of work on a device, and the most that the device can do.

Work on a device is asynchronous: times are those between two of its own events. Without a device
the host's clock serves, and the high-water mark that the kernel keeps of a process.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.results import Figure, median

GIB = 2.0**30
MATMUL_SIZES = (8_192, 16_384)


def find_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    """Empty where there is no NVIDIA device."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], *, device: torch.device) -> float:
    """How long the device was busy with what `work` gives it, gaps included."""
    synchronize(device)
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def repeated(
    work: Callable[[], object], *, device: torch.device, warmups: int, repeats: int
) -> list[float]:
    """Seconds of each repeat, the warm-ups left out."""
    for _ in range(warmups):
        work()
    return [seconds(work, device=device) for _ in range(repeats)]


def allocated_bytes(device: torch.device) -> int:
    """Of live tensors, when the device has caught up."""
    synchronize(device)
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(work: Callable[[], object], *, device: torch.device) -> int:
    """The most that tensors took during `work`, beyond what there was before."""
    before = allocated_bytes(device)
    if device.type != "cuda":
        return _peak_of_process(work)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_of_process(work: Callable[[], object]) -> int:
    """CPU torch counts no memory; the kernel does: see `clear_refs` in proc(5)."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work left in the heap would be used unseen
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def memory_figure(at: str, size_bytes: float, *, device: torch.device) -> Iterator[Figure]:
    """Nothing where no device keeps account."""
    if device.type == "cuda":
        yield Figure(at, size_bytes / GIB, "GiB")


def limits(*, toy: bool) -> Iterator[Figure]:
    """The peaks by which the rest is judged: bf16 products, and copies within the device."""
    device = find_device()
    sizes = (256,) if toy else MATMUL_SIZES
    rates = {size: _matmul_rates(size, device=device) for size in sizes}
    for size, values in rates.items():
        yield median(f"matmul bf16 {size}", values, "TFLOP/s", better="higher")
    yield median("copy within the device", _copy_rates(device, toy=toy), "GB/s", better="higher")


def _matmul_rates(size: int, *, device: torch.device, products: int = 10) -> list[float]:
    """TFLOP/s of square products of random numbers; zeros would be faster than anything real."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def work() -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    times = repeated(work, device=device, warmups=2, repeats=7)
    return [products * 2.0 * size**3 / value / 1e12 for value in times]


def _copy_rates(device: torch.device, *, toy: bool) -> list[float]:
    """GB/s, bytes read and bytes written."""
    source = torch.randn(2**20 if toy else 2**30, device=device)
    target = torch.empty_like(source)
    times = repeated(lambda: target.copy_(source), device=device, warmups=2, repeats=7)
    return [2 * source.nbytes / value / 1e9 for value in times]
