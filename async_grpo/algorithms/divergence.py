"""Generalised Jensen-Shannon divergences between a teacher's distribution q and the policy's p.

    0 < α < 1    D = α KL(q‖m) + (1 - α) KL(p‖m),  m = (1 - α) p + α q
    α = 0        D = KL(q‖p)
    α = 1        D = KL(p‖q)                Agarwal et al., GKD, arXiv 2306.13649, eq. 1

The gradient by a logit of the policy over the temperature is p_v (g_v - Σ p g), where g is
(1 - α) log(p/m), or log(p/q) for α = 1; for α = 0 it is p_v Σ q - q_v.

Legend: C tokens of a chunk, M outcomes: tokens of the vocabulary, or cells of several.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_EXPONENT = 80.0  # exp() of it is finite in float32, and beside it 1 is nothing


def divergence(policy: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    """D [C] of log-probabilities [C, M], in nats; at least 0.

    Where p and q are nearly the same its terms cancel to second order in log(q/p), and so does the
    rounding of these: with 0 = Σ (q - p) in the sum each of its terms is at least 0.

    >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> [round(divergence(p, q, alpha=alpha).item(), 4) for alpha in (0, 0.5, 1)]
    [0.1308, 0.0338, 0.1438]
    """
    gap = teacher - policy
    if 0 < alpha < 1:
        by_policy, by_teacher = _by_mixture(gap, alpha)
        by_policy = by_policy.mul_(policy.exp()).sum(-1)
        by_teacher = by_teacher.mul_(teacher.exp()).sum(-1)
        total = alpha * by_teacher + (1 - alpha) * by_policy
    else:
        # q - p without cancellation: the smaller is exp(-|gap|) of the larger.
        excess = torch.expm1(-gap.abs()).mul_(torch.maximum(policy, teacher).exp_())
        excess = excess.mul_(gap.sign()).neg_()
        total = (
            torch.exp(teacher).mul_(gap).sub_(excess).sum(-1)
            if alpha == 0
            else torch.exp(policy).mul_(-gap).add_(excess).sum(-1)
        )
    return total.clamp_(min=0)  # what is below is rounding


def gradient_by_logits(policy: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    """∂D / ∂logits [C, M] that make the policy's log-probabilities [C, M]; each row sums to 0.

    For α = 0 it is no quotient q/p, which overflows where the policy is sure of something else.
    """
    probs = policy.exp()
    if alpha == 0:
        outcomes = teacher.exp()
        return probs.mul_(outcomes.sum(-1, keepdim=True)).sub_(outcomes)
    gap = teacher - policy
    by_prob = gap.neg_() if alpha == 1 else _by_mixture(gap, alpha)[0].mul_(1 - alpha)
    # Relative to the likeliest outcome's, whose p g would cancel against the mean: where p is
    # nearly 1 only rounding would be left of its gradient.
    by_prob = by_prob - by_prob.gather(-1, policy.argmax(-1, keepdim=True))
    mean = (probs * by_prob).sum(-1, keepdim=True)
    return by_prob.sub_(mean).mul_(probs)


def _by_mixture(gap: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """log(p/m) and log(q/m) [C, M] of gap = log(q/p), exactly 0 where it is 0.

    m/p = 1 + α (q/p - 1), and m/q likewise: of the two the one of the smaller weight is taken, in
    which 1 never cancels.
    """
    gap = gap.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    if alpha < 0.5:
        by_policy = torch.expm1(gap).mul_(alpha).log1p_().neg_()
        return by_policy, gap.add_(by_policy)
    by_teacher = torch.expm1(-gap).mul_(1 - alpha).log1p_().neg_()
    return by_teacher - gap, by_teacher
