"""Which slots are given is a matter of the ordinal alone, and exact in every window."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from async_grpo.data.order import MixedOrder, QuestionStream

shares = st.one_of(
    st.floats(0.0, 1.0),
    st.integers(0, 100).map(lambda percent: percent / 100),
    st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
)
ordinals = st.integers(0, 10**7)


def mixed(share, *, num_questions=7, num_pairs=5, seed=3, size=4):
    return MixedOrder(
        sampled_share=share,
        questions=QuestionStream(num_questions, seed=seed),
        pairs=QuestionStream(num_pairs, seed=seed, purpose="pairs"),
        samples_per_slot=size,
    )


@given(share=shares, first=ordinals, length=st.integers(1, 400))
def test_every_window_has_its_share_to_less_than_one_slot(share, first, length):
    order = mixed(share)
    num_sampled = sum(not order.pairs_of(first + i) for i in range(length))
    assert abs(num_sampled - length * Fraction(str(share))) < 1


def test_a_tenth_is_a_tenth_of_every_ten_slots():
    """0.7 and 0.1 have no exact binary value: in a long run a slot would be missing."""
    for share in (0.1, 0.3, 0.7):
        order = mixed(share)
        for first in (0, 10**6, 10**15):
            sampled = [not order.pairs_of(first + i) for i in range(10)]
            assert sum(sampled) == round(10 * share)


@given(share=shares, num=st.integers(1, 9), size=st.integers(1, 6), seed=st.integers(0, 99))
def test_questions_and_pairs_keep_whole_epochs_whatever_their_slots(share, num, size, seed):
    """Read in order, each kind is its own stream from its beginning: nothing is skipped."""
    order = mixed(share, num_questions=num, num_pairs=num, seed=seed, size=size)
    asked, read = [], []
    for ordinal in range(60):
        if pairs := order.pairs_of(ordinal):
            assert len(pairs) == size
            read += pairs
        else:
            asked.append(order.question(ordinal))
    assert asked == [order.questions.index(n) for n in range(len(asked))]
    assert read == [order.pairs.index(n) for n in range(len(read))]


@given(share=shares, wanted=st.permutations(range(40)))
def test_a_slot_is_the_same_whenever_it_is_asked_for(share, wanted):
    in_order, again = mixed(share), mixed(share)
    expected = {o: (in_order.pairs_of(o), in_order.question(o)) for o in range(40)}
    assert {o: (again.pairs_of(o), again.question(o)) for o in wanted} == expected


def test_a_run_without_pairs_asks_what_it_always_asked():
    order = mixed(1.0)
    assert not any(order.pairs_of(ordinal) for ordinal in range(100))
    asked = [order.question(ordinal) for ordinal in range(100)]
    assert asked == [order.questions.index(ordinal) for ordinal in range(100)]


def test_questions_and_pairs_of_one_seed_are_in_orders_of_their_own():
    order = mixed(0.5, num_questions=50, num_pairs=50)
    questions = [order.questions.index(n) for n in range(50)]
    assert questions != [order.pairs.index(n) for n in range(50)]
