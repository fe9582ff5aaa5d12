"""Minibatches behind a step that was not finite, kept in a file so that they can be trained again.

A file holds what the loss reads, as plain arrays; texts and the questions' columns stay behind.

Legend: M minibatches, S samples of all of them, one row each, in order; K weight-version spans,
P prompt and L output tokens of all samples, laid end to end.

    learner = Learner.build(config, ranks)  # the weights that the skipped step left untouched
    for minibatch in load_minibatches("runs/latest/non_finite/step_12_rank_0.npz"):
        learner.accumulate(minibatch)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import DTypeLike, NDArray

from async_grpo.errors import DataError
from async_grpo.files import replacing
from async_grpo.types import (
    Episode,
    Minibatch,
    Question,
    Row,
    Sample,
    Verdict,
    VersionSpan,
    WeightsVersion,
)

logger = logging.getLogger(__name__)
REPLAY_FOLDER = "non_finite"
MAX_FILES = 8  # a rank; the first ones tell the most
FORMAT = 2

BEHAVIOUR = "behaviour_logprobs"
ADVANTAGES = "token_advantages"
SCORES = "scores of "  # and a name

Columns = dict[str, NDArray[Any]]


class Replay:
    """Holds one rank's minibatches of the current step, and writes the suspects of a bad one."""

    def __init__(self, output_dir: str, *, rank: int) -> None:
        self._folder = Path(output_dir) / REPLAY_FOLDER
        self._rank = rank
        self._minibatches: list[Minibatch] = []

    def keep(self, minibatch: Minibatch) -> None:
        """Remember a minibatch until its step has ended."""
        self._minibatches.append(minibatch)

    def discard(self) -> None:
        """The step is not finished: forget its minibatches."""
        self._minibatches = []

    def end_step(self, step: int, *, suspects: Sequence[int]) -> Path | None:
        """Write `suspects`, indices of this step's minibatches, if there are any; forget all.

        The file that was written. Fillers are left out. A disk that refuses costs the file only.
        """
        kept, self._minibatches = self._minibatches, []
        chosen = [kept[index] for index in suspects if kept[index].samples]
        if not chosen:
            return None
        if self._num_files() >= MAX_FILES:
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

    def _num_files(self) -> int:
        return len(list(self._folder.glob(f"step_*_rank_{self._rank}.npz")))


def save_minibatches(path: Path, minibatches: Sequence[Minibatch]) -> None:
    """Write minibatches so that `load_minibatches` gives them back; whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **_columns(minibatches))


def load_minibatches(path: str | Path) -> tuple[Minibatch, ...]:
    """What `save_minibatches` wrote; nothing is unpickled.

    Raises `DataError` for any other file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile) as error:
        raise DataError(f"{path} must hold kept minibatches, cannot be read: {error}") from error
    found = columns.get("format")
    if found is None or found.shape != () or found != FORMAT:  # a foreign file may have an array
        raise DataError(
            f"{path} must hold kept minibatches of format {FORMAT}, got "
            f"{found}: read it with the release that wrote it"
        )
    samples = _samples(columns)
    return tuple(
        Minibatch(int(round_index), tuple(next(samples) for _ in range(count)))
        for round_index, count in zip(columns["round_index"], columns["num_samples"], strict=True)
    )


def _columns(minibatches: Sequence[Minibatch]) -> Columns:
    """Ragged arrays laid end to end, with their lengths."""
    samples = [part for m in minibatches for sample in m.samples for part in sample.parts()]
    rows = [row for sample in samples for row in sample.episode.rows]
    names = sorted({name for sample in samples for name in sample.scores})
    spans = [_plain_spans(row.weights_versions) for row in rows]
    return {
        "format": np.array(FORMAT),
        "round_index": np.array([minibatch.round_index for minibatch in minibatches]),  # [M]
        "num_samples": np.array([len(minibatch.samples) for minibatch in minibatches]),  # [M]
        "ordinal": np.array([sample.ordinal for sample in samples], np.int64),  # [S]
        "index": np.array([sample.index for sample in samples], np.int64),  # [S]
        "reward": np.array([sample.verdict.reward for sample in samples], np.float64),  # [S]
        "verdict": np.array([sample.verdict.status for sample in samples], np.str_),  # [S]
        "row": np.array([sample.row for sample in samples], np.int64),  # [S]
        "num_trained_elsewhere": np.array(  # [S]
            [sample.num_trained_elsewhere for sample in samples], np.int64
        ),
        "prompt_length": _lengths([row.prompt_token_ids for row in rows]),  # [S]
        "output_length": _lengths([row.token_ids for row in rows]),  # [S]
        "num_spans": _lengths(spans),  # [S]
        "prompt_ids": _join([row.prompt_token_ids for row in rows], np.int32),  # [P]
        "output_ids": _join([row.token_ids for row in rows], np.int32),  # [L]
        "loss_mask": _join([row.loss_mask for row in rows], np.bool_),  # [L]
        "spans": _join(spans, np.int64),  # [K, 4] incarnation, batches, start, stop
        "advantage": np.array(  # [S]
            [0.0 if np.ndim(s.advantage) else s.advantage for s in samples], np.float64
        ),
        **_some(ADVANTAGES, [s.advantage if np.ndim(s.advantage) else None for s in samples]),
        **_some(BEHAVIOUR, [row.logprobs for row in rows]),
        **{
            key: column
            for name in names
            for key, column in _some(SCORES + name, [s.scores.get(name) for s in samples]).items()
        },
    }


def _some(name: str, values: Sequence[Any]) -> Columns:
    """[L] or [L, K] of the rows that have them, and which do."""
    has = np.array([value is not None for value in values], np.bool_)
    return {f"has {name}": has, name: _join([v for v in values if v is not None], np.float32)}


def _samples(columns: Columns) -> Iterator[Sample]:
    """The samples of all minibatches, in order."""
    output_length = columns["output_length"]
    prompts = _split(columns["prompt_ids"], columns["prompt_length"])
    outputs = _split(columns["output_ids"], output_length)
    masks = _split(columns["loss_mask"], output_length)
    behaviours = _read_some(columns, BEHAVIOUR)
    advantages = _read_some(columns, ADVANTAGES)
    names = [key.removeprefix(SCORES) for key in columns if key.startswith(SCORES)]
    scores = {name: _read_some(columns, SCORES + name) for name in names}
    spans = _split(columns["spans"], columns["num_spans"])
    for i in range(len(columns["ordinal"])):
        row = Row(
            prompts[i],
            outputs[i],
            behaviours[i],
            masks[i],
            tuple(_version_spans(spans[i])),
        )
        own = advantages[i]
        status, reward = str(columns["verdict"][i]), float(columns["reward"][i])
        yield Sample(
            ordinal=int(columns["ordinal"][i]),
            index=int(columns["index"][i]),
            question=Question(prompts[i], "", None, {}),
            episode=Episode((row,)),
            verdict=Verdict(status, reward, None, "", "", 0.0),  # type: ignore[arg-type]
            advantage=float(columns["advantage"][i]) if own is None else own,
            scores={name: array for name in names if (array := scores[name][i]) is not None},
            row=int(columns["row"][i]),
            num_trained_elsewhere=int(columns["num_trained_elsewhere"][i]),
        )


def _read_some(columns: Columns, name: str) -> list[NDArray[Any] | None]:
    """The array of each row, None where it has none."""
    has = columns[f"has {name}"]
    found = iter(_split(columns[name], columns["output_length"][has]))
    return [next(found) if each else None for each in has]


def _plain_spans(spans: Iterable[VersionSpan]) -> NDArray[np.int64]:
    rows = [(*span.version, span.start, span.stop) for span in spans]
    return np.array(rows, np.int64).reshape(-1, 4)


def _version_spans(rows: NDArray[np.int64]) -> Iterator[VersionSpan]:
    for incarnation, batches, start, stop in rows.tolist():
        yield VersionSpan(WeightsVersion(incarnation, batches), start, stop)


def _lengths(parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.array([len(part) for part in parts], np.int64)


def _join(parts: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def _split(values: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
