"""The first promise: a streamed, two-rank batch has the gradient of one float64 pass."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import (
    VOCAB_SIZE,
    make_sample,
    oracle_gradient,
    oracle_logprobs,
    oracle_twin,
    relative_difference,
    tiny_model,
)
from private_cluster import environment
from streamed_gradient import VERSION, Story

from async_grpo.algorithms.base import REFERENCE
from async_grpo.config.train_config import TrainConfig
from async_grpo.types import Episode, Question, Sample, Turn, Verdict, VersionSpan

# In `make test`, test_scripted_loop.py holds every step of whole runs to float64, and a run with a
# KL penalty to the bits of the plain program, whose gradient test_fsdp.py holds to float64.
pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOLERANCE = 1e-5
GROUP_SIZE = 4
EVEN, UNGRADED, UNLUCKY = 1, 2, frozenset({0, 5})  # ordinals
REWARDS = ((0, 1, 1, 0), (1, 1, 1, 1), (1, 0, 0, 0), (0.5, 0, 1, 1),
           (0, 0, 1, 0), (0.25, 0.5, 1, 0), (1, 1, 0, 1), (0, 0, 0, 1))  # fmt: skip


def make_config(folder, **changes):
    options = {
        "model_name_or_path": folder,
        "data_path": "none",
        "batch_size": len(REWARDS),
        "train_minibatch_size": 4,
        "num_training_batches": 1,
        "samples_per_question": GROUP_SIZE,
        "max_generation_tokens": 24,
        "max_tokens_per_gpu": 64,
        "loss_chunksize": 16,
        "temperature": 0.8,
        "dump_samples_filename": "",
    }
    return TrainConfig(**options | changes)


def make_story(config, model):
    """Groups whose behaviour and reference lie around the model's own log-probabilities."""
    rng = np.random.default_rng(11)
    twin = oracle_twin(model)
    questions, completions, verdicts, references = [], [], [], []
    for ordinal, rewards in enumerate(REWARDS):
        prompt = rng.integers(VOCAB_SIZE, size=rng.integers(2, 10)).astype(np.int32)
        outputs = [rng.integers(VOCAB_SIZE, size=rng.integers(1, 24)) for _ in rewards]
        if ordinal % 2:  # these begin as the first does, up to a token of its own each
            outputs[1:] = [np.r_[outputs[0][: rng.integers(20)], o][:23] for o in outputs[1:]]
        own = [
            own_logprobs(twin, prompt, output, config.sampling.temperature) for output in outputs
        ]
        pairs = zip(outputs, own, strict=True)
        questions.append(Question(prompt, "", None, {}))
        completions.append(tuple(make_completion(ids, lp, rng) for ids, lp in pairs))
        references.append(
            tuple((lp + rng.normal(0, 0.3, len(lp))).astype(np.float32) for lp in own)
        )
        statuses = ["scored"] * 3 + ["error" if ordinal == UNGRADED else "scored"]
        pairs = zip(statuses, rewards, strict=True)
        verdicts.append(tuple(Verdict(s, float(r), None, "story", "", 0.0) for s, r in pairs))
    return Story(
        config, tuple(questions), tuple(completions), tuple(verdicts), tuple(references), UNLUCKY
    )


@torch.no_grad()
def own_logprobs(twin, prompt, output, temperature):
    return oracle_logprobs(twin, make_sample(prompt, output), temperature=temperature).numpy()


def make_completion(output, own, rng):
    return Turn(
        token_ids=output.astype(np.int32),
        logprobs=(own + rng.normal(0, 0.3, len(own))).astype(np.float32),
        weights_versions=(VersionSpan(VERSION, 0, len(output)),),
        finish_reason="stop",
        text="",
    )


def expected_samples(story, ordinals):
    """The samples that count in D, with advantages by the formula as it is printed."""
    samples = []
    for ordinal in ordinals:
        if ordinal == UNGRADED:
            continue
        rewards = np.array(REWARDS[ordinal], dtype=np.float64)
        spread = rewards.std(ddof=1)
        advantages = (rewards - rewards.mean()) / (spread + 1e-4) if spread else 0 * rewards
        for index, completion in enumerate(story.completions[ordinal]):
            samples.append(
                Sample(
                    ordinal,
                    index,
                    story.questions[ordinal],
                    Episode.of_turn(story.questions[ordinal].input_token_ids, completion),
                    story.verdicts[ordinal][index],
                    float(advantages[index]),
                    {REFERENCE: story.references[ordinal][index]},
                )
            )
    return samples


CASES = {
    "kl": {"kl_coefficient": 0.1},
    "token-mean": {"aggregation": "token-mean", "clip_high": 0.28},
    "whole batch": {"train_minibatch_size": 0, "kl_coefficient": 0.05, "kl_estimator": "k2"},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(tied=True)


@pytest.fixture(scope="module")
def streamed(model, ray_cluster, tmp_path_factory):
    """By case: its story, and what each of two ranks says of each step."""
    folder = tmp_path_factory.mktemp("streamed")
    model.save_pretrained(folder / "model")
    stories = [
        make_story(make_config(str(folder / "model"), **changes), model)
        for changes in CASES.values()
    ]
    torch.save(stories, folder / "story.pt")
    script = Path(__file__).with_name("streamed_gradient.py")
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(script), ray_cluster, str(folder / "story.pt"), str(folder / "result"),
        ],
        env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[:5000]
    ranks = [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(2)]
    return {
        name: (story, list(zip(*results, strict=True)))
        for name, story, *results in zip(CASES, stories, *ranks, strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_a_streamed_batch_has_the_gradient_of_one_float64_pass(case, streamed, model):
    story, steps = streamed[case]
    config = story.config
    assert len(steps) == config.batching.steps_per_batch
    for number, step in enumerate(steps):
        first = number * config.batching.questions_per_step
        samples = expected_samples(story, range(first, first + config.batching.questions_per_step))
        expected = oracle_gradient(model, samples, config)
        for gradient, _, _ in step:
            assert relative_difference(gradient, expected) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_took_part_equally_often_and_nothing_was_lost(case, streamed):
    story, steps = streamed[case]
    for number, ((_, end, sizes), (_, other_end, other_sizes)) in enumerate(steps):
        first = number * story.config.batching.questions_per_step
        samples = expected_samples(
            story, range(first, first + story.config.batching.questions_per_step)
        )
        assert end == other_end
        assert len(sizes) == len(other_sizes) >= 2
        assert min(sum(sizes), sum(other_sizes)) > 0
        assert sum(sizes) + sum(other_sizes) == end.fates["trained"]
        assert end.fates["trained"] + end.fates["zero_contribution"] == len(samples)
        assert end.fates["failed"] == (GROUP_SIZE if number == 0 else 0)
        assert end.num_samples == len(samples)
        assert end.num_tokens == sum(sample.num_trained_tokens for sample in samples)


def test_samples_without_a_gradient_are_counted_but_not_sent(streamed):
    fates = {case: steps[0][0][1].fates for case, (_, steps) in streamed.items()}
    assert fates["token-mean"]["zero_contribution"] >= GROUP_SIZE
    assert fates["kl"]["zero_contribution"] < GROUP_SIZE
