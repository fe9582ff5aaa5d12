"""Whether a long run stays small: memory, descriptors and threads of every role, from outside.

Reads /proc of every process of a real run each few seconds, and fits a straight line of each
quantity against the batches done, after a warm-up. Memory is what a process shares with nobody
(PSS less shared memory): pages of the object store are counted once, as the store's own.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from async_grpo.cli.interrupts import interrupt_once
from benchmarks import procfs, results
from benchmarks.faults.books import Work
from benchmarks.faults.live import LiveRun, Shape
from benchmarks.faults.roles import cast
from benchmarks.results import Figure
from benchmarks.slopes import Slope, after_warm_up, slope

NAME = "soak"
WARM_UP = 0.3  # of the batches
MIB = 2**20
SERVICES = {"raylet": "raylet/raylet", "gcs": "gcs/gcs_server"}
FLAT_MIB, FLAT_COUNT = 1.0, 0.5  # in 1,000 batches: what a goal allows
STEP_MIB, STEP_COUNT = 4.0, 2.0  # a page of an allocator, a call's descriptor: not yet growth
logger = logging.getLogger(__name__)


@click.command()
@click.option("--minutes", default=10.0, help="how long the run is watched")
@click.option("--interval-s", default=3.0, help="seconds between two looks")
@click.option("--scripted", is_flag=True, help="generation takes no time: thousands of batches")
@click.option("--ranks", default=1, help="trainer ranks")
@click.option("--output-dir", default="runs/benchmarks/soak", help="replaced")
@click.option("--results-dir", default=str(results.FOLDER), help="where soak.json goes")
def main(
    minutes: float,
    interval_s: float,
    scripted: bool,
    ranks: int,
    output_dir: str,
    results_dir: str,
) -> None:
    """Watch a real run with everything on, and say what grows."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("async_grpo").setLevel("WARNING")
    interrupt_once()
    shutil.rmtree(output_dir, ignore_errors=True)
    click.echo(f"{results.machine()}, {results.load()}")
    shape = Shape(
        work=Work(batch_size=2, group=4, max_staleness=1), num_ranks=ranks, is_scripted=scripted
    )
    with LiveRun(Path(output_dir), shape) as run:
        looks = watch(run, seconds=60 * minutes, interval_s=interval_s)
        (Path(output_dir) / "looks.json").write_text(json.dumps(looks))
        run.stop()
    figures, shown = summarise(looks)
    name = f"{NAME}_scripted" if scripted else NAME
    click.echo(shown)
    click.echo(f"wrote {results.write(name, figures, folder=Path(results_dir))}, {results.load()}")


def watch(run: LiveRun, *, seconds: float, interval_s: float) -> list[dict[str, float]]:
    """One record a look: batches done, and every quantity of every role."""
    looks: list[dict[str, float]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        run.wait_for_rows(1, timeout_s=1)
        looks.append({"batch": float(len(run.rows()))} | _held(run) | _written(run))
        if len(looks) % 20 == 0:
            logger.info("%d batches, %d looks", looks[-1]["batch"], len(looks))
        time.sleep(interval_s)
    return looks


def _held(run: LiveRun) -> dict[str, float]:
    found: dict[str, float] = {}
    for role, pids in _players(run).items():
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


def _written(run: LiveRun) -> dict[str, float]:
    """What lies on the disk; the run's own files are meant to grow."""
    logs = [*(run.folder / "logs").iterdir(), *(run.session / "session_latest" / "logs").rglob("*")]
    checkpoints = (run.output / "checkpoints").rglob("*")
    return {
        "logs: size, MiB": _size(logs) / MIB,
        "checkpoints: size, MiB": _size(checkpoints) / MIB,
        "samples and metrics: size, MiB": _size(run.output.glob("*.jsonl")) / MIB,
    }


def _players(run: LiveRun) -> dict[str, list[int]]:
    living = run.living()
    lines = {pid: procfs.command_line(pid) for pid in living}
    services = {
        role: [pid for pid in living if part in lines[pid].partition(" ")[0]]
        for role, part in SERVICES.items()
    }
    dispatchers = [c.pid for name, c in run.commands.items() if name not in ("ray", "trainer")]
    own = {pid for pid in dispatchers if pid}
    return cast(run) | services | {"dispatchers": sorted(own)}


def _size(files: Iterable[Path]) -> int:
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # rotated away meanwhile
            continue
    return total


def summarise(looks: Sequence[Mapping[str, float]]) -> tuple[list[Figure], str]:
    """Figures, and a table of every quantity that all looks of the counted part have."""
    counted = after_warm_up(looks, share=WARM_UP)
    names = [name for name in counted[0] if name != "batch" and all(name in c for c in counted)]
    batches = [look["batch"] for look in counted]
    slopes = {name: slope(batches, [look[name] for look in counted]) for name in names}
    rows = [
        (
            name, f"{line.first:.2f}", f"{line.last:.2f}", f"{line.per_thousand:+.3f}",
            f"{line.error:.3f}", _verdict(name, line),
        )
        for name, line in slopes.items()
    ]  # fmt: skip
    header = ("quantity", "first", "last", "per 1,000 batches", "error", "")
    figures = [Figure("batches", looks[-1]["batch"], "batches", "higher")]
    figures += [
        Figure(
            f"{name}, growth", line.per_thousand, f"{_unit(name)}/1000 batches",
            goal=_allowed(name), spread=(line.first, line.last),
        )
        for name, line in slopes.items()
    ]  # fmt: skip
    return figures, results.table(header, rows)


def _unit(name: str) -> str:
    return "MiB" if name.endswith("MiB") else name.rpartition(": ")[2]


def _allowed(name: str) -> float | None:
    if name.endswith("size, MiB"):
        return None
    return FLAT_MIB if name.endswith("MiB") else FLAT_COUNT


def _verdict(name: str, line: Slope) -> str:
    allowed, step = _allowed(name), STEP_MIB if name.endswith("MiB") else STEP_COUNT
    is_steep = allowed is not None and line.is_growth and line.per_thousand > allowed
    return "GROWS" if is_steep and line.last - line.first > step else ""


if __name__ == "__main__":
    main()
