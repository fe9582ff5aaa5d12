"""Log-probabilities of chosen tokens from hidden states, without ever holding a [N, V] tensor.

Legend: N scored tokens, H hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """What the policy says of N given tokens; both carry gradient when the hidden states do.

    A named tuple, because FSDP2 finds the tensors of a forward's result as a pytree.
    """

    logprobs: Tensor  # [N] float32, or float64 for a float64 model
    entropy: Tensor  # [N] same type, in nats


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    target_ids: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    bias: Tensor | None = None,
) -> TokenLogprobs:
    """Log-softmax of `(hidden @ head_weight.T + bias) / temperature` at `target_ids`.

    hidden [N, H], head_weight [V, H], target_ids [N] int64, bias [V]. At most a few [C, V] tensors
    live at a time, forward and backward: the backward pass recomputes the logits of each chunk.
    Raises ValueError when `chunk_size` or `temperature` is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}: 1024 is usual")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}: 1.0 is usual")
    values = _ChunkedLogprobs.apply(hidden, head_weight, bias, target_ids, temperature, chunk_size)
    return TokenLogprobs(*values)


class _ChunkedLogprobs(torch.autograd.Function):
    """The forward keeps [N] statistics; the backward recomputes softmax chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        statistics = [
            _statistics(_logits(hidden[rows], weight, bias, temperature), targets[rows])
            for rows in _chunks(len(targets), chunk_size)
        ]
        columns = zip(*statistics, strict=True)
        logprobs, log_normaliser, entropy = (torch.cat(column) for column in columns)
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_normaliser.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=log_normaliser.dtype)
        for rows in _chunks(len(targets), ctx.chunk_size):
            grad = _logits(hidden[rows], weight, bias, ctx.temperature)
            grad = _grad_logits_(
                grad.sub_(log_normaliser[rows, None]),
                targets[rows],
                grad_logprobs[rows],
                grad_entropy[rows],
                entropy[rows],
            ).div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """Slices that cover [0, num_tokens); one empty slice when there is nothing to cover."""
    starts = range(0, max(num_tokens, 1), chunk_size)
    return [slice(start, min(start + chunk_size, num_tokens)) for start in starts]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[C, V] logits over temperature, in at least float32: a fresh tensor."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log-probability of the targets, log-normaliser and entropy, each [C]. Overwrites `logits`."""
    log_normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.sub_(log_normaliser[:, None])
    chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs)
    return chosen, log_normaliser, entropy


def _grad_logits_(
    logprobs: Tensor, targets: Tensor, grad_chosen: Tensor, grad_entropy: Tensor, entropy: Tensor
) -> Tensor:
    """Gradient with respect to the [C, V] scaled logits, whose log-softmax is `logprobs`.

    d logprob_target / d logit_j = [j = target] - p_j
    d entropy / d logit_j = -p_j (logprob_j + entropy)
    """
    probabilities = logprobs.exp()
    logprobs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_chosen[:, None])
    grad = probabilities.mul_(logprobs).neg_()
    return grad.scatter_add_(-1, targets[:, None], grad_chosen[:, None])
