"""Rows of a question that begin alike: each shared token is computed once, and counted once.

What is computed is counted in the rows that `collate` makes of the bins that packing chose.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from effort import histories
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_row, make_sample, sample_of_rows

from async_grpo.batching.admission import StepKey
from async_grpo.batching.packing import TokenCount, items_of, pack_round, pack_rounds
from async_grpo.batching.rounds import RoundFormer
from async_grpo.model.collate import collate

STEP = StepKey(0, 0)
VOCAB = 2**31 - 1  # two random tokens never agree by chance


def computed(bins, parts):
    """Tokens of the packed row of each bin; an empty bin computes none that count."""
    packed = (
        collate([parts[key] for key in keys], aggregation="sample-mean", share_prompts=True)
        for keys in bins
        if keys
    )
    return [(row.input_ids.numel(), row.target_ids.numel()) for row in packed]


def packed(samples, *, num_ranks=1, max_tokens=2**20, shares_prefixes=True):
    """Tokens that all bins of a step compute, and the number of its rounds."""
    parts, items = of(samples, shares_prefixes=shares_prefixes)
    rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=max_tokens)
    bins = [keys for bins in rounds for keys in bins]
    return sum(num for num, _ in computed(bins, parts)), len(rounds)


def of(samples, *, shares_prefixes=True):
    """Rows by key, and their items."""
    parts, items = {}, []
    for _, group in itertools.groupby(samples, key=lambda sample: sample.ordinal):
        rows = [part for sample in group for part in sample.parts()]
        own = items_of(rows, attention_ratio=500, shares_prefixes=shares_prefixes)
        parts |= {item.key: row for item, row in zip(own, rows, strict=True)}
        items += own
    return parts, items


def with_whole_prompts(samples):
    """Tokens computed where rows share a prompt as a whole, or nothing."""
    rows = [row for sample in samples for row in sample.episode.rows]
    prompts = {row.prompt_token_ids.tobytes(): len(row.prompt_token_ids) for row in rows}
    return sum(prompts.values()) + sum(len(row.token_ids) for row in rows)


def numbered(samples, *, ordinal=0):
    return [replace(sample, ordinal=ordinal, index=i) for i, sample in enumerate(samples)]


def rewritten(prompt, read, sampled, *, episodes=8, turns=6, seed=0):
    """Episodes whose template strips what was thought: each turn has a row of its own."""
    rng = np.random.default_rng(seed)
    draw = lambda count: rng.integers(VOCAB, size=count)  # noqa: E731
    question = draw(prompt)
    samples = []
    for _ in range(episodes):
        kept = [draw(read) for _ in range(turns - 1)]
        histories = (np.concatenate([question, *kept[:turn]]) for turn in range(turns))
        samples.append(sample_of_rows([make_row(each, draw(sampled)) for each in histories]))
    return samples


def forced(prompt, trunk, sampled, *, branches=8, seed=0):
    """Answers that fork from one of them, each a stretch of its trunk later than the one before."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(VOCAB, size=prompt + branches * trunk)
    starts = (whole[: prompt + number * trunk] for number in range(1, branches + 1))
    return [make_sample(start, rng.integers(VOCAB, size=sampled)) for start in starts]


def appended(prompt, read, sampled, *, episodes=8, turns=6, seed=0):
    """Episodes of one row: what is read follows what was sampled, which is kept."""
    rng = np.random.default_rng(seed)
    question, length = rng.integers(VOCAB, size=prompt), turns * sampled + (turns - 1) * read
    mask = [t % (sampled + read) < sampled for t in range(length)]
    return [
        make_sample(question, rng.integers(VOCAB, size=length), mask=mask) for _ in range(episodes)
    ]


@pytest.mark.parametrize(("sizes", "ratio"), [((2048, 128, 256), 5.7), ((256, 200, 1000), 1.5)])
def test_rewritten_histories_are_computed_once(sizes, ratio):
    """With whole prompts: turn k reads P + (k-1) h, 8 (6 P + 15 h + 6 u), less 7 P of first turns.

    A trie has P once, of each episode 5 h, and all 48 u.
    """
    p, h, u = sizes
    samples = numbered(rewritten(p, h, u))
    before = with_whole_prompts(samples)
    assert before == 41 * p + 120 * h + 48 * u
    now, _ = packed(samples)
    assert now == pytest.approx(p + 40 * h + 48 * u, rel=0.01)
    assert before / now == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize("sizes", [(2048, 128, 256), (256, 200, 1000)])
def test_forced_branches_are_computed_once(sizes):
    """Branch k reads P + k s; the deepest one's trunk, 8 s, is that of all."""
    p, s, u = sizes
    samples = numbered(forced(p, s, u))
    assert with_whole_prompts(samples) == 8 * p + 36 * s + 8 * u
    assert packed(samples)[0] == pytest.approx(p + 8 * s + 8 * u, rel=0.01)


def test_appended_turns_and_plain_answers_are_computed_and_packed_as_ever():
    for samples in (appended(256, 50, 100), [s for s in forced(300, 0, 60)]):
        samples = numbered(samples)
        assert packed(samples)[0] == pytest.approx(with_whole_prompts(samples), rel=0.02)
        _, items = of(samples)
        assert not any(item.segments for item in items)


def test_a_policy_that_cannot_share_is_packed_as_ever():
    _, items = of(numbered(rewritten(64, 8, 8)), shares_prefixes=False)
    assert not any(item.segments for item in items)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_trie_larger_than_the_budget_repeats_little_more_than_its_prompt(num_ranks):
    p, h, u = 256, 200, 1000
    samples = numbered(rewritten(p, h, u))
    now, num_rounds = packed(samples, num_ranks=num_ranks, max_tokens=16384)
    assert num_rounds == -(-4 // num_ranks)  # 56,256 tokens
    assert now <= p + 40 * h + 48 * u + 4 * (p + 5 * h)


def test_questions_keep_together_where_that_does_not_unbalance_the_ranks():
    samples = [
        each
        for ordinal in range(4)
        for each in numbered(rewritten(400, 20, 30, seed=ordinal), ordinal=ordinal)
    ]
    alone = 400 + 40 * 20 + 48 * 30
    now, num_rounds = packed(samples, num_ranks=2, max_tokens=2 * alone)
    assert num_rounds == 1
    assert now <= 4 * alone


def test_equal_answers_count_what_the_head_scores():
    parts, items = of(numbered([make_sample([1, 2], [3] * 10) for _ in range(8)]))
    rounds = pack_rounds(items, num_ranks=1, max_tokens=40)
    assert computed([keys for [keys] in rounds], parts) == [(11, 30), (11, 30), (11, 20)]


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=7)
ROWS = st.lists(st.tuples(IDS, IDS, st.integers(0, 2**7 - 1)), min_size=1, max_size=3)


@st.composite
def tries(draw):
    """Questions whose rows agree often: their tokens are 0 and 1."""
    samples = []
    for ordinal in range(draw(st.integers(1, 4))):
        group = [
            sample_of_rows(
                [
                    make_row(prompt, output, mask=[mask >> t & 1 for t in range(len(output))])
                    for prompt, output, mask in rows
                ]
            )
            for rows in draw(st.lists(ROWS, min_size=1, max_size=5))
        ]
        samples += numbered(group, ordinal=ordinal)
    return samples


@settings(max_examples=histories(100), deadline=None)
@given(samples=tries(), num_ranks=st.integers(1, 5), budget=st.integers(14, 60), rng=st.randoms())
def test_no_bin_computes_or_scores_more_than_the_budget_and_each_row_goes_out_once(
    samples, num_ranks, budget, rng
):
    parts, items = of(samples)
    rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=budget)
    bins = [keys for each in rounds for keys in each]
    assert sorted(key for keys in bins for key in keys) == sorted(parts)
    assert all(most <= budget for row in computed(bins, parts) for most in row)
    if len(items) >= len(bins):
        assert all(bins)
    shuffled = rng.sample(items, len(items))
    assert pack_rounds(shuffled, num_ranks=num_ranks, max_tokens=budget) == rounds
    one = pack_round(items, num_ranks=num_ranks, max_tokens=budget)
    assert pack_round(shuffled, num_ranks=num_ranks, max_tokens=budget) == one
    assert all(most <= budget for row in computed(one.bins, parts) for most in row)
    placed = [key for keys in one.bins for key in keys] + [item.key for item in one.leftover]
    assert sorted(placed) == sorted(parts)
    assert sum(map(bool, one.bins)) == min(num_ranks, len(items))


@settings(max_examples=histories(50), deadline=None)
@given(samples=tries(), num_ranks=st.integers(1, 3), budget=st.integers(14, 60))
def test_rounds_of_a_step_that_grows_hold_each_row_once(samples, num_ranks, budget):
    """What waits is counted as it is computed, also after a part of a question has gone out."""
    former = RoundFormer(num_ranks, max_tokens=budget, steps_per_batch=1)
    parts, items = of(samples)
    waiting, sent = {}, []

    def take(formed):
        sent.extend(key for keys in formed.bins for key in keys)
        for key in sent:
            waiting.pop(key, None)

    for now_s, item in enumerate(items):
        former.offer(STEP, item=item)
        waiting[item.key] = item
        while formed := former.next_round(now_s, hungry=True):
            take(formed)
        assert former._ready[STEP].num_tokens == TokenCount(waiting.values()).total
    former.step_complete(STEP)
    while (formed := former.next_round(0.0, hungry=False)) != STEP:
        take(formed)
    assert sorted(sent) == sorted(parts)
