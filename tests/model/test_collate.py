"""Packing keeps every token in its place and gives it the weight of its sample."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import make_row, make_sample, sample_of_rows

from async_grpo.model.collate import collate, collate_pairs, split_by_row, to_device

IDS = st.lists(st.integers(0, 63), min_size=1, max_size=8)
SAMPLES = st.lists(
    st.tuples(IDS, IDS, st.integers(0, 2**8 - 1), st.floats(-3, 3)).map(
        lambda it: make_sample(
            it[0],
            it[1],
            mask=[bool(it[2] >> t & 1) for t in range(len(it[1]))],
            behaviour=[-0.1 * t for t in range(len(it[1]))],
            reference=[-0.2 * t for t in range(len(it[1]))],
            advantage=it[3],
        )
    ),
    max_size=6,
)


def test_a_small_minibatch_by_hand():
    first = make_sample([5, 6], [7, 8, 9], mask=[1, 0, 1], behaviour=[-1, -2, -3], advantage=0.5)
    second = make_sample([4], [3], behaviour=[-4], advantage=-1.0)
    packed = collate([first, second], aggregation="sample-mean")
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 4]  # 9 and 3 predict nothing
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0]
    assert packed.cu_seqlens.tolist() == [0, 4, 5]
    assert packed.max_seqlen == 4
    assert packed.logit_positions.tolist() == [1, 3, 4]
    assert packed.target_ids.tolist() == [7, 9, 3]
    assert packed.sample_index.tolist() == [0, 0, 1]
    assert packed.weights.tolist() == [0.5, 0.5, 1.0]
    assert packed.advantages.tolist() == [0.5, 0.5, -1.0]
    assert packed.behaviour_logprobs.tolist() == [-1, -3, -4]
    assert packed.scores == {}
    assert packed.num_samples == 2


@given(samples=SAMPLES)
def test_every_trained_token_is_predicted_from_its_own_prefix(samples):
    packed = collate(samples, aggregation="token-mean")
    expected = [
        (index, [*sample.question.input_token_ids, *sample.episode.rows[0].token_ids[:t]], token)
        for index, sample in enumerate(samples)
        for t, token in enumerate(sample.episode.rows[0].token_ids)
        if sample.episode.rows[0].loss_mask[t]
    ]
    starts = packed.cu_seqlens.tolist()
    got = [
        (index, packed.input_ids[starts[index] : position + 1].tolist(), target)
        for index, position, target in zip(
            packed.sample_index.tolist(),
            packed.logit_positions.tolist(),
            packed.target_ids.tolist(),
            strict=True,
        )
    ]
    assert got == expected


PROMPTS = st.sampled_from([[5], [5, 6, 7], [5, 6, 8]])
GROUPED = st.lists(
    st.tuples(PROMPTS, IDS, st.integers(0, 2**8 - 1)).map(
        lambda it: make_sample(it[0], it[1], mask=[bool(it[2] >> t & 1) for t in range(len(it[1]))])
    ),
    min_size=1,
    max_size=8,
)


def test_a_shared_prompt_by_hand():
    samples = [make_sample([5, 6], [7, 8, 9]), make_sample([5, 6], [3, 2]), make_sample([4], [1])]
    packed = collate(samples, aggregation="sample-mean", share_prompts=True)
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 3, 4]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 2, 0]
    assert packed.repeat_index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]
    assert packed.first_index.tolist() == [0, 1, 2, 3, 6, 7]
    assert packed.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert packed.logit_positions.tolist() == [1, 2, 3, 1, 4, 5]
    assert packed.target_ids.tolist() == [7, 8, 9, 3, 2, 1]
    assert packed.sample_index.tolist() == [0, 0, 0, 1, 1, 2]


@given(samples=GROUPED)
def test_with_shared_prompts_the_whole_sequences_are_those_without(samples):
    plain = collate(samples, aggregation="sample-mean")
    packed = collate(samples, aggregation="sample-mean", share_prompts=True)
    assert plain.repeat_index is plain.first_index is None
    whole, first = packed.repeat_index, packed.first_index
    if whole is None:
        whole = first = torch.arange(len(packed.input_ids))
    assert torch.equal(packed.input_ids[whole], plain.input_ids)
    assert torch.equal(packed.position_ids[whole], plain.position_ids)
    assert torch.equal(whole[first], torch.arange(len(packed.input_ids)))
    assert torch.equal(packed.cu_seqlens, plain.cu_seqlens)
    assert torch.equal(packed.logit_positions, whole[plain.logit_positions])
    for name in ("target_ids", "sample_index", "weights", "advantages", "behaviour_logprobs"):
        assert torch.equal(getattr(packed, name), getattr(plain, name))


@given(samples=GROUPED)
def test_each_beginning_of_sequences_lies_in_the_row_once(samples):
    """Also of outputs that agree for a while; what is behind the last trained token is left out."""
    packed = collate(samples, aggregation="sample-mean", share_prompts=True)
    whole = packed.repeat_index
    plain = collate(samples, aggregation="sample-mean")
    ids = plain.input_ids.tolist()
    beginnings = {
        tuple(ids[start:end])
        for start, stop in itertools.pairwise(plain.cu_seqlens.tolist())
        for end in range(start + 1, stop + 1)
    }
    assert len(packed.input_ids) == len(beginnings)
    assert whole is None or len(whole) == len(ids) > len(beginnings)


@given(samples=SAMPLES)
def test_row_is_never_longer_than_its_samples_and_lengths_agree(samples):
    packed = collate(samples, aggregation="token-mean")
    num_scored = sum(sample.num_trained_tokens for sample in samples)
    assert len(packed.input_ids) == packed.cu_seqlens[-1] == len(packed.position_ids)
    assert len(packed.input_ids) <= max(sum(sample.num_tokens for sample in samples), 1)
    for values in (packed.weights, packed.advantages, packed.behaviour_logprobs):
        assert values.shape == (num_scored,)
        assert values.dtype == torch.float32


@given(samples=SAMPLES.filter(bool), constant=st.integers(1, 100))
def test_weights_are_those_of_the_design(samples, constant):
    per_sample = {
        name: split_by_row(packed.weights, packed)
        for name in ("sample-mean", "token-mean", "constant")
        for packed in [collate(samples, aggregation=name, constant_length=constant)]
    }
    for index, sample in enumerate(samples):
        length = sample.num_trained_tokens
        assert per_sample["sample-mean"][index].sum() == pytest.approx(1.0 if length else 0.0)
        assert per_sample["token-mean"][index].sum() == length
        assert per_sample["constant"][index].sum() == pytest.approx(length / constant)


@given(samples=SAMPLES)
def test_splitting_gives_every_sample_its_own_values_back(samples):
    packed = collate(samples, aggregation="sample-mean")
    parts = split_by_row(packed.behaviour_logprobs, packed)
    assert len(parts) == len(samples)
    for part, sample in zip(parts, samples, strict=True):
        own = sample.episode.rows[0].logprobs[sample.episode.rows[0].loss_mask]
        np.testing.assert_array_equal(part.numpy(), own)


def test_a_fully_masked_sample_adds_no_token():
    masked = make_sample([1, 2], [3, 4], mask=[0, 0])
    packed = collate([masked, make_sample([5], [6])], aggregation="sample-mean")
    assert packed.target_ids.tolist() == [6]
    assert packed.num_samples == 2
    assert collate([masked], aggregation="sample-mean").target_ids.tolist() == []


def test_a_filler_has_a_row_and_nothing_to_score():
    packed = collate([], aggregation="sample-mean", scores={"reference": 0, "math": 3})
    assert packed.num_samples == 0
    assert len(packed.input_ids) == 1
    assert len(packed.target_ids) == len(packed.weights) == len(packed.scores["reference"]) == 0
    assert packed.scores["math"].shape == (0, 3)
    assert split_by_row(packed.weights, packed) == []


def test_advantages_and_scores_may_be_one_a_token_over_all_rows_of_a_sample():
    rows = [make_row([1], [2, 3], mask=[1, 0]), make_row([1, 4], [5, 6, 7], mask=[0, 1, 1])]
    sample = replace(
        sample_of_rows(rows, advantage=np.arange(5, dtype=np.float32)),
        scores={"math": np.arange(10, dtype=np.float32).reshape(5, 2)},
    )
    packed = collate([sample, replace(sample, advantage=0.5)], aggregation="token-mean")
    assert packed.advantages.tolist() == [0, 3, 4, 0.5, 0.5, 0.5]
    assert packed.scores["math"].tolist() == [[0, 1], [6, 7], [8, 9]] * 2


def test_a_sample_of_several_rows_is_counted_where_its_first_row_is_trained():
    sample = sample_of_rows([make_row([1], [2, 3]), make_row([1, 4], [5]), make_row([6], [7])])
    first, *others = sample.parts()
    assert collate([first, *others], aggregation="sample-mean").num_samples == 1
    assert collate(others, aggregation="sample-mean").num_samples == 0
    assert collate([*others, make_sample([5], [6])], aggregation="sample-mean").num_samples == 1


def test_pairs_score_every_output_token():
    prompt, output = np.array([1, 2], dtype=np.int32), np.array([3, 4, 5], dtype=np.int32)
    packed = collate_pairs([(prompt, output), (output, prompt)])
    assert packed.target_ids.tolist() == [3, 4, 5, 1, 2]
    assert packed.weights.tolist() == [1.0] * 5
    assert [len(part) for part in split_by_row(packed.weights, packed)] == [3, 2]


def test_moving_keeps_everything():
    packed = collate([make_sample([1], [2, 3])], aggregation="sample-mean")
    moved = to_device(packed, torch.device("meta"))
    assert moved.input_ids.device.type == moved.weights.device.type == "meta"
    assert (moved.max_seqlen, moved.num_samples, moved.scores) == (2, 1, {})


@pytest.mark.gpu
def test_a_row_is_on_its_way_while_the_device_is_busy():
    """Copies of more than 64 KiB from memory that is not pinned wait for the stream."""
    device = torch.device("cuda")
    packed = collate_pairs([(np.arange(9, dtype=np.int32), np.arange(20_000, dtype=np.int32))])
    to_device(packed, device)  # memory is pinned once
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second
    moved = to_device(packed, device)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(moved.input_ids.cpu(), packed.input_ids)
    assert torch.equal(moved.target_ids.cpu(), packed.target_ids)


def test_half_known_references_empty_prompts_and_odd_aggregations_are_refused():
    with_reference = make_sample([1], [2], reference=[-1.0])
    with pytest.raises(ValueError, match="sample \\(0, 0\\) lacks reference"):
        collate([with_reference, make_sample([1], [2])], aggregation="sample-mean")
    with pytest.raises(ValueError, match="at least one token"):
        collate([make_sample([], [2])], aggregation="sample-mean")
    with pytest.raises(ValueError, match="aggregation must be"):
        collate([with_reference], aggregation="constant")
