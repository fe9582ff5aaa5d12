"""Demonstrations as a trainer's stream, so that SFT is the RL step with an advantage of 1. Pure.

Every rank computes the same rounds from the same inputs and takes its own bins: ranks agree
without talking to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from async_grpo.batching.admission import AdmissionWindow, StepKey
from async_grpo.batching.packing import (
    DEFAULT_ATTENTION_RATIO,
    Item,
    Key,
    estimate_cost,
    pack_rounds,
)
from async_grpo.environments.given import given_episode
from async_grpo.errors import DataError
from async_grpo.types import (
    EndOfStep,
    Minibatch,
    Question,
    Sample,
    StreamItem,
    Tally,
    TrainingPair,
    Verdict,
    tally,
)

DEMONSTRATION = Verdict("scored", 1.0, None, "sft", "", 0.0)


def supervised_stream(
    pairs: Sequence[TrainingPair],
    *,
    stream_index: Callable[[int], int],
    batch_size: int,
    questions_per_step: int,
    num_batches: int,
    num_ranks: int,
    rank: int,
    max_tokens: int,
    attention_ratio: float = DEFAULT_ATTENTION_RATIO,
    first_batch: int = 0,
) -> Iterator[StreamItem]:
    """One rank's minibatches and step ends of a run of `num_batches` batches of pairs.

    `stream_index(ordinal)` is the index into `pairs` of a slot of the run. Pairs are checked
    before anything is streamed: `DataError` names one that is empty or exceeds `max_tokens`.
    Ranks are balanced by `packing.estimate_cost` with the model's `attention_ratio`.
    """
    _check_pairs(pairs, max_tokens)
    window = AdmissionWindow(
        batch_size,
        questions_per_step=questions_per_step,
        max_staleness=num_batches,  # demonstrations exist already: nothing to wait for
        num_batches=num_batches,
    )

    def stream() -> Iterator[StreamItem]:
        ordinals = range(first_batch * batch_size, num_batches * batch_size, questions_per_step)
        for first in ordinals:
            step = window.step_of(first)
            ordinals = window.ordinals_of(step)
            samples: dict[Key, Sample] = {
                (o, 0, 0): _sample(o, pairs[stream_index(o)]) for o in ordinals
            }
            lengths = {key: sample.num_tokens for key, sample in samples.items()}
            items = [
                Item(key, n, estimate_cost(n, attention_ratio=attention_ratio))
                for key, n in lengths.items()
            ]
            rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=max_tokens)
            sent = [Tally()] * num_ranks
            for index, bins in enumerate(rounds):
                parts = [tuple(samples[key] for key in keys) for keys in bins]
                sent = [old.plus(_tally(part)) for old, part in zip(sent, parts, strict=True)]
                yield Minibatch(index, parts[rank])
            yield _end_of_step(step, list(samples.values()), sent, window.steps_per_batch)

    return stream()


def _check_pairs(pairs: Sequence[TrainingPair], max_tokens: int) -> None:
    for number, pair in enumerate(pairs, start=1):
        num_prompt, num_output = len(pair.prompt_token_ids), len(pair.completion_token_ids)
        if not num_prompt or not num_output:
            raise DataError(
                f"a training pair needs a prompt and a completion, got {num_prompt} and "
                f"{num_output} tokens in pair {number}: drop or complete it"
            )
        if num_prompt + num_output > max_tokens:
            raise DataError(
                f"prompt + completion must fit --max-tokens-per-gpu ({max_tokens}), got "
                f"{num_prompt} + {num_output} tokens in pair {number}: raise it or shorten the pair"
            )


def _sample(ordinal: int, pair: TrainingPair) -> Sample:
    question = Question(pair.prompt_token_ids, input="", answer=None, columns={})
    return Sample(ordinal, 0, question, given_episode(pair), DEMONSTRATION, advantage=1.0)


def _tally(samples: Sequence[Sample]) -> Tally:
    return tally(samples, incarnation=0, aggregation="token-mean")


def _end_of_step(
    step: StepKey, samples: Sequence[Sample], sent: Sequence[Tally], steps_per_batch: int
) -> EndOfStep:
    num_output_tokens = sum(sample.num_trained_tokens for sample in samples)
    num_tokens = sum(sample.num_tokens for sample in samples)
    return EndOfStep(
        batch=step.batch,
        step_in_batch=step.step_in_batch,
        is_last_of_batch=step.step_in_batch == steps_per_batch - 1,
        num_samples=len(samples),
        num_tokens=num_output_tokens,
        sent=tuple(sent),
        fates={"trained": len(samples)},
        sums={
            "num_groups": 0.0,
            "num_samples": float(len(samples)),
            "prompt_tokens": float(num_tokens - num_output_tokens),
            "output_tokens": float(num_output_tokens),
        },
    )
