"""What a fault among the verifier processes costs: the sample that caused it, and the others.

    python -m benchmarks.verifier_faults

Two processes grade a steady stream of innocent samples while one fault after another is injected:
texts that hang, eat memory, crash, flood the output, start processes or forge answers, and kills of
verifier, keeper and zygote from outside. A verdict is wrong when an innocent sample is not scored
1.0, or a guilty one earns anything.

detected: from the injection to the first accident that the pool has counted; recovered: from there
until every slot has a process again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.family import children
from async_grpo.verification.sandbox import Sandbox
from async_grpo.verification.slot import Slot
from async_grpo.verification.spawner import Spawner
from benchmarks import results
from benchmarks.results import Figure, median

REPOSITORY = str(Path(__file__).parents[1])
NUM_SLOTS = 2
TIMEOUT_S = 2.0
PAUSE_S = 0.01  # between two innocent samples of a client
NUM_CLIENTS = 4
SAMPLE = {"output": r"so it is \boxed{15}", "answer": "15"}
ADAPTER = r"""
import os, subprocess, sys, time
from async_grpo.verification.graders.library import math_verify_reward

def adapter(sample, **kwargs):
    kind = sample.get("kind")
    if kind == "hang":
        while True: pass
    if kind == "memory bomb":
        return {"reward": len(bytearray(64 << 30))}
    if kind == "segfault":
        import ctypes; ctypes.string_at(0)
    if kind == "output flood":
        for _ in range(20): os.write(1, b"x" * (1 << 20))
        raise ValueError("done")
    if kind == "processes":
        while True: subprocess.Popen(["sleep", "60"])
    if kind == "forged answer":
        os.write(3, b"\x00\x00\x00\x02{}")
        time.sleep(60)
    return {"reward": math_verify_reward(sample["output"], sample["answer"])}
"""
TEXTS = {
    "hang": "unscorable",
    "memory bomb": "unscorable",
    "segfault": "error",
    "output flood": "error",
    "processes": "unscorable",
    "forged answer": "error",
}


@dataclass(slots=True)
class Trial:
    """What was seen while one kind of fault was injected again and again."""

    detected_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    innocent_s: list[float] = field(default_factory=list)
    num_wrong: int = 0


async def stream(box: Sandbox, trial: Trial, stop: asyncio.Event) -> None:
    """A client that sends innocent samples one after another."""
    while not stop.is_set():
        started = time.perf_counter()
        verdict = await box.grade(SAMPLE)
        trial.innocent_s.append(time.perf_counter() - started)
        trial.num_wrong += (verdict.status, verdict.reward) != ("scored", 1.0)
        await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def innocents(box: Sandbox, trial: Trial) -> AsyncIterator[None]:
    stop = asyncio.Event()
    clients = [asyncio.create_task(stream(box, trial, stop)) for _ in range(NUM_CLIENTS)]
    yield
    stop.set()
    await asyncio.gather(*clients)


async def inject_text(box: Sandbox, kind: str, trial: Trial) -> None:
    """A guilty sample; it is tried twice, and the first accident counts as its detection."""
    verdict = await box.grade(SAMPLE | {"kind": kind})
    trial.num_wrong += (verdict.status, verdict.reward) != (TEXTS[kind], 0.0)


def victims() -> dict[str, int] | None:
    """A process of each role, by its place below this one; None while spare ones come and go."""
    zygotes = [below for child in children(os.getpid()) for below in children(child)]
    keepers = children(zygotes[0]) if len(zygotes) == 1 else []
    verifiers = [child for keeper in keepers for child in children(keeper)]
    if not len(keepers) == len(verifiers) == NUM_SLOTS:
        return None
    return {"zygote": zygotes[0], "keeper": keepers[0], "verifier": verifiers[0]}


async def at_rest() -> dict[str, int]:
    """What can be killed, once there are as many processes as slots."""
    while True:
        if found := victims():
            return found
        await asyncio.sleep(0.01)


def accidents(box: Sandbox) -> int:
    return sum(box.events.get(kind, 0) for kind in ("overrun", "error", "lost", "died_idle"))


async def observe(box: Sandbox, trial: Trial, before: int) -> None:
    """Note when the pool has counted an accident, and when all slots have processes again."""
    started = time.perf_counter()
    while accidents(box) == before:  # noqa: ASYNC110 - the pool has no event for either
        await asyncio.sleep(0.001)
    detected = time.perf_counter()
    while box.num_up < NUM_SLOTS:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    trial.detected_s.append(detected - started)
    trial.recovered_s.append(time.perf_counter() - detected)


async def run_trial(box: Sandbox, fault: str, repeats: int) -> Trial:
    trial = Trial()
    async with innocents(box, trial):
        for _ in range(repeats):
            found = await at_rest()
            watcher = asyncio.create_task(observe(box, trial, accidents(box)))
            if fault in TEXTS:
                await inject_text(box, fault, trial)
            elif fault != "none":
                os.kill(found[fault.split()[-1]], signal.SIGKILL)
            else:
                watcher.cancel()
                await asyncio.sleep(0.5)
                continue
            await watcher
            await asyncio.sleep(0.3)  # the next one hits a pool at rest
    return trial


def percentiles(name: str, values: list[float]) -> list[Figure]:
    p50, p99 = np.percentile(values, [50, 99]) * 1000
    return [Figure(f"{name}, p50", float(p50), "ms"), Figure(f"{name}, p99", float(p99), "ms")]


async def throughput(adapter: str, num_slots: int, num_samples: int) -> Figure:
    config = VerifierConfig(reward_names=(adapter,), search_paths=(REPOSITORY,))
    box = Sandbox(config, num_processes=num_slots)
    await box.start()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        await asyncio.gather(*(box.grade(SAMPLE) for _ in range(num_samples)))
        seconds.append(num_samples / (time.perf_counter() - started))
    await box.close()
    return median(f"math_verify with {num_slots} processes", seconds, "samples/s", better="higher")


def respawns(adapter: str, repeats: int) -> list[Figure]:
    spawner = Spawner()
    slot = Slot(VerifierConfig(reward_names=(adapter,)), spawner)
    slot.start()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        slot.stop()
        slot.start()
        seconds.append(time.perf_counter() - started)
    spawner.close()
    slot.stop()
    return percentiles("a process is killed and replaced", seconds)


async def faults(adapter: str, repeats: int) -> tuple[list[Figure], list[list[str]]]:
    config = VerifierConfig(
        reward_names=(adapter,), search_paths=(REPOSITORY,), timeout_s=TIMEOUT_S, memory_mib=2048
    )
    box = Sandbox(config, num_processes=NUM_SLOTS)
    await box.start()
    figures, rows, num_wrong = [], [], 0
    for fault in ("none", *TEXTS, "killed verifier", "killed keeper", "killed zygote"):
        trial = await run_trial(box, fault, repeats)
        num_wrong += trial.num_wrong
        figures += percentiles(f"{fault}: innocent sample", trial.innocent_s)
        if trial.detected_s:
            figures += percentiles(f"{fault}: detected", trial.detected_s)
            figures += percentiles(f"{fault}: recovered", trial.recovered_s)
        rows.append(row(fault, trial))
    figures.append(Figure("wrong verdicts", num_wrong, "samples", goal=0))
    await box.close()
    return figures, rows


def row(fault: str, trial: Trial) -> list[str]:
    cells = [fault, str(len(trial.detected_s)), str(len(trial.innocent_s)), str(trial.num_wrong)]
    for values in (trial.detected_s, trial.recovered_s, trial.innocent_s):
        p50, p99 = np.percentile(values, [50, 99]) * 1000 if values else (np.nan, np.nan)
        cells.append(f"{p50:.0f} / {p99:.0f}" if values else "-")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=20, help="injections of each fault")
    repeats = parser.parse_args().repeats
    print(results.machine(), results.load())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "faulty.py")
        path.write_text(ADAPTER)
        adapter = f"{path}:adapter"
        figures = respawns(adapter, 5 * repeats)
        figures += [asyncio.run(throughput(adapter, slots, 500)) for slots in (1, 2)]
        more, rows = asyncio.run(faults(adapter, repeats))
    header = (
        "fault",
        "injected",
        "innocent",
        "wrong",
        "detected",
        "recovered",
        "delay of innocent",
    )
    print("milliseconds, p50 / p99")
    print(results.table(header, rows))
    print(results.show([*figures, more[-1]]))
    print(results.write("verifier_faults", [*figures, *more]))


if __name__ == "__main__":
    main()
