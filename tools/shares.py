"""Print how many questions of each type every batch of a run had, out of its dumped samples.

    python tools/shares.py runs/three_types

Questions that were dropped, or replaced by another of their type, are not in the count.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def shares(folder: Path) -> dict[int, Counter[str]]:
    """{batch: its questions by type}."""
    slots: dict[tuple[int, int], str] = {}
    with (folder / "samples.jsonl").open() as file:
        for line in map(json.loads, file):
            if line["fate"] not in ("replaced", "failed") and not line["given"]:
                slots[line["batch"], line["ordinal"]] = line["dataset_type"]
    found: dict[int, Counter[str]] = {}
    for (batch, _), kind in sorted(slots.items()):
        found.setdefault(batch, Counter())[kind] += 1
    return found


def main() -> None:
    for batch, counts in shares(Path(sys.argv[1])).items():
        told = ", ".join(f"{kind or 'no type'} {counts[kind]}" for kind in sorted(counts))
        sys.stdout.write(f"batch {batch + 1}: {told}\n")


if __name__ == "__main__":
    main()
