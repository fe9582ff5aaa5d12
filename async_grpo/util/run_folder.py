"""A run's output folder: names of its files, cleared for a new run, cut back for a resumed one."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from async_grpo.util.files import explained

logger = logging.getLogger(__name__)
METRICS_FILE = "training_metrics.jsonl"
EVALUATIONS_FILE = "evaluation_metrics.jsonl"
BEST_FILE = "best_checkpoint.json"
PARAMETERS_FILE = "training_params.json"
RUN_FILE = "run.toml"  # every option of a launched run: launched in its turn, it goes on
CHECKPOINTS_FOLDER = "checkpoints"
EXPORTS_FOLDER = "hf_format"


def is_restart() -> bool:
    """Whether torchrun has restarted these ranks, so that the folder holds this very run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def newest_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """Batch number and path of the newest committed checkpoint; reads no file of it."""
    found = [
        (marker.stat().st_mtime_ns, int(number), marker.parent)
        for marker in folder.glob(f"{CHECKPOINTS_FOLDER}/batch_*/COMMITTED")
        # A batch that was saved again lies in batch_12.2.
        if (number := marker.parent.name.removeprefix("batch_").partition(".")[0]).isdigit()
    ]
    return max(found)[1:] if found else None


def exports_in(folder: Path) -> dict[int, Path]:
    """{number of trained samples: export} of a run's folder."""
    found = folder.glob(f"{EXPORTS_FOLDER}/samples_*")
    ends = {each: each.name.removeprefix("samples_") for each in found}
    return {int(end): each for each, end in ends.items() if end.isdigit()}


def clear(folder: Path, *, files: tuple[str, ...], folders: tuple[str, ...]) -> None:
    """Make the folder of a new run and delete what an older run left in it."""
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in folders:  # the checkpoints first: they must not outlive their metrics
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in files:
            (folder / name).unlink(missing_ok=True)


def cut_back(folder: Path, sizes: Mapping[str, int], *, source: Path) -> None:
    """Truncate files to their length at a checkpoint: {name: bytes}.

    `source`: the folder of the run that wrote the checkpoint, which keeps its own files.
    """
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, size_bytes in sizes.items():
            file = folder / name
            if source.absolute() != folder.absolute():
                _copy(source / name, file)
            found = file.stat().st_size if file.exists() else 0
            if found < size_bytes:
                logger.warning("%s has lost lines that the checkpoint knows of", file)
            elif found:
                os.truncate(file, size_bytes)


def _copy(source: Path, file: Path) -> None:
    file.unlink(missing_ok=True)
    if source.exists():
        shutil.copyfile(source, file)
