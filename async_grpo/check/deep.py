"""What `check --deep` trains and compares: by the run's own learner, collate, loss, step and audit.

`trial` runs on every rank and returns plain numbers; `cli/deep_check.py` starts the ranks, and says
what passes:

worst       two steps of the largest minibatch that the token budget allows
batch       one recorded batch again and again: are its answers told apart by their advantages
answers     half of the recorded prompts: are answers to the other half told apart, more than after
            training with the same advantages dealt to any answer
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from async_grpo.config.train_config import TrainConfig
from async_grpo.devices.current import free_bytes
from async_grpo.model.collate import collate, to_device
from async_grpo.run.replaying import Recorded, read_record
from async_grpo.training.fsdp import reshard
from async_grpo.training.learner import Learner
from async_grpo.training.minibatch_log import LOG_FOLDER, logged_minibatch, logged_steps
from async_grpo.training.ranks import Ranks
from async_grpo.training.step import StepResult
from async_grpo.types import (
    EndOfStep,
    Episode,
    Minibatch,
    Question,
    Row,
    Sample,
    TrainingPair,
    Verdict,
    tally,
)
from async_grpo.util.errors import DataError

NUM_REPEATS, NUM_PASSES, NUM_SHUFFLES = 20, 4, 4
GRADED = Verdict.scored(1.0, adapter="check")
NO_LABEL = -100
SHOWN = 4  # tokens of an output that are printed, at its beginning and at its end
COLUMNS = "{:>9} {:>7} {:<12} {:>7} {:<12} {}"
HEADING = COLUMNS.format("place", "id", "text", "label", "text", "mask")
Minibatches = Sequence[Minibatch]  # of one rank
Numbers = dict[str, Any]  # for a file that `cli/deep_check.py` reads


def line_shown(sample: Sample, decode: Callable[[list[int]], str]) -> tuple[str, str]:
    """What is wrong with the labels of a sample's first row, or ""; and a table of them.

    The table is read from the tensors that the model and the loss are given.
    """
    sample = sample.parts()[0]
    (row,) = sample.episode.rows
    packed = collate([sample], aggregation="token-mean")
    ids = np.concatenate([row.prompt_token_ids, row.token_ids])
    num_prompt, num_read = len(row.prompt_token_ids), packed.input_ids.numel()
    labels = np.full(len(ids), NO_LABEL)
    labels[packed.logit_positions.numpy()] = packed.target_ids.numpy()
    expected = np.full(len(ids), NO_LABEL)
    places = num_prompt - 1 + np.flatnonzero(row.loss_mask)
    expected[places] = ids[places + 1]
    num_wrong = int((labels != expected).sum() + (packed.input_ids.numpy() != ids[:num_read]).sum())
    trained = labels[labels != NO_LABEL].tolist()
    problem = f"{num_wrong} labels are not the next id of the output" if num_wrong else ""
    if sample.episode.is_given and len(trained) < len(row.token_ids):
        problem = problem or f"of {len(row.token_ids)} tokens of the completion, all must be"
    shown = {*range(max(0, num_prompt - 3), num_prompt + SHOWN), *range(len(ids) - SHOWN, len(ids))}
    lines = [
        f"{len(trained)} of {len(ids)} ids have a label, {num_prompt} are the prompt's; the labels "
        f"are {_short(decode(trained), 60)}",
        HEADING,
    ]
    for place in sorted(shown & {*range(len(ids))}):
        id_, label = int(ids[place]), int(labels[place])
        of_label = (label, _short(decode([label]))) if label >= 0 else ("-", "-")
        values = (place, id_, _short(decode([id_])), *of_label, int(label >= 0))
        lines.append(COLUMNS.format(*values))
    return problem if trained else problem or "no token is trained", "\n".join(lines)


def _short(text: str, longest: int = 9) -> str:
    return repr(text if len(text) <= longest else f"{text[: longest - 1]}…")


def trial(name: str, config: TrainConfig, ranks: Ranks, *, longest: int) -> Numbers:
    """The numbers of one trial, the same on every rank; collective. `longest`: tokens, of worst."""
    free = free_bytes(ranks.device, share=config.memory.gpus_per_rank)
    if name == "worst":
        learner = Learner.build(config, ranks)
        return {"free": free, **worst_minibatch(learner, ranks, longest=longest)}
    record = read_record(Path(config.recording.output_dir), batch=None)
    batches = list(recorded_batches(record, ranks))
    if name == "batch":
        return on_one_batch(Learner.build(config, ranks), ranks, batches)
    gains = []
    for seed in range(1 + NUM_SHUFFLES):
        gc.collect()  # the learner before: a device may hold only one
        torch.cuda.empty_cache()
        learner = Learner.build(config, ranks)
        gains.append(gain_on_others(learner, ranks, batches, seed=seed))
    return {"own": gains[0], "shuffled": gains[1:]}


def worst_minibatch(learner: Learner, ranks: Ranks, *, longest: int) -> Numbers:
    """Two steps on as many sequences of `longest` tokens as a minibatch of each rank holds.

    The second meets AdamW's moments, and the old policy where a loss compares with it.
    """
    number = max(1, learner.config.batching.max_tokens_per_gpu // longest)
    minibatch = Minibatch(0, tuple(_made(learner, index, longest) for index in range(number)))
    results = [step_on(learner, ranks, [minibatch], step=step) for step in range(2)]
    return {
        "sequences": number,
        "skipped": "".join(result.skipped for result in results),
        "norm": results[-1].grad_norm,
        **results[-1].meters,
    }


def _made(learner: Learner, index: int, num_tokens: int) -> Sample:
    """A sampled sequence, all of whose tokens but the first are trained."""
    vocab_size = learner.policy.model.config.vocab_size
    ids = ((np.arange(num_tokens) + index) % vocab_size).astype(np.int32)
    length = num_tokens - 1
    scores = {
        name: np.zeros((length, columns) if columns else length, np.float32)
        for name, columns in learner.algorithm.score_columns.items()
    }
    logprobs = np.full(length, -np.log(vocab_size), np.float32)
    row = Row(ids[:1], ids[1:], logprobs, np.ones(length, np.bool_), ())
    question = Question(ids[:1], input="", answer=None, columns={})
    return Sample(index, 0, question, Episode((row,)), GRADED, (-1.0) ** index, scores)


def step_on(learner: Learner, ranks: Ranks, minibatches: Minibatches, *, step: int) -> StepResult:
    """Train the minibatches of all ranks as one gradient step; collective."""
    for each in minibatches:
        learner.accumulate(each)
    own = tally(
        (sample for each in minibatches for sample in each.samples),
        incarnation=0,
        aggregation=learner.algorithm.aggregation,
        constant_length=learner.config.objective.constant_length_samples,
    )
    sent = tuple(ranks.gather(own))
    num_samples = sum(each.num_samples for each in sent)
    num_tokens = sum(each.num_tokens for each in sent)
    return learner.update(EndOfStep(0, step, False, num_samples, num_tokens, sent=sent))


@torch.no_grad()
def gap(learner: Learner, ranks: Ranks, minibatches: Minibatches) -> tuple[float, float]:
    """Mean log-probability of a token in answers of positive and of negative advantage, in nats.

    A mean over each answer's tokens first, then over answers; collective.
    """
    sums = np.zeros((2, 2))  # by sign: Σ w lp, Σ w
    policy, options = learner.policy, {"temperature": learner.algorithm.temperature}
    for minibatch in minibatches:
        packed = collate(
            minibatch.samples, aggregation="sample-mean", share_prompts=policy.shares_prompts
        )
        packed = to_device(packed, learner.device)
        scored = policy(packed, **options, chunk_size=learner.config.chunk_size)
        for row, chosen in enumerate((packed.advantages > 0, packed.advantages < 0)):
            weights = packed.weights[chosen].double()
            sums[row] += float((weights * scored.logprobs[chosen]).sum()), float(weights.sum())
    reshard(policy)
    total = np.sum(ranks.gather(sums), axis=0)
    above, below = total[:, 0] / np.maximum(total[:, 1], 1e-12)
    return float(above), float(below)


def recorded_batches(record: Recorded, ranks: Ranks) -> Iterator[list[Minibatch]]:
    """This rank's minibatches of each recorded batch."""
    log, kept = record.folder / LOG_FOLDER, list[Minibatch]()
    for step in logged_steps(log, rank=ranks.rank, batches=record.batches):
        kept += [logged_minibatch(each)[0] for each in step.minibatches]
        if step.end.is_last_of_batch:
            yield kept
            kept = []


def first_sample(folder: Path) -> Sample:
    """The first sample that a run of this folder has trained and recorded on rank 0."""
    batches = logged_steps(
        folder / LOG_FOLDER, rank=0, batches=read_record(folder, batch=None).batches
    )
    for record in (record for step in batches for record in step.minibatches):
        for sample in logged_minibatch(record)[0].samples:
            return sample
    raise DataError(f"{folder} must hold a trained sample, none had an advantage: look at rewards")


def on_one_batch(learner: Learner, ranks: Ranks, batches: Sequence[Minibatches]) -> Numbers:
    """Train the recorded batch with most answers of both signs, again and again.

    Raises `DataError` where no batch has both.
    """
    signs = np.sum(ranks.gather([_signs(each) for each in batches]), axis=0)  # [batches, 2]
    told = signs.min(axis=1)
    if not told.any():
        raise DataError(
            f"one of {len(batches)} recorded batches must have answers of positive and of negative "
            "advantage, none has: nothing is learnt of these rewards, look at what was sampled"
        )
    chosen = int(told.argmax())
    before = gap(learner, ranks, batches[chosen])
    for step in range(NUM_REPEATS):
        step_on(learner, ranks, batches[chosen], step=step)
    after = gap(learner, ranks, batches[chosen])
    return {"batch": chosen, "answers": signs[chosen].tolist(), "before": before, "after": after}


def _signs(minibatches: Minibatches) -> list[int]:
    """[answers of positive, of negative advantage]."""
    signs = [np.sign(np.mean(sample.advantage)) for m in minibatches for sample in m.samples]
    return [signs.count(1), signs.count(-1)]


def gain_on_others(
    learner: Learner, ranks: Ranks, batches: Sequence[Minibatches], *, seed: int
) -> float:
    """Train half of the prompts; how much farther are answers to the others apart, in nats.

    `seed` 0: with their own advantages; else with these dealt to any of the trained answers.
    """
    others = [_half(each, 1) for batch in batches for each in batch]
    before = gap(learner, ranks, others)
    for number in range(NUM_PASSES * len(batches)):
        index = number % len(batches)
        trained = [_half(each, 0) for each in batches[index]]
        if seed:
            trained = dealt(trained, np.random.default_rng([seed, ranks.rank, index]))
        step_on(learner, ranks, trained, step=number)
    after = gap(learner, ranks, others)
    return (after[0] - after[1]) - (before[0] - before[1])


def _half(minibatch: Minibatch, half: int) -> Minibatch:
    """The samples of one half of all prompts, whichever batch they are in."""
    prompts = [each.question.input_token_ids.tobytes() for each in minibatch.samples]
    pairs = zip(minibatch.samples, prompts, strict=True)
    return replace(minibatch, samples=tuple(s for s, prompt in pairs if crc32(prompt) % 2 == half))


def dealt(minibatches: Minibatches, rng: np.random.Generator) -> list[Minibatch]:
    """The minibatches with their advantages in another order."""
    own = [float(np.mean(sample.advantage)) for m in minibatches for sample in m.samples]
    order = iter(rng.permutation(own).tolist())
    return [
        replace(m, samples=tuple(replace(s, advantage=next(order)) for s in m.samples))
        for m in minibatches
    ]


def shuffled(pairs: Sequence[TrainingPair]) -> list[TrainingPair]:
    """The pairs with completions of others; whole texts, which have no prompt, by their tokens."""
    rng, number = np.random.default_rng(0), len(pairs)
    if all(len(pair.prompt_token_ids) == 1 for pair in pairs):
        texts = [rng.permutation(pair.completion_token_ids) for pair in pairs]
    else:  # by a cycle, in which nobody keeps its own
        order = rng.permutation(number)
        texts = [pairs[i].completion_token_ids for i in range(number)]
        for place in range(number):
            texts[order[place]] = pairs[order[place - 1]].completion_token_ids
    return [replace(p, completion_token_ids=text) for p, text in zip(pairs, texts, strict=True)]


def distance(one: Path, other: Path, start: Path) -> float:
    """How far the weights of two checkpoints are apart, by the way from `start` to `one`.

    0.0 where all their tensors, AdamW's moments too, are equal to the bit; infinite where no weight
    has moved, so that nothing can be said.
    """
    files = [_by_tensor(folder) for folder in (one, other, start)]
    is_equal, apart, way = True, 0.0, 0.0
    for name in files[0]:
        first, second, begun = (_tensor(each, name) for each in files)
        is_equal = is_equal and torch.equal(first, second)
        if name.startswith("policy."):
            apart += float((first.double() - second.double()).square().sum())
            way += float((first.double() - begun.double()).square().sum())
    if not way:
        return math.inf
    return 0.0 if is_equal else max(math.sqrt(apart / way), sys.float_info.epsilon)


def _by_tensor(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


def _tensor(files: Mapping[str, Path], name: str) -> Tensor:
    with safe_open(files[name], "pt") as tensors:
        return tensors.get_tensor(name)


def same_questions(one: Path, other: Path) -> tuple[int, int, int]:
    """(outputs, those of other questions, those that are the same) of the second dump of samples.

    Outputs are those in both dumps, by their places in the run.
    """
    told = [{_place(each): each for each in map(json.loads, path.open())} for path in (one, other)]
    both = [(told[0][place], told[1][place]) for place in told[0].keys() & told[1].keys()]
    others = sum(first["input"] != second["input"] for first, second in both)
    return len(both), others, sum(first["output"] == second["output"] for first, second in both)


def _place(line: Mapping[str, Any]) -> tuple[int, int, int]:
    return line["ordinal"], line["attempt"], line["index"]
