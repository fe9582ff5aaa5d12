from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.data.order import QuestionStream, _permutation, sampling_seed

sizes = st.integers(1, 50)
seeds = st.integers(-5, 2**63)

ORDER_OF_SEED_37 = [6, 1, 0, 8, 5, 4, 9, 3, 7, 2, 2, 7, 3, 6, 9, 1, 4, 8, 5, 0]
REPLACEMENTS = [9, 0, 1]
SAMPLING_SEED = 8250888354812687153


@given(size=sizes, seed=seeds, epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    stream = QuestionStream(size, seed=seed)
    indices = [stream.index(epoch * size + position) for position in range(size)]
    assert sorted(indices) == list(range(size))


@given(size=sizes, seed=seeds, ordinals=st.permutations(range(60)))
def test_random_access_equals_reading_in_order(size, seed, ordinals):
    in_order = QuestionStream(size, seed=seed)
    expected = [in_order.index(ordinal) for ordinal in range(60)]
    shuffled = QuestionStream(size, seed=seed)
    assert {ordinal: shuffled.index(ordinal) for ordinal in ordinals} == dict(enumerate(expected))


def test_the_order_is_the_same_on_every_machine_and_version():
    stream = QuestionStream(10, seed=37)
    assert [stream.index(ordinal) for ordinal in range(20)] == ORDER_OF_SEED_37
    assert [stream.replacement(5, attempt=attempt) for attempt in (1, 2, 3)] == REPLACEMENTS
    assert sampling_seed(37, ordinal=0, attempt=0) == SAMPLING_SEED


def test_epochs_and_seeds_differ():
    orders = set()
    for seed in range(20):
        stream = QuestionStream(30, seed=seed)
        for epoch in range(20):
            orders.add(tuple(stream.index(epoch * 30 + position) for position in range(30)))
    assert len(orders) == 400


@given(size=sizes, seed=seeds, slot=st.integers(0, 10**9), attempt=st.integers(1, 100))
def test_a_replacement_is_a_question_and_moves_no_other(size, seed, slot, attempt):
    stream, untouched = QuestionStream(size, seed=seed), QuestionStream(size, seed=seed)
    assert 0 <= stream.replacement(slot, attempt=attempt) < size
    assert [stream.index(o) for o in range(20)] == [untouched.index(o) for o in range(20)]


def test_replacements_are_spread_evenly():
    stream = QuestionStream(10, seed=1)
    drawn = [stream.replacement(slot, attempt=a) for slot in range(500) for a in (1, 2)]
    counts = [drawn.count(index) for index in range(10)]
    assert min(counts) > 65 and max(counts) < 135


@settings(max_examples=20)
@given(seed=seeds)
def test_sampling_seeds_differ_and_fit_a_signed_int64(seed):
    drawn = {sampling_seed(seed, ordinal=o, attempt=a) for o in range(50) for a in range(5)}
    assert len(drawn) == 250
    assert all(0 <= value < 2**63 for value in drawn)


def test_only_few_epochs_are_kept():
    stream = QuestionStream(5, seed=0)
    for ordinal in range(100):
        stream.index(ordinal)
    assert _permutation.cache_info().currsize == 32
