"""Whether a worker's answer is what was asked for. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.lag import covers_output
from async_grpo.errors import StaleAnswerError, WorkerError
from async_grpo.types import (
    Episode,
    EpisodesRequest,
    GenerationRequest,
    LogprobRequest,
    Turn,
    WeightsVersion,
)

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
        if not covers_output(completion):
            raise WorkerError("the worker did not say of every token which weights sampled it")
        _check_versions(completion, oldest)


def check_episodes(request: EpisodesRequest, episodes: tuple[Episode, ...]) -> None:
    """Raise unless these are all episodes, every turn of weights that the group may have."""
    if len(episodes) != request.num_samples:
        raise WorkerError(f"{len(episodes)} episodes came back, {request.num_samples} were asked")
    for episode in episodes:
        for turn in episode.turns:
            _check_versions(turn, request.oldest)


def _check_versions(turn: Turn, oldest: WeightsVersion) -> None:
    for span in turn.weights_versions:
        if span.version < oldest or span.version.incarnation != oldest.incarnation:
            raise StaleAnswerError(
                f"tokens of weights {span.version} came back, {oldest} or later were asked"
            )


def check_scores(request: LogprobRequest, scores: tuple[Scores, ...]) -> None:
    """Raise unless there is a finite score for every token."""
    lengths = [len(score) for score in scores]
    asked = [len(ids) for ids in request.output_token_ids]
    if lengths != asked:
        raise WorkerError(f"scores of outputs of {lengths} tokens came back, {asked} were asked")
    if not all(np.isfinite(score).all() for score in scores):
        raise WorkerError("reference log-probabilities must be finite, and are not")
