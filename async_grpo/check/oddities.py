"""What can run, and is most probably not meant; a `prepare` that cannot run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from async_grpo.check.facts import Facts, Setup
from async_grpo.check.finding import Finding
from async_grpo.config.train_config import TrainConfig

HOT = 2.0  # a sampling temperature above which outputs are close to noise
MANY_UNKNOWN = 0.1
OWN_PROGRAMS = ("python", "async-grpo")  # which `launch` starts as it was started itself


def check_options(setup: Setup, facts: Facts) -> Iterator[Finding]:
    """Values that leave nothing to learn, and more processes than this machine has cores."""
    config, cores = setup.train, os.cpu_count() or 1
    if not config.learning_rate:
        yield _odd("options", "--learning-rate is 0: nothing is learnt, 1e-6 is usual")
    if config.temperature > HOT:
        text = f"--temperature {config.temperature:g} samples close to noise: 1 is usual"
        yield _odd("options", text)
    yield from _warm_up(config, of_slot=1 if setup.learns_from_pairs else 0)
    started = sum(each.num_workers for each in setup.workers)
    if 0 < setup.num_cpus < started:
        text = f"num_cpus {setup.num_cpus} is fewer than the {started} workers of the file, which "
        yield _odd("options", f"{text}take one each: leave it out, or give {started}")
    if setup.num_ranks > cores and not facts.num_devices:
        text = f"--nproc-per-node {setup.num_ranks} exceeds the {cores} cores of this machine, and "
        yield _odd("options", f"{text}there is no device: start at most {cores}")


def _warm_up(config: TrainConfig, *, of_slot: int) -> Iterator[Finding]:
    by_samples = config.schedule_clock == "samples"
    per_batch = config.steps_per_batch
    if by_samples:
        per_batch = config.batch_size * (of_slot or config.samples_per_question)
    total = config.num_training_batches * per_batch
    warm_up = config.num_warmup_samples if by_samples else config.num_warmup_steps
    if warm_up >= total and config.lr_scheduler != "constant":
        text = f"the learning rate warms up for {warm_up} {config.schedule_clock}, the run has "
        yield _odd("options", f"{text}{total}: shorten the warm-up, or train longer")


def check_prepare(setup: Setup, _: Facts) -> Iterator[Finding]:
    """Programs, and the first script: what comes after it may have been made by it."""
    for number, (program, *words) in enumerate(setup.prepare):
        is_made = number and os.sep in program
        if program not in OWN_PROGRAMS and not is_made and not shutil.which(program):
            yield _cannot("program", program)
        is_script = number == 0 and program.startswith("python") and words[0:1]
        if is_script and words[0].endswith(".py") and not Path(words[0]).is_file():
            yield _cannot("script", words[0])


def _cannot(kind: str, name: str) -> Finding:
    text = f"[launch] prepare must name a {kind} that is there, {name} is not: correct it"
    return Finding("error", "prepare", text)


def check_lines(_: Setup, facts: Facts) -> Iterator[Finding]:
    """What a file's lines have in common with each other, and with what is trained."""
    reads = facts.data if isinstance(facts.data, tuple) else ()
    for read in reads:
        path = read.source.path
        for sentence in read.notes.in_words(path):
            yield _odd("data", sentence)
        if read.unknown >= MANY_UNKNOWN:
            text = f"{read.unknown:.0%} of the tokens of the first prompts of {path} are unknown"
            yield _odd("data", f"{text} to the model's tokenizer: take text that it knows")
        for other in reads if read.purpose == "held out" else ():
            shared = len(read.notes.keys & other.notes.keys)
            if shared and other.purpose != "held out":
                text = f"{shared} of the {len(read.notes.keys)} questions of {path} (held out) are "
                text += f"in {other.source.path}, which is trained: hold out others"
                yield _odd("data", text)


def _odd(subject: str, text: str) -> Finding:
    return Finding("warning", subject, text)
