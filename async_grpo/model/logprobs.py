"""Log-probabilities, entropies and head terms, without ever holding a [N, V] tensor.

A head term is one number computed of a token's whole distribution, such as a divergence.

Legend: N scored tokens, H hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from async_grpo.model.lm_head import UNCHANGED, Head, Rescaling, add_product_

# exp() of it is 0 in every type, while its products with numbers near 1 stay finite: in place of
# -inf it makes 0 * log 0 = 0.
LEAST_LOGPROB = -1e4


class HeadTerm(Protocol):
    """One number a token, computed of its whole distribution: `Algorithm.terms`.

    `rows` are the `Sample.scores` of the same tokens, by name: [C] or [C, K] each. Neither method
    is called without tokens.
    """

    @property
    def name(self) -> str:
        """Its key in `TokenLogprobs.terms`."""
        ...

    def value(self, logprobs: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """The values [C] of a chunk's log-probabilities [C, V]."""
        ...

    def gradient(self, logprobs: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Gradient [C, V] of each value by its log-probabilities, taken as independent.

        Example: for Σ_v p_v (log p_v - log q_v) it is p_v (log p_v - log q_v + 1).
        """
        ...


class TokenLogprobs(NamedTuple):
    """Values of N target tokens under the policy; differentiable when the hidden states are.

    A named tuple, because FSDP2 finds the tensors of a forward's result as a pytree.
    """

    logprobs: Tensor  # [N] float32, or float64 for a float64 model
    entropy: Tensor  # [N] same type, in nats
    terms: Mapping[str, Tensor] = {}  # [N] each, of the head terms that were asked for


def token_logprobs(
    hidden: Tensor,
    head: Head,
    target_ids: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    compile: bool = False,
    terms: Sequence[HeadTerm] = (),
    rows: Mapping[str, Tensor] | None = None,
) -> TokenLogprobs:
    """Log-softmax of `head.logits(hidden) / temperature` at `target_ids`.

    hidden [N, H], target_ids [N] int64.
    At most a few [C, V] tensors exist at a time, forward and backward: the backward pass recomputes
    the logits of each chunk. `compile`: fuse the operations on a chunk's logits, if there are no
    `terms`. `rows`, [N] or [N, K] each, are what terms read besides the log-probabilities.
    Raises ValueError when `chunk_size` or `temperature` is not positive.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}: 1024 is usual")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}: 1.0 is usual")
    setting = _Setting(
        head.rescaling, temperature, chunk_size, compile and not terms, tuple(terms), rows or {}
    )
    logprobs, entropy, *values = _ChunkedLogprobs.apply(
        hidden, head.weight, head.bias, target_ids, setting
    )
    names = [term.name for term in terms]
    return TokenLogprobs(logprobs, entropy, dict(zip(names, values, strict=True)))


class _Setting(NamedTuple):
    rescaling: Rescaling
    temperature: float
    chunk_size: int
    compile: bool
    terms: tuple[HeadTerm, ...]
    rows: Mapping[str, Tensor]

    def rows_of(self, chunk: slice) -> dict[str, Tensor]:
        return {name: values[chunk] for name, values in self.rows.items()}


class _ChunkedLogprobs(torch.autograd.Function):
    """The forward keeps [N] statistics; the backward recomputes softmax chunk by chunk."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        setting: _Setting,
    ) -> tuple[Tensor, ...]:
        head = Head(weight, bias, setting.rescaling)
        statistics_of = _compiled(_statistics) if setting.compile else _statistics
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Allocated before the chunks: tensors that outlive a chunk would fragment the heap until it
        # is as large as all logits at once (glibc, below 32 MiB a tensor).
        logprobs, log_normaliser, entropy, *values = (
            torch.empty(len(targets), dtype=dtype, device=hidden.device)
            for _ in range(3 + len(setting.terms))
        )
        for rows in _chunks(len(targets), setting.chunk_size):
            logprobs[rows], log_normaliser[rows], entropy[rows], whole = statistics_of(
                hidden[rows],
                head,
                targets[rows],
                temperature=setting.temperature,
                keeps_whole=bool(setting.terms),
            )
            for value, term in zip(values, setting.terms, strict=True):
                if len(targets):
                    value[rows] = term.value(whole, setting.rows_of(rows))
            del whole  # before the next chunk's is allocated
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.setting = setting
        ctx.set_materialize_grads(False)
        return logprobs, entropy, *values

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        grad_chosen = torch.zeros_like(entropy) if grads[0] is None else grads[0]
        grad_entropy = grads[1]
        head = Head(weight, bias, ctx.setting.rescaling)
        pairs = zip(ctx.setting.terms, grads[2:], strict=True)
        used = [(term, grad) for term, grad in pairs if grad is not None and len(targets)]
        gradient_of = _compiled(_grad_logits) if ctx.setting.compile else _grad_logits
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None  # of a frozen head
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=log_normaliser.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=log_normaliser.dtype)
        for rows in _chunks(len(targets), ctx.setting.chunk_size):
            grad = gradient_of(
                hidden[rows],
                head,
                targets[rows],
                temperature=ctx.setting.temperature,
                log_normaliser=log_normaliser[rows],
                entropy=entropy[rows],
                grad_chosen=grad_chosen[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
                terms=[(term, grad[rows]) for term, grad in used],
                rows=ctx.setting.rows_of(rows),
            )
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                add_product_(grad_weight, grad.T, hidden[rows])
            del grad  # before the next chunk's is allocated
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None


@functools.cache
def _compiled(function: Callable[..., object]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """Slices that cover [0, num_tokens); one empty slice for 0 tokens."""
    starts = range(0, max(num_tokens, 1), chunk_size)
    return [slice(start, min(start + chunk_size, num_tokens)) for start in starts]


def _statistics(
    hidden: Tensor, head: Head, targets: Tensor, *, temperature: float, keeps_whole: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """log-probability of the targets, log-normaliser and entropy, each [C], and on request all
    log-probabilities [C, V].

    With x the logits minus their largest and z = sum exp(x): entropy = log z - sum(x exp(x)) / z,
    whose terms are all positive. One exponential of the chunk serves all three.
    """
    logits = _over(head.logits(hidden), temperature)
    largest = logits.amax(-1, keepdim=True)
    logits.sub_(largest)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    if head.bias is not None:
        logits.clamp_(min=LEAST_LOGPROB)
    exponentials = logits.exp()
    total = exponentials.sum(-1)
    log_total = total.log()
    entropy = log_total - exponentials.mul_(logits).sum(-1) / total
    whole = logits.sub_(log_total[:, None]) if keeps_whole else None
    return chosen - log_total, largest.squeeze(-1) + log_total, entropy, whole


def _grad_logits(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad_chosen: Tensor,
    grad_entropy: Tensor | None,
    terms: Sequence[tuple[HeadTerm, Tensor]],
    rows: Mapping[str, Tensor],
) -> Tensor:
    """Gradient with respect to the [C, V] output of the head, before rescaling and temperature.

    d logprob_target / d logit_j = [j = target] - p_j
    d entropy / d logit_j = -p_j (logprob_j + entropy)
    d term / d logit_j = g_j - p_j Σ_v g_v, where g is its gradient by log-probabilities
    """
    logits = head.logits(hidden)
    slope = head.rescaling.slope(logits)
    logprobs = _over(logits, temperature).sub_(log_normaliser[:, None])
    if head.bias is not None:
        logprobs.clamp_(min=LEAST_LOGPROB)
    of_terms = [_term_gradient(logprobs, term, grad / temperature, rows) for term, grad in terms]
    grad_chosen = grad_chosen[:, None] / temperature
    if grad_entropy is None:
        grad = logprobs.exp_().mul_(-grad_chosen)
    else:
        grad = logprobs.exp()
        grad_entropy = grad_entropy[:, None] / temperature
        logprobs.add_(entropy[:, None]).mul_(grad_entropy).add_(grad_chosen)
        grad.mul_(logprobs).neg_()
    for each in of_terms:
        grad += each
    grad.scatter_add_(-1, targets[:, None], grad_chosen)
    return grad if head.rescaling == UNCHANGED else grad.mul_(slope)


def _over(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.div_(temperature)


def _term_gradient(
    logprobs: Tensor, term: HeadTerm, grad: Tensor, rows: Mapping[str, Tensor]
) -> Tensor:
    """Gradient [C, V] by logits / temperature, times the incoming gradient [C] of each value."""
    by_logprob = term.gradient(logprobs, rows)
    total = by_logprob.sum(-1, keepdim=True)
    return torch.addcmul(by_logprob, logprobs.exp(), total, value=-1).mul_(grad[:, None])
