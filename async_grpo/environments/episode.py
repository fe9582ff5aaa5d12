"""One episode: its policy, whose turns become rows, and its services.

A row is a sequence that is trained as one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from async_grpo.config.roles import ENVIRONMENT, GENERATION, VERIFIER, judge, service
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Outage, reach
from async_grpo.environments.chat.messages import Dialogue, Message, Renderer, ToolSpec
from async_grpo.environments.judging import VerdictForm
from async_grpo.types import (
    Episode,
    EpisodesRequest,
    Experts,
    GenerationRequest,
    GradingRequest,
    JudgeRequest,
    OutageRequest,
    Question,
    Row,
    SamplingContract,
    ServiceRequest,
    Turn,
    Verdict,
    VerificationRequest,
)
from async_grpo.types.message import packed, unpacked
from async_grpo.util.errors import AsyncGrpoError, ConfigError, DeadlineError, ServerAway
from async_grpo.util.waiting import TRIES, ask_again, together

logger = logging.getLogger(__name__)
T = TypeVar("T")
V = TypeVar("V")
Ask = Callable[..., Awaitable[Any]]  # (role, method, request, *, cost) -> a worker's answer
FindRenderer = Callable[[str, str], Renderer]  # (model, name of --renderer) -> renderer
# (history, its sampling, the worker that caches its longest prefix or "") -> a turn.
Generate = Callable[[NDArray[np.int32], SamplingContract, str], Awaitable[Turn]]
AFTER_LOSS_S = 1.0
MAX_REASON_CHARACTERS = 500


class NoRoom(Exception):
    """The next turn may not fit into a row: the episode ends, unless `play` catches this."""


class _OpenRow:
    """A row to which later turns may be added."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self.history = prompt  # [P + L]
        self._num_prompt = len(prompt)
        self._logprobs: list[NDArray[np.float32]] = []
        self._mask: list[NDArray[np.bool_]] = []
        self._spans: list[tuple[int, Turn]] = []  # where each turn begins in the output
        self._experts: Experts | None = None  # of the history up to its last token but one

    def is_prefix_of(self, token_ids: NDArray[np.int32]) -> bool:
        return np.array_equal(token_ids[: len(self.history)], self.history)

    def extend(self, token_ids: NDArray[np.int32], turn: Turn) -> int:
        """Add a turn after `token_ids`, whose new tokens are not trained.

        Returns the index in the output at which the turn begins.
        """
        num_read = len(token_ids) - len(self.history)
        self._logprobs += [np.zeros(num_read, np.float32), turn.logprobs]
        is_trained = np.full(len(turn.token_ids), not turn.is_constrained)
        self._mask += [np.zeros(num_read, np.bool_), is_trained]
        start = len(token_ids) - self._num_prompt
        self._spans.append((start, turn))
        self._experts = self._with_experts_of(turn)
        self.history = np.concatenate([token_ids, turn.token_ids])
        return start

    def _with_experts_of(self, turn: Turn) -> Experts | None:
        """Those of each token when it was first computed; None once a turn does not tell them."""
        known = self._experts
        if turn.experts is None or (known is None and self._spans[1:]):
            return None
        before = turn.experts[:0] if known is None else known
        return np.concatenate([before, turn.experts[len(before) :]])

    def row(self) -> Row:
        return Row(
            prompt_token_ids=self.history[: self._num_prompt],
            token_ids=self.history[self._num_prompt :],
            logprobs=np.concatenate(self._logprobs),
            loss_mask=np.concatenate(self._mask),
            weights_versions=tuple(
                span._replace(start=start + span.start, stop=start + span.stop)
                for start, turn in self._spans
                for span in turn.weights_versions
            ),
            experts=self._experts,
        )


class EpisodePolicy:
    """The policy of one episode: requests turns, and keeps each of them in exactly one row.

    A turn whose history extends a row is added to it. A history that was rewritten becomes the
    prompt of another row: no token of it is trained again.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        sampling: SamplingContract,
        max_row_tokens: int,
        constrains: bool = False,
    ) -> None:
        """`max_row_tokens`: of the longest row that engine and trainer take."""
        self._generate = generate
        self._constrains = constrains
        self._sampling = sampling
        self.max_row_tokens = max_row_tokens
        self._rows: list[_OpenRow] = []
        self._turns: list[Turn] = []
        self._places: list[tuple[int, int]] = []  # of each turn: its row, and where it begins
        self._shown: Episode | None = None  # the latest return value of `episode`

    @property
    def num_tokens(self) -> int:
        """Tokens of the turns so far."""
        return sum(len(turn.token_ids) for turn in self._turns)

    async def sample(
        self,
        token_ids: ArrayLike,
        *,
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        grammar: str = "",
        cut: Callable[[Turn], Turn] | None = None,
    ) -> Turn:
        """See `Policy`; raises `NoRoom`."""
        grammar = grammar if self._constrains else ""
        history = np.array(token_ids, dtype=np.int32)
        longest = min(max_tokens or self._sampling.max_tokens, self._sampling.max_tokens)
        if not len(history):
            raise ValueError("a history needs at least one token, got none: give the question's")
        if longest < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}: leave it out")
        if len(history) + longest > self.max_row_tokens:
            raise NoRoom(
                f"{len(history)} tokens and an answer of up to {longest} must fit "
                f"{self.max_row_tokens}"
            )
        stop_ids = tuple(dict.fromkeys((*self._sampling.stop_token_ids, *stop)))
        sampling = replace(
            self._sampling, stop_token_ids=stop_ids, max_tokens=longest, grammar=grammar
        )
        prefer = self._turns[-1].worker_id if self._turns else ""
        turn = await self._generate(history, sampling, prefer)
        turn = cut(turn) if cut else turn
        turn = replace(turn, is_constrained=True) if grammar else turn
        is_own = turn.finish_reason == "length" and longest < self._sampling.max_tokens
        self._add(history, replace(turn, finish_reason="max_tokens") if is_own else turn)
        return turn

    def episode(self, *, is_cut: bool = False) -> Episode:
        """See `Policy`."""
        rows = tuple(row.row() for row in self._rows)
        places = tuple(self._places)
        self._shown = Episode(rows, tuple(self._turns), is_cut, places=places)
        return self._shown

    @property
    def _ended(self) -> Episode:
        return self._shown or self.episode()

    def masked_as(self, episode: Episode) -> Episode:
        """The recorded episode with the masks and verdict of `episode`, which has no complaint."""
        own = self._ended
        if episode is own:
            return own
        masks = (np.array(row.loss_mask, np.bool_) for row in episode.rows)
        rows = (replace(row, loss_mask=mask) for row, mask in zip(own.rows, masks, strict=True))
        return replace(own, rows=tuple(rows), verdict=episode.verdict)

    def complaint(self, episode: Episode) -> str:
        """Why an environment may not return this episode; empty: it may.

        It may mask more tokens than the recorded one, and change nothing else.
        """
        own = self._ended
        if len(episode.rows) != len(own.rows):
            return f"there are {len(own.rows)} rows, it returned {len(episode.rows)}"
        for number, (row, given) in enumerate(zip(own.rows, episode.rows, strict=True)):
            if given is row:
                continue
            if not _same_tokens(row, given):
                return f"the tokens of row {number} are others, or do not extend its prompt"
            num_read = np.count_nonzero(given.loss_mask.astype(bool) & ~row.loss_mask)
            if num_read:
                return f"row {number} would train {num_read} tokens that the model only read"
        return ""

    def _add(self, history: NDArray[np.int32], turn: Turn) -> None:
        extended = [row for row in self._rows if row.is_prefix_of(history)]
        if not extended:
            extended = [_OpenRow(history)]
            self._rows += extended
        row = max(extended, key=lambda row: len(row.history))
        self._places.append((self._rows.index(row), row.extend(history, turn)))
        self._turns.append(turn)


def _same_tokens(row: Row, other: Row) -> bool:
    same_spans = row.weights_versions == other.weights_versions
    same_length = np.shape(other.loss_mask) == row.loss_mask.shape
    arrays = ("prompt_token_ids", "token_ids", "logprobs")
    return (same_spans and same_length) and all(
        np.array_equal(getattr(row, name), getattr(other, name)) for name in arrays
    )


@dataclass(eq=False, repr=False)
class EpisodeServices:
    """See `Services`: those of one episode, or of the grading; knows when nothing is awaited."""

    _request: EpisodesRequest
    _ask: Ask
    _find_renderer: FindRenderer
    index: int  # of the episode in its group
    _outage: Outage | None  # which made the previous try fail before its first turn
    num_turns: int = 0  # requested
    asks: int = 0  # unanswered
    judged: list[tuple[object, ...]] = field(default_factory=list)  # verdicts of several judges
    _idle_since_s: float = field(default_factory=time.monotonic)

    @property
    def idle_s(self) -> float:
        """For how long the environment has waited for nothing; 0: it waits for an answer."""
        return 0.0 if self.asks else time.monotonic() - self._idle_since_s

    @property
    def model(self) -> str:
        """See `Services`."""
        return self._request.model

    async def ask(
        self, role: str, method: str, request: object, *, cost: float = 1.0, **where: object
    ) -> Any:
        """See `Services`."""
        with self._busy():
            return await self._ask(role, method, request, cost=cost, **where)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Within, the environment waits for an answer."""
        self.asks += 1
        try:
            yield
        finally:
            self.asks -= 1
            self._idle_since_s = time.monotonic()

    async def tell(self, why: str) -> None:
        """Report that the episode waits for a server, until cancelled.

        Raises `EpisodeFailed` when the controller ends the waiting.
        """
        kind = self._request.question.dataset_type
        request = OutageRequest(kind, why[:MAX_REASON_CHARACTERS])
        try:
            await self.ask(ENVIRONMENT, "outage", request)
        except AsyncGrpoError as error:
            raise EpisodeFailed(FailureClass.DEADLINE, str(error)) from error

    async def reach(self, send: Callable[[], Awaitable[T]], *, is_idempotent: bool = False) -> T:
        """See `Services`."""
        return await reach(send, is_idempotent=is_idempotent, tell=self.tell)

    async def dialogue(self, *, tools: Sequence[ToolSpec] = ()) -> Dialogue:
        """See `Services`."""
        request = self._request
        # Only the first dialogue with a model waits for its tokenizer.
        with self._busy():
            renderer = await asyncio.to_thread(self._find_renderer, request.model, request.renderer)
        return Dialogue(renderer, tools=tools)

    async def verify(self, question: Question, episodes: Sequence[Episode]) -> tuple[Verdict, ...]:
        """See `Services`."""
        outputs = tuple(
            VerificationRequest(self._request.ordinal, index, question, episode.turns[-1])
            for index, episode in enumerate(episodes)
        )
        return await self.ask(VERIFIER, "verify", GradingRequest(outputs), cost=float(len(outputs)))

    async def turn(
        self, history: NDArray[np.int32], sampling: SamplingContract, prefer: str
    ) -> Turn:
        """Sample a turn, if possible on the worker `prefer`; a lost turn is sampled again."""
        request = self._request
        seed = None
        if request.seed is not None:  # numpy makes one number of several
            words = np.random.SeedSequence((request.seed, self.index, self.num_turns))
            seed = int(words.generate_state(1, np.uint64)[0]) >> 1
        self.num_turns += 1
        if self._outage:
            self._outage.close()
        asked = GenerationRequest(request.ordinal, request.attempt, history, 1, sampling, seed)
        try:
            async with asyncio.timeout(request.turn_timeout_s or None):
                turns: tuple[Turn, ...] = await self._asked_again(
                    GENERATION, "generate", asked, version=request.oldest, prefer=prefer or None
                )
            return turns[0]
        except AsyncGrpoError as error:
            is_late = isinstance(error, DeadlineError)
            failure = FailureClass.DEADLINE if is_late else FailureClass.ENGINE
            message = f"a turn failed {TRIES} times, the last time: {error}"
            raise EpisodeFailed(failure, message) from error
        except TimeoutError as error:
            message = f"a turn took longer than --turn-timeout-s {request.turn_timeout_s:g}"
            raise EpisodeFailed(FailureClass.TIMEOUT, message) from error

    async def judge(
        self,
        names: Sequence[str],
        messages: Sequence[Message],
        *,
        form: VerdictForm[V],
        temperature: float = 0.0,
        max_tokens: int = 512,
    ) -> tuple[V, ...]:
        """See `Services`."""
        request = JudgeRequest(form.asked(messages), temperature, max_tokens)
        work = [self._verdict(name, form, request) for name in names]
        verdicts = tuple(await together(work, name="judge"))
        if len(verdicts) > 1:
            self.judged.append(verdicts)
        return verdicts

    async def ask_judge(
        self,
        name: str,
        messages: Sequence[Message],
        *,
        temperature: float = 1.0,
        max_tokens: int = 512,
    ) -> str:
        """See `Services`."""
        request = JudgeRequest(tuple(messages), temperature, max_tokens)
        return await self._judge_answer(name, request)

    async def _verdict(self, name: str, form: VerdictForm[V], request: JudgeRequest) -> V:
        for _ in range(TRIES):
            answer = await self._judge_answer(name, request)
            try:
                return form.verdict(answer)
            except ValueError as error:
                problem = error
                again = form.asked_again(request.messages, answer=answer, problem=error)
                request = replace(request, messages=again, is_again=True)
        message = f"judge {name} gave no verdict {TRIES} times, the last time: {problem}"
        raise EpisodeFailed(FailureClass.JUDGE, message)

    async def _judge_answer(self, name: str, request: JudgeRequest) -> str:
        known = self._request.judges
        if name not in known:
            message = f"judge {name!r} must be one of --judges {','.join(known)!r}: name it there"
            raise EpisodeFailed(FailureClass.ENVIRONMENT, message)
        return (await self._answer(judge(name), request, FailureClass.JUDGE)).text

    def __getitem__(self, name: str) -> Callable[[object], Awaitable[Any]]:
        """See `Services`."""

        async def answer(content: object) -> object:
            request = ServiceRequest(packed(content))
            return unpacked(await self._answer(service(name), request, FailureClass.SERVICE))

        return answer

    async def _answer(self, role: str, request: object, failure: FailureClass) -> Any:
        """The answer of a worker of the role; if the worker is lost, of another one."""
        try:
            return await self.reach(
                lambda: self._asked_again(role, "answer", request), is_idempotent=True
            )
        except ConfigError as error:  # there is no such role
            raise EpisodeFailed(FailureClass.ENVIRONMENT, str(error)) from error
        except AsyncGrpoError as error:
            who = role.replace(":", " ")
            message = f"{who} failed {TRIES} times, the last time: {error}"
            raise EpisodeFailed(failure, message) from error

    async def _asked_again(self, role: str, method: str, request: object, **where: Any) -> Any:
        """See `ask_again`; for a server that is away, no other worker is tried."""
        return await ask_again(
            lambda: self.ask(role, method, request, **where),
            lost=AsyncGrpoError,
            final=(ServerAway, ConfigError),
            warn=partial(logger.warning, "another %s worker is asked: %s", role),
            pause_s=AFTER_LOSS_S,
        )
