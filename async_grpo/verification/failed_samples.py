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


def append_failed(
    path: str, requests: Sequence[VerificationRequest], verdicts: Sequence[Verdict]
) -> None:
    """Append a line of JSON for each sample whose verdict is an error."""
    lines = [
        adapter_sample(request) | {"adapter": verdict.adapter, "reason": verdict.reason}
        for request, verdict in zip(requests, verdicts, strict=True)
        if verdict.status == "error"
    ]
    if lines:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(x, ensure_ascii=False, default=str) + "\n" for x in lines)
