import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scripted_run import make_config

from async_grpo.batching.packing import DEFAULT_ATTENTION_RATIO
from async_grpo.batching.supervised import supervised_stream
from async_grpo.types import EndOfStep, Minibatch, TrainingPair

BUDGET = 64


def pair(num_prompt, num_output):
    ids = np.arange(num_prompt + num_output, dtype=np.int32)
    return TrainingPair(ids[:num_prompt], ids[num_prompt:])


def streams(pairs, *, ranks=2, attention_ratio=DEFAULT_ATTENTION_RATIO, **changes):
    options = {"algorithm": "sft", "train_minibatch_size": 2, "max_tokens_per_gpu": BUDGET}
    config = make_config(**options | changes)
    return [
        list(
            supervised_stream(
                pairs,
                batching=config.batching,
                stream_index=lambda ordinal: ordinal % len(pairs),
                num_ranks=ranks,
                rank=rank,
                attention_ratio=attention_ratio,
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
        rows = streams(pairs, ranks=2, attention_ratio=ratio, batch_size=5, train_minibatch_size=0)
        return [[sample.ordinal for sample in items[0].samples] for items in rows]

    assert bins(1e9) == [[0, 4], [1, 2, 3]]  # 44 tokens each
    assert bins(1e-9) == [[0], [1, 2, 3, 4]]  # 32 squared against 800


def test_a_demonstration_is_a_sample_with_advantage_one():
    pairs = [pair(3, 5)]
    minibatch = streams(pairs, ranks=1, train_minibatch_size=1)[0][0]
    (sample,) = minibatch.samples
    (row,) = sample.episode.rows
    assert row.prompt_token_ids is pairs[0].prompt_token_ids
    assert row.token_ids is pairs[0].completion_token_ids
    assert (sample.num_trained_tokens, sample.num_tokens) == (5, 8)
    assert (sample.advantage, sample.verdict.adapter, sample.verdict.status) == (1, "sft", "scored")
    assert (row.logprobs, row.weights_versions) == (None, ())
