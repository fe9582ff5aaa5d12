"""The loss of `Distillation`: plain sums over tokens, not divided by their number.

Besides GRPO's terms it has a divergence, a term of the chunked head, which a rank computes of a
teacher's payload. It is a generalised Jensen-Shannon divergence between the teacher's distribution
q and the policy's p:

    0 < α < 1    D = α KL(q‖m) + (1 - α) KL(p‖m),  m = (1 - α) p + α q
    α = 0        D = KL(q‖p)
    α = 1        D = KL(p‖q)                Agarwal et al., GKD, arXiv 2306.13649, eq. 1

The gradient by a logit of the policy over the temperature is p_v (g_v - Σ p g), where g is
(1 - α) log(p/m), or log(p/q) for α = 1; for α = 0 it is p_v Σ q - q_v.

p is taken at the temperature τ = --gkd-temperature and q, of which nothing is differentiated, at
--teacher-temperature, by default the same, both over the columns that both models have: models pad
one vocabulary to different widths. `TopKDivergence` compares the teacher's
K likeliest tokens and one cell for all others, in both distributions. Merging cells can only lower
a divergence: 0 <= D_K <= D_(K+1) <= D_V.

Legend: N trained tokens of a minibatch, C of a chunk, V columns of the policy's logits, W those
that a teacher has too, K of them, M outcomes: tokens of the vocabulary, or cells of several, d
hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_grpo.algorithms.base import LossSums, Teacher
from async_grpo.config.roles import TEACHER
from async_grpo.config.teaching import TeachingOptions
from async_grpo.model.logprobs import LEAST_LOGPROB, TokenLogprobs
from async_grpo.types import PackedMinibatch, Payload

NAME = "divergence"
IDS, LOGPROBS, TAIL = f"{TEACHER}.ids", f"{TEACHER}.logprobs", f"{TEACHER}.tail"
HIDDEN, LOGITS, INDEX = f"{TEACHER}.hidden", f"{TEACHER}.logits", f"{TEACHER}.index"
Rows = Mapping[str, Tensor]
Loss = Callable[[TokenLogprobs, PackedMinibatch], LossSums]
MAX_EXPONENT = 80.0  # exp() of it is finite in float32, and adding 1 to that changes nothing


def distillation_loss(
    scored: TokenLogprobs, packed: PackedMinibatch, teaching: TeachingOptions, *, grpo: Loss
) -> LossSums:
    """The sums of `grpo` with the teachers' part of each advantage, and γ Σ w_i divergence_it.

    `scored.terms[NAME]` [N] is read if γ is not 0, also of given tokens. `teacher_gap_sum` is over
    sampled tokens, `gkd_divergence_sum` over all; neither is weighted.
    """
    gap = packed.scores[TEACHER] - scored.logprobs.detach()
    followed = packed.advantages * teaching.reward_coefficient
    if teaching.opd_coefficient:
        bound = teaching.opd_clip or None
        within = gap if bound is None else gap.clamp(-bound, bound)
        followed = followed + teaching.opd_coefficient * within
    result = grpo(scored, replace(packed, advantages=followed))
    sampled_gap = gap if packed.is_given is None else gap[~packed.is_given]
    loss, sums = result.loss, {**result.sums, "teacher_gap_sum": sampled_gap.sum()}
    if teaching.gkd_coefficient:
        divergence_N = scored.terms[NAME]
        sums |= {"gkd_divergence_sum": divergence_N.sum()}
        if teaching.gkd_square_temperature:
            divergence_N = divergence_N * teaching.gkd_temperature**2
        loss = loss + teaching.gkd_coefficient * (packed.weights * divergence_N).sum()
        if (tail := packed.scores.get(TAIL)) is not None:
            sums |= {"teacher_tail_sum": torch.exp(tail).sum()}
    return LossSums(loss, sums=sums)


@dataclass(frozen=True, slots=True, eq=False)
class Divergence(ABC):
    """A head term that compares each token's distribution with that of its teacher.

    `rows` hold the payload and, with several teachers, the number of the token's: `INDEX` [C].
    """

    teachers: tuple[Teacher, ...]
    alpha: float
    temperature: float  # τ, of the policy
    teacher_temperature: float
    policy_temperature: float  # of the log-probabilities in `value` and `gradient`
    name: str = NAME

    def value(self, logprobs: Tensor, rows: Rows) -> Tensor:
        """The divergence [C] of the policy's log-probabilities [C, V]."""
        values = logprobs.new_empty(len(logprobs))
        for chosen, teacher in self._by_teacher(rows):
            policy = self._policy(logprobs, chosen, teacher)
            values[chosen] = self._value(policy, _of(rows, chosen), teacher)
        return values

    def gradient(self, logprobs: Tensor, rows: Rows) -> Tensor:
        """Its gradient [C, V] by the policy's log-probabilities; each row sums to 0."""
        gradient = torch.zeros_like(logprobs)
        for chosen, teacher in self._by_teacher(rows):
            policy = self._policy(logprobs, chosen, teacher)
            found = self._gradient(policy, _of(rows, chosen), teacher)
            gradient[chosen, : teacher.width] = found.mul_(self._scale)
        return gradient

    @abstractmethod
    def _value(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        """The divergence [C] of one teacher's tokens; `policy`: log-probabilities [C, W] at τ."""

    @abstractmethod
    def _gradient(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        """Its gradient [C, W] by the policy's logits divided by τ, a new tensor."""

    @property
    def _scale(self) -> float:
        """(logits / τ) divided by (logits / policy's temperature)."""
        return self.policy_temperature / self.temperature

    def _policy(self, logprobs: Tensor, chosen: Tensor | slice, teacher: Teacher) -> Tensor:
        """The policy's log-probabilities [C, W] at τ, over the columns that the teacher has."""
        if self._scale == 1.0 and teacher.width >= logprobs.shape[-1]:
            return logprobs[chosen]
        return torch.log_softmax(logprobs[chosen, : teacher.width] * self._scale, dim=-1)

    def _by_teacher(self, rows: Rows) -> Iterator[tuple[Tensor | slice, Teacher]]:
        """Yield (tokens, their teacher) of each teacher with any; all at once if teachers agree."""
        first = self.teachers[0]
        if all(t.width == first.width and t.head is first.head for t in self.teachers):
            yield slice(None), first
            return
        for number, teacher in enumerate(self.teachers):
            chosen = (rows[INDEX] == number).nonzero().squeeze(-1)
            if len(chosen):  # rows are as wide as the widest teacher of this minibatch
                yield chosen, teacher


class TopKDivergence(Divergence):
    """D of K tokens and a tail: reads the teacher's `IDS` and `LOGPROBS` [C, K], and `TAIL` [C]."""

    __slots__ = ()

    def _value(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        cells = _cells(policy.gather(-1, rows[IDS]), tail_of(policy, rows[IDS]))
        return divergence(cells, _cells(rows[LOGPROBS], rows[TAIL]).to(cells), alpha=self.alpha)

    def _gradient(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        ids = rows[IDS]
        cells = _cells(policy.gather(-1, ids), tail_of(policy, ids))
        of_teacher = _cells(rows[LOGPROBS], rows[TAIL]).to(cells)
        by_cell = gradient_by_logits(cells, of_teacher, alpha=self.alpha)
        # A token's share p_v / p_tail of the tail, in log space: both may be too small for floats.
        # The share may overflow for the K tokens, whose values the scatter overwrites.
        others = (policy - cells[:, -1:]).exp_().mul_(by_cell[:, -1:])
        return others.scatter_(-1, ids, by_cell[:, :-1])


class DenseDivergence(Divergence):
    """D of all tokens: reads `LOGITS` [C, width] of the teacher, or its `HIDDEN` states [C, d]."""

    __slots__ = ()

    def _value(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        return divergence(policy, self._teacher(rows, teacher, policy), alpha=self.alpha)

    def _gradient(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        return gradient_by_logits(policy, self._teacher(rows, teacher, policy), alpha=self.alpha)

    def _teacher(self, rows: Rows, teacher: Teacher, policy: Tensor) -> Tensor:
        """The teacher's log-probabilities [C, W] at its temperature."""
        num_columns = policy.shape[-1]
        if teacher.head is None:
            logits = rows[LOGITS][:, :num_columns]
        else:
            head = teacher.head.columns(slice(num_columns))
            hidden = rows[HIDDEN][:, : head.weight.shape[1]]  # padded to the widest teacher's
            logits = head.logits(hidden.to(head.weight.dtype))
        logprobs = torch.log_softmax(logits.to(policy) / self.teacher_temperature, dim=-1)
        return logprobs.clamp_(min=LEAST_LOGPROB)


def head_term(
    payload: Payload,
    teachers: Sequence[Teacher],
    *,
    alpha: float,
    policy_temperature: float,
    temperature: float = 0.0,
) -> Divergence:
    """The term that reads payloads of this kind; `teachers` in the order of `INDEX`.

    `temperature`: τ of the policy's distribution; 0: that of the payload, for both.
    """
    kind = TopKDivergence if payload.kind == "topk" else DenseDivergence
    own = temperature or payload.temperature
    return kind(tuple(teachers), alpha, own, payload.temperature, policy_temperature)


def top_k_with_tail(
    logits: Tensor, k: int, *, temperature: float, width: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A teacher's K likeliest ids [C, K] int32, their log-probabilities [C, K] and that of all
    others together [C], of logits [C, V] over τ in their first `width` columns (0: all).

    Raises ValueError for fewer columns than K.

    >>> logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    >>> ids, logprobs, tail = top_k_with_tail(logits, 2, temperature=1.0)
    >>> ids.tolist(), logprobs.exp().tolist(), tail.exp().tolist()
    ([[0, 1]], [[0.5, 0.25]], [0.25])
    """
    logits = logits[:, : width or None]
    if k > logits.shape[-1]:
        raise ValueError(
            f"k must not exceed the {logits.shape[-1]} tokens of the vocabulary, got {k}: lower "
            "--gkd-top-k"
        )
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    chosen, ids = logprobs.topk(k, dim=-1)
    return ids.to(torch.int32), chosen, tail_of(logprobs, ids)


def tail_of(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log of the probability [C] of all tokens but `ids` [C, K]; -inf if there are no others.

    A sum over these tokens: 1 less the probability of `ids` is rounding error where that is near 1.
    """
    return logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)


def _cells(chosen: Tensor, tail: Tensor) -> Tensor:
    """Log-probabilities [C, K] and [C] as [C, K + 1]; all finite, so that 0 log 0 = 0."""
    return torch.cat([chosen, tail[:, None]], dim=-1).clamp_(min=LEAST_LOGPROB)


def _of(rows: Rows, chosen: Tensor | slice) -> Rows:
    return {name: values[chosen] for name, values in rows.items()}


def divergence(policy: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    """D [C] of log-probabilities [C, M], in nats; at least 0.

    Where p and q are nearly equal, the terms cancel to second order in log(q/p), and rounding would
    remain; adding 0 = Σ (q - p) to the sum makes each term at least 0.

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
    return total.clamp_(min=0)  # negative values are rounding errors


def gradient_by_logits(policy: Tensor, teacher: Tensor, *, alpha: float) -> Tensor:
    """∂D / ∂logits [C, M] of the policy's log-probabilities [C, M]; each row sums to 0.

    For α = 0 it avoids the quotient q/p, which overflows where p is tiny.
    """
    probs = policy.exp()
    if alpha == 0:
        outcomes = teacher.exp()
        return probs.mul_(outcomes.sum(-1, keepdim=True)).sub_(outcomes)
    gap = teacher - policy
    by_prob = gap.neg_() if alpha == 1 else _by_mixture(gap, alpha)[0].mul_(1 - alpha)
    # Subtract g of the likeliest outcome, whose p g would cancel against the mean: where p is near
    # 1, only rounding would remain of its gradient.
    by_prob = by_prob - by_prob.gather(-1, policy.argmax(-1, keepdim=True))
    mean = (probs * by_prob).sum(-1, keepdim=True)
    return by_prob.sub_(mean).mul_(probs)


def _by_mixture(gap: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """log(p/m) and log(q/m) [C, M] of gap = log(q/p), exactly 0 where it is 0.

    m/p = 1 + α (q/p - 1), and m/q likewise: the one with the smaller weight is computed, in which 1
    does not cancel; the other follows from it.
    """
    gap = gap.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    if alpha < 0.5:
        by_policy = torch.expm1(gap).mul_(alpha).log1p_().neg_()
        return by_policy, gap.add_(by_policy)
    by_teacher = torch.expm1(-gap).mul_(1 - alpha).log1p_().neg_()
    return by_teacher - gap, by_teacher
