"""What an algorithm is: how samples become a gradient, in one object that one file defines.

                            asked by the controller          asked by trainer ranks
which scores are needed     `needs`
a finished group            `finish_group`, `mask`,
                            `contributes`
a finished step             `finish_step`
the sum over tokens                                          `aggregation`, `terms`, `loss`

The controller's half imports no torch: a `loss` that needs it imports it in its own body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """What another model says of a sample's tokens: `Sample.scores[role]`, later `packed`'s.

    The role `roles.TEACHER` is that of the teacher to which `--teacher-for` routes the sample.
    """

    role: str  # whose workers give it
    num_columns: int = 0  # of each token; 0: the log-probability of the token itself
    before_advantages: bool = False  # of every sample, for rewards or advantages are made of them
    of_given: bool = False  # also of samples that nobody sampled: they are 0 there otherwise
    payload: Payload | None = None  # also asked, of a teacher: fetched by the rank that trains
    fetches_heads: bool = False  # every rank fetches its teachers' heads, once

    def columns(self, *, num_teachers: int) -> dict[str, int]:
        """{name: columns of each token} in `packed.scores`: the role's own, and of the payload.

        Of hidden states and logits there are as many as the teacher has: 0 says one or more. Of
        several teachers also which it is.
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
    """What a rank knows of a teacher."""

    width: int  # columns of its logits
    head: Head | None = None  # of `width` columns, where a need `fetches_heads`


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """What one minibatch adds to the gradient and to the metrics of its step."""

    loss: Tensor  # [] differentiable, Σ w_i * loss_it
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # [] each; all minibatches add up


class Algorithm:
    """The base of every algorithm: each default is that of plain scoring without advantages.

    Example: advantages that are normalised over the whole gradient step.

        class GlobalNorm(Grpo):
            def finish_step(self, groups):
                rewards = np.array([s.shaped_reward for g in groups for s in g.samples])
                ...
                return [[(s.shaped_reward - mean) / std for s in g.samples] for g in groups]
    """

    needs: tuple[ScoreNeed, ...] = ()
    learns_from_pairs = False  # of prompt and completion: neither questions nor workers are needed
    uses_old_policy = False  # `packed.scores["old"]`: the policy as it was when the batch began
    terms: tuple[HeadTerm, ...] = ()  # what the chunked head computes beside log-probabilities

    metrics: tuple[Metric, ...] = ()  # made of sums of its loss, beside those of every run

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.prepare()

    def prepare(self) -> None:
        """Say what these options need; raise `ConfigError` for some that contradict each other."""

    @property
    def waits_for_step(self) -> bool:
        """Whether advantages need the whole gradient step: its rounds then wait for it."""
        return type(self).finish_step is not Algorithm.finish_step

    @property
    def needs_reference(self) -> bool:
        """Whether the policy's own earlier weights score its samples."""
        return any(need.role == REFERENCE for need in self.needs)

    @property
    def score_columns(self) -> dict[str, int]:
        """{name in `packed.scores`: columns} of all that it needs."""
        return dict(self._columns(self.needs))

    @property
    def scores_of_given(self) -> frozenset[str]:
        """Of these columns, those that samples need which nobody sampled."""
        return frozenset(dict(self._columns(need for need in self.needs if need.of_given)))

    @property
    def teacher_need(self) -> ScoreNeed | None:
        """What it needs of the run's teachers; None: they are not asked."""
        return next((need for need in self.needs if need.role == TEACHER), None)

    @property
    def temperature(self) -> float:
        """At which the policy's log-probabilities are computed."""
        return self.config.sampling.temperature

    @property
    def samples_per_slot(self) -> int:
        """Samples that a slot of the batch is planned to give."""
        return self.config.sampling.samples_per_question

    @property
    def aggregation(self) -> str:
        """The weight w_i of a token, and with it what D counts (design, section 4)."""
        return self.config.objective.aggregation

    def finish_group(self, group: Group) -> Group:
        """The group with shaped rewards and advantages, or replaced: its slot draws again.

        Every member was verified, and has the scores that are needed before advantages.
        """
        return group

    def finish_step(self, groups: Sequence[Group]) -> Sequence[Sequence[Advantage]]:
        """The advantages of all groups that a gradient step keeps, a sample each."""
        raise NotImplementedError

    def mask(self, samples: Samples) -> Samples:
        """The samples with the tokens masked that are not trained; decided after advantages."""
        return samples

    def contributes(self, sample: Sample) -> bool:
        """False only where the gradient of the sample is exactly zero, whatever the policy."""
        return sample.num_trained_tokens > 0

    def teacher_terms(self, teachers: Sequence[Teacher]) -> tuple[HeadTerm, ...]:
        """Terms of the chunked head, beside `terms`, that read what the teachers send.

        `teachers` are all of the run, in the order of `--teacher-for`: `packed.scores`'
        `teacher.index` counts them. Trainer ranks ask once, when they have met their teachers.
        """
        return ()

    def loss(self, scored: TokenLogprobs, packed: PackedMinibatch) -> LossSums:
        """Plain sums over the minibatch's tokens: nothing here divides by a count of them.

        Where `packed.is_given`, a token has no behaviour log-probability: cross-entropy and
        divergences from a teacher are what can be learnt from it.
        """
        raise NotImplementedError

    def in_words(self) -> tuple[str, ...]:
        """What is optimised, a sentence each."""
        return ()

    def _columns(self, needs: Iterable[ScoreNeed]) -> Iterator[tuple[str, int]]:
        num_teachers = len(self.config.teacher_names)
        for need in needs:
            yield from need.columns(num_teachers=num_teachers).items()


class GroupRules(Protocol):
    """The controller's half of an algorithm, in this process or in another."""

    needs: tuple[ScoreNeed, ...]
    waits_for_step: bool

    async def finish_group(self, group: Group) -> Group:
        """`Algorithm.finish_group`; of a group that is kept and waits for no step, all of it.

        A given group has neither rewards nor advantages: it is masked, and nothing else.
        """
        ...

    async def finish_step(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """The same groups with the advantages of their step, masks and contributions."""
        ...


class LocalRules:
    """An algorithm's rules as plain calls."""

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
        """With masks, and the samples told apart that contribute exactly zero."""
        samples = tuple(
            sample if self._algorithm.contributes(sample) else replace(sample, contributes=False)
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
