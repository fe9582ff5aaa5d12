"""--use-ref-answers: a group with its reference has the gradient of one float64 pass, and one D."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from formulas import group_advantages, sample_loss, token_weight
from oracle import (
    make_config,
    oracle_logprobs,
    oracle_outputs,
    oracle_twin,
    random_samples,
    relative_difference,
    tiny_model,
)
from test_mixed import denominator
from trained import OPTIONS, make_learner

from async_grpo.algorithms.base import Algorithm, LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.algorithms.grpo import Grpo
from async_grpo.batching.supervised import without_references
from async_grpo.model.collate import collate
from async_grpo.model.policy import hf_named_parameters
from async_grpo.types import Group, Verdict
from async_grpo.util.errors import ConfigError

OBJECTIVES = (
    {"kl_coefficient": 0.1, "entropy_coefficient": 0.02},
    {"kl_coefficient": 0.1, "ratio_mode": "behaviour", "aggregation": "token-mean"},
    {"ratio_mode": "behaviour", "ratio_level": "sequence", "clip_high": 0.9, "clip_low": 0.9},
    {"ratio_mode": "behaviour", "aggregation": "constant", "constant_length_samples": 7},
    {"advantage": "rloo", "temperature": 0.7},
)
REWARDS = (1.0, 0.0, 0.0, 0.5)  # the last is the reference's


def make_group(model, *, seed, temperature):
    """Three sampled outputs of one question and its reference answer, graded."""
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, 20, model=model, temperature=temperature)
    samples = [s for s in samples if len(s.episode.rows) == 1 and s.num_trained_tokens][:4]
    (row,) = samples[-1].episode.rows
    given = replace(row, logprobs=None, weights_versions=())
    samples[-1] = replace(
        samples[-1], scores={}, episode=replace(samples[-1].episode, rows=(given,), turns=())
    )
    return Group(0, 0, tuple(
        replace(sample, ordinal=0, index=index, verdict=Verdict.scored(reward), advantage=0.0)
        for index, (sample, reward) in enumerate(zip(samples, REWARDS, strict=True))
    ))  # fmt: skip


def oracle_gradient(model, samples, config):
    """Token by token; of the reference its cross-entropy, by the D of all that are trained."""
    sampled = [s for s in samples if not s.episode.is_given]
    total = torch.zeros((), dtype=torch.float64)
    for output in oracle_outputs(model, sampled, config):
        total = total + sample_loss(output, config)
    for sample in (s for s in samples if s.episode.is_given):
        lp = oracle_logprobs(model, sample, temperature=config.sampling.temperature)
        lp = lp[sample.episode.rows[0].loss_mask]
        nll = -config.objective.ref_answer_coefficient * lp.sum()
        total = total + token_weight(len(lp), config) * nll
    (total / denominator(samples, config)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", OBJECTIVES)
@pytest.mark.parametrize("coefficient", [0.0, 0.7])
def test_its_gradient_is_that_of_one_float64_pass(options, coefficient):
    own = {"use_ref_answers": True, "ref_answer_coefficient": coefficient}
    config = make_config(**(OPTIONS | options | own))
    learner = make_learner(config)
    twin = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    group = make_group(twin, seed=3, temperature=config.sampling.temperature)
    group = asyncio.run(LocalRules(learner.algorithm).finish_group(group))
    sampled = [s.advantage for s in group.samples[:3]]
    by_hand = group_advantages(REWARDS, config.objective.advantage)  # the baseline knows all four
    assert sampled == pytest.approx(by_hand[:3], rel=1e-12)
    assert all(sample.contributes for sample in group.samples)
    samples = (group if coefficient else without_references(group)).samples
    assert len(samples) == 3 + (coefficient > 0)
    expected, d = oracle_gradient(twin, samples, config), denominator(samples, config)
    for part in (samples[:2], samples[2:3], samples[3:], ()):  # in any minibatches
        packed = collate(
            part,
            aggregation=config.objective.aggregation,
            constant_length=config.objective.constant_length_samples,
            scores=learner.algorithm.score_columns,
            scores_of_given=learner.algorithm.scores_of_given,
            dtype=torch.float64,
        )
        learner.step.accumulate(packed)
    got = {name: parameter.grad / d for name, parameter in hf_named_parameters(learner.policy)}
    assert relative_difference(got, expected) <= 1e-12


def test_the_cross_entropy_is_measured_a_token():
    config = make_config(**OPTIONS, use_ref_answers=True, ref_answer_coefficient=2.0)
    learner = make_learner(config)
    twin = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    *_, reference = make_group(twin, seed=4, temperature=1.0).samples
    packed = collate([reference], aggregation="sample-mean", dtype=torch.float64)
    learner.step.accumulate(packed)
    learner.step.accumulate(collate([], aggregation="sample-mean", dtype=torch.float64))
    lp = oracle_logprobs(twin, reference, temperature=1.0)[reference.episode.rows[0].loss_mask]
    metrics = learner.step.finish(1).metrics
    nll = metrics["ref_answer_nll_sum"] / metrics["ref_answer_tokens"]
    assert nll == pytest.approx(-lp.mean().item(), rel=1e-9)


class OwnLoss(Grpo):
    def loss(self, scored, packed):
        return super().loss(scored, packed)


class Knows(OwnLoss):
    takes_ref_answers = True


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ref_answer_coefficient": 1.0}, "--ref-answer-coefficient goes with --use-ref-answers"),
        ({"use_ref_answers": True, "ref_answer_coefficient": -1.0}, "must not be negative"),
        ({"use_ref_answers": True, "ref_answer_coefficient": float("inf")}, "must be finite"),
        ({"use_ref_answers": True, "algorithm": "sft"}, "needs --algorithm grpo without teachers"),
        (
            {"use_ref_answers": True, "environment": "verifiers:python tasks"},
            "needs questions that are answered once .*, got True: leave it out, or verifiers",
        ),
        (
            {"use_ref_answers": True, "teacher_for": "math", "opd_coefficient": 1.0},
            "takes_ref_answers = True",
        ),
        ({"use_ref_answers": True, "algorithm": f"{__file__}:OwnLoss"}, "takes_ref_answers = True"),
    ],
)
def test_what_cannot_have_a_reference_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        find_algorithm(make_config(**(OPTIONS | options)))


def test_a_loss_of_a_user_s_own_may_say_that_it_knows_them():
    options = OPTIONS | {"use_ref_answers": True, "algorithm": f"{__file__}:Knows"}
    assert find_algorithm(make_config(**options)).takes_ref_answers
    assert not Algorithm.takes_ref_answers
