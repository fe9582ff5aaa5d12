"""Finished samples as lines of JSON: what the model wrote, and what became of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.sample_files import NUM_FILES, drop_from, rotate
from async_grpo.line_file import LineFile
from async_grpo.types import Group, Sample

UNLIMITED = float("inf")


class SampleLog:
    """Appends one line a sample, one write a group; without a path, nothing is written.

    A disk that refuses costs samples of the dump, not the run; `take_notices` tells of it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        next_ordinal: int = 0,
        has_tokens: bool = False,
        max_bytes: float = UNLIMITED,
    ) -> None:
        """What is there of slots from `next_ordinal` on is removed: they are sampled again."""
        self._path = path
        self._has_tokens = has_tokens
        self._max_file_bytes = max_bytes / NUM_FILES
        self._notices: list[str] = []
        self._lines = LineFile(path or Path(), unit="samples", say=self._notices.append)
        if path is not None:
            self._drop_from(path, next_ordinal)

    @property
    def num_lost(self) -> int:
        """Samples that could not be written."""
        return self._lines.num_lost

    def take_notices(self) -> tuple[str, ...]:
        """What people should hear of since the last call, in sentences."""
        notices = tuple(self._notices)
        self._notices.clear()
        return notices

    def write(self, group: Group, *, batch: int, fates: tuple[str, ...]) -> None:
        """`fates` says of each sample what became of it."""
        if self._path is None:
            return
        lines = [
            json.dumps(self._line(sample, group.attempt, batch, fate), ensure_ascii=False) + "\n"
            for sample, fate in zip(group.samples, fates, strict=True)
        ]
        content = "".join(lines).encode("utf-8", errors="backslashreplace")
        self._make_room(self._path, len(content))
        self._lines.append(content, number=len(lines))

    def _make_room(self, path: Path, num_bytes: int) -> None:
        """Begin another file when `num_bytes` are too many for the newest."""
        try:
            size_bytes = path.stat().st_size if path.exists() else 0
            if size_bytes and size_bytes + num_bytes > self._max_file_bytes:
                for file in rotate(path):
                    self._notices.append(f"{file} was removed, so that --dump-max-gib is kept")
        except OSError as error:
            self._max_file_bytes = UNLIMITED  # told once, and not tried again
            self._notices.append(
                f"{path} grows beyond --dump-max-gib, for it cannot be renamed: {error}"
            )

    def _drop_from(self, path: Path, first: int) -> None:
        try:
            drop_from(path, first)
        except OSError as error:
            self._notices.append(
                f"{path} could not be cut back to what was trained ({error.strerror or error}): "
                f"samples of ordinals from {first} on may be there twice"
            )

    def _line(self, sample: Sample, attempt: int, batch: int, fate: str) -> dict[str, object]:
        """`drop_from` reads the first two."""
        verdict, completion = sample.verdict, sample.completion
        return {
            "batch": batch,
            "ordinal": sample.ordinal,
            "attempt": attempt,
            "index": sample.index,
            "fate": fate,
            "input": sample.question.input,
            "output": completion.text,
            "answer": sample.question.answer,
            "reward": verdict.reward,
            "format_reward": verdict.format_reward,
            "overlong_penalty": sample.overlong_penalty,
            "kl_penalty": sample.kl_penalty,
            "advantage": sample.advantage,
            "verdict": verdict.status,
            "adapter": verdict.adapter,
            "reason": verdict.reason,
            "finish_reason": completion.finish_reason,
            "num_input_tokens": len(sample.question.input_token_ids),
            "num_output_tokens": len(completion.token_ids),
            "weights_versions": [
                [str(span.version), span.start, span.stop] for span in completion.weights_versions
            ],
        } | (_token_columns(sample) if self._has_tokens else {})


def _token_columns(sample: Sample) -> dict[str, object]:
    """About 90 bytes an output token."""
    completion = sample.completion
    return {
        "input_token_ids": sample.question.input_token_ids.tolist(),
        "output_token_ids": completion.token_ids.tolist(),
        "loss_mask": completion.loss_mask.tolist(),
        "behaviour_logprobs": _numbers(completion.logprobs),
        "reference_logprobs": _numbers(sample.reference_logprobs),
    }


def _numbers(values: NDArray[np.float32] | None) -> list[float] | None:
    return None if values is None else values.tolist()
