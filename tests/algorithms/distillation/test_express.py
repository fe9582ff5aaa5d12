import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from members import CPU, Members, giving, logits, opened

from async_grpo.algorithms.express import ExpressGroup, keep_in
from async_grpo.algorithms.express_plan import cut, mesh, plan_sends
from async_grpo.util import deadlines
from async_grpo.util.errors import ExpressLost

MIB = 1 << 20
NUM_COLUMNS, PADDED = 1003, 1010  # the student's vocabulary, and the teacher's


def dealt(rows, parts, seed):
    """Uneven shares, in any order."""
    order = random.Random(seed).sample(rows, len(rows))
    edges = sorted(random.Random(seed).sample(range(1, len(rows)), parts - 1))
    return [order[a:b] for a, b in zip([0, *edges], [*edges, len(rows)], strict=True)]


def blocks(teachers, trainers, *, num_rows):
    rows, size = list(range(num_rows)), teachers[0] * teachers[1]
    members = range(size + trainers[0] * trainers[1])
    held = mesh(dealt(rows, teachers[0], 1), cut(PADDED, teachers[1]), processes=members[:size])
    needed = mesh(
        dealt(rows, trainers[0], 2), cut(NUM_COLUMNS, trainers[1]), processes=members[size:]
    )
    return held, needed


def exchanged(group, held, needed, dtype, *, chunk_bytes=40_000, at_each=lambda: None):
    """The bits that one member receives, those of its block; None for a teacher."""
    sends = plan_sends(held, needed, item_bytes=dtype.itemsize, chunk_bytes=chunk_bytes)
    own = {block.process: block for block in (*held, *needed)}[group.rank]
    start, stop = own.columns
    cells = torch.full((len(own.rows), stop - start), torch.nan, dtype=dtype)
    give, take = giving(own, PADDED, dtype), keep_in(cells, first_column=start)

    def slow_give(send):
        at_each()
        return give(send)

    def slow_take(send, received):
        at_each()
        take(send, received)

    group.exchange(sends, give=slow_give, take=slow_take)
    return None if own in held else bits(cells)


def bits(cells):
    return cells.contiguous().view(torch.uint8).numpy()


def one_exchange(rank, say, *, meeting, held, needed):
    group = ExpressGroup(meeting, rank=rank, device=CPU, timeout_s=30)
    return exchanged(group, held, needed, meeting.dtype)


@pytest.mark.parametrize(
    ("teachers", "trainers", "dtype"),
    [
        ((2, 2), (2, 1), torch.bfloat16),
        ((1, 4), (1, 2), torch.float32),
        ((2, 1), (1, 3), torch.float32),
        ((1, 2), (3, 1), torch.bfloat16),
        ((3, 1), (2, 2), torch.bfloat16),
        ((1, 3), (4, 1), torch.float32),
    ],
    ids=str,
)
def test_what_arrives_is_what_one_process_computes(teachers, trainers, dtype):
    held, needed = blocks(teachers, trainers, num_rows=97)
    num_members = len(held) + len(needed)
    meeting, _store = opened(num_members, dtype)
    with Members(
        one_exchange, num_members=num_members, meeting=meeting, held=held, needed=needed
    ) as members:
        received = members.results()[len(held) :]
    check(needed, received, dtype)


def check(needed, received, dtype):
    for block, cells in zip(needed, received, strict=True):
        whole = logits(list(block.rows), PADDED, dtype)
        assert np.array_equal(cells, bits(whole[:, slice(*block.columns)]))


SILENCE_S = 3.0


def until_lost_then_again(rank, say, *, before, after, victim):
    """An exchange that goes on until a member is lost; then one of those that are left."""
    group = ExpressGroup(before[0], rank=rank, device=CPU, timeout_s=SILENCE_S)

    def slowly():
        say("begun")
        time.sleep(0.02)

    began = time.monotonic()
    with pytest.raises(ExpressLost):
        exchanged(group, *before[1:], before[0].dtype, chunk_bytes=PADDED * 4, at_each=slowly)
    say(time.monotonic() - began)
    with pytest.raises(ExpressLost, match="closed"):
        exchanged(group, *before[1:], before[0].dtype)
    group = ExpressGroup(after[0], rank=rank - (rank > victim), device=CPU, timeout_s=30)
    return exchanged(group, *after[1:], after[0].dtype)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
@pytest.mark.parametrize(
    ("victim", "left"), [(1, ((1, 1), (2, 1))), (3, ((2, 1), (1, 1)))], ids=["teacher", "trainer"]
)
def test_a_lost_member_ends_the_group_for_all_and_those_left_form_another(victim, left, number):
    dtype = torch.float32
    before = blocks((2, 1), (2, 1), num_rows=400)
    after = blocks(*left, num_rows=50)
    (first, _store), (second, _other) = opened(4, dtype), opened(3, dtype)
    with Members(
        until_lost_then_again,
        num_members=4,
        before=(first, *before),
        after=(second, *after),
        victim=victim,
    ) as members:
        for _ in range(5):
            assert members.heard(victim) == "begun"
        members.send(victim, number)
        survivors = [rank for rank in range(4) if rank != victim]
        for rank in survivors:
            while (said := members.heard(rank)) == "begun":
                pass
            assert 0 < said < SILENCE_S + 5
        received = [members.heard(rank) for rank in survivors]
    held, needed = after
    check(needed, received[len(held) :], dtype)


def failing_teacher(rank, say, *, meeting, held, needed):
    group = ExpressGroup(meeting, rank=rank, device=CPU, timeout_s=SILENCE_S)

    def fail():
        if rank == 0:
            raise OSError("out of memory")

    exchanged(group, held, needed, meeting.dtype, at_each=fail)


def test_a_member_that_fails_ends_the_group_with_its_own_error():
    held, needed = blocks((2, 1), (1, 1), num_rows=9)
    meeting, _store = opened(3, torch.float32)
    with Members(
        failing_teacher, num_members=3, meeting=meeting, held=held, needed=needed
    ) as members:
        with pytest.raises(RuntimeError, match="OSError: out of memory"):
            members.heard(0)
        for rank in (1, 2):
            with pytest.raises(RuntimeError, match="ExpressLost"):
                members.heard(rank)


def peak_growth(rank, say, *, meeting, held, needed, chunk_bytes):
    """Bytes by which an exchange makes a process larger than it was with plan and model."""
    group = ExpressGroup(meeting, rank=rank, device=CPU, timeout_s=30)
    sends = plan_sends(held, needed, item_bytes=4, chunk_bytes=chunk_bytes)
    own = (*held, *needed)[rank]
    give = giving(own, PADDED, meeting.dtype)
    for send in [send for send in sends if send.source == rank][:1]:
        give(send)  # what products allocate once, is allocated here
    before, sizes = allocated(), []
    cells = torch.empty(0 if own in held else len(own.rows), NUM_COLUMNS)
    keep = keep_in(cells)

    def watched_give(send):
        computed = give(send)
        sizes.append(allocated())
        return computed

    def watched_take(send, received):
        keep(send, received)
        sizes.append(allocated())

    group.exchange(sends, give=watched_give, take=watched_take)
    return max(sizes) - before


def allocated():
    """Bytes of this process that are no file's: libraries are read from theirs as they are used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_no_member_holds_more_than_its_slice_and_a_chunk():
    chunk_bytes = 4 * MIB
    slack = 24 * MIB  # of the allocator, which keeps freed chunks; a teacher's whole block has 77
    held, needed = blocks((1, 2), (2, 1), num_rows=40_000)
    meeting, _store = opened(4, torch.float32)
    with Members(
        peak_growth,
        num_members=4,
        meeting=meeting,
        held=held,
        needed=needed,
        chunk_bytes=chunk_bytes,
    ) as members:
        growth = members.results()
    slices = [len(block.rows) * NUM_COLUMNS * 4 for block in needed]
    assert sum(slices) > 150 * MIB
    for grown, size in zip(growth, [0, 0, *slices], strict=True):
        assert grown <= size + chunk_bytes + slack


def of_both_meshes(rank, say, *, meeting, held, needed):
    """Every process has a teacher's block and a trainer's."""
    group = ExpressGroup(meeting, rank=rank, device=CPU, timeout_s=30)
    sends = plan_sends(held, needed, item_bytes=4, chunk_bytes=40_000)
    cells = torch.empty(len(needed[rank].rows), NUM_COLUMNS)
    give = giving(held[rank], PADDED, meeting.dtype)
    group.exchange(sends, give=give, take=keep_in(cells, first_column=0))
    return bits(cells)


def test_processes_may_be_teachers_and_trainers_at_once():
    rows = list(range(60))
    held = mesh(dealt(rows, 2, 1), cut(PADDED, 1), processes=range(2))
    needed = mesh(dealt(rows, 2, 2), cut(NUM_COLUMNS, 1), processes=range(2))
    meeting, _store = opened(2, torch.float32)
    with Members(
        of_both_meshes, num_members=2, meeting=meeting, held=held, needed=needed
    ) as members:
        check(needed, members.results(), torch.float32)


def test_cells_of_another_shape_or_type_are_refused_before_they_travel():
    held = mesh([[0]], cut(4, 1), processes=[0])
    sends = plan_sends(held, held, item_bytes=4, chunk_bytes=64)
    meeting, _store = opened(1, torch.float32)
    for cells in (torch.zeros(1, 3), torch.zeros(1, 4, dtype=torch.bfloat16)):
        group = ExpressGroup(meeting, rank=0, device=CPU)
        with pytest.raises(ValueError, match=r"\(1, 4\) and the group's type torch.float32"):
            group.exchange(sends, give=lambda _, c=cells: c, take=lambda *_: None)


def test_a_group_whose_members_do_not_come_is_lost(monkeypatch):
    monkeypatch.setattr(deadlines, "EXPRESS_FORMED_S", 1.0)
    meeting, _store = opened(2, torch.float32)
    with pytest.raises(ExpressLost, match="lost a member"):
        ExpressGroup(meeting, rank=0, device=CPU, timeout_s=1.0)
