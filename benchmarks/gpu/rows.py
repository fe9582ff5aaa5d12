"""Packed rows for the trainer and for attention: lengths that fill a budget exactly, random ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_grpo.types import (
    Episode,
    Minibatch,
    Question,
    Sample,
    Turn,
    Verdict,
    VersionSpan,
    WeightsVersion,
)

SHORTEST = 4
LONGEST_PROMPT = 256


def equal(total: int, *, parts: int) -> list[int]:
    """
    >>> equal(16, parts=4)
    [4, 4, 4, 4]
    """
    if total % parts:
        raise ValueError(f"{total} tokens do not make {parts} equal parts: take another budget")
    return [total // parts] * parts


def heavy_tailed(total: int, *, seed: int) -> list[int]:
    """Lognormal around an eleventh of the budget, as reasoning runs are: 1,500 of 16,384.

    >>> sum(heavy_tailed(16_384, seed=0)), len(heavy_tailed(16_384, seed=0))
    (16384, 8)
    """
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (rest := total - sum(lengths)) > 0:
        drawn = max(SHORTEST, int(rng.lognormal(np.log(total / 11), 1.0)))
        lengths.append(rest if rest - drawn < SHORTEST else drawn)
    return lengths


def mixtures(total: int) -> dict[str, list[int]]:
    """The lengths by which attention's ways are compared."""
    return {
        "32 equal": equal(total, parts=32),
        "8 equal": equal(total, parts=8),
        "heavy tail": heavy_tailed(total, seed=0),
        "one": [total],
    }


def minibatch(segments: Sequence[int], *, vocabulary: int, seed: int) -> Minibatch:
    """Samples whose packed row has exactly these segments: the last token is scored, not read."""
    rng = np.random.default_rng(seed)
    samples = [
        _sample(length + 1, vocabulary=vocabulary, ordinal=ordinal, rng=rng)
        for ordinal, length in enumerate(segments)
    ]
    return Minibatch(0, tuple(samples))


def _sample(length: int, *, vocabulary: int, ordinal: int, rng: np.random.Generator) -> Sample:
    ids = rng.integers(vocabulary, size=length, dtype=np.int32)
    num_prompt = max(1, min(LONGEST_PROMPT, length // 4))
    num_output = length - num_prompt
    # Around what a random model says of every token.
    behaviour = (-np.log(vocabulary) + rng.normal(0, 0.05, num_output)).astype(np.float32)
    turn = Turn(
        token_ids=ids[num_prompt:],
        logprobs=behaviour,
        weights_versions=(VersionSpan(WeightsVersion(0, 0), 0, num_output),),
        finish_reason="stop",
        text="",
    )
    return Sample(
        ordinal=ordinal,
        index=0,
        question=Question(ids[:num_prompt], "", None, {}),
        episode=Episode.of_turn(ids[:num_prompt], turn),
        verdict=Verdict.scored(1.0, adapter="random"),
        advantage=float(rng.normal()),
    )
