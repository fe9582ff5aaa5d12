"""Turns become rows: what is trained as one sequence. Pure but for the question to the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

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

    def extend(self, token_ids: NDArray[np.int32], turn: Turn) -> int:
        """`token_ids` were read, of which the new ones are not trained; `turn` was sampled.

        Where in the output the turn begins.
        """
        num_read = len(token_ids) - len(self.history)
        self._logprobs += [np.zeros(num_read, np.float32), turn.logprobs]
        self._mask += [np.zeros(num_read, np.bool_), np.ones(len(turn.token_ids), np.bool_)]
        start = len(token_ids) - self._num_prompt
        self._spans.append((start, turn))
        self.history = np.concatenate([token_ids, turn.token_ids])
        return start

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
        self.max_row_tokens = max_row_tokens
        self._rows: list[_OpenRow] = []
        self._turns: list[Turn] = []
        self._places: list[tuple[int, int]] = []
        self._shown: Episode | None = None

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
        if longest < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}: leave it out")
        if len(history) + longest > self.max_row_tokens:
            raise NoRoom(
                f"{len(history)} tokens and an answer of up to {longest} must fit "
                f"{self.max_row_tokens}"
            )
        stop_ids = tuple(dict.fromkeys((*self._sampling.stop_token_ids, *stop)))
        sampling = SamplingContract(self._sampling.temperature, stop_ids, longest)
        prefer = self._turns[-1].worker_id if self._turns else ""
        turn = await self._generate(history, sampling, prefer)
        turn = cut(turn) if cut else turn
        is_own = turn.finish_reason == "length" and longest < self._sampling.max_tokens
        self._add(history, replace(turn, finish_reason="max_tokens") if is_own else turn)
        return turn

    def episode(self, *, is_cut: bool = False) -> Episode:
        """The rows of all turns; `is_cut`: the next one did not fit."""
        rows = tuple(row.row() for row in self._rows)
        places = tuple(self._places)
        self._shown = Episode(rows, tuple(self._turns), is_cut, places=places)
        return self._shown

    @property
    def _ended(self) -> Episode:
        return self._shown or self.episode()

    def masked_as(self, episode: Episode) -> Episode:
        """The episode as it was recorded, with masks and verdict of one without a complaint."""
        own = self._ended
        if episode is own:
            return own
        masks = (np.array(row.loss_mask, np.bool_) for row in episode.rows)
        rows = (replace(row, loss_mask=mask) for row, mask in zip(own.rows, masks, strict=True))
        return replace(own, rows=tuple(rows), verdict=episode.verdict)

    def complaint(self, episode: Episode) -> str:
        """Why an environment may not return this as the episode that it has played; empty: it may.

        It may mask more than `episode` did, and nothing else.
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
