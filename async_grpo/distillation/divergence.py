"""Generalised Jensen-Shannon divergences between a teacher's distribution q and the policy's p.

    0 < α < 1    D = α KL(q‖m) + (1 - α) KL(p‖m),  m = (1 - α) p + α q
    α = 0        D = KL(q‖p)
    α = 1        D = KL(p‖q)                Agarwal et al., GKD, arXiv 2306.13649, eq. 1

The gradient by a logit of the policy over the temperature is p_v (g_v - Σ p g), where g is
(1 - α) log(p/m), or log(p/q) for α = 1; for α = 0 it is p_v - q_v.

Legend: C tokens of a chunk, M outcomes: tokens of the vocabulary, or cells of several.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_EXPONENT = 80.0  # exp() of it is finite in float32, and beside it 1 is nothing


def divergence(policy: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    """D [C] of log-probabilities [C, M], in nats; at least 0.

    Where p and q are nearly the same its terms cancel to second order in log(q/p), and so does the
    rounding of these: Σ (q - p) = 0 is part of the sum, each of whose terms is then at least 0.

    >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> [round(divergence(p, q, alpha=alpha).item(), 4) for alpha in (0, 0.5, 1)]
    [0.1308, 0.0338, 0.1438]
    """
    gap = teacher - policy
    if 0 < alpha < 1:
        smaller, distance = _smaller_by_mixture(gap, alpha)
        by_policy = distance.where(gap < 0, 0).add_(smaller).mul_(policy.exp()).sum(-1)
        by_teacher = distance.where(gap > 0, 0).add_(smaller).mul_(teacher.exp()).sum(-1)
        total = alpha * by_teacher + (1 - alpha) * by_policy
    else:
        # q - p, of which the smaller is a share exp(-|gap|) of the larger
        excess = torch.expm1(-gap.abs()).mul_(torch.maximum(policy, teacher).exp_())
        excess = excess.mul_(gap.sign()).neg_()
        total = (
            torch.exp(teacher).mul_(gap).sub_(excess).sum(-1)
            if alpha == 0
            else torch.exp(policy).mul_(gap).neg_().add_(excess).sum(-1)
        )
    return total.clamp_(min=0)  # what is below is rounding


def gradient_by_logits(policy: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    """∂D/∂log-probability of the policy [C, M], along its distributions: it sums to 0.

    That of α = 0 is no quotient q/p, which overflows where the policy is sure of something else.
    """
    probs = policy.exp()
    if alpha == 0:
        return probs.sub_(teacher.exp())
    gap = teacher - policy
    if alpha == 1:
        by_prob = gap.neg_()
    else:
        smaller, distance = _smaller_by_mixture(gap, alpha)
        by_prob = distance.where(gap < 0, 0).add_(smaller).mul_(1 - alpha)
    mean = (probs * by_prob).sum(-1, keepdim=True)
    return by_prob.sub_(mean).mul_(probs)


def _smaller_by_mixture(gap: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """log(min(p, q) / m) and |log(q/p)| [C, M], of gap = log(q/p).

    With a the weight of the larger in m, min(p, q) / m = 1 / (1 + a (exp(|gap|) - 1)): a sum of
    positive numbers, exact where p = q.
    """
    distance = gap.abs().clamp_(max=MAX_EXPONENT)
    of_larger = torch.where(gap > 0, alpha, 1 - alpha).to(gap.dtype)
    return of_larger.mul_(torch.expm1(distance)).log1p_().neg_(), distance
