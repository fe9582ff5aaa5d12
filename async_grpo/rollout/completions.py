"""What vLLM says of one sampled output, checked and made into a `Turn`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import Turn, VersionSpan, WeightsVersion
from async_grpo.util.errors import WorkerError

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


def read_completion(output: CompletionOutput) -> Turn:
    """The output with an empty text; raises `WorkerError` when it cannot be trained on."""
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    return Turn(
        token_ids=token_ids,
        logprobs=read_logprobs(output),
        weights_versions=_version_spans(output),
        finish_reason=output.finish_reason,
        text="",
    )


def read_logprobs(output: CompletionOutput) -> NDArray[np.float32]:
    """[L] of exactly the sampled tokens; raises `WorkerError` when one is missing or not finite."""
    flat: Any = output.logprobs
    if flat is None or list(flat.token_ids) != list(output.token_ids):
        raise WorkerError(
            "vLLM must report the log-probability of every sampled token, and did not"
        )
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        bad = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise WorkerError(
            f"log-probabilities must be finite, got {logprobs[bad]} at output token {bad}: "
            "the weights may have diverged"
        )
    return logprobs


def _version_spans(output: CompletionOutput) -> tuple[VersionSpan, ...]:
    """Spans over [0, L); raises `WorkerError` for tokens made before any published weights."""
    if output.weight_versions is None:
        raise WorkerError("vLLM must report the weights of every output token, and did not")
    try:
        return tuple(
            VersionSpan(WeightsVersion.parse(span.version), span.start, span.end)
            for span in output.weight_versions
        )
    except ValueError:
        raise WorkerError(
            "a worker must not generate before it serves published weights: register it first"
        ) from None
