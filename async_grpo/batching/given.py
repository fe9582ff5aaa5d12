"""Groups that nobody samples: given pairs in the place of a question's outputs."""

from __future__ import annotations

from collections.abc import Sequence

from async_grpo.types import Episode, GivenPair, Group, Sample, TrainingPair, Verdict

UNGRADED = Verdict("scored", 0.0, None, "", "", 0.0)  # which nothing reads of given samples


def given_group(ordinal: int, pairs: Sequence[GivenPair]) -> Group:
    """The pairs of a slot as its samples, in their order: without advantages, and not scored."""
    samples = (
        Sample(ordinal, index, pair.question, _episode(pair), UNGRADED, advantage=0.0)
        for index, pair in enumerate(pairs)
    )
    return Group(ordinal, 0, tuple(samples))


def _episode(pair: GivenPair) -> Episode:
    tokens = TrainingPair(pair.question.input_token_ids, pair.completion_token_ids)
    return Episode.of_pair(tokens, text=pair.completion)
