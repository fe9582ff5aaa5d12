from collections import Counter
from itertools import product
from random import Random

import numpy as np
import pytest
from effort import FULL
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algorithms.express_plan import Block, cut, mesh, plan_sends

SIZES = range(1, 9) if FULL else (1, 2, 3, 4, 8)
MESHES = list(product(SIZES, SIZES))


def dealt(random, rows, parts):
    """Any rows to any part, in any order; some parts may have none."""
    lists = [[] for _ in range(parts)]
    for row in random.sample(rows, len(rows)):
        random.choice(lists).append(row)
    return lists


def cut_anywhere(random, num_columns, parts):
    edges = sorted(random.randrange(num_columns + 1) for _ in range(parts - 1))
    return list(zip([0, *edges], [*edges, num_columns], strict=True))


def check(held, needed, sends, *, item_bytes, chunk_bytes):
    """Each needed cell once and nothing else; as many bytes as the receivers lack, no more."""
    source_blocks, target_blocks = ({b.process: b for b in side} for side in (held, needed))
    counts = {b.process: np.zeros((len(b.rows), b.columns[1] - b.columns[0]), int) for b in needed}
    for send in sends:
        source, target = source_blocks[send.source], target_blocks[send.target]
        assert [source.rows[i] for i in send.source_rows] == [
            target.rows[i] for i in send.target_rows
        ]
        start, stop = send.columns
        assert source.columns[0] <= start < stop <= source.columns[1]
        first = target.columns[0]
        counts[send.target][np.array(send.target_rows), start - first : stop - first] += 1
        assert 0 < np.prod(send.shape) * item_bytes <= chunk_bytes
    assert all((cells == 1).all() for cells in counts.values())
    travelled = sum(int(np.prod(send.shape)) for send in sends if not send.is_local)
    assert travelled == sum(lacking(target, source_blocks) for target in needed)


def lacking(target, source_blocks):
    """Cells of a target that do not lie in its own process."""
    own = source_blocks.get(target.process, Block(target.process, (), (0, 0)))
    (a, b), (c, d) = target.columns, own.columns
    here = len(set(own.rows) & set(target.rows)) * max(0, min(b, d) - max(a, c))
    return len(target.rows) * (b - a) - here


@pytest.mark.parametrize("teachers", MESHES)
def test_between_any_two_meshes_each_needed_cell_travels_once(teachers):
    for trainers in MESHES:
        random = Random(str((teachers, trainers)))
        rows = list(range(random.randrange(1, 20)))
        num_columns = random.randrange(1, 30)
        held = mesh(
            dealt(random, rows, teachers[0]),
            cut(num_columns + random.randrange(3), teachers[1]),  # padded, or of another width
            processes=range(teachers[0] * teachers[1]),
        )
        needed = mesh(
            dealt(random, rows, trainers[0]),
            cut(num_columns, trainers[1]),
            processes=range(len(held), len(held) + trainers[0] * trainers[1]),
        )
        sends = plan_sends(held, needed, item_bytes=2, chunk_bytes=100)
        check(held, needed, sends, item_bytes=2, chunk_bytes=100)


@given(st.randoms(use_true_random=False))
def test_any_blocks_with_replicas_and_shared_processes_are_served_once(random):
    rows = [((ordinal, 0, 0, 0), token) for ordinal in range(3) for token in range(4)]
    num_columns = random.randrange(1, 20)
    held = [
        block
        for replica in range(random.randrange(1, 4))
        for block in mesh(
            dealt(random, rows, 2),
            cut_anywhere(random, num_columns, 3),
            processes=range(6 * replica, 6 * replica + 6),
        )
    ]
    needed = [
        Block(process, tuple(random.sample(rows, random.randrange(len(rows)))), columns)
        for process in random.sample(range(24), 5)
        for columns in [sorted_pair(random, num_columns)]
    ]
    chunk_bytes = 4 * random.randrange(num_columns, 100)
    sends = plan_sends(held, needed, item_bytes=4, chunk_bytes=chunk_bytes)
    check(held, needed, sends, item_bytes=4, chunk_bytes=chunk_bytes)


def sorted_pair(random, num_columns):
    start, stop = sorted(random.sample(range(num_columns + 1), 2))
    return start, stop


@given(st.randoms(use_true_random=False))
def test_the_plan_is_the_same_in_whatever_order_a_process_names_the_blocks(random):
    held = mesh(dealt(random, list(range(9)), 2), cut(11, 2), processes=range(4))
    needed = mesh(dealt(random, list(range(9)), 3), cut(10, 1), processes=range(4, 7))
    plan = plan_sends(held, needed, item_bytes=4, chunk_bytes=80)
    shuffled = random.sample(held, 4), random.sample(needed, 3)
    assert plan_sends(*shuffled, item_bytes=4, chunk_bytes=80) == plan


def test_replicas_share_the_sending():
    rows = list(range(101))
    held = mesh([rows] * 4, cut(6, 1), processes=range(4))
    needed = mesh([rows[:30], rows[30:]], cut(6, 1), processes=[4, 5])
    sent = Counter()
    for send in plan_sends(held, needed, item_bytes=1, chunk_bytes=60):
        sent[send.source] += len(send.source_rows)
    assert sorted(sent.values()) == [25, 25, 25, 26]


def test_who_needs_what_it_holds_copies_it():
    held = mesh([["a"], ["a"]], cut(4, 1), processes=[0, 1])
    needed = mesh([["a"]], cut(4, 1), processes=[1])
    (send,) = plan_sends(held, needed, item_bytes=1, chunk_bytes=4)
    assert send.is_local


def test_the_first_sends_of_a_plan_go_between_distinct_pairs():
    held = mesh([[0, 1, 2], [3, 4, 5]], cut(4, 1), processes=[0, 1])
    needed = mesh([[0, 3], [1, 4], [2, 5]], cut(4, 1), processes=[2, 3, 4])
    first, second = plan_sends(held, needed, item_bytes=1, chunk_bytes=4)[:2]
    assert {first.source, second.source} == {0, 1}
    assert first.target != second.target


def test_a_cell_that_nobody_holds_is_refused():
    held = mesh([["a"]], cut(4, 1), processes=[0])
    with pytest.raises(ValueError, match=r"columns \(4, 6\) of row a"):
        plan_sends(held, mesh([["a"]], cut(6, 1), processes=[1]), item_bytes=1, chunk_bytes=9)
    with pytest.raises(ValueError, match="row b, which process 1 needs"):
        plan_sends(held, mesh([["b"]], cut(4, 1), processes=[1]), item_bytes=1, chunk_bytes=9)


def test_a_row_twice_and_a_chunk_below_a_row_are_refused():
    held = mesh([["a"]], cut(4, 1), processes=[0])
    with pytest.raises(ValueError, match="got a twice"):
        plan_sends(held, mesh([["a", "a"]], cut(4, 1), processes=[1]), item_bytes=1, chunk_bytes=9)
    with pytest.raises(ValueError, match="4 columns, 16 bytes, got 15"):
        plan_sends(held, mesh([["a"]], cut(4, 1), processes=[1]), item_bytes=4, chunk_bytes=15)
    with pytest.raises(ValueError, match="one block of a mesh"):
        plan_sends(held * 2, mesh([["a"]], cut(4, 1), processes=[1]), item_bytes=1, chunk_bytes=9)
