"""Where a run's data comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataSource:
    """A file, or what `datasets.load_dataset` reads of a name or a folder."""

    path: str
    split: str = "train"
    config: str = ""  # empty: its only one
