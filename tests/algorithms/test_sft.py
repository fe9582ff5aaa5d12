"""Supervised training over pairs: cross-entropy, a mean over all tokens of the step."""

import numpy as np
import pytest
import torch
from oracle import make_config, oracle_logprobs, random_samples
from trained import OPTIONS, assert_same_parameters, make_learner, make_oracle, train

from async_grpo.algorithms.sft import Sft
from async_grpo.model.collate import collate
from async_grpo.model.logprobs import TokenLogprobs

CONFIG = make_config(algorithm="sft", aggregation="sample-mean", temperature=0.5, **OPTIONS)


def test_a_pair_is_a_sample_and_options_of_sampling_change_nothing():
    algorithm = Sft(CONFIG)
    assert (algorithm.temperature, algorithm.samples_per_slot) == (1.0, 1)
    assert (algorithm.aggregation, algorithm.needs) == ("token-mean", ())


def test_the_loss_is_bit_for_bit_the_weighted_negative_log_likelihood():
    samples = random_samples(np.random.default_rng(0), 4, model=make_oracle()[0])
    packed = collate(samples, aggregation="token-mean")
    logprobs = torch.randn(len(packed.weights), generator=torch.Generator().manual_seed(0))
    scored = TokenLogprobs(logprobs, torch.zeros_like(logprobs))
    assert torch.equal(Sft(CONFIG).loss(scored, packed).loss, -(packed.weights * logprobs).sum())


def test_it_trains_as_the_oracle_does():
    learner = make_learner(CONFIG)
    model, optimizer = make_oracle()
    for batch in range(3):
        samples = random_samples(np.random.default_rng(batch), 5, model=model)
        masks = [sample.episode.rows[0].loss_mask for sample in samples]
        parts = [
            oracle_logprobs(model, sample, temperature=1.0)[mask]
            for sample, mask in zip(samples, masks, strict=True)
        ]
        loss = -torch.cat(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        result = train(learner, samples, batch=batch)
        optimizer.step()
        num_tokens = sum(map(len, parts))
        assert result.metrics["loss_sum"] / num_tokens == pytest.approx(loss.item(), rel=1e-6)
        assert_same_parameters(learner, model)
