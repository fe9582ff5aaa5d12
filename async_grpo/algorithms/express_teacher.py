"""A teacher rank of an express group: the whole trunk, and its columns of the head.

consumes:     rounds: sequences to read, and who needs which rows of their logits
produces:     these cells, a chunk at a time, into the sends of the round's plan
waits for:    the trainer ranks that the cells go to, and at a round's end all members
unblocked by: a trainer that is ready for the next chunk

Legend: N output tokens of a round here, C of one chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from async_grpo.algorithms.express import ExpressGroup, Give, Meeting
from async_grpo.algorithms.express_plan import Block, Send
from async_grpo.algorithms.express_round import ExpressRound, Reading
from async_grpo.model.scoring import Scorer, TokenIds
from async_grpo.util import deadlines
from async_grpo.util.errors import ExpressLost

Pair = tuple[TokenIds, TokenIds]  # prompt ids [P], output ids [L]


class ExpressTeacher:
    """A teacher's model as one member of express groups, one after another."""

    def __init__(self, scorer: Scorer, *, device: torch.device, max_tokens: int) -> None:
        """A forward has at most `max_tokens`, of prompts and outputs."""
        self._scorer = scorer
        self._device = device
        self._max_tokens = max_tokens
        self._group: ExpressGroup | None = None

    def join(
        self, meeting: Meeting, *, rank: int, timeout_s: float = deadlines.EXPRESS_CHUNK_S
    ) -> None:
        """Leave the group before, if any, for a new one. Raises `ExpressLost`."""
        self.leave()
        self._group = ExpressGroup(meeting, rank=rank, device=self._device, timeout_s=timeout_s)

    def leave(self) -> None:
        """Close the group, if any."""
        if self._group is not None:
            self._group.close()
        self._group = None

    @torch.no_grad()
    def serve(self, work: ExpressRound) -> None:
        """Read the sequences, and send what others need of their logits. Raises `ExpressLost`."""
        group = self._group
        if group is None:
            raise ExpressLost("this teacher is in no express group: form one")
        try:
            own = next(block for block in work.held if block.process == group.rank)
            give = self._giving(self._hidden(work.readings), own, group.dtype)
            sends = work.sends(group.dtype.itemsize)
        except BaseException:
            self.leave()
            raise
        group.exchange(sends, give=give, take=_nothing)

    def _hidden(self, readings: Sequence[Reading]) -> Tensor:
        """[N, H] last hidden states, of which the head predicts the output tokens."""
        policy = self._scorer.policy
        parts = [
            policy.hidden_states(self._scorer.packed(pairs))
            for pairs in _forwards(readings, self._max_tokens)
        ]
        width = self._scorer.head.weight.shape[1]
        return torch.cat(parts) if parts else torch.empty(0, width, device=self._device)

    def _giving(self, hidden: Tensor, own: Block, dtype: torch.dtype) -> Give:
        """Logits [C, columns] of a send: this rank's columns of the head, for one chunk of rows."""
        head = self._scorer.head.columns(slice(*own.columns))

        def give(send: Send) -> Tensor:
            part = slice(*(column - own.columns[0] for column in send.columns))
            rows = torch.tensor(send.source_rows, device=hidden.device)
            return head.columns(part).logits(hidden.index_select(0, rows)).to(dtype)

        return give


def _forwards(readings: Sequence[Reading], max_tokens: int) -> Iterator[list[Pair]]:
    """Prompts and outputs in order, as many to a forward as fit; at least one."""
    taken: list[Pair] = []
    room = max_tokens
    for reading in readings:
        size = len(reading.prompt) + len(reading.output)
        if taken and size > room:
            yield taken
            taken, room = [], max_tokens
        taken.append((reading.prompt, reading.output))
        room -= size
    if taken:
        yield taken


def _nothing(send: Send, cells: Tensor) -> None:
    """A teacher needs no cells."""
