"""Divergences as terms of the chunked head: what a rank computes of a teacher's payload.

Both distributions are taken at a temperature τ of their own, over the columns that both models
have: they pad one vocabulary to different widths. `TopKDivergence` compares the teacher's K
likeliest tokens and one cell for all others, on both sides. Merging cells can only lower a
divergence: 0 <= D_K <= D_(K+1) <= D_V.

Legend: C tokens of a chunk, V columns of the policy's logits, W those that a teacher has too, K of
them, d hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.algorithms.divergence import divergence, gradient_by_logits
from async_grpo.model.lm_head import Head
from async_grpo.model.logprobs import LEAST_LOGPROB
from async_grpo.types import Payload
from async_grpo.types.roles import TEACHER

NAME = "divergence"
IDS, LOGPROBS, TAIL = f"{TEACHER}.ids", f"{TEACHER}.logprobs", f"{TEACHER}.tail"
HIDDEN, LOGITS, INDEX = f"{TEACHER}.hidden", f"{TEACHER}.logits", f"{TEACHER}.index"
Rows = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """What a rank knows of a teacher."""

    width: int  # columns of its logits
    head: Head | None = None  # of `width` columns, for the payload `hidden`


@dataclass(frozen=True, slots=True, eq=False)
class Divergence(ABC):
    """A head term that compares each token's distribution with that of its teacher.

    `rows` hold what the payload says; of several teachers also which it is: `INDEX` [C].
    """

    teachers: tuple[Teacher, ...]
    alpha: float
    temperature: float  # τ
    policy_temperature: float  # of the log-probabilities that it is given
    name: str = NAME

    def value(self, logprobs: Tensor, rows: Rows) -> Tensor:
        """[C] of the policy's log-probabilities [C, V]."""
        values = logprobs.new_empty(len(logprobs))
        for chosen, teacher in self._by_teacher(rows):
            policy = self._policy(logprobs, chosen, teacher)
            values[chosen] = self._value(policy, _of(rows, chosen), teacher)
        return values

    def gradient(self, logprobs: Tensor, rows: Rows) -> Tensor:
        """[C, V] by the policy's log-probabilities; each row sums to 0."""
        gradient = torch.zeros_like(logprobs)
        for chosen, teacher in self._by_teacher(rows):
            policy = self._policy(logprobs, chosen, teacher)
            found = self._gradient(policy, _of(rows, chosen), teacher)
            gradient[chosen, : teacher.width] = found.mul_(self._scale)
        return gradient

    @abstractmethod
    def _value(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        """[C] of one teacher's tokens, of the policy's log-probabilities [C, W] at τ."""

    @abstractmethod
    def _gradient(self, policy: Tensor, rows: Rows, teacher: Teacher) -> Tensor:
        """[C, W] by the policy's logits over τ, a fresh tensor."""

    @property
    def _scale(self) -> float:
        """Logits over τ by logits over the policy's temperature."""
        return self.policy_temperature / self.temperature

    def _policy(self, logprobs: Tensor, chosen: Tensor | slice, teacher: Teacher) -> Tensor:
        """[C, W] the policy's log-probabilities at τ over the columns that its teacher has."""
        if self._scale == 1.0 and teacher.width >= logprobs.shape[-1]:
            return logprobs[chosen]
        return torch.log_softmax(logprobs[chosen, : teacher.width] * self._scale, dim=-1)

    def _by_teacher(self, rows: Rows) -> Iterator[tuple[Tensor | slice, Teacher]]:
        """(tokens, their teacher) of teachers that have some; all at once where none differ."""
        first = self.teachers[0]
        if all(t.width == first.width and t.head is first.head for t in self.teachers):
            yield slice(None), first
            return
        for number, teacher in enumerate(self.teachers):
            chosen = (rows[INDEX] == number).nonzero().squeeze(-1)
            if len(chosen):  # rows are as wide as the widest teacher that has some here
                yield chosen, teacher


class TopKDivergence(Divergence):
    """D of K tokens and a tail: reads `IDS` and `LOGPROBS` [C, K], and `TAIL` [C], at τ."""

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
        # Of the K it may overflow, and they are written over.
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
        """[C, W] log-probabilities of the teacher at τ."""
        num_columns = policy.shape[-1]
        if teacher.head is None:
            logits = rows[LOGITS][:, :num_columns]
        else:
            head = teacher.head.columns(slice(num_columns))
            hidden = rows[HIDDEN][:, : head.weight.shape[1]]  # filled up to the widest teacher's
            logits = head.logits(hidden.to(head.weight.dtype))
        logprobs = torch.log_softmax(logits.to(policy) / self.temperature, dim=-1)
        return logprobs.clamp_(min=LEAST_LOGPROB)


def head_term(
    payload: Payload, teachers: Sequence[Teacher], *, alpha: float, policy_temperature: float
) -> Divergence:
    """The term that reads such payloads of these teachers, which `INDEX` counts."""
    kind = TopKDivergence if payload.kind == "topk" else DenseDivergence
    return kind(tuple(teachers), alpha, payload.temperature, policy_temperature)


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
    """[C] log of the probability of all tokens but `ids` [C, K]; -inf where there are no others.

    A sum over these: 1 less the others would be rounding where they have nearly all.
    """
    return logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)


def _cells(chosen: Tensor, tail: Tensor) -> Tensor:
    """[C, K + 1] of log-probabilities [C, K] and [C]; all finite, so that 0 log 0 = 0."""
    return torch.cat([chosen, tail[:, None]], dim=-1).clamp_(min=LEAST_LOGPROB)


def _of(rows: Rows, chosen: Tensor | slice) -> Rows:
    return {name: values[chosen] for name, values in rows.items()}
