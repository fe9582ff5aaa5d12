"""Files of samples that could not be graded, for those who want to find out why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
    """Appends to every file that is wanted; one that cannot be written ends nothing."""

    def __init__(self) -> None:
        self._complaints: dict[str, str] = {}  # by file; empty once told

    def append(
        self,
        paths: Iterable[str],
        requests: Sequence[VerificationRequest],
        verdicts: Sequence[Verdict],
    ) -> None:
        """A line of JSON for each sample whose verdict is an error."""
        failed = [(r, v) for r, v in zip(requests, verdicts, strict=True) if v.status == "error"]
        if not failed:
            return
        text = "".join(map(_line, *zip(*failed, strict=True)))
        for path in sorted(set(paths) - {""}):
            try:
                with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
            except OSError as error:
                self._complaints.setdefault(
                    path, f"samples that could not be graded are not kept in {path}: {error}"
                )

    def take_complaint(self, path: str) -> str:
        """Why a file could not be written, the first time that it is asked for; else nothing."""
        complaint = self._complaints.get(path, "")
        if complaint:
            self._complaints[path] = ""
        return complaint


def _line(request: VerificationRequest, verdict: Verdict) -> str:
    line = adapter_sample(request) | {"adapter": verdict.adapter, "reason": verdict.reason}
    return json.dumps(line, ensure_ascii=False, default=str) + "\n"
