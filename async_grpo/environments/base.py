"""Defines environments: user code that plays an episode for a question. No Ray here.

    class Guess(Environment):
        async def play(self, question, policy, services):
            history = question.input_token_ids
            first = await policy.sample(history)
            history = np.concatenate([history, first.token_ids, feedback(question, first)])
            await policy.sample(history)
            return policy.episode()

The tokens that the model samples are trained; the model only reads the others in `history`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from numpy.typing import ArrayLike

from async_grpo.environments.causes import Cause
from async_grpo.environments.causes import ModelError as ModelError  # for authors
from async_grpo.environments.chat.messages import Dialogue, Message, ToolSpec
from async_grpo.environments.judging import VerdictForm
from async_grpo.types import Episode, Question, Turn, Verdict
from async_grpo.util.errors import WorkerError, escaped
from async_grpo.util.waiting import together
from async_grpo.verification.graders import UnscorableError

T = TypeVar("T")


class FailureClass(StrEnum):
    """The part of an episode that has failed; mistakes of the model are no failures."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    TOOL = "tool infrastructure"
    JUDGE = "judge"
    SERVICE = "service"
    DEADLINE = "deadline"  # there was no progress for too long
    TIMEOUT = "timeout"  # of --turn-timeout-s or --episode-timeout-s: not played again


CAUSES = {  # of failures that are raised without a cause; of other parts it is unknown
    FailureClass.ENGINE: Cause.STATE,
    FailureClass.TOOL: Cause.STATE,
    FailureClass.TIMEOUT: Cause.LIMIT,
}


class EpisodeFailed(WorkerError):
    """An episode could not be played or graded: an error, never a reward of 0."""

    def __init__(
        self,
        failure: FailureClass,
        message: str,
        again: Mapping[str, tuple[int, int]] | None = None,
        *,
        cause: Cause | None = None,
    ) -> None:
        """`cause` decides what follows, see causes.py; None: the one in `CAUSES`.

        `again`: the field of `PlayedGroup`, for the group that fails with the episode.
        """
        super().__init__(escaped(message))
        self.failure = failure
        self.again = again or {}
        self.cause = cause or CAUSES.get(failure, Cause.UNKNOWN)
        self.place = ""  # the exception's name and the line of the user's code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failure, str(self), self.again), vars(self)


class Policy(Protocol):
    """What one episode can ask of the model that is trained."""

    @property
    def max_row_tokens(self) -> int:
        """Tokens of the longest row that engine and trainer take, with an answer."""

    async def sample(
        self,
        token_ids: ArrayLike,
        *,
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        grammar: str = "",
        cut: Callable[[Turn], Turn] | None = None,
    ) -> Turn:
        """Sample the model's next tokens after `token_ids`, the whole history, until a stop id.

        `max_tokens` may only shorten the run's longest output, `stop` only add ids to the run's;
        `cut` may end the turn earlier (`Turn.stopped`), but must decide by its tokens up to there.
        `grammar` (see `SamplingContract`) is followed with --constrained-outputs, and ignored
        without; such a turn is read and not trained.
        A turn that may not fit into a row is not sampled: the episode ends, with `length`.
        """

    def episode(self, *, is_cut: bool = False) -> Episode:
        """The rows of all turns so far, which `play` returns; `is_cut`: the next did not fit."""


class Services(Protocol):
    """What an episode can ask of other workers of the run."""

    @property
    def model(self) -> str:
        """The run's model: a folder, or a name on a hub."""

    async def verify(self, question: Question, episodes: Sequence[Episode]) -> tuple[Verdict, ...]:
        """Verdicts of the run's rewards for the last turn of each episode."""

    async def ask(self, role: str, method: str, request: object, *, cost: float = 1.0) -> Any:
        """The answer of a worker of `role`; `cost`: in units of that role's capacity."""

    def __getitem__(self, name: str) -> Callable[[object], Awaitable[Any]]:
        """A function that asks a service of yours: `await services["calculator"]("1+2")`.

        See `Service`. If a worker is lost, another one gets its requests. Calls raise
        `EpisodeFailed` for a service that fails, and for one that has no workers.
        """

    async def reach(self, send: Callable[[], Awaitable[T]], *, is_idempotent: bool = False) -> T:
        """The result of `send`, a request to a server of yours; repeated while that is away.

        A request that may have arrived is repeated only if it may arrive twice: `is_idempotent`.
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
        """A verdict of each of these judges of --judges; a judge without one is asked again.

        Raises `EpisodeFailed` for a judge that fails: that is never a grade.
        """

    async def ask_judge(
        self,
        name: str,
        messages: Sequence[Message],
        *,
        temperature: float = 1.0,
        max_tokens: int = 512,
    ) -> str:
        """The next message of a judge's model, such as a played user; raises `EpisodeFailed`."""

    async def dialogue(self, *, tools: Sequence[ToolSpec] = ()) -> Dialogue:
        """A conversation with the policy in messages: `await dialogue.reply(policy, messages)`."""


class Environment:
    """Derive and write `play`; one object plays all episodes of a worker, many at a time."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """Play one episode; ends with `return policy.episode()`.

        Let the model read what a tool says of its mistakes. Raise `ModelError` for a mistake that
        ends the episode, which is then graded as it stands. Any other exception fails the whole
        group; `EpisodeFailed` names the part that failed.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how it plays")

    async def grade(
        self, question: Question, episodes: Sequence[Episode], services: Services
    ) -> Sequence[Verdict]:
        """A verdict for each episode of a group, when all have ended.

        By default those that the episodes have (`replace(policy.episode(), verdict=...)`), or the
        rewards' if any has none.
        """
        own = [episode.verdict for episode in episodes if episode.verdict]
        return own if len(own) == len(episodes) else await services.verify(question, episodes)


class SingleTurn(Environment):
    """The controller plays it itself: one request to one engine for all members of a group."""

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """Sample one answer to the question."""
        await policy.sample(question.input_token_ids)
        return policy.episode()


class GradedTurn(SingleTurn):
    """One turn, graded by an asynchronous reward: `--environment my_rewards.py:my_reward`.

    It is played and graded in an environment worker, so that the reward may ask services.
    """

    def __init__(self, reward: Callable[..., Awaitable[Any]], *, name: str) -> None:
        """`reward` takes (question, episode, services); if it is groupwise, all episodes."""
        self._reward = reward
        self._name = name

    async def grade(
        self, question: Question, episodes: Sequence[Episode], services: Services
    ) -> Sequence[Verdict]:
        """What the reward says; whatever it raises, but for `UnscorableError`, fails the group."""
        if getattr(self._reward, "groupwise", False):
            results = list(await self._reward(question, episodes, services))
        else:
            work = (self._one(question, episode, services) for episode in episodes)
            results = await together(work, name="reward")
        return [self._verdict(result) for result in results]

    async def _one(self, question: Question, episode: Episode, services: Services) -> object:
        try:
            return await self._reward(question, episode, services)
        except UnscorableError as error:
            return error

    def _verdict(self, result: object) -> Verdict:
        if isinstance(result, Verdict):  # such as that of `services.verify`
            return result
        if isinstance(result, UnscorableError):
            return Verdict("unscorable", 0.0, result.format_reward, self._name, str(result), 0.0)
        parts: Mapping[str, Any] = result if isinstance(result, Mapping) else {"reward": result}
        try:
            reward, other = float(parts["reward"]), parts.get("format_reward")
            return Verdict(
                "scored", reward, None if other is None else float(other), self._name, "", 0.0
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TypeError(
                f"reward {self._name} must return a number, or a dict with 'reward', got {result!r}"
            ) from error
