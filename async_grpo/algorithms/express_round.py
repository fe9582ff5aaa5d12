"""One minibatch of every trainer rank, as work for the ranks of a teacher: pure.

A sequence is read by the tensor ranks of one data rank, wherever its logits are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo.algorithms.express_plan import Block, Send, cut, mesh, plan_sends
from async_grpo.types import RowKey
from async_grpo.types.message import Parcel

CHUNK_BYTES = 16 << 20


class Reading(NamedTuple):
    """One sequence that a teacher reads for one trainer rank."""

    key: RowKey
    prompt: NDArray[np.int32]  # [P]
    output: NDArray[np.int32]  # [L]
    trained: NDArray[np.intp]  # indices into the output of the tokens whose logits are needed


@dataclass(frozen=True, slots=True, eq=False)
class ExpressRound(Parcel):
    """What one teacher rank reads, and what becomes of all ranks' logits."""

    readings: tuple[Reading, ...]  # whose output tokens are the rows of its block, in order
    held: tuple[Block, ...]  # of all teacher ranks: members 0, 1, ... of the group
    needed: tuple[Block, ...]  # of all trainer ranks: the members after these
    chunk_bytes: int = CHUNK_BYTES

    @property
    def num_tokens(self) -> int:
        """That this rank reads."""
        return sum(map(_length, self.readings))

    def sends(self, item_bytes: int) -> tuple[Send, ...]:
        """The same on every member; `item_bytes`: of one logit."""
        return plan_sends(
            self.held, self.needed, item_bytes=item_bytes, chunk_bytes=self.chunk_bytes
        )


def plan_round(
    needs: Sequence[Sequence[Reading]], *, teachers: tuple[int, int], width: int
) -> list[ExpressRound]:
    """The work of each teacher rank; `needs` are those of each trainer rank.

    `teachers`: sizes of the data and the tensor axis. `width`: columns of the logits.
    """
    num_data, num_tensor = teachers
    parts = _share_out([reading for own in needs for reading in own], num_data)
    num_teachers = num_data * num_tensor
    held = mesh(
        [[(r.key, token) for r in part for token in range(len(r.output))] for part in parts],
        cut(width, num_tensor),
        processes=range(num_teachers),
    )
    needed = mesh(
        [[(r.key, int(token)) for r in own for token in r.trained] for own in needs],
        cut(width, 1),
        processes=range(num_teachers, num_teachers + len(needs)),
    )
    return [ExpressRound(tuple(part), held, needed) for part in parts for _ in range(num_tensor)]


def _share_out(readings: Sequence[Reading], num_parts: int) -> list[list[Reading]]:
    """The longest first, each to who has the fewest tokens: near-even forwards."""
    parts: list[list[Reading]] = [[] for _ in range(num_parts)]
    num_tokens = [0] * num_parts
    for reading in sorted(readings, key=lambda r: (-_length(r), r.key)):
        least = num_tokens.index(min(num_tokens))
        parts[least].append(reading)
        num_tokens[least] += _length(reading)
    return parts


def _length(reading: Reading) -> int:
    return len(reading.prompt) + len(reading.output)
