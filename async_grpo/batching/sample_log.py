"""Finished samples as lines of JSON: what the model writes, and all that its gradient came from."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_grpo.errors import DataError
from async_grpo.types import Group, Sample


class SampleLog:
    """Appends one line a sample, one write a group; without a path, nothing is written."""

    def __init__(self, path: Path | None, *, next_ordinal: int = 0) -> None:
        """What is there of slots from `next_ordinal` on is removed: they are sampled again."""
        self._path = path
        if path is not None and path.exists():
            _drop(path, next_ordinal)

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


def _drop(path: Path, first: int) -> None:
    """Remove the samples of slot `first` and of later ones, in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with path.open("rb") as old, temporary.open("wb") as new:
            new.writelines(line for line in old if _is_earlier(line, first))
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(
            f"{path} must be cut back to what was trained, but: {error}: make room, or move it away"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _is_earlier(line: bytes, first: int) -> bool:
    r"""Whether a line is whole, and of a slot before `first`.

    >>> _is_earlier(b'{"batch": 2, "ordinal": 9, "attempt": 0}\n', 10)
    True
    >>> _is_earlier(b'{"batch": 2, "ordinal": 10, "attempt": 0}\n', 10)
    False
    >>> _is_earlier(b'{"batch": 2, "ordinal": 9, "att', 10)
    False
    """
    found = re.match(rb'\{"batch": \d+, "ordinal": (\d+),', line)
    return found is not None and line.endswith(b"\n") and int(found[1]) < first


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
