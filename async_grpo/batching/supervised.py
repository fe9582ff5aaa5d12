"""What is given, not sampled: pairs of an SFT run or of a slot, and reference answers. Pure.

SFT is the RL step with an advantage of 1. Every rank computes the same rounds from the same inputs
and takes its own bins, so that ranks agree without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from async_grpo.batching.admission import StepKey
from async_grpo.batching.packing import (
    DEFAULT_ATTENTION_RATIO,
    items_of,
    pack_rounds,
)
from async_grpo.config.sampling_options import BatchingOptions
from async_grpo.types import (
    EndOfStep,
    Episode,
    GivenPair,
    Group,
    Minibatch,
    Question,
    Sample,
    StreamItem,
    TrainingPair,
    Turn,
    Verdict,
    tally,
)

DEMONSTRATION = Verdict.scored(1.0, adapter="sft")
NOT_GRADED = Verdict.scored(0.0)  # of given samples; nobody reads it
PairRound = list[tuple[Sample, ...]]  # a minibatch for each rank


def supervised_stream(
    pairs: Sequence[TrainingPair],
    *,
    batching: BatchingOptions,
    stream_index: Callable[[int], int],
    num_ranks: int,
    rank: int,
    attention_ratio: float = DEFAULT_ATTENTION_RATIO,
    first_batch: int = 0,
) -> Iterator[StreamItem]:
    """The minibatches and step ends of one rank in a run over pairs, from `first_batch` on.

    `stream_index(ordinal)` is the index into `pairs` of a slot of the run.
    """
    num_slots = batching.questions_per_step
    for batch in range(first_batch, batching.num_training_batches):
        for step_in_batch in range(batching.steps_per_batch):
            first = batch * batching.batch_size + step_in_batch * num_slots
            rounds = pack_pairs(
                {
                    ordinal: pairs[stream_index(ordinal)]
                    for ordinal in range(first, first + num_slots)
                },
                num_ranks=num_ranks,
                max_tokens=batching.max_tokens_per_gpu,
                attention_ratio=attention_ratio,
            )
            for index, parts in enumerate(rounds):
                yield Minibatch(index, parts[rank])
            is_last = step_in_batch + 1 == batching.steps_per_batch
            yield _end_of_step(StepKey(batch, step_in_batch), rounds, is_last=is_last)


def pack_pairs(
    pairs: Mapping[int, TrainingPair],
    *,
    num_ranks: int,
    max_tokens: int,
    attention_ratio: float = DEFAULT_ATTENTION_RATIO,
) -> list[PairRound]:
    """Pack pairs, by ordinal, into rounds of minibatches of at most `max_tokens` tokens each.

    Ranks are balanced by `packing.estimate_cost` with the model's `attention_ratio`.
    """
    samples = []
    for ordinal, pair in pairs.items():
        question = Question(pair.prompt_token_ids, input="", answer=None, columns={})
        episode = Episode.of_pair(pair)
        samples.append(Sample(ordinal, 0, question, episode, DEMONSTRATION, advantage=1.0))
    items = items_of(samples, attention_ratio=attention_ratio)
    by_key = {item.key: sample for item, sample in zip(items, samples, strict=True)}
    rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=max_tokens)
    return [[tuple(by_key[key] for key in keys) for keys in bins] for bins in rounds]


def _end_of_step(step: StepKey, rounds: Sequence[PairRound], *, is_last: bool) -> EndOfStep:
    by_rank = [[sample for part in parts for sample in part] for parts in zip(*rounds, strict=True)]
    samples = [sample for part in by_rank for sample in part]
    num_output_tokens = sum(sample.num_trained_tokens for sample in samples)
    num_tokens = sum(sample.num_tokens for sample in samples)
    return EndOfStep(
        batch=step.batch,
        step_in_batch=step.step_in_batch,
        is_last_of_batch=is_last,
        num_samples=len(samples),
        num_tokens=num_output_tokens,
        sent=tuple(tally(part, incarnation=0, aggregation="token-mean") for part in by_rank),
        fates={"trained": len(samples)},
        sums={
            "num_groups": 0.0,
            "num_samples": float(len(samples)),
            "prompt_tokens": float(num_tokens - num_output_tokens),
            "output_tokens": float(num_output_tokens),
        },
    )


def given_group(ordinal: int, pairs: Sequence[GivenPair]) -> Group:
    """The group of a slot of given pairs, a sample each, without advantages and scores."""
    samples = []
    for index, pair in enumerate(pairs):
        tokens = TrainingPair(pair.question.input_token_ids, pair.completion_token_ids)
        episode = Episode.of_pair(tokens, text=pair.completion)
        samples.append(Sample(ordinal, index, pair.question, episode, NOT_GRADED, advantage=0.0))
    return Group(ordinal, 0, tuple(samples))


def reference_of(question: Question) -> tuple[Episode, Turn] | None:
    """A question's reference answer as a member of its group, and as rewards read an output."""
    token_ids = question.reference_token_ids
    if token_ids is None:
        return None
    pair = TrainingPair(question.input_token_ids, token_ids)
    episode = Episode.of_pair(pair, text=question.reference)
    no_logprobs = np.zeros(len(token_ids), np.float32)
    return episode, Turn(token_ids, no_logprobs, (), "stop", question.reference)


def without_references(group: Group) -> Group:
    """The group without its reference answer, which counts in the group's statistics alone."""
    given = (each for each in group.samples if each.episode.is_given)
    references = tuple(replace(each, episode=each.episode.untrained()) for each in given)
    return replace(group, samples=group.sampled, references=references) if references else group
