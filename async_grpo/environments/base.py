"""What an environment is: user code that turns a question into an episode. No Ray here.

    class Guess(Environment):
        async def play(self, question, policy, services):
            history = question.input_token_ids
            first = await policy.sample(history)
            history = np.concatenate([history, first.token_ids, feedback(question, first)])
            await policy.sample(history)
            return policy.episode()

What the model samples is trained; what `history` holds beside is only read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from numpy.typing import ArrayLike

from async_grpo.environments.causes import Cause
from async_grpo.environments.causes import ModelError as ModelError  # authors find it here
from async_grpo.environments.chat.messages import Dialogue, Message, ToolSpec
from async_grpo.environments.judging import VerdictForm
from async_grpo.types import Episode, Question, Turn, Verdict
from async_grpo.util.errors import WorkerError, escaped

T = TypeVar("T")


class FailureClass(StrEnum):
    """What has failed of an episode; the model's own mistakes are none of these."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    TOOL = "tool infrastructure"
    JUDGE = "judge"
    SERVICE = "service"
    DEADLINE = "deadline"  # nothing moved for too long
    TIMEOUT = "timeout"  # of --turn-timeout-s or --episode-timeout-s: it is not played again


CAUSES = {  # of a part that has failed, where nobody says more; of others it is unknown
    FailureClass.ENGINE: Cause.STATE,
    FailureClass.TOOL: Cause.STATE,
    FailureClass.TIMEOUT: Cause.LIMIT,
}


class EpisodeFailed(WorkerError):
    """An episode that could not be played, or graded: an error, never a reward of 0."""

    def __init__(
        self,
        failure: FailureClass,
        message: str,
        again: Mapping[str, tuple[int, int]] | None = None,
        *,
        cause: Cause | None = None,
    ) -> None:
        """`cause` decides what follows, see there; None: that of `CAUSES`.

        `again`: of the group that is lost with it, see `PlayedGroup`.
        """
        super().__init__(escaped(message))
        self.failure = failure
        self.again = again or {}
        self.cause = cause or CAUSES.get(failure, Cause.UNKNOWN)
        self.place = ""  # what was raised and the line, where the episode was played

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failure, str(self), self.again), vars(self)


class Policy(Protocol):
    """The model that is trained, as one episode sees it."""

    @property
    def max_row_tokens(self) -> int:
        """The longest row that engine and trainer take, an answer included."""

    async def sample(
        self,
        token_ids: ArrayLike,
        *,
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        cut: Callable[[Turn], Turn] | None = None,
    ) -> Turn:
        """The model's next tokens after `token_ids`, the whole history, until a stop id.

        `max_tokens` may only shorten the run's longest output, `stop` only add ids to the run's;
        `cut` may end the turn earlier (`Turn.stopped`), by nothing but its tokens until there.
        A turn that may not fit into a row is not asked for: the episode ends, with `length`.
        """

    def episode(self, *, is_cut: bool = False) -> Episode:
        """The rows of all turns until now, what `play` returns; `is_cut`: the next had no room."""


class Services(Protocol):
    """Whatever else an episode needs: each is a role with workers."""

    @property
    def model(self) -> str:
        """The run's: a folder, or a name on a hub."""

    async def verify(self, question: Question, episodes: Sequence[Episode]) -> tuple[Verdict, ...]:
        """What the run's rewards say of the last turn of each episode."""

    async def ask(self, role: str, method: str, request: object, *, cost: float = 1.0) -> Any:
        """The answer of a worker of `role`."""

    def __getitem__(self, name: str) -> Callable[[object], Awaitable[Any]]:
        """What asks a service of yours: `await services["calculator"]("1+2")`, see `Service`.

        A worker that is lost has its requests asked again elsewhere. Raises `EpisodeFailed` for a
        service that fails, and for one that has no workers.
        """

    async def reach(self, send: Callable[[], Awaitable[T]], *, is_idempotent: bool = False) -> T:
        """What `send` gives, a request to a server of yours: sent again while that is away.

        One that may have arrived is sent again only if it may arrive twice: `is_idempotent`.
        """

    async def judge(
        self,
        names: Sequence[str],
        messages: Sequence[Message],
        *,
        form: VerdictForm[T],
        temperature: float = 0.0,
        max_tokens: int = 512,
    ) -> tuple[T, ...]:
        """A verdict of each judge of --judges; who gives none is asked again.

        Raises `EpisodeFailed` for a judge that fails: it is never a grade.
        """

    async def ask_judge(
        self,
        name: str,
        messages: Sequence[Message],
        *,
        temperature: float = 1.0,
        max_tokens: int = 512,
    ) -> str:
        """What the model of a judge says next, as when it plays a user; raises `EpisodeFailed`."""

    async def dialogue(self, *, tools: Sequence[ToolSpec] = ()) -> Dialogue:
        """A conversation with the policy in messages: `await dialogue.reply(policy, messages)`."""


class Environment:
    """Derive and write `play`; one object plays every episode of a worker, many at a time."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """One episode, which ends with `return policy.episode()`.

        What a tool says of a mistake of the model is something that the model reads. `ModelError`
        ends the episode, graded as it stands, for what the model wrote; any other exception fails
        its whole group; `EpisodeFailed` says which part did.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it plays")

    async def grade(
        self, question: Question, episodes: Sequence[Episode], services: Services
    ) -> Sequence[Verdict]:
        """A verdict for each episode of a group, when all have ended.

        By default the one that an episode has (`replace(policy.episode(), verdict=...)`), else the
        rewards'.
        """
        own = [episode.verdict for episode in episodes if episode.verdict]
        return own if len(own) == len(episodes) else await services.verify(question, episodes)


class SingleTurn(Environment):
    """Played by the controller itself: all members of a group are one request to one engine."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """The question, answered once."""
        await policy.sample(question.input_token_ids)
        return policy.episode()
