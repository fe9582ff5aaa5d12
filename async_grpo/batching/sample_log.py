"""Finished samples as lines of JSON: what the model writes, and all that its gradient came from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import Group, Sample


class SampleLog:
    """Appends one line a sample, one write a group; without a path, nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, group: Group, *, batch: int, fates: tuple[str, ...]) -> None:
        """`fates` says of each sample what became of it."""
        if self._path is None:
            return
        lines = [
            json.dumps(_line(sample, group.attempt, batch, fate), ensure_ascii=False) + "\n"
            for sample, fate in zip(group.samples, fates, strict=True)
        ]
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(lines))


def _line(sample: Sample, attempt: int, batch: int, fate: str) -> dict[str, object]:
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
        "weights_versions": [
            [str(span.version), span.start, span.stop] for span in completion.weights_versions
        ],
        "input_token_ids": sample.question.input_token_ids.tolist(),
        "output_token_ids": completion.token_ids.tolist(),
        "loss_mask": completion.loss_mask.tolist(),
        "behaviour_logprobs": _numbers(completion.logprobs),
        "reference_logprobs": _numbers(sample.reference_logprobs),
    }


def _numbers(values: NDArray[np.float32] | None) -> list[float] | None:
    return None if values is None else values.tolist()
