"""Whether a worker's answer is what was asked for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import (
    Episode,
    EpisodesRequest,
    GenerationRequest,
    LogprobRequest,
    Turn,
    VersionSpan,
    WeightsVersion,
)
from async_grpo.util.errors import StaleAnswerError, WorkerError

Scores = NDArray[np.float32]  # [L]


def check_completions(
    request: GenerationRequest, completions: tuple[Turn, ...], oldest: WeightsVersion
) -> None:
    """Raise unless `completions` are finished, and of `oldest` or later weights, every token."""
    if len(completions) != request.num_samples:
        raise WorkerError(f"{len(completions)} samples came back, {request.num_samples} were asked")
    for completion in completions:
        if completion.finish_reason == "abort":
            raise WorkerError("the worker gave up the request before it was finished")
        is_sampled = np.ones(len(completion.token_ids), np.bool_)
        _check_versions(completion.weights_versions, is_sampled, oldest)


def check_episodes(request: EpisodesRequest, episodes: tuple[Episode, ...]) -> None:
    """Raise unless these are all episodes, every token of weights that the group may have."""
    if len(episodes) != request.num_samples:
        raise WorkerError(f"{len(episodes)} episodes came back, {request.num_samples} were asked")
    for episode in episodes:
        for row in episode.rows:
            is_sampled = row.loss_mask & (row.logprobs is not None)
            _check_versions(row.weights_versions, is_sampled, request.oldest)


def _check_versions(
    spans: Sequence[VersionSpan], is_sampled: NDArray[np.bool_], oldest: WeightsVersion
) -> None:
    if not covers(spans, is_sampled):
        raise WorkerError("the worker did not say of every token which weights sampled it")
    for span in spans:
        if span.version < oldest or span.version.incarnation != oldest.incarnation:
            raise StaleAnswerError(
                f"tokens of weights {span.version} came back, {oldest} or later were asked"
            )


def covers(spans: Sequence[VersionSpan], is_sampled: NDArray[np.bool_]) -> bool:
    """Every token that was sampled has exactly one version, and no other has several."""
    ends = [0, *(span.stop for span in spans)]
    if ends == sorted(ends) and [*(s.start for s in spans), len(is_sampled)] == ends:
        return True  # one after another, as an engine's are
    num_versions = np.zeros(len(is_sampled), np.int64)
    for span in spans:
        if not 0 <= span.start <= span.stop <= len(num_versions):
            return False
        num_versions[span.start : span.stop] += 1
    return bool((num_versions <= 1).all() and (num_versions[is_sampled] == 1).all())


def check_scores(request: LogprobRequest, scores: tuple[Scores, ...]) -> None:
    """Raise unless there is a finite score for every token."""
    lengths = [len(score) for score in scores]
    asked = [len(ids) for ids in request.output_token_ids]
    if lengths != asked:
        raise WorkerError(f"scores of outputs of {lengths} tokens came back, {asked} were asked")
    if not all(np.isfinite(score).all() for score in scores):
        raise WorkerError("reference log-probabilities must be finite, and are not")
