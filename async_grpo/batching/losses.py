"""What becomes of a group when a worker that samples it, or plays its episodes, is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from async_grpo.batching.failures import Requests, SlotFailed, Verdicts, WorkProgress
from async_grpo.batching.leased_work import LOSSES, Reason
from async_grpo.batching.ledger import SlotAccount
from async_grpo.config.roles import ENVIRONMENT
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause, Next, decide
from async_grpo.types import Cut, GenerationRequest, Question, Turn, VerificationRequest
from async_grpo.types.samples import joined
from async_grpo.util.waiting import forget


class Members:
    """The outputs of a group while workers sample them and are lost, and their verdicts."""

    def __init__(
        self,
        request: GenerationRequest,
        question: Question,
        account: SlotAccount,
        grade: Callable[[Requests], Coroutine[object, object, Verdicts]],
        grades_singly: Callable[[], bool],
    ) -> None:
        """`grades_singly()`: `grade` needs no other outputs of the group, as far as is known."""
        # A grammar's state is not in the tokens.
        self.request = replace(request, with_cuts=not request.sampling.grammar)
        self.account = account
        self._question = question
        self._grade = grade
        self._grades_singly = grades_singly
        self._begun: Sequence[Turn] = ()  # what lost workers have sampled of each, up to a cut
        # By index: outputs that have ended while others went on.
        self._graded: dict[int, tuple[Turn, asyncio.Task[Verdicts]]] = {}

    def told(self, cuts: Sequence[Cut]) -> None:
        """Begin to grade the outputs that have ended with the last of the worker's cuts."""
        if not self._grades_singly():
            return
        for index, part in enumerate(cuts[-1].parts):
            if part.is_finished and index not in self._graded:
                turn = joined(self._parts(cuts)[index])
                asked = VerificationRequest(self.request.ordinal, index, self._question, turn)
                task = asyncio.create_task(self._grade((asked,)), name="grade-early")
                self._graded[index] = turn, task

    def _parts(self, cuts: Sequence[Cut]) -> list[tuple[Turn, ...]]:
        told = [cut.parts for cut in cuts]
        return list(zip(*([self._begun, *told] if self._begun else told), strict=True))

    def again(self, reason: Reason, cuts: Sequence[Cut]) -> tuple[GenerationRequest, int]:
        """The request to the next worker, and the number of outputs that it has to sample.

        All outputs go on from the last cut, the same for those that were short and long. Without a
        cut, or after a bad answer, all are sampled again: that prefers what is sampled soon.
        """
        if reason not in LOSSES:
            self._begun = ()
        elif cuts:
            self._begun = [joined(parts) for parts in self._parts(cuts)]
        if self._begun:
            self.account.went_on(reason)
        else:
            self.account.sampled_again(reason)
        num_ended = sum(turn.is_finished for turn in self._begun)
        request = replace(self.request, begun=tuple(self._begun))
        return request, self.request.num_samples - num_ended

    async def verdicts(self, turns: Sequence[Turn]) -> Verdicts:
        """Those of all turns; of outputs that were sampled again after an early one, of the new."""
        early = {
            index: task
            for index, (turn, task) in self._graded.items()
            if np.array_equal(turn.token_ids, turns[index].token_ids)
        }
        late = [index for index in range(len(turns)) if index not in early]
        asked = tuple(
            VerificationRequest(self.request.ordinal, index, self._question, turns[index])
            for index in late
        )
        found = dict(zip(late, await self._grade(asked), strict=True)) if asked else {}
        found |= {index: (await task)[0] for index, task in early.items()}
        return tuple(found[index] for index in range(len(turns)))

    def close(self) -> None:
        """Grade no more."""
        for _, task in self._graded.values():
            task.cancel()
            task.add_done_callback(forget)


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """Decides for one group of episodes whether it is played again after a failure."""

    dataset_type: str
    account: SlotAccount
    progress: WorkProgress
    num_tries: Counter[bool] = field(default_factory=Counter)  # by whether a token was sampled

    def failed(self, error: EpisodeFailed) -> None:
        """Its worker reports a failure; raise `SlotFailed` unless the group is played again."""
        self.account.played_again(error.again)
        stage = f"{ENVIRONMENT}: {error.failure}"
        self._again(error, stage=stage, reason=stage, has_sampled=True)

    def worker_lost(self, reason: str) -> None:
        """As `failed`, for a worker that can no longer report."""
        problem = self.progress.problem.reason if self.progress.problem else ""
        why = EpisodeFailed(FailureClass.ENVIRONMENT, problem, cause=Cause.STATE)
        has_sampled = self.account.has_sampled
        self._again(why, stage=ENVIRONMENT, reason=reason, has_sampled=has_sampled)

    def _again(self, failed: EpisodeFailed, *, stage: str, reason: str, has_sampled: bool) -> None:
        self.num_tries[has_sampled] += 1
        num_tries = self.num_tries[has_sampled]
        follows = decide(failed.cause, has_sampled=has_sampled, num_tries=num_tries)
        if follows not in (Next.GROUP, Next.MEMBER):
            sentence = f"{failed}: the groups of such episodes are dropped, and counted"
            self.progress.failed(f"{stage} {self.dataset_type} {failed.place}", sentence)
            raise SlotFailed(stage, str(failed)) from failed
        self.account.sampled_again(reason)
