"""Which cells of a teacher's logits are sent from which process to which. Pure.

A mesh is data x tensor: the data axis cuts rows (trained tokens), the tensor axis the vocabulary.
Teacher and trainer meshes may have any sizes; rows are matched by their ids, not their positions.

A round is one minibatch of every trainer rank, as work for the ranks of a teacher: the tensor ranks
of one data rank read a sequence, whichever ranks need its logits.

Example: teachers 1 x 2 hold both halves of four columns, trainers 2 x 1 need a row each.

>>> teachers = mesh([["a", "b"]], cut(4, 2), processes=[0, 1])
>>> trainers = mesh([["b"], ["a"]], cut(4, 1), processes=[2, 3])
>>> for send in plan_sends(teachers, trainers, item_bytes=2, chunk_bytes=64):
...     print(send.source, send.target, send.source_rows, send.columns)
0 2 (1,) (0, 2)
1 3 (0,) (2, 4)
0 3 (0,) (0, 2)
1 2 (1,) (2, 4)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import RowKey
from async_grpo.types.message import Parcel

RowId = Hashable  # of one row of logits: (`RowKey` of its sequence, token within the output)
Interval = tuple[int, int]  # columns [first, second)
Holders = Mapping[RowId, Sequence[tuple[int, int]]]  # (index of a block, position in its rows)
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """The cells that one process holds or needs: these rows x these columns."""

    process: int  # its rank in the express group
    rows: tuple[RowId, ...]
    columns: Interval


class Send(NamedTuple):
    """The cells of one message, or of a copy if source and target are the same process."""

    source: int  # process
    target: int
    source_rows: tuple[int, ...]  # positions in the rows of the source's block
    target_rows: tuple[int, ...]  # positions of the same rows in the target's block
    columns: Interval

    @property
    def shape(self) -> tuple[int, int]:
        """(number of rows, number of columns)."""
        return len(self.source_rows), self.columns[1] - self.columns[0]

    @property
    def is_local(self) -> bool:
        return self.source == self.target


def cut(num_columns: int, parts: int) -> tuple[Interval, ...]:
    """Consecutive intervals whose widths differ by at most one.

    >>> cut(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    widths = [num_columns // parts + (part < num_columns % parts) for part in range(parts)]
    return tuple(pairwise(accumulate(widths, initial=0)))


def mesh(
    rows: Sequence[Sequence[RowId]], columns: Sequence[Interval], *, processes: Sequence[int]
) -> tuple[Block, ...]:
    """One block a process: that of data rank d and tensor rank t is number d * len(columns) + t."""
    blocks = product(map(tuple, rows), columns)
    return tuple(
        Block(process, own_rows, own_columns)
        for process, (own_rows, own_columns) in zip(processes, blocks, strict=True)
    )


def plan_sends(
    held: Sequence[Block], needed: Sequence[Block], *, item_bytes: int, chunk_bytes: int
) -> tuple[Send, ...]:
    """Sends by which every needed cell reaches its block exactly once, in the order of sending.

    `item_bytes`: of one cell. Sends are cut by rows into chunks of at most `chunk_bytes`. A cell's
    source is the process that needs it, if it holds it, else the holder with the fewest cells to
    send so far. Raises ValueError when no process holds a needed cell, when a process has two
    blocks on one side or a block has a row twice, or when `chunk_bytes` is less than one row.
    """
    held, needed = (_checked(side) for side in (held, needed))
    holders: dict[RowId, list[tuple[int, int]]] = defaultdict(list)
    for number, block in enumerate(held):
        for position, row in enumerate(block.rows):
            holders[row].append((number, position))
    num_cells: Counter[int] = Counter()  # to send, by process
    sends = [
        (number, send)
        for target in needed
        for whole in _sends_to(target, held, holders, num_cells)
        for number, send in enumerate(_chunks(whole, item_bytes, chunk_bytes))
    ]
    sources, targets = (
        {block.process: place for place, block in enumerate(side)} for side in (held, needed)
    )

    def order(numbered: tuple[int, Send]) -> tuple[int, ...]:
        """By number of the chunk, then so that neighbours have other sources and targets."""
        number, send = numbered
        distance = (targets[send.target] - sources[send.source]) % len(targets)
        return number, distance, sources[send.source], *send.columns

    return tuple(send for _, send in sorted(sends, key=order))


def _checked(blocks: Sequence[Block]) -> Sequence[Block]:
    """The blocks, sorted by process: every member makes the same plan. ValueError: see above."""
    counts = Counter(block.process for block in blocks)
    if counts and max(counts.values()) > 1:
        raise ValueError(f"a process has one block of a mesh, got several of {max(counts)}")
    for block in blocks:
        if len(set(block.rows)) < len(block.rows):
            twice, _ = Counter(block.rows).most_common(1)[0]
            raise ValueError(f"a block has each row once, got {twice} twice in {block.process}")
    return sorted(blocks, key=lambda block: block.process)


def _sends_to(
    target: Block, held: Sequence[Block], holders: Holders, num_cells: Counter[int]
) -> Iterator[Send]:
    """Yield uncut sends of all cells that one block needs; adds to the sources' `num_cells`."""
    found: dict[tuple[int, Interval], list[tuple[int, int]]] = defaultdict(list)
    pieces: dict[tuple[int, ...], list[tuple[Interval, list[int]]]] = {}
    for target_row, row in enumerate(target.rows):
        positions = dict(holders.get(row, ()))
        numbers = tuple(positions)
        if numbers not in pieces:
            pieces[numbers] = list(_pieces(target, row, [(n, held[n]) for n in numbers]))
        for columns, candidates in pieces[numbers]:
            source = min(
                candidates,
                key=lambda n: (held[n].process != target.process, num_cells[held[n].process], n),
            )
            if held[source].process != target.process:
                num_cells[held[source].process] += columns[1] - columns[0]
            found[source, columns].append((positions[source], target_row))
    for (number, columns), places in found.items():
        source_rows, target_rows = zip(*places, strict=True)
        yield Send(held[number].process, target.process, source_rows, target_rows, columns)


def _pieces(
    target: Block, row: RowId, candidates: Sequence[tuple[int, Block]]
) -> Iterator[tuple[Interval, list[int]]]:
    """Yield the target's columns, cut where a holder's begin or end, with each piece's holders."""
    start, stop = target.columns
    edges = {edge for _, block in candidates for edge in block.columns if start < edge < stop}
    for columns in pairwise(sorted({start, stop} | edges)):
        having = [
            number
            for number, block in candidates
            if block.columns[0] <= columns[0] and columns[1] <= block.columns[1]
        ]
        if not having:
            raise ValueError(
                f"every needed cell must be held by a process, nobody holds columns {columns} of "
                f"row {row}, which process {target.process} needs: have a teacher score it"
            )
        yield columns, having


def _chunks(send: Send, item_bytes: int, chunk_bytes: int) -> Iterator[Send]:
    num_rows, width = send.shape
    step = chunk_bytes // (width * item_bytes)
    if not step:
        raise ValueError(
            f"a chunk must hold a row of {width} columns, {width * item_bytes} bytes, got "
            f"{chunk_bytes}: make chunks larger"
        )
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        yield send._replace(source_rows=send.source_rows[rows], target_rows=send.target_rows[rows])


class Reading(NamedTuple):
    """One sequence that a teacher reads for one trainer rank."""

    key: RowKey
    prompt: NDArray[np.int32]  # [P]
    output: NDArray[np.int32]  # [L]
    trained: NDArray[np.intp]  # indices into the output of the tokens whose logits are needed

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True, eq=False)
class ExpressRound(Parcel):
    """The sequences that one teacher rank reads, and the blocks of all members of the group."""

    readings: tuple[Reading, ...]  # their output tokens are the rows of its block, in order
    held: tuple[Block, ...]  # of all teacher ranks: members 0, 1, ... of the group
    needed: tuple[Block, ...]  # of all trainer ranks: the members after these
    chunk_bytes: int = CHUNK_BYTES

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that this rank reads."""
        return sum(reading.num_tokens for reading in self.readings)

    def sends(self, item_bytes: int) -> tuple[Send, ...]:
        """The plan, the same on every member; `item_bytes`: of one logit."""
        return plan_sends(
            self.held, self.needed, item_bytes=item_bytes, chunk_bytes=self.chunk_bytes
        )


def plan_round(
    needs: Sequence[Sequence[Reading]], *, teachers: tuple[int, int], width: int
) -> list[ExpressRound]:
    """The work of each teacher rank; `needs` has the sequences of each trainer rank.

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
    """Divide the sequences, longest first, each to the part with the fewest tokens so far."""
    parts: list[list[Reading]] = [[] for _ in range(num_parts)]
    num_tokens = [0] * num_parts
    for reading in sorted(readings, key=lambda r: (-r.num_tokens, r.key)):
        least = num_tokens.index(min(num_tokens))
        parts[least].append(reading)
        num_tokens[least] += reading.num_tokens
    return parts
