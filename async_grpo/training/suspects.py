"""Minibatches behind a step that was not finite, kept in a file so that they can be trained again.

A file holds the arrays that model and loss read of each minibatch (`PackedMinibatch`), under its
number: `0.input_ids`, `0.scores.reference`. Beside them `0.keys` [S, 4] tells whose sequences these
are: ordinal, attempt, index in the group, row. Texts, the questions' columns and the hidden states
and logits of teachers stay behind.

    learner = Learner.build(config, ranks)  # the weights that the skipped step left untouched
    for packed in load_minibatches("runs/latest/non_finite/step_12_rank_0.npz"):
        learner.step.accumulate(to_device(packed, learner.device))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from async_grpo.types import Minibatch, PackedMinibatch
from async_grpo.util.errors import DataError
from async_grpo.util.files import replacing

logger = logging.getLogger(__name__)
SUSPECTS_FOLDER = "non_finite"
MAX_FILES = 8  # a rank; the first ones tell the most
FORMAT = 3
SCORES = "scores."  # and a name

# Of teachers: a whole step of them would be many times a minibatch's activations.
TOO_LARGE = ("teacher.hidden", "teacher.logits")

Arrays = dict[str, NDArray[np.generic]]


class Suspects:
    """Holds one rank's minibatches of the current step, and writes the suspects of a bad one."""

    def __init__(self, output_dir: str, *, rank: int) -> None:
        self._folder = Path(output_dir) / SUSPECTS_FOLDER
        self._rank = rank
        self._kept: list[tuple[Minibatch, PackedMinibatch]] = []

    def keep(self, minibatch: Minibatch, packed: PackedMinibatch) -> None:
        """Remember a minibatch, as it is packed for the model, until its step has ended."""
        if any(name in packed.scores for name in TOO_LARGE):
            packed = replace(packed, scores=_small(packed.scores))
            samples = (replace(sample, scores={}) for sample in minibatch.samples)
            minibatch = replace(minibatch, samples=tuple(samples))
        self._kept.append((minibatch, packed))

    def discard(self) -> None:
        """The step is not finished: forget its minibatches."""
        self._kept = []

    def end_step(self, step: int, *, suspects: Sequence[int]) -> Path | None:
        """Write `suspects`, indices of this step's minibatches, if there are any; forget all.

        The file that was written. Fillers are left out. A disk that refuses costs the file only.
        """
        kept, self._kept = self._kept, []
        chosen = [kept[index] for index in suspects if kept[index][0].samples]
        if not chosen:
            return None
        if len(list(self._folder.glob(f"step_*_rank_{self._rank}.npz"))) >= MAX_FILES:
            logger.warning("%s holds %d files of this rank: no more", self._folder, MAX_FILES)
            return None
        path = self._folder / f"step_{step}_rank_{self._rank}.npz"
        try:
            save_minibatches(path, chosen)
        except OSError as error:
            logger.error("the minibatches of step %d could not be kept: %s", step, error)
            return None
        logger.warning("kept %d minibatches of step %d in %s", len(chosen), step, path)
        return path


def save_minibatches(path: Path, minibatches: Sequence[tuple[Minibatch, PackedMinibatch]]) -> None:
    """Write minibatches so that `load_minibatches` gives them back; whole, or not at all."""
    arrays: Arrays = {"format": np.array(FORMAT)}
    for number, (minibatch, packed) in enumerate(minibatches):
        keys = [part.key for sample in minibatch.samples for part in sample.parts()]
        own = {**_arrays(packed), "keys": np.array(keys, np.int64)}
        arrays |= {f"{number}.{name}": array for name, array in own.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_minibatches(path: str | Path) -> tuple[PackedMinibatch, ...]:
    """What `save_minibatches` wrote, as it was packed; nothing is unpickled.

    Raises `DataError` for any other file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} must hold kept minibatches, cannot be read: {error}") from error
    written = found.pop("format", None)
    if written is None or written.shape != () or written != FORMAT:
        raise DataError(
            f"{path} must hold kept minibatches of format {FORMAT}, got "
            f"{written}: read it with the release that wrote it"
        )
    by_number: dict[int, Arrays] = {}
    for name, array in found.items():
        number, _, field = name.partition(".")
        by_number.setdefault(int(number), {})[field] = array
    return tuple(_packed(by_number[number]) for number in sorted(by_number))


def _small(scores: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values for name, values in scores.items() if name not in TOO_LARGE}


def _arrays(packed: PackedMinibatch) -> Arrays:
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    scores = {SCORES + name: rows for name, rows in values.pop("scores").items()}
    present = {name: value for name, value in (values | scores).items() if value is not None}
    return {name: np.asarray(value) for name, value in present.items()}


def _packed(arrays: Mapping[str, NDArray[np.generic]]) -> PackedMinibatch:
    values: dict[str, Any] = {
        name: torch.from_numpy(array) if array.ndim else int(array)
        for name, array in arrays.items()
        if name != "keys"
    }
    names = [name for name in values if name.startswith(SCORES)]
    scores = {name.removeprefix(SCORES): values.pop(name) for name in names}
    return PackedMinibatch(**values, scores=scores)
