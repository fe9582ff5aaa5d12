"""A fault among the verifier processes costs the sample that caused it, and no other.

    VERIFIER_FAULT_REPEATS=20 python -m pytest -m slow -rA THIS_FILE

Two processes grade a steady stream of innocent samples while one fault after another is injected:
texts that hang, eat memory, crash, flood the output, start processes or forge answers, and kills
of the server, its bwrap and a request from outside. A verdict is wrong when an innocent sample is
not scored 1.0, or a guilty one earns anything. The table (printed, shown by -rA) tells, in
milliseconds:

detected: from the injection to the first accident that the pool has counted; recovered: from there
until the server is up again.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from verifier_processes import REPOSITORY, processes, verdict_of

from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.sandbox import Sandbox
from benchmarks import results

REPEATS = int(os.environ.get("VERIFIER_FAULT_REPEATS", "5"))
RECOVERED_WITHIN_S = 30.0
NUM_SLOTS = 2
TIMEOUT_S = 2.0
PAUSE_S = 0.01  # between two innocent samples of a client
NUM_CLIENTS = 4
SAMPLE = {"output": r"so it is \boxed{15}", "answer": "15"}
ADAPTER = r"""
import os, subprocess, sys, time
from async_grpo.verification.graders.math_verify import math_verify_reward
from async_grpo.verification.graders.shipped import warm_up

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
        os.write(3, b"{}")
        os._exit(0)
    return {"reward": math_verify_reward(sample["output"], sample["answer"])}

adapter.prepare = lambda: warm_up(math_verify_reward)
"""
TEXTS = {
    "hang": "unscorable",
    "memory bomb": "unscorable",
    "segfault": "error",
    "output flood": "error",
    "processes": "unscorable",
    "forged answer": "error",
}
KILLS = ("killed request", "killed server", "killed bwrap")


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
        verdict = await verdict_of(box, SAMPLE)
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
    verdict = await verdict_of(box, SAMPLE | {"kind": kind})
    trial.num_wrong += (verdict.status, verdict.reward) != (TEXTS[kind], 0.0)


def victim(fault: str) -> int | None:
    """The process to kill, if there is one at the moment."""
    found = processes()
    pids = {"server": found.servers, "bwrap": found.outer, "request": found.requests}
    return next(iter(pids[fault.split()[-1]]), None)


async def kill(fault: str, box: Sandbox) -> None:
    """A request ends within milliseconds, so one after another is hit until a kill came in time."""
    before = accidents(box)
    while accidents(box) == before:
        pid = victim(fault)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                if fault != "killed request":
                    return
        await asyncio.sleep(0.005)


def accidents(box: Sandbox) -> int:
    kinds = ("overrun", "error", "lost", "server_restarts")
    return sum(box.events.get(kind, 0) for kind in kinds)


async def observe(box: Sandbox, trial: Trial, before: int) -> None:
    """Note when the pool has counted an accident, and when it can grade again."""
    started = time.perf_counter()
    while accidents(box) == before:  # noqa: ASYNC110 - the pool has no event for either
        await asyncio.sleep(0.001)
    detected = time.perf_counter()
    while not all(server.is_up for server in box._servers.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    trial.detected_s.append(detected - started)
    trial.recovered_s.append(time.perf_counter() - detected)


async def run_trial(box: Sandbox, fault: str, repeats: int) -> Trial:
    trial = Trial()
    async with innocents(box, trial):
        for _ in range(repeats):
            watcher = asyncio.create_task(observe(box, trial, accidents(box)))
            if fault in TEXTS:
                await inject_text(box, fault, trial)
            elif fault != "none":
                await kill(fault, box)
            else:
                watcher.cancel()
                await asyncio.sleep(0.5)
                continue
            await watcher
            await asyncio.sleep(0.3)  # the next one hits a pool at rest
    return trial


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_verdict_is_wrong_and_every_slot_comes_back_whatever_dies(tmp_path):
    path = tmp_path / "faulty.py"
    path.write_text(ADAPTER)
    rows, wrong, slow = asyncio.run(all_faults(f"{path}:adapter"))
    print("milliseconds, p50 / p99")
    print(results.table(HEADER, rows))
    assert wrong == [] and slow == []


async def all_faults(adapter: str) -> tuple[list[list[str]], list[str], list[str]]:
    """Lines of the table, faults with wrong verdicts, and faults that lamed a slot for long."""
    config = VerifierConfig(
        reward_names=(adapter,), search_paths=(REPOSITORY,), timeout_s=TIMEOUT_S, memory_mib=2048
    )
    box = Sandbox(config, num_processes=NUM_SLOTS)
    await box.start()
    rows, wrong, slow = [], [], []
    for fault in ("none", *TEXTS, *KILLS):
        trial = await run_trial(box, fault, REPEATS)
        rows.append(row(fault, trial))
        assert trial.innocent_s, fault
        wrong += [fault] * trial.num_wrong
        slow += [fault for seconds in trial.recovered_s if seconds > RECOVERED_WITHIN_S]
    await box.close()
    return rows, wrong, slow


HEADER = (
    "fault", "injected", "innocent", "wrong", "detected", "recovered", "delay of innocent"
)  # fmt: skip


def row(fault: str, trial: Trial) -> list[str]:
    cells = [fault, str(len(trial.detected_s)), str(len(trial.innocent_s)), str(trial.num_wrong)]
    for values in (trial.detected_s, trial.recovered_s, trial.innocent_s):
        p50, p99 = np.percentile(values, [50, 99]) * 1000 if values else (np.nan, np.nan)
        cells.append(f"{p50:.0f} / {p99:.0f}" if values else "-")
    return cells
