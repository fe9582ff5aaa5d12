"""An algorithm of a paper's size is one file: on-policy distillation, trained like the oracle."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from opd import BOUND, ETA, TEACHER
from oracle import make_config, oracle_logprobs, random_samples
from trained import HERE, OPTIONS, assert_same_parameters, make_learner, make_oracle, train

from async_grpo.algorithms.base import LocalRules
from async_grpo.telemetry.metrics_row import metrics_row
from async_grpo.types import Group

NUM_STEPS = 3


def scripted_groups(learner, model, rng):
    """Two verified groups with a teacher's scores, as the controller finishes them."""
    rules = LocalRules(learner.algorithm)
    for ordinal in range(2):
        members = []
        for index, sample in enumerate(random_samples(rng, 3, model=model)):
            scores = {TEACHER: sample.scores["reference"] + rng.normal(0, 2, 1).astype(np.float32)}
            verdict = replace(sample.verdict, reward=float(index == 0))
            members.append(
                replace(sample, ordinal=ordinal, index=index, scores=scores, verdict=verdict)
            )
        group = asyncio.run(rules.finish_group(Group(ordinal, 0, tuple(members))))
        yield from (sample for sample in group.samples if sample.contributes)


def oracle_loss(model, samples):
    """-(A + η clip(tea - lp)) times the ratio, a mean over tokens, then over samples."""
    losses = []
    for sample in samples:
        mask = sample.episode.rows[0].loss_mask
        if not mask.any():
            continue
        lp = oracle_logprobs(model, sample, temperature=1.0)[mask]
        gap = torch.from_numpy(sample.scores[TEACHER][mask]).double() - lp.detach()
        followed = sample.advantage + ETA * gap.clamp(-BOUND, BOUND)
        losses.append(-(followed * (lp - lp.detach()).exp()).mean())
    return torch.stack(losses).sum() / len(samples)


def test_distillation_of_one_file_trains_as_the_oracle_does():
    config = make_config(algorithm=f"{HERE}/opd.py:OnPolicyDistillation", **OPTIONS)
    learner = make_learner(config)
    model, optimizer = make_oracle()
    rng = np.random.default_rng(0)
    for batch in range(NUM_STEPS):
        samples = list(scripted_groups(learner, model, rng))
        seen = [
            (s, mask, oracle_logprobs(model, s, temperature=1.0).detach()[mask])
            for s in samples
            for mask in [s.episode.rows[0].loss_mask]
        ]
        loss = oracle_loss(model, samples)
        optimizer.zero_grad()
        loss.backward()
        result = train(learner, samples, batch=batch)
        optimizer.step()
        assert result.metrics["loss_sum"] / len(samples) == pytest.approx(loss.item(), rel=1e-6)
        assert_same_parameters(learner, model)
        counts = {name: {} for name in ("fates", "reasons", "tokens")}
        row = metrics_row(result.metrics, declared=learner.algorithm.metrics, **counts)
        gaps = [s.scores[TEACHER][mask] - lp.numpy() for s, mask, lp in seen]
        assert row["teacher_gap"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-5)
    assert learner.step.clocks.steps == NUM_STEPS


def test_a_sample_without_the_teacher_s_scores_is_refused_by_name():
    learner = make_learner(make_config(algorithm=f"{HERE}/opd.py:OnPolicyDistillation", **OPTIONS))
    model, _ = make_oracle()
    (sample,) = random_samples(np.random.default_rng(1), 1, model=model)
    with pytest.raises(ValueError, match="lacks teacher:math"):
        train(learner, [sample], batch=0)
