"""What a run comes to, in numbers and words: its batches, steps, disk and memory.

And values of options that can run but are probably mistakes.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator

import numpy as np

from async_grpo.check.data_read import DataRead
from async_grpo.check.facts import Facts
from async_grpo.check.finding import Finding, Setup
from async_grpo.config.sampling_options import BatchingOptions
from async_grpo.model.model_folder import ModelFacts, WeightsSize
from async_grpo.types.snapshots import store_complaint

HOT = 2.0  # a sampling temperature above which outputs are close to noise
STORE_SHARE = 0.3  # of memory that Ray's store takes
STORE_OF_SHARED = 0.95  # and of /dev/shm, if that is less
BYTES_OF_STATE = 12  # a parameter's float32 value and AdamW's two moments
BYTES_OF_TOKEN = 6  # of text in the dump of samples, about
BYTES_OF_COLUMNS = 90  # an output token with --dump-token-columns
BYTES_OF_SAMPLE = 1000  # a line of the dump without its text, about
GIB = 1 << 30


def check_batch(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """What a batch, a gradient step and the whole run come to."""
    config, ranks = setup.train, setup.num_ranks
    lines = 0
    if isinstance(facts.data, tuple):
        reads = [read for read in facts.data if read.purpose == "train"]
        lines = sum(read.num_lines for read in reads) if all(each.is_whole for each in reads) else 0
    is_sft = setup.learns_from_pairs
    of_slot = 1 if is_sft else config.samples_per_slot
    text = batch_in_words(
        config.batching, of_slot=of_slot, num_ranks=ranks, num_lines=lines, is_sft=is_sft
    )
    yield Finding("ok", "batch", text)
    per_step = config.batching.questions_per_step * of_slot
    if per_step < ranks:
        yield Finding(
            "warning",
            "batch",
            f"--nproc-per-node {ranks} exceeds the {per_step} samples of a gradient step, which "
            "leaves ranks idle: start fewer, or raise --batch-size or --train-minibatch-size",
        )


def check_room(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """Disk for what the run writes, and memory for two versions of the weights."""
    if facts.size is None:
        return
    config, free = setup.train, facts.disk_free_bytes
    kept, dumped = _disk_need(setup, facts.size)
    need = f"{in_gib(kept)} of checkpoints and exports and up to {in_gib(dumped)} of samples"
    text = f"{config.recording.output_dir} has {in_gib(free)} free, the run writes {need}"
    remedy = "name another --output-dir, or lower --keep-checkpoints or --dump-max-gib"
    if free < kept + dumped:
        yield Finding("error" if free < kept else "warning", "disk", f"{text}: {remedy}")
    else:
        yield Finding("ok", "disk", text)
    if setup.starts_head:
        of_one = 2 if facts.num_devices else 4  # bytes, as they travel
        yield _store(facts, snapshot=of_one * facts.size.num_parameters)


def _store(facts: Facts, *, snapshot: int) -> Finding:
    """Whether Ray's object store on this machine holds two snapshots of `snapshot` bytes."""
    store = int(min(STORE_SHARE * facts.memory_bytes, STORE_OF_SHARED * facts.shared_bytes))
    if complaint := store_complaint(snapshot, store_bytes=store, share=1.0):
        return Finding("warning", "memory", complaint)
    text = f"two versions of the weights are {in_gib(2 * snapshot)}, Ray's store {in_gib(store)}"
    return Finding("ok", "memory", text)


def check_options(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """Values that leave nothing to learn, and more processes than this machine has cores."""
    config, cores = setup.train, os.cpu_count() or 1
    if not config.optimizer.learning_rate:
        text = "--learning-rate is 0: nothing is learnt, 1e-6 is usual"
        yield Finding("warning", "options", text)
    if config.sampling.temperature > HOT:
        text = f"--temperature {config.sampling.temperature:g} samples close to noise: 1 is usual"
        yield Finding("warning", "options", text)
    yield from _warm_up(setup)
    started = sum(each.num_workers for each in setup.workers)
    if 0 < setup.given_cpus < started:
        text = f"num_cpus {setup.given_cpus} is fewer than the {started} workers of the file, "
        remedy = f"which take one each: leave it out, or give {started}"
        yield Finding("warning", "options", text + remedy)
    if setup.num_ranks > cores and not facts.num_devices:
        text = f"--nproc-per-node {setup.num_ranks} exceeds the {cores} cores of this machine, and "
        yield Finding("warning", "options", f"{text}there is no device: start at most {cores}")


def _warm_up(setup: Setup) -> Iterator[Finding]:
    optimizer, batching = setup.train.optimizer, setup.train.batching
    per_batch = batching.steps_per_batch
    if optimizer.schedule_clock == "samples":
        of_slot = 1 if setup.learns_from_pairs else setup.train.samples_per_slot
        per_batch = batching.batch_size * of_slot * batching.num_passes
    total = batching.num_training_batches * per_batch
    if optimizer.schedule_clock == "tokens":
        total = optimizer.num_schedule_tokens or sys.maxsize
    warm_up = optimizer.num_warmup
    if warm_up >= total and optimizer.lr_scheduler != "constant":
        text = f"the learning rate warms up for {warm_up} {optimizer.schedule_clock}, the run has "
        yield Finding("warning", "options", f"{text}{total}: shorten the warm-up, or train longer")


def sizes_in_words(model: ModelFacts, size: WeightsSize | None) -> str:
    """Sizes of a model, in a sentence."""
    weights = f"{in_units(size.num_parameters)} parameters, " if size else ""
    text = f"its text model ({model.text_model}) alone is trained; " if model.text_model else ""
    return (
        f"{model.path}: {text}{weights}{model.vocab_size} tokens in the vocabulary, sequences of "
        f"up to {model.max_positions}; outputs end with token ids {list(model.stop_token_ids)}"
    )


def lengths_in_words(read: DataRead) -> str:
    """Lengths of prompts, or of whole pairs, in tokens, as a sentence."""
    kind = "prompts" if read.purpose != "given" else "pairs"
    low, middle, high = min(read.lengths), int(np.median(read.lengths)), max(read.lengths)
    return f"{kind} of {low} to {high} tokens, half of them up to {middle}"


def batch_in_words(
    batching: BatchingOptions, *, of_slot: int, num_ranks: int, num_lines: int, is_sft: bool
) -> str:
    """Samples of a batch, a gradient step, a rank and the run, as a sentence.

    `of_slot`: samples of a question, or 1 of pairs.

    >>> batching = BatchingOptions(train_minibatch_size=8, num_passes=2)
    >>> print(batch_in_words(batching, of_slot=8, num_ranks=2, num_lines=64, is_sft=False))
    a batch is 32 questions x 8 samples = 256, in 4 gradient steps of 64, trained in 2 passes; \
2 ranks of 16384 tokens a minibatch train about 32 samples of a step each; 100 batches are 25600 \
samples and 800 steps, and ask each of 64 questions 50 times
    """
    samples, step = batching.batch_size * of_slot, batching.questions_per_step * of_slot
    what = "pairs" if is_sft else f"questions x {of_slot} samples = {samples}"
    kind = "pair" if is_sft else "question"
    steps, passes = batching.steps_per_pass, batching.num_passes
    trained = f", trained in {passes} passes" if passes > 1 else ""
    text = (
        f"a batch is {batching.batch_size} {what}, in {steps} gradient step{'s'[: steps > 1]} of "
        f"{step}{trained}; {num_ranks} rank{'s'[: num_ranks > 1]} of "
        f"{batching.max_tokens_per_gpu} tokens a minibatch train about "
        f"{math.ceil(step / num_ranks)} samples of a step each; "
        f"{batching.num_training_batches} batches are {samples * batching.num_training_batches} "
        f"samples and {steps * passes * batching.num_training_batches} steps"
    )
    if not num_lines:
        return text
    times = batching.num_training_batches * batching.batch_size / num_lines
    return f"{text}, and ask each of {num_lines} {kind}s {times:.3g} times"


def _disk_need(setup: Setup, size: WeightsSize) -> tuple[int, int]:
    """Bytes of checkpoints and exports, and the most bytes of the dump of samples.

    While a checkpoint is written, those that are kept are still there.
    """
    recording, batching = setup.train.recording, setup.train.batching
    sampling, every = setup.train.sampling, recording.min_samples_per_checkpoint
    saves = recording.keep_checkpoints + 1 if recording.checkpoint_every_batches else 0
    questions = batching.num_training_batches * batching.batch_size
    samples = questions * setup.train.samples_per_slot
    exports = 1 + (samples // every if every else 0)
    of_token = BYTES_OF_TOKEN + BYTES_OF_COLUMNS * recording.dump_token_columns
    dumped = samples * (BYTES_OF_SAMPLE + of_token * sampling.max_generation_tokens)
    if recording.dump_max_gib:
        dumped = min(dumped, int(recording.dump_max_gib * GIB))
    state = saves * BYTES_OF_STATE * size.num_parameters
    return state + exports * size.size_bytes, dumped if recording.dump_samples_filename else 0


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
