"""Whether a long run stays small: memory, descriptors and threads of every role, from outside.

    SOAK_MINUTES=20 SOAK_REAL=1 python -m pytest -m slow -rA tests/faults/test_soak.py

Reads /proc of every process of a real run each few seconds, and fits a straight line of each
quantity against the batches done, after a warm-up. Memory is what a process shares with nobody
(PSS less shared memory): pages of the object store are counted once, as the store's own. Without
SOAK_REAL generation takes no time: thousands of batches.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import procfs, results
from faults.books import Work
from faults.live import LiveRun, Shape
from faults.roles import cast
from faults.slopes import Slope, after_warm_up, slope

REPOSITORY = Path(__file__).parents[2]
MINUTES = float(os.environ.get("SOAK_MINUTES", "4"))
INTERVAL_S = 3.0
WARM_UP = 0.3  # of the batches
MIB = 2**20
SERVICES = {"raylet": "raylet/raylet", "gcs": "gcs/gcs_server"}
FLAT_MIB, FLAT_COUNT = 1.0, 0.5  # in 1,000 batches
STEP_MIB, STEP_COUNT = 4.0, 2.0  # a page of an allocator, a call's descriptor: not yet growth


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_that_a_process_holds_grows_with_the_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    work = Work(batch_size=2, group=4, max_staleness=1)
    is_scripted = not os.environ.get("SOAK_REAL")
    with LiveRun(tmp_path, Shape(work=work, num_ranks=1, is_scripted=is_scripted)) as run:
        looks = watch(run, seconds=60 * MINUTES)
        run.stop()
    lines = lines_of(looks)
    print(f"{looks[-1]['batch']:.0f} batches\n{table(lines)}")
    assert [name for name, line in lines.items() if grows(name, line)] == []


def watch(run: LiveRun, *, seconds: float) -> list[dict[str, float]]:
    """One record a look: batches done, and every quantity of every role."""
    looks: list[dict[str, float]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        run.wait_for_rows(1, timeout_s=1)
        looks.append({"batch": float(len(run.rows()))} | held(run) | written(run))
        time.sleep(INTERVAL_S)
    return looks


def held(run: LiveRun) -> dict[str, float]:
    found: dict[str, float] = {}
    for role, pids in players(run).items():
        usages = [usage for pid in pids if (usage := procfs.usage(pid)) is not None]
        if not usages:
            continue
        own = sum(usage.pss_bytes - min(usage.pss_bytes, usage.shared_bytes) for usage in usages)
        found[f"{role}: memory, MiB"] = own / MIB
        found[f"{role}: descriptors"] = sum(usage.num_fds for usage in usages)
        found[f"{role}: threads"] = sum(usage.num_threads for usage in usages)
        if role == "raylet":
            found["object store: memory, MiB"] = sum(u.shared_bytes for u in usages) / MIB
    return found


def written(run: LiveRun) -> dict[str, float]:
    """What lies on the disk; the run's own files are meant to grow."""
    logs = [*(run.folder / "logs").iterdir(), *(run.session / "session_latest" / "logs").rglob("*")]
    checkpoints = (run.output / "checkpoints").rglob("*")
    return {
        "logs: size, MiB": size(logs) / MIB,
        "checkpoints: size, MiB": size(checkpoints) / MIB,
        "samples and metrics: size, MiB": size(run.output.glob("*.jsonl")) / MIB,
    }


def players(run: LiveRun) -> dict[str, list[int]]:
    living = run.living()
    lines = {pid: procfs.command_line(pid) for pid in living}
    services = {
        role: [pid for pid in living if part in lines[pid].partition(" ")[0]]
        for role, part in SERVICES.items()
    }
    dispatchers = [c.pid for name, c in run.commands.items() if name not in ("ray", "trainer")]
    own = {pid for pid in dispatchers if pid}
    return cast(run) | services | {"dispatchers": sorted(own)}


def size(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # rotated away meanwhile
            continue
    return total


def lines_of(looks: list[dict[str, float]]) -> dict[str, Slope]:
    """A line through every quantity that all looks of the counted part have."""
    counted = after_warm_up(looks, share=WARM_UP)
    names = [name for name in counted[0] if name != "batch" and all(name in c for c in counted)]
    batches = [look["batch"] for look in counted]
    return {name: slope(batches, [look[name] for look in counted]) for name in names}


def grows(name: str, line: Slope) -> bool:
    """Whether it is more than noise and than a step; files of the run are meant to grow."""
    flat, step = (FLAT_MIB, STEP_MIB) if name.endswith("MiB") else (FLAT_COUNT, STEP_COUNT)
    is_steep = line.is_growth and line.per_thousand > flat and line.last - line.first > step
    return is_steep and not name.endswith("size, MiB")


def table(lines: dict[str, Slope]) -> str:
    header = ("quantity", "first", "last", "per 1,000 batches", "error", "")
    rows = [
        (
            name, f"{line.first:.2f}", f"{line.last:.2f}", f"{line.per_thousand:+.3f}",
            f"{line.error:.3f}", "GROWS" if grows(name, line) else "",
        )
        for name, line in lines.items()
    ]  # fmt: skip
    return results.table(header, rows)
