"""Logits from teacher ranks straight to trainer ranks: the process group, and a teacher's part.

The group exists beside the trainers' own. It is formed between two gradient steps, and again when
its members change. It uses gloo on hosts and NCCL on CUDA devices, by the same calls.

`ExpressGroup`, in each member:
consumes:     a plan, which every member makes of the same meshes; chunks that a teacher computes
produces:     the rows that a trainer needs; or `ExpressLost` on every remaining member
waits for:    the other end of each send; at the end of an exchange, all members
unblocked by: sends in the plan's order; a member's loss, by its closed connections or a timeout

`ExpressTeacher`, a teacher rank with the whole model and its columns of the head, or with shards of
the model and sequences of its own:
consumes:     rounds: sequences to read, and which rank needs which rows of their logits
produces:     these cells, a chunk at a time, into the sends of the round's plan
waits for:    the trainer ranks that the cells go to, and at a round's end all members
unblocked by: a trainer that is ready for the next chunk

Legend: N output tokens of a round here, C of one chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.algorithms.express_plan import Block, ExpressRound, Reading, Send
from async_grpo.model.scorer import FILLER, Scorer, TokenIds
from async_grpo.util import deadlines
from async_grpo.util.errors import ExpressLost

Give = Callable[[Send], Tensor]  # computes the cells of a send
Take = Callable[[Send, Tensor], None]  # keeps a copy of the cells of a send
Pair = tuple[TokenIds, TokenIds]  # prompt ids [P], output ids [L]


class Meeting(NamedTuple):
    """The address of one group's store, and what its members must agree on besides the plan."""

    address: str
    port: int
    num_members: int
    dtype: torch.dtype  # of the cells that travel


def open_meeting(
    address: str, *, num_members: int, dtype: torch.dtype
) -> tuple[Meeting, dist.Store]:
    """Called by one process, which keeps the store until it has left the group.

    `address`: that of this machine, by which other members reach it.
    """
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    return Meeting(address, store.port, num_members, dtype), store


class ExpressGroup:
    """One member of a group. After an error of any method, the caller must form another group."""

    def __init__(
        self,
        meeting: Meeting,
        *,
        rank: int,
        device: torch.device,
        timeout_s: float = deadlines.EXPRESS_CHUNK_S,
    ) -> None:
        """Return when all members have joined; `rank` is this process's rank in plans.

        A member that does not answer for `timeout_s` is lost. Raises `ExpressLost`.
        """
        self.rank = rank
        self.dtype = meeting.dtype
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        with _as_loss():
            store = dist.TCPStore(
                meeting.address,
                meeting.port,
                is_master=False,
                timeout=timedelta(seconds=deadlines.EXPRESS_FORMED_S),
            )
            self._group: dist.Backend | None = self._form(store, meeting.num_members)
            self._meet()

    def exchange(self, sends: Sequence[Send], *, give: Give, take: Take) -> None:
        """Carry out this member's part of a plan: call `give` as a source, `take` as a target.

        `give` returns cells [rows, columns] of the group's dtype on its device; `take` gets such
        cells, which the next chunk overwrites. One chunk is held besides what these two keep.
        Returns when every member has done its part. Raises `ExpressLost`. After any error in this
        member the group is closed, and the others get `ExpressLost`.
        """
        try:
            buffer = self._buffer(sends)
            for number, send in enumerate(sends):
                if send.source == self.rank:
                    self._give(number, send, self._checked(send, give(send)), take)
                elif send.target == self.rank:
                    take(send, self._received(number, send, buffer))
            self._meet()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group; members that still wait for this one get `ExpressLost`."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._group = None

    def _form(self, store: dist.Store, num_members: int) -> dist.Backend:
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, self.rank, num_members, options)
        return dist.ProcessGroupGloo(store, self.rank, num_members, self._timeout)

    def _give(self, number: int, send: Send, cells: Tensor, take: Take) -> None:
        if send.is_local:  # gloo cannot send from a process to itself
            take(send, cells)
            return
        with _as_loss():
            self._open.send([cells], send.target, number).wait(self._timeout)

    def _received(self, number: int, send: Send, buffer: Tensor) -> Tensor:
        rows, columns = send.shape
        cells = buffer[: rows * columns].view(rows, columns)
        with _as_loss():
            self._open.recv([cells], send.source, number).wait(self._timeout)
        return cells

    def _meet(self) -> None:
        """Wait for all members."""
        here = torch.zeros(1, device=self._device)
        with _as_loss():
            self._open.allreduce([here]).wait(self._timeout)

    @property
    def _open(self) -> dist.Backend:
        if self._group is None:
            raise ExpressLost("this express group is closed: form another")
        return self._group

    def _checked(self, send: Send, cells: Tensor) -> Tensor:
        """Make cells contiguous; ValueError for a shape or dtype that would crash the receiver."""
        if cells.shape != send.shape or cells.dtype != self.dtype:
            raise ValueError(
                f"cells must have the plan's shape {send.shape} and the group's type "
                f"{self.dtype}, got {tuple(cells.shape)} of {cells.dtype}"
            )
        return cells.contiguous()

    def _buffer(self, sends: Sequence[Send]) -> Tensor:
        """A buffer for the largest chunk that this member receives."""
        sizes = (
            send.shape[0] * send.shape[1]
            for send in sends
            if send.target == self.rank and not send.is_local
        )
        return torch.empty(max(sizes, default=0), dtype=self.dtype, device=self._device)


def keep_in(cells: Tensor, *, first_column: int = 0) -> Take:
    """A `Take` that writes into `cells` [N, columns], the block of the target."""

    def take(send: Send, received: Tensor) -> None:
        start, stop = (column - first_column for column in send.columns)
        rows = torch.tensor(send.target_rows, device=cells.device)
        cells[:, start:stop].index_copy_(0, rows, received)

    return take


@contextmanager
def _as_loss() -> Iterator[None]:
    """Raise torch's errors of connections and timeouts as `ExpressLost`."""
    try:
        yield
    except RuntimeError as error:  # torch has no class for gloo's errors
        if isinstance(error, ExpressLost):
            raise
        raise ExpressLost(
            f"an express group has lost a member ({error}): the step is done again without it"
        ) from error


class ExpressTeacher:
    """A teacher's model as a member of express groups, one after another."""

    def __init__(self, scorer: Scorer, *, device: torch.device, max_tokens: int) -> None:
        """`max_tokens`: of prompts and outputs in one forward."""
        self._scorer = scorer
        self._device = device
        self._max_tokens = max_tokens
        self._group: ExpressGroup | None = None

    def join(
        self, meeting: Meeting, *, rank: int, timeout_s: float = deadlines.EXPRESS_CHUNK_S
    ) -> None:
        """Join a new group; leave the one before, if any. Raises `ExpressLost`."""
        self.leave()
        self._group = ExpressGroup(meeting, rank=rank, device=self._device, timeout_s=timeout_s)

    def leave(self) -> None:
        """Close the group, if any."""
        if self._group is not None:
            self._group.close()
        self._group = None

    @staticmethod
    def num_forwards(work: ExpressRound, *, max_tokens: int) -> int:
        """Forwards that a rank's sequences take, at least one: it makes a sharded head whole."""
        return max(1, len(list(_forwards(work.readings, max_tokens))))

    @torch.no_grad()
    def serve(self, work: ExpressRound, *, num_forwards: int = 1) -> None:
        """Read the sequences, and send the logits that trainers need. Raises `ExpressLost`.

        `num_forwards`: the most of any rank that shares the model.
        """
        group = self._group
        if group is None:
            raise ExpressLost("this teacher is in no express group: form one")
        try:
            own = next(block for block in work.held if block.process == group.rank)
            give = self._giving(self._hidden(work.readings, num_forwards), own, group.dtype)
            sends = work.sends(group.dtype.itemsize)
        except BaseException:
            self.leave()
            raise
        group.exchange(sends, give=give, take=_nothing)

    def _hidden(self, readings: Sequence[Reading], num_forwards: int) -> Tensor:
        """The last hidden states [N, H], of which the head predicts the output tokens."""
        policy = self._scorer.policy
        parts = [
            policy.hidden_states(self._scorer.packed(pairs))
            for pairs in _forwards(readings, self._max_tokens)
        ]
        for _ in range((num_forwards - len(parts)) * self._scorer.is_sharded):
            policy.hidden_states(self._scorer.packed([FILLER]))  # the others gather from this rank
        width = self._scorer.head.weight.shape[1]
        return torch.cat(parts) if parts else torch.empty(0, width, device=self._device)

    def _giving(self, hidden: Tensor, own: Block, dtype: torch.dtype) -> Give:
        """A `Give`: logits [C, columns] of a send's rows, by this rank's columns of the head."""
        head = self._scorer.head.columns(slice(*own.columns))

        def give(send: Send) -> Tensor:
            part = slice(*(column - own.columns[0] for column in send.columns))
            rows = torch.tensor(send.source_rows, device=hidden.device)
            return head.columns(part).logits(hidden.index_select(0, rows)).to(dtype)

        return give


def _forwards(readings: Sequence[Reading], max_tokens: int) -> Iterator[list[Pair]]:
    """Yield the (prompt, output) pairs of each forward, in order; as many as fit, at least one."""
    taken: list[Pair] = []
    room = max_tokens
    for reading in readings:
        if taken and reading.num_tokens > room:
            yield taken
            taken, room = [], max_tokens
        taken.append((reading.prompt, reading.output))
        room -= reading.num_tokens
    if taken:
        yield taken


def _nothing(send: Send, cells: Tensor) -> None:
    """A `Take` of teachers, which plans give no cells."""
