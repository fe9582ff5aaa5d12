"""Figures of a benchmark: a table on the screen and a file that the next run is compared with."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "results"
# What figures depend on: they may be measured one after the other, each committed at once.
CODE = (".", ":!benchmarks/results", ":!docs", ":!tests", ":!tools", ":!*.md")
RATIOS = ("", "x", "fraction", "%")  # units of what two machines may be compared by


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number; `spread` is the lowest and highest of the values it is the median of."""

    name: str
    value: float
    unit: str
    better: Literal["higher", "lower"] = "lower"
    goal: float | None = None
    spread: tuple[float, float] | None = None


def median(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    better: Literal["higher", "lower"] = "lower",
    goal: float | None = None,
) -> Figure:
    """The median of several measurements, with their spread.

    >>> median("time", [3.0, 1.0, 2.0], "s")
    Figure(name='time', value=2.0, unit='s', better='lower', goal=None, spread=(1.0, 3.0))
    """
    spread = (min(values), max(values))
    return Figure(name, statistics.median(values), unit, better, goal, spread)


def machine() -> str:
    """Number and kind of the processors: what a time depends on, and nothing that identifies.

    >>> machine().endswith("GiB")
    True
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {models[0] if models else 'unknown'}, {memory_gib:.0f} GiB"


def commit(folder: Path = FOLDER) -> str:
    """The last commit that changed `CODE`, `+changes` where it differs; unknown without one."""
    of = ("git", "-C", str(folder.parents[1]))
    last = subprocess.run(
        [*of, "log", "-1", "--format=%h", "--", *CODE], capture_output=True, text=True
    )
    changed = subprocess.run([*of, "diff", "--quiet", "HEAD", "--", *CODE], capture_output=True)
    return last.stdout.strip() + "+changes" * bool(changed.returncode) if last.stdout else "unknown"


def load() -> str:
    """How busy the machine is, for whoever doubts a time."""
    return "load average " + " ".join(f"{value:.2f}" for value in os.getloadavg())


def command() -> str:
    """The command line that repeats this run, from the top folder of the repository."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write(name: str, figures: Sequence[Figure], *, folder: Path = FOLDER, device: str = "") -> Path:
    """Replace the benchmark's file; `device` is what was measured where it is no processor."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "benchmark": name,
        "command": command(),
        "commit": commit(),
        "machine": ", ".join(filter(None, [device, machine()])),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "figures": [_entry(figure) for figure in figures],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read(name: str, *, folder: Path = FOLDER) -> list[Figure]:
    """The figures of a benchmark's file; none where it has never been run."""
    path = folder / f"{name}.json"
    entries = json.loads(path.read_text())["figures"] if path.exists() else []
    return [_figure(entry) for entry in entries]


def measured_at(*names: str, folder: Path = FOLDER) -> str:
    """The commit of the first of these files that is there; empty: none is."""
    files = (folder / f"{name}.json" for name in names)
    found = next((file for file in files if file.exists()), None)
    return str(json.loads(found.read_text()).get("commit", "unknown")) if found else ""


def _figure(entry: dict[str, Any]) -> Figure:
    spread = entry.get("spread")
    return Figure(
        entry["name"],
        entry["value"],
        entry["unit"],
        entry["better"],
        entry["goal"],
        (spread[0], spread[1]) if spread else None,
    )


def _entry(figure: Figure) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": figure.name,
        "value": figure.value,
        "unit": figure.unit,
        "goal": figure.goal,
        "better": figure.better,
    }
    return entry | ({"spread": list(figure.spread)} if figure.spread else {})


def show(figures: Sequence[Figure]) -> str:
    """The figures as a table, with spread and goal."""
    rows = []
    for figure in figures:
        spread = " - ".join(f"{value:.3g}" for value in figure.spread) if figure.spread else ""
        goal = "" if figure.goal is None else f"{figure.goal:g}"
        rows.append((figure.name, f"{figure.value:.3g}", figure.unit, spread, goal))
    return table(("figure", "median", "unit", "spread", "goal"), rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other, numbers to the right.

    >>> print(table(["policy", "s"], [["ours", "1.5"], ["whole batch", "12"]]))
    policy         s
    ours         1.5
    whole batch   12
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
