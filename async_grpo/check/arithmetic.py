"""What a run comes to, in numbers and words, from its options alone. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.model_folder import ModelFacts, WeightsSize

if TYPE_CHECKING:
    from async_grpo.check.facts import DataRead

BYTES_OF_STATE = 12  # a parameter's float32 value and AdamW's two moments
BYTES_OF_TOKEN = 6  # of text in the dump of samples, about
BYTES_OF_COLUMNS = 90  # an output token with --dump-token-columns
BYTES_OF_SAMPLE = 1000  # a line of the dump without its text, about
GIB = 1 << 30


def sizes_in_words(model: ModelFacts, size: WeightsSize | None) -> str:
    """Of a model, for people."""
    weights = f"{in_units(size.num_parameters)} parameters, " if size else ""
    return (
        f"{model.path}: {weights}{model.vocab_size} tokens in the vocabulary, sequences of up to "
        f"{model.max_positions}; outputs end with token ids {list(model.stop_token_ids)}"
    )


def lengths_in_words(read: DataRead) -> str:
    """Of prompts, or of whole pairs, in tokens."""
    kind = "prompts" if read.purpose != "given" else "pairs"
    low, middle, high = (int(value(read.lengths)) for value in (min, _median, max))
    return f"{kind} of {low} to {high} tokens, half of them up to {middle}"


def batch_in_words(config: TrainConfig, *, num_ranks: int, num_lines: int, is_sft: bool) -> str:
    """What is sampled and trained a batch, a gradient step, a rank and in all.

    >>> config = TrainConfig(model_name_or_path="m", data_path="d", train_minibatch_size=8)
    >>> print(batch_in_words(config, num_ranks=2, num_lines=64, is_sft=False))
    a batch is 32 questions x 8 samples = 256, in 4 gradient steps of 64; 2 ranks of 16384 tokens \
a minibatch train about 32 samples of a step each; 100 batches are 25600 samples and 400 steps, \
and ask each of 64 questions 50 times
    """
    of_question = 1 if is_sft else config.samples_per_question
    samples, step = config.batch_size * of_question, config.questions_per_step * of_question
    what = "pairs" if is_sft else f"questions x {of_question} samples = {samples}"
    kind = "pair" if is_sft else "question"
    steps = config.steps_per_batch
    text = (
        f"a batch is {config.batch_size} {what}, in {steps} gradient step{'s'[: steps > 1]} of "
        f"{step}; {num_ranks} rank{'s'[: num_ranks > 1]} of {config.max_tokens_per_gpu} tokens a "
        f"minibatch train about {math.ceil(step / num_ranks)} samples of a step each; "
        f"{config.num_training_batches} batches are {samples * config.num_training_batches} "
        f"samples and {steps * config.num_training_batches} steps"
    )
    if not num_lines:
        return text
    times = config.num_training_batches * config.batch_size / num_lines
    return f"{text}, and ask each of {num_lines} {kind}s {times:.3g} times"


def disk_need(config: TrainConfig, size: WeightsSize) -> tuple[int, int]:
    """Bytes of checkpoints and exports, and at most those of the dump of samples.

    While a checkpoint is written, those that are kept are still there.
    """
    saves = (config.keep_checkpoints + 1) if config.checkpoint_every_batches else 0
    samples = config.num_training_batches * config.batch_size * config.samples_per_question
    every = config.min_samples_per_checkpoint
    exports = 1 + (samples // every if every else 0)
    of_token = BYTES_OF_TOKEN + BYTES_OF_COLUMNS * config.dump_token_columns
    dumped = samples * (BYTES_OF_SAMPLE + of_token * config.max_generation_tokens)
    if config.dump_max_gib:
        dumped = min(dumped, int(config.dump_max_gib * GIB))
    state = saves * BYTES_OF_STATE * size.num_parameters
    return state + exports * size.size_bytes, dumped if config.dump_samples_filename else 0


def in_gib(size_bytes: float) -> str:
    """
    >>> in_gib(3 << 29), in_gib(1_000_000)
    ('1.5 GiB', '0.00093 GiB')
    """
    return f"{size_bytes / GIB:.2g} GiB"


def in_units(number: float) -> str:
    """
    >>> in_units(950), in_units(1_540_000_000)
    ('950', '1.54 billion')
    """
    for name, unit in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _median(values: object) -> float:
    import numpy as np

    return float(np.median(values))  # type: ignore[call-overload]
