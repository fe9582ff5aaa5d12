"""A batch of sampled and given samples has the gradient of one float64 pass, and one D."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from formulas import sample_loss, token_weight
from mixed import GAMMA, TEACHER
from oracle import (
    make_config,
    oracle_logprobs,
    oracle_outputs,
    oracle_twin,
    random_samples,
    relative_difference,
    tiny_model,
)
from trained import HERE, OPTIONS, make_learner

from async_grpo.model.collate import collate
from async_grpo.model.policy import hf_named_parameters
from async_grpo.types import Minibatch

OBJECTIVES = (
    {"kl_coefficient": 0.1, "entropy_coefficient": 0.02},
    {"kl_coefficient": 0.1, "ratio_mode": "behaviour", "aggregation": "token-mean"},
    {"ratio_mode": "behaviour", "ratio_level": "sequence", "clip_high": 0.9, "clip_low": 0.9},
    {"importance_correction": "truncate", "correction_level": "sequence", "max_staleness": 0},
)
MEASURED = ("sampled_tokens", "mismatch_max", "mismatch_kl_sum", "kl_sum", "loss_sum")


def as_given(sample):
    """The same tokens, which nobody sampled: no behaviour, no version, no reference."""
    rows = tuple(replace(row, logprobs=None, weights_versions=()) for row in sample.episode.rows)
    teacher = {TEACHER: sample.scores[TEACHER]}
    return replace(sample, episode=replace(sample.episode, rows=rows, turns=()), scores=teacher)


def make_samples(model, *, seed, temperature=1.0):
    """Six with a teacher's scores, every other one given."""
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, 6, model=model)
    samples = [
        replace(s, scores={**s.scores, TEACHER: s.scores["reference"] - np.float32(0.5)})
        for s in samples
    ]
    return [as_given(s) if index % 2 else s for index, s in enumerate(samples)]


def config_of(options):
    return make_config(algorithm=f"{HERE}/mixed.py:Mixed", **(OPTIONS | options))


def oracle_gradient(model, samples, config):
    """Token by token: what each sample's kind admits, all by the D of all samples."""
    sampled = [s for s in samples if not s.episode.is_given]
    total = torch.zeros((), dtype=torch.float64)
    for output in oracle_outputs(model, sampled, config):
        total = total + sample_loss(output, config)
    for sample in samples:
        mask = np.concatenate([row.loss_mask for row in sample.episode.rows])
        lp = oracle_logprobs(model, sample, temperature=config.sampling.temperature)[mask]
        teacher = torch.from_numpy(sample.scores[TEACHER][mask]).double()
        loss = GAMMA * (teacher - lp).square().sum()
        if sample.episode.is_given:
            loss = loss - lp.sum()
        total = total + (token_weight(len(lp), config) * loss if len(lp) else 0.0)
    (total / denominator(samples, config)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def denominator(samples, config):
    if config.objective.aggregation == "token-mean":
        return sum(sample.num_trained_tokens for sample in samples)
    return len(samples)


@pytest.mark.parametrize("options", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_batch_has_the_gradient_of_one_float64_pass(options, seed):
    config = config_of(options)
    learner = make_learner(config)
    twin = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    samples = make_samples(twin, seed=seed)
    expected = oracle_gradient(twin, samples, config)
    d = denominator(samples, config)
    # Mixed, all given, all sampled, none.
    for part in (samples[:3], samples[3:4], samples[4:5], samples[5:], []):
        packed = collate(
            part,
            aggregation=config.objective.aggregation,
            scores=learner.algorithm.score_columns,
            scores_of_given=learner.algorithm.scores_of_given,
            dtype=torch.float64,
        )
        learner.step.accumulate(packed)
    got = {name: parameter.grad / d for name, parameter in hf_named_parameters(learner.policy)}
    assert relative_difference(got, expected) <= 1e-12


def test_plain_grpo_learns_nothing_from_given_tokens_and_measures_the_sampled_ones():
    config = make_config(**(OPTIONS | {"kl_coefficient": 0.1, "entropy_coefficient": 0.02}))
    learner = make_learner(config)
    twin = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    sampled, given = make_samples(twin, seed=5)[:2]
    learner.accumulate(Minibatch(0, (given,)))
    assert any(given.episode.rows[0].loss_mask)
    assert all(not p.grad.any() for p in learner.policy.parameters() if p.grad is not None)
    learner.discard()
    learner.accumulate(Minibatch(0, (sampled,)))
    alone = learner.step.finish(0).metrics
    learner.accumulate(Minibatch(0, (sampled, given)))
    mixed = learner.step.finish(0).metrics
    assert mixed["trained_tokens"] == alone["trained_tokens"] + given.num_trained_tokens
    for name in MEASURED:
        assert mixed[name] == pytest.approx(alone[name], rel=1e-6), name


def test_a_given_sample_needs_only_the_scores_that_its_terms_read():
    learner = make_learner(config_of({"kl_coefficient": 0.1}))
    twin = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    sampled, given = make_samples(twin, seed=1)[:2]
    learner.accumulate(Minibatch(0, (given, sampled)))
    for sample, missing in ((replace(given, scores={}), TEACHER), (
        replace(sampled, scores={TEACHER: sampled.scores[TEACHER]}), "reference"
    )):  # fmt: skip
        with pytest.raises(ValueError, match=f"lacks {missing}"):
            learner.accumulate(Minibatch(1, (sample,)))
