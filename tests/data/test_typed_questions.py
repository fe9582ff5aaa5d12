"""Every type has its share of every batch, and its own epochs; the ordinal alone decides."""

import pickle
from collections import Counter
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor

from hypothesis import assume, given
from hypothesis import strategies as st

from async_grpo.data.order import MixedOrder, QuestionStream, TypedQuestions

weights_of_types = st.lists(
    st.one_of(st.integers(1, 9), st.integers(1, 400).map(lambda n: n / 100)), min_size=2, max_size=6
)
batch_sizes = st.integers(1, 48)
shares_sampled = st.one_of(st.just(1.0), st.integers(1, 99).map(lambda percent: percent / 100))


def order_of(weights, batch_size, share=1.0, size=7):
    questions = TypedQuestions(
        [QuestionStream(size, seed=kind) for kind in range(len(weights))],
        weights=weights,
        batch_size=batch_size,
        sampled_share=share,
    )
    pairs = QuestionStream(5, seed=9, purpose="pairs")
    return MixedOrder(sampled_share=share, questions=questions, pairs=pairs, samples_per_slot=1)


def kinds_of(order, ordinals, size=7):
    return [order.question(o) // size for o in ordinals if not order.pairs_of(o)]


@given(weights=weights_of_types, batch_size=batch_sizes, share=shares_sampled)
def test_every_batch_has_each_type_s_share_rounded_down_or_up(weights, batch_size, share):
    order = order_of(weights, batch_size, share)
    exact = [Fraction(str(weight)) for weight in weights]
    parts = [Fraction(str(share)) * batch_size * each / sum(exact) for each in exact]
    for batch in range(12):
        counts = Counter(kinds_of(order, range(batch * batch_size, (batch + 1) * batch_size)))
        for kind, part in enumerate(parts):
            assert floor(part) <= counts[kind] <= ceil(part)


@given(weights=weights_of_types, batch_size=batch_sizes, share=shares_sampled)
def test_over_many_batches_no_type_is_two_slots_from_its_share(weights, batch_size, share):
    order = order_of(weights, batch_size, share)
    exact = [Fraction(str(weight)) for weight in weights]
    slots = kinds_of(order, range(40 * batch_size))
    for kind, each in enumerate(exact):
        due = Fraction(str(share)) * 40 * batch_size * each / sum(exact)
        assert abs(slots.count(kind) - due) < 2


@given(weights=weights_of_types, batch_size=batch_sizes, share=shares_sampled, data=st.data())
def test_a_slot_is_the_same_for_who_begins_with_it(weights, batch_size, share, data):
    """A run that goes on asks first of all for a slot in the middle, in another process."""
    order = order_of(weights, batch_size, share)
    num_slots = 8 * batch_size
    expected = [order.question(o) for o in range(num_slots)]
    fresh = pickle.loads(pickle.dumps(order_of(weights, batch_size, share)))
    for ordinal in data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, max_size=9)):
        assert fresh.question(ordinal) == expected[ordinal]


@given(weights=weights_of_types, batch_size=batch_sizes, share=shares_sampled)
def test_each_type_reads_its_own_file_in_whole_epochs(weights, batch_size, share):
    order = order_of(weights, batch_size, share)
    slots = [order.question(o) for o in range(6 * batch_size) if not order.pairs_of(o)]
    for kind in range(len(weights)):
        own = [index - 7 * kind for index in slots if index // 7 == kind]
        stream = QuestionStream(7, seed=kind)
        assert own == [stream.index(n) for n in range(len(own))]


@given(weights=weights_of_types, batch_size=batch_sizes, share=shares_sampled)
def test_a_replacement_is_of_the_type_that_it_replaces(weights, batch_size, share):
    order = order_of(weights, batch_size, share)
    for ordinal in range(3 * batch_size):
        if not order.pairs_of(ordinal):
            again = {order.replacement(ordinal, attempt=n) // 7 for n in (1, 2, 3)}
            assert again == {order.question(ordinal) // 7}


def test_types_take_turns_within_a_batch():
    order = order_of([2, 1, 1], 8)
    assert kinds_of(order, range(8)) == [0, 1, 2, 0, 0, 1, 2, 0]


@given(weights=weights_of_types, batch_size=st.integers(6, 48))
def test_no_type_is_absent_for_long(weights, batch_size):
    """Within a batch any first slots hold a type's share, to less than one slot and a half."""
    assume(max(weights) < 4 * min(weights))
    order = order_of(weights, batch_size)
    slots = kinds_of(order, range(batch_size))
    for kind in range(len(weights)):
        running = list(accumulate(slot == kind for slot in slots))
        for place, number in enumerate(running, start=1):
            assert abs(number - slots.count(kind) * place / batch_size) < 1.5


def test_one_file_of_a_type_has_the_order_of_a_run_without_types():
    alone = order_of([3.0], 5)
    assert [alone.question(o) for o in range(40)] == [
        QuestionStream(7, seed=0).index(o) for o in range(40)
    ]
