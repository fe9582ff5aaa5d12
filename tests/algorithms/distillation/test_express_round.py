import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algorithms.express_plan import Reading, plan_round


def reading(number, num_prompt, trained):
    """A sequence whose output tokens are trained where `trained` says so."""
    tokens = np.arange(num_prompt, dtype=np.int32)
    output = np.arange(len(trained), dtype=np.int32)
    return Reading((number, 0, 0, 0), tokens, output, np.flatnonzero(trained))


SEQUENCES = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.booleans(), min_size=1, max_size=6)), max_size=9
)


@given(SEQUENCES, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.randoms())
def test_every_sequence_is_read_once_and_every_trained_token_arrives(
    sequences, num_trainers, num_data, num_tensor, random
):
    needs = [[] for _ in range(num_trainers)]
    for number, (num_prompt, trained) in enumerate(sequences):
        random.choice(needs).append(reading(number, num_prompt, trained))
    rounds = plan_round(needs, teachers=(num_data, num_tensor), width=7)
    assert len(rounds) == num_data * num_tensor
    for tensor_rank in range(num_tensor):
        read = [r.key for work in rounds[tensor_rank::num_tensor] for r in work.readings]
        assert sorted(read) == [(number, 0, 0, 0) for number in range(len(sequences))]
    for process, work in enumerate(rounds):
        (own,) = (block for block in work.held if block.process == process)
        assert list(own.rows) == [(r.key, t) for r in work.readings for t in range(len(r.output))]
    sends = {work.sends(2) for work in rounds}
    assert len(sends) == 1  # every member makes the same plan
    cells = sum(np.prod(send.shape) for send in sends.pop())
    assert cells == 7 * sum(sum(trained) for _, trained in sequences)


def test_ranks_of_sharded_teachers_read_once_what_those_of_whole_ones_read_each():
    needs = [
        [reading(64 * r + n, 10, [n % 3 > 0] * (1 + n % 7)) for n in range(64)] for r in range(4)
    ]
    whole, sharded = (plan_round(needs, teachers=mesh, width=64) for mesh in ((8, 8), (64, 1)))
    assert len(whole) == len(sharded) == 64
    once = sum(each.num_tokens for own in needs for each in own)
    assert sum(work.num_tokens for work in whole) == 8 * once
    assert sum(work.num_tokens for work in sharded) == once
    assert max(work.num_tokens for work in sharded) <= 1.2 * once / 64
    num_cells = 64 * sum(len(each.trained) for own in needs for each in own)
    for rounds in (whole, sharded):
        sends = rounds[0].sends(2)
        assert sum(np.prod(send.shape) for send in sends) == num_cells
        assert {send.target for send in sends} == {64, 65, 66, 67}


def test_teachers_read_about_as_many_tokens_each():
    needs = [[reading(n, 10, [True] * (1 + n % 7)) for n in range(40)]]
    rounds = plan_round(needs, teachers=(3, 1), width=4)
    tokens = [sum(len(r.prompt) + len(r.output) for r in work.readings) for work in rounds]
    assert max(tokens) - min(tokens) <= 11
