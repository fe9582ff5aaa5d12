import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.batching.supervised import supervised_stream
from async_grpo.errors import DataError
from async_grpo.types import EndOfStep, Minibatch, TrainingPair

BUDGET = 64


def pair(num_prompt, num_output):
    ids = np.arange(num_prompt + num_output, dtype=np.int32)
    return TrainingPair(ids[:num_prompt], ids[num_prompt:])


def streams(pairs, *, ranks=2, **changes):
    options = {"batch_size": 4, "questions_per_step": 2, "num_batches": 3, "max_tokens": BUDGET}
    return [
        list(
            supervised_stream(
                pairs,
                stream_index=lambda ordinal: ordinal % len(pairs),
                num_ranks=ranks,
                rank=rank,
                **options | changes,
            )
        )
        for rank in range(ranks)
    ]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 34)), min_size=1, max_size=9),
    ranks=st.integers(1, 4),
)
def test_every_rank_sees_the_same_steps_and_every_pair_goes_to_one_of_them(shapes, ranks):
    by_rank = streams([pair(*shape) for shape in shapes], ranks=ranks)
    seen = []
    for row in zip(*by_rank, strict=True):
        if isinstance(row[0], EndOfStep):
            assert all(end == row[0] for end in row)
            continue
        assert all(isinstance(minibatch, Minibatch) for minibatch in row)
        assert len({minibatch.round_index for minibatch in row}) == 1
        for minibatch in row:
            assert sum(sample.num_tokens for sample in minibatch.samples) <= BUDGET
            seen += [sample.ordinal for sample in minibatch.samples]
    assert sorted(seen) == list(range(12))


def test_steps_end_with_denominators_over_all_ranks():
    ends = [i for i in streams([pair(3, 5), pair(2, 7)])[1] if isinstance(i, EndOfStep)]
    assert [(end.batch, end.step_in_batch, end.is_last_of_batch) for end in ends] == [
        (0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True), (2, 0, False), (2, 1, True),
    ]  # fmt: skip
    assert {(end.num_samples, end.num_tokens) for end in ends} == {(2, 12)}
    assert ends[0].fates == {"trained": 2}
    assert ends[0].sums == {
        "num_groups": 0, "num_samples": 2, "prompt_tokens": 5, "output_tokens": 12,
    }  # fmt: skip


def test_ranks_are_balanced_by_what_attention_costs_in_this_model():
    def bins(ratio):
        pairs = [pair(1, n - 1) for n in (32, 16, 16, 12, 12)]
        rows = streams(pairs, ranks=2, attention_ratio=ratio, batch_size=5, questions_per_step=5)
        return [[sample.ordinal for sample in items[0].samples] for items in rows]

    assert bins(1e9) == [[0, 4], [1, 2, 3]]  # 44 tokens each
    assert bins(1e-9) == [[0], [1, 2, 3, 4]]  # 32 squared against 800


def test_a_demonstration_is_a_sample_with_advantage_one():
    pairs = [pair(3, 5)]
    minibatch = streams(pairs, ranks=1, questions_per_step=1)[0][0]
    (sample,) = minibatch.samples
    (row,) = sample.episode.rows
    assert row.prompt_token_ids is pairs[0].prompt_token_ids
    assert row.token_ids is pairs[0].completion_token_ids
    assert (sample.num_trained_tokens, sample.num_tokens) == (5, 8)
    assert (sample.advantage, sample.verdict.adapter, sample.verdict.status) == (1, "sft", "scored")
    assert (row.logprobs, row.weights_versions) == (None, ())


@pytest.mark.parametrize(
    ("shape", "message"),
    [((60, 5), r"\(64\), got 60 \+ 5 tokens in pair 2"), ((3, 0), "3 and 0 tokens in pair 2")],
)
def test_a_pair_that_cannot_be_trained_is_named_before_anything_is_streamed(shape, message):
    with pytest.raises(DataError, match=message):
        supervised_stream(
            [pair(1, 1), pair(*shape)],
            stream_index=lambda ordinal: 0,
            batch_size=1,
            questions_per_step=1,
            num_batches=1,
            num_ranks=1,
            rank=0,
            max_tokens=BUDGET,
        )
