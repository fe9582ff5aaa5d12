"""The file of samples that could not be graded, for those who want to find out why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.types import Verdict, VerificationRequest


def adapter_sample(request: VerificationRequest) -> dict[str, Any]:
    """The dict that adapters receive; what the run knows goes before columns of the same name."""
    question, completion = request.question, request.completion
    return dict(question.columns) | {
        "input": question.input,
        "answer": question.answer,
        "output": completion.text,
        "sample_text": question.input + completion.text,
        "output_token_ids": completion.token_ids.tolist(),
        "finish_reason": completion.finish_reason,
    }


class FailedSamples:
    """Appends to the file that is wanted; one that cannot be written ends nothing."""

    def __init__(self, path: str) -> None:
        """`path` is empty when nobody wants the file."""
        self._path = path
        self._complaint: str | None = None  # empty: it has been told

    def append(self, requests: Sequence[VerificationRequest], verdicts: Sequence[Verdict]) -> None:
        """A line of JSON for each sample whose verdict is an error."""
        pairs = zip(requests, verdicts, strict=True)
        text = "".join(_line(r, v) for r, v in pairs if v.status == "error")
        if not text or not self._path:
            return
        try:
            with Path(self._path).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            if self._complaint is None:
                self._complaint = (
                    f"samples that could not be graded are not kept in {self._path}: {error}"
                )

    def take_complaint(self) -> str:
        """Why the file could not be written, once; else nothing."""
        complaint = self._complaint
        if complaint:
            self._complaint = ""
        return complaint or ""


def _line(request: VerificationRequest, verdict: Verdict) -> str:
    line = adapter_sample(request) | {"adapter": verdict.adapter, "reason": verdict.reason}
    return json.dumps(line, ensure_ascii=False, default=str) + "\n"
