"""Two ways from hidden states to log-probabilities of a large vocabulary, with the loss on top.

Both make what the trainer reads: the log-probability of each token, with gradient, and the entropy
at each, which only metrics read where the bonus is off.

Legend: N scored tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.model.logprobs import token_logprobs
from async_grpo.training.ratios import clipped_policy_loss

Head = Callable[["Inputs"], Tensor]  # log-probabilities [N], with gradient


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What reaches the output layer, and what the loss compares with."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [N] int64
    behaviour: Tensor  # [N] log-probabilities
    advantages: Tensor  # [N]

    @property
    def gradient_bytes(self) -> int:
        """Of the result of every backward pass, whichever way."""
        return self.hidden.nbytes + self.weight.nbytes


def make_inputs(num_tokens: int, *, vocab_size: int, hidden_size: int) -> Inputs:
    """Random float32 inputs, the same at every call, whose logits have a deviation of 2."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Inputs(
        hidden=random(num_tokens, hidden_size).requires_grad_(),
        weight=random(vocab_size, hidden_size).mul_(2 * hidden_size**-0.5).requires_grad_(),
        targets=torch.randint(vocab_size, (num_tokens,), generator=generator),
        behaviour=random(num_tokens) - 12.0,
        advantages=random(num_tokens),
    )


def chunked(chunk_size: int) -> Head:
    """Ours, as the trainer calls it."""
    return lambda inputs: (
        token_logprobs(
            inputs.hidden, inputs.weight, inputs.targets, temperature=1.0, chunk_size=chunk_size
        ).logprobs
    )


def full_logits(inputs: Inputs) -> Tensor:
    """[N, V] at once, the plain form; the entropy needs no gradient."""
    every = (inputs.hidden @ inputs.weight.T).log_softmax(-1)
    with torch.no_grad():
        torch.linalg.vecdot(every.exp(), every)
    return every.gather(-1, inputs.targets[:, None]).squeeze(-1)


def cross_entropy(inputs: Inputs) -> Tensor:
    """[N, V] at once and no entropy: less than the trainer needs, the cheapest full form."""
    logits = inputs.hidden @ inputs.weight.T
    return -torch.nn.functional.cross_entropy(logits, inputs.targets, reduction="none")


def loss_of(head: Head, inputs: Inputs) -> Tensor:
    """Clipped policy loss, a plain sum."""
    ratio = torch.exp(head(inputs) - inputs.behaviour)
    loss, _ = clipped_policy_loss(ratio, inputs.advantages, clip_low=0.2, clip_high=0.2)
    return loss.sum()
