"""A float64 policy trained with a user's algorithm, and the same steps of a float64 oracle."""

from pathlib import Path
from types import SimpleNamespace

import torch
from oracle import oracle_twin, sent, tiny_model

from async_grpo.model.policy import PolicyModel
from async_grpo.training.learner import Learner
from async_grpo.types import EndOfStep, Minibatch

HERE = Path(__file__).parent
RATE = 1e-3
OPTIONS = {
    "learning_rate": RATE, "max_staleness": 0, "max_grad_norm": 0.0, "loss_chunksize": 5,
    "batch_size": 2, "samples_per_question": 3,
}  # fmt: skip


def make_learner(config):
    policy = PolicyModel(tiny_model(tied=True, dtype=torch.float64))
    ranks = SimpleNamespace(rank=0, device=torch.device("cpu"))
    return Learner(policy, config, ranks)


def train(learner, samples, *, batch):
    """One gradient step in minibatches of two, one of them empty; its sums."""
    parts = [samples[start : start + 2] for start in range(0, len(samples), 2)]
    for index, part in enumerate([*parts, ()]):
        learner.accumulate(Minibatch(index, tuple(part)))
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    end = EndOfStep(
        batch,
        0,
        True,
        num_samples=len(samples),
        num_tokens=num_tokens,
        sent=sent(samples, aggregation=learner.algorithm.aggregation),
    )
    return learner.update(end)


def make_oracle():
    """The same model behind transformers' own attention and head, and plain AdamW."""
    model = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    return model, torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )


def assert_same_parameters(learner, model):
    """To a thousandth of one step: weights of tokens are float32 in the package."""
    for (name, got), want in zip(
        learner.policy.model.named_parameters(), model.parameters(), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=RATE / 1000, msg=name)
