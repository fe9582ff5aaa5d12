"""Turns become rows: what is trained as one sequence. Pure but for the question to the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from async_grpo.types import Episode, Row, SamplingContract, Turn

# (history, its sampling, the worker that holds its longest prefix or "") -> a turn.
Generate = Callable[[NDArray[np.int32], SamplingContract, str], Awaitable[Turn]]


class NoRoom(Exception):
    """The next turn may not fit into a row; `play` lets it pass, and the episode ends."""


class _OpenRow:
    """A row that later turns may extend."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self.history = prompt  # [P + L]
        self._num_prompt = len(prompt)
        self._logprobs: list[NDArray[np.float32]] = []
        self._mask: list[NDArray[np.bool_]] = []
        self._spans: list[tuple[int, Turn]] = []  # where each turn begins in the output

    def is_prefix_of(self, token_ids: NDArray[np.int32]) -> bool:
        return np.array_equal(token_ids[: len(self.history)], self.history)

    def extend(self, token_ids: NDArray[np.int32], turn: Turn) -> None:
        """`token_ids` were read, of which the new ones are not trained; `turn` was sampled."""
        num_read = len(token_ids) - len(self.history)
        self._logprobs += [np.zeros(num_read, np.float32), turn.logprobs]
        self._mask += [np.zeros(num_read, np.bool_), np.ones(len(turn.token_ids), np.bool_)]
        self._spans.append((len(token_ids) - self._num_prompt, turn))
        self.history = np.concatenate([token_ids, turn.token_ids])

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
        )


class EpisodePolicy:
    """The policy of one episode: asks for turns, and keeps each of them in exactly one row.

    A history that extends a row continues it. One that does not, because it was rewritten, begins
    another row, whose prompt it is: nothing of it is trained again.
    """

    def __init__(
        self, generate: Generate, *, sampling: SamplingContract, max_row_tokens: int
    ) -> None:
        """`max_row_tokens`: the longest row that engine and trainer take."""
        self._generate = generate
        self._sampling = sampling
        self._max_row_tokens = max_row_tokens
        self._rows: list[_OpenRow] = []
        self._turns: list[Turn] = []

    @property
    def num_tokens(self) -> int:
        """Sampled until now, in whole turns."""
        return sum(len(turn.token_ids) for turn in self._turns)

    async def sample(
        self,
        token_ids: ArrayLike,
        *,
        max_tokens: int | None = None,
        stop: Sequence[int] = (),
        cut: Callable[[Turn], Turn] | None = None,
    ) -> Turn:
        """See `Policy`; raises `NoRoom`."""
        history = np.array(token_ids, dtype=np.int32)
        longest = min(max_tokens or self._sampling.max_tokens, self._sampling.max_tokens)
        if not len(history):
            raise ValueError("a history needs at least one token, got none: give the question's")
        if len(history) + longest > self._max_row_tokens:
            raise NoRoom(
                f"{len(history)} tokens and an answer of up to {longest} must fit "
                f"{self._max_row_tokens}"
            )
        stop_ids = tuple(dict.fromkeys((*self._sampling.stop_token_ids, *stop)))
        sampling = SamplingContract(self._sampling.temperature, stop_ids, longest)
        prefer = self._turns[-1].worker_id if self._turns else ""
        turn = await self._generate(history, sampling, prefer)
        turn = cut(turn) if cut else turn
        self._add(history, turn)
        return turn

    def episode(self, *, is_cut: bool = False) -> Episode:
        """The rows of all turns; `is_cut`: the next one did not fit."""
        return Episode(tuple(row.row() for row in self._rows), tuple(self._turns), is_cut)

    def _add(self, history: NDArray[np.int32], turn: Turn) -> None:
        extended = [row for row in self._rows if row.is_prefix_of(history)]
        if not extended:
            extended = [_OpenRow(history)]
            self._rows += extended
        max(extended, key=lambda row: len(row.history)).extend(history, turn)
        self._turns.append(turn)
