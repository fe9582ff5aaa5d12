"""How soon a run notices what befalls its processes, and is whole again; see docs/faults.md.

The faults are those of `tests/faults/test_fault_matrix.py`, which commits them on a real run. It
fails where one was not made good or has cost a sample; there is no file then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import results
from benchmarks.results import Figure, median

NAME = "faults"
MATRIX = ("-m", "slow", "-n", "0", "tests/faults/test_fault_matrix.py", "-k", "whole_matrix")
QUICK = {"FAULT_SCRIPTED": "1", "FAULT_RANKS": "1", "FAULT_ROLES": "verifier server"}
TIMES = ("detected", "whole again")


@click.command()
@click.option("--quick", is_flag=True, help="one role of a run without engines")
@click.option("--results-dir", default=str(results.FOLDER), help="where faults.json goes")
def main(quick: bool, results_dir: str) -> None:
    """Commit all faults on a real run, one after the other."""
    click.echo(f"{results.machine()}, {results.load()}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        environment = os.environ | {"FAULT_OUTCOMES": str(file)} | (QUICK if quick else {})
        command = [sys.executable, "-m", "pytest", "-rA", *MATRIX]
        if subprocess.run(command, env=environment).returncode:
            raise click.ClickException("a fault was not made good, or cost a sample: see above")
        figures = figures_of(json.loads(file.read_text()))
    click.echo(f"\n{results.show(figures)}")
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def figures_of(found: Mapping[str, Any]) -> list[Figure]:
    """Seconds by fault and over all of them, and the books of the whole run.

    >>> fault = {"fault": "controller: SIGKILL", "detected": 0.2, "whole again": 3.0}
    >>> [f.name for f in figures_of({"faults": [fault], "books": {"batches": 9}})][:2]
    ['controller: SIGKILL, detected', 'controller: SIGKILL, whole again']
    """
    faults: Sequence[Mapping[str, Any]] = found["faults"]
    figures = [
        median(f"{name}, {time}", seconds, "s")
        for name in dict.fromkeys(each["fault"] for each in faults)
        for time in TIMES
        if (
            seconds := [
                s for each in faults if each["fault"] == name and (s := each[time]) is not None
            ]
        )
    ]
    for time in TIMES:
        # A freeze that ends before anybody has to notice it is not detected.
        seconds = [s for each in faults if (s := each[time]) is not None]
        figures.append(median(f"all, {time}", seconds, "s"))
        p99 = float(np.percentile(seconds, 99, method="inverted_cdf"))
        figures.append(Figure(f"all, {time}, p99", p99, "s"))
    books = {"faults": len(faults), **found["books"]}
    return figures + [Figure(f"all, {name}", number, name) for name, number in books.items()]


if __name__ == "__main__":
    main()
