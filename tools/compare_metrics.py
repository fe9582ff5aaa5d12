"""Compares what Prometheus reads of a run with docs/metrics.md and with the run, name by name.

    curl -s localhost:PORT/metrics | python tools/compare_metrics.py docs/metrics.md runs/RUN

Tells each name that is served and not in the page, and each that the newest lines of the run give a
value and that is not served; exits with 1 if there is any. What the page describes as a family, as
`fate_<name>`, may be there or not. Without a run, what is not served is told alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

EXPORTED = re.compile(r"^ray_async_grpo_(\w+)(?:{[^}]*})? ", re.MULTILINE)
TABLED = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
FAMILIES = re.compile(
    r"(token_)?fate_\w+|(failed|discarded)_\w+|lost_(turns|tokens)_\w+|lag_\d+_(samples|tokens)"
)
FILES = ("training_metrics.jsonl", "evaluation_metrics.jsonl")


def exported(text: str) -> set[str]:
    """Names of our gauges in what Ray serves, without its prefix and ours."""
    return set(EXPORTED.findall(text))


def documented(page: str) -> set[str]:
    """Names in the tables of the page."""
    return set(TABLED.findall(page))


def measured(run: Path) -> set[str]:
    """Names to which the newest lines of a run give a value."""
    found: set[str] = set()
    for file in (run / name for name in FILES):
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        row = json.loads(lines[-1]) if lines else {}
        found |= {name.partition("/")[0] for name in row if row[name] is not None}
    return found


def undocumented(served: set[str], known: set[str]) -> set[str]:
    """What the page should have, as a name or as one of a family."""
    return {name for name in served - known if not FAMILIES.fullmatch(name)}


def main(arguments: Sequence[str]) -> int:
    page, *runs = map(Path, arguments)
    served, known = exported(sys.stdin.read()), documented(page.read_text(encoding="utf-8"))
    of_runs = {name for run in runs for name in measured(run)} & known
    wrong = [
        *_lines("served, but not in the page", undocumented(served, known)),
        *_lines("measured, but not served", of_runs - served),
    ]
    told = [*wrong, *_lines("without a value", known - served - of_runs)]
    told.append(f"{len(served)} names served, {len(known)} in the page, {len(wrong)} wrong")
    sys.stdout.write("\n".join(told) + "\n")
    return int(bool(wrong))


def _lines(what: str, names: Iterable[str]) -> list[str]:
    return [f"{what}: {name}" for name in sorted(names)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
