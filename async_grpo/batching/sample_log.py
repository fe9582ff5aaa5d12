"""Finished samples as lines of JSON, for people who want to read what the model writes."""

from __future__ import annotations

import json
from pathlib import Path

from async_grpo.types import Sample


class SampleLog:
    """Appends one line a sample, one write a group; without a path, nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, samples: tuple[Sample, ...], *, batch: int, fates: tuple[str, ...]) -> None:
        """`fates` says of each sample what became of it."""
        if self._path is None:
            return
        lines = [
            json.dumps(_line(sample, batch, fate), ensure_ascii=False) + "\n"
            for sample, fate in zip(samples, fates, strict=True)
        ]
        with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(lines))


def _line(sample: Sample, batch: int, fate: str) -> dict[str, object]:
    verdict, completion = sample.verdict, sample.completion
    return {
        "batch": batch,
        "ordinal": sample.ordinal,
        "index": sample.index,
        "fate": fate,
        "input": sample.question.input,
        "output": completion.text,
        "answer": sample.question.answer,
        "reward": verdict.reward,
        "format_reward": verdict.format_reward,
        "advantage": sample.advantage,
        "verdict": verdict.status,
        "adapter": verdict.adapter,
        "reason": verdict.reason,
        "finish_reason": completion.finish_reason,
        "output_tokens": len(completion.token_ids),
        "weights_versions": [str(span.version) for span in completion.weights_versions],
    }
