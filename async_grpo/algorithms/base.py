"""The interface of an algorithm: how samples become a gradient, in one class of one file.

                            called by the controller         called by trainer ranks
which scores are needed     `needs`
a finished group            `finish_group`, `mask`,
                            `contributes`
a finished step             `finish_step`
the sum over tokens                                          `aggregation`, `terms`, `loss`

The controller's half imports no torch: a `loss` that needs it imports it in its body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.roles import REFERENCE, TEACHER
from async_grpo.types import Group, Payload, Sample
from async_grpo.types.metrics import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from async_grpo.config.train_config import TrainConfig
    from async_grpo.model.lm_head import Head
    from async_grpo.model.logprobs import HeadTerm, TokenLogprobs
    from async_grpo.types import PackedMinibatch


Samples = tuple[Sample, ...]
Advantage = float | NDArray[np.float32]  # of a sample, or of each of its tokens [L]


@dataclass(frozen=True, slots=True)
class ScoreNeed:
    """Scores of a sample's tokens by another model: `Sample.scores[role]`, then `packed.scores`.

    The role `roles.TEACHER` is that of the teacher to which `--teacher-for` routes the sample.
    """

    role: str  # of the workers that compute them: `reference`, `teacher:NAME`
    num_columns: int = 0  # of each token; 0: the log-probability of the token itself
    before_advantages: bool = False  # rewards or advantages of every sample are computed of them
    of_given: bool = False  # also for given pairs, which have zeros otherwise
    payload: Payload | None = None  # of a teacher, besides: fetched by the rank that trains
    fetches_heads: bool = False  # every rank fetches its teachers' heads, once

    def columns(self, *, num_teachers: int) -> dict[str, int]:
        """{name in `packed.scores`: columns of each token}, of the role and of its payload.

        0 stands for one value a token, and for hidden states and logits, whose width is the
        teacher's. With several teachers a column `index` tells which one scored the token.
        """
        if self.payload is None:
            return {self.role: self.num_columns}
        several = {"index": 0} if num_teachers > 1 else {}
        return {self.role: self.num_columns} | {
            f"{self.role}.{name}": number
            for name, number in (self.payload.columns | several).items()
        }


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """A teacher's data that a rank needs to compute `Algorithm.teacher_terms`."""

    width: int  # columns of its logits
    head: Head | None = None  # of `width` columns, where a need `fetches_heads`


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """What one minibatch adds to the gradient and to the metrics of its step."""

    loss: Tensor  # [] differentiable, Σ w_i * loss_it
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # [] each, added up over minibatches


class Algorithm:
    """The base class of every algorithm; the defaults are those of one without advantages.

    Example: advantages that are normalised over the whole gradient step.

        class GlobalNorm(Grpo):
            def finish_step(self, groups):
                rewards = np.array([s.shaped_reward for g in groups for s in g.samples])
                ...
                return [[(s.shaped_reward - mean) / std for s in g.samples] for g in groups]
    """

    needs: tuple[ScoreNeed, ...] = ()
    learns_from_pairs = False  # (prompt, completion): neither questions nor workers are needed
    takes_ref_answers = False  # a group may have a given member, which `loss` trains if it is to
    uses_old_policy = False  # reads `packed.scores["old"]`, of the policy at the batch's start
    terms: tuple[HeadTerm, ...] = ()  # what the chunked head computes besides log-probabilities

    metrics: tuple[Metric, ...] = ()  # quotients of `LossSums.sums`, besides those of every run

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.prepare()

    def prepare(self) -> None:
        """Set attributes such as `needs` from the options; `ConfigError` if these contradict."""

    @property
    def waits_for_step(self) -> bool:
        """Whether advantages need the whole gradient step, so that its rounds wait for the last."""
        return type(self).finish_step is not Algorithm.finish_step

    @property
    def needs_reference(self) -> bool:
        """Whether earlier weights of the policy score its samples."""
        return any(need.role == REFERENCE for need in self.needs)

    @property
    def score_columns(self) -> dict[str, int]:
        """{name in `packed.scores`: columns} of all `needs`."""
        return self._columns(self.needs)

    @property
    def scores_of_given(self) -> frozenset[str]:
        """The names among `score_columns` that given pairs need too."""
        return frozenset(self._columns(need for need in self.needs if need.of_given))

    @property
    def teacher_need(self) -> ScoreNeed | None:
        """Its need of the run's teachers, or None."""
        return next((need for need in self.needs if need.role == TEACHER), None)

    @property
    def temperature(self) -> float:
        """The temperature at which the policy's log-probabilities are computed."""
        return self.config.sampling.temperature

    @property
    def samples_per_slot(self) -> int:
        """Samples that are planned for each slot of a batch."""
        return self.config.samples_per_slot

    @property
    def aggregation(self) -> str:
        """The rule for the weight w_i of a token and for what D counts (design, section 4)."""
        return self.config.objective.aggregation

    def finish_group(self, group: Group) -> Group:
        """The group with shaped rewards and advantages, or with `is_replaced`: to be drawn again.

        Every sample has been verified, and has its scores with `before_advantages`.
        """
        return group

    def finish_step(self, groups: Sequence[Group]) -> Sequence[Sequence[Advantage]]:
        """The advantages of all groups of a gradient step, one for each sample."""
        raise NotImplementedError

    def mask(self, samples: Samples) -> Samples:
        """Called after advantages: the samples, with tokens masked that must not be trained."""
        return samples

    def contributes(self, sample: Sample) -> bool:
        """False only where the gradient of the sample is exactly zero, whatever the policy."""
        return sample.num_trained_tokens > 0

    def teacher_terms(self, teachers: Sequence[Teacher]) -> tuple[HeadTerm, ...]:
        """Terms of the chunked head, besides `terms`, that read the teachers' payloads.

        Called once, on every trainer rank, when all teachers are known: `teachers`, in the order of
        `--teacher-for`, which is that of `packed.scores["teacher.index"]`.
        """
        return ()

    def loss(self, scored: TokenLogprobs, packed: PackedMinibatch) -> LossSums:
        """Plain sums over the minibatch's tokens, not divided by their number.

        A token with `packed.is_given` has no behaviour log-probability: it allows cross-entropy and
        divergences from a teacher alone.
        """
        raise NotImplementedError

    def in_words(self) -> tuple[str, ...]:
        """Sentences for the log about what is optimised."""
        return ()

    def _columns(self, needs: Iterable[ScoreNeed]) -> dict[str, int]:
        num = len(self.config.teacher_names)
        return {k: v for need in needs for k, v in need.columns(num_teachers=num).items()}


class GroupRules(Protocol):
    """The controller's half of an algorithm, in this process or in another."""

    needs: tuple[ScoreNeed, ...]
    waits_for_step: bool

    async def finish_group(self, group: Group) -> Group:
        """`Algorithm.finish_group`, then masks and contributions unless the group is replaced or
        waits for its step. A given group has neither rewards nor advantages: it is only masked.
        """
        ...

    async def finish_step(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The same groups with the advantages of their step, masks and contributions."""
        ...


class LocalRules:
    """`GroupRules` by calls of an algorithm in this process."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.needs = algorithm.needs
        self.waits_for_step = algorithm.waits_for_step
        self._algorithm = algorithm

    async def finish_group(self, group: Group) -> Group:
        if group.is_given:
            return self._settled(group)
        finished = self._algorithm.finish_group(group)
        return finished if finished.is_replaced or self.waits_for_step else self._settled(finished)

    async def finish_step(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        found = self._algorithm.finish_step(groups)
        return tuple(
            self._settled(with_advantages(group, advantages))
            for group, advantages in zip(groups, found, strict=True)
        )

    def _settled(self, group: Group) -> Group:
        """The group with masks, and with `contributes` False for samples that contribute zero."""
        # The balancing loss of experts does not depend on the advantage.
        balances = self._algorithm.config.objective.balance_coefficient > 0
        samples = tuple(
            sample
            if self._algorithm.contributes(sample) or (balances and sample.num_trained_tokens)
            else replace(sample, contributes=False)
            for sample in self._algorithm.mask(group.samples)
        )
        return replace(group, samples=samples)


def with_advantages(group: Group, advantages: Sequence[Advantage]) -> Group:
    """The group with an advantage for each of its samples."""
    samples = tuple(
        replace(sample, advantage=advantage)
        for sample, advantage in zip(group.samples, advantages, strict=True)
    )
    return replace(group, samples=samples)
