"""Turns become rows: trained ids are sampled ids, over all turns, each once."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from players import VERSION, make_turn

from async_grpo.batching.leased_work import covers
from async_grpo.batching.statistics import tokens_by_lag
from async_grpo.environments.episode import EpisodePolicy, NoRoom
from async_grpo.types import SamplingContract

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@st.composite
def stories(draw):
    """A prompt, and turns: how the history goes on from the one before, and what is sampled."""
    kinds = st.sampled_from(["extend", "rewrite", "drop the start", "go back"])
    turns = st.tuples(kinds, st.lists(st.integers(10, 19), max_size=4), TOKENS, st.integers(0, 4))
    return draw(TOKENS), draw(st.lists(turns, min_size=1, max_size=6))


def played(story):
    """(episode, what the policy was asked, what it sampled)."""
    prompt, turns = story
    asked, made = [], [make_turn(sampled, cut=min(cut, len(sampled))) for *_, sampled, cut in turns]
    rest = iter(made)

    async def generate(history, sampling, prefer):
        asked.append(history.tolist())
        return next(rest)

    async def scenario():
        sampling = SamplingContract(1.0, (1,), 6)
        policy = EpisodePolicy(generate, sampling=sampling, max_row_tokens=10_000)
        history, seen = list(prompt), [list(prompt)]
        for kind, read, _, _ in turns:
            if asked:
                history = {
                    "extend": history,
                    "rewrite": [99, *prompt],
                    "drop the start": history[1:] or [98],
                    "go back": seen[len(seen) // 2],
                }[kind] + read
            turn = await policy.sample(history)
            history = [*history, *turn.token_ids.tolist()]
            seen.append(history)
        return policy.episode()

    return asyncio.run(scenario()), asked, made


@settings(max_examples=300, deadline=None)
@given(stories())
def test_trained_ids_are_the_sampled_ids_over_all_turns_each_once(story):
    episode, asked, made = played(story)
    trained, sampled = [], []  # each token after all that the model had read before it
    for row in episode.rows:
        prompt, output = row.prompt_token_ids.tolist(), row.token_ids.tolist()
        trained += [(prompt + output[:t], output[t]) for t in np.flatnonzero(row.loss_mask)]
    for history, turn in zip(asked, made, strict=True):
        ids = turn.token_ids.tolist()
        sampled += [(history + ids[:t], token) for t, token in enumerate(ids)]
    assert sorted(trained) == sorted(sampled)


@settings(max_examples=100, deadline=None)
@given(stories())
def test_logprobs_and_versions_stand_beside_the_tokens_that_they_are_of(story):
    episode, _, made = played(story)
    assert all(covers(row.weights_versions, row.loss_mask) for row in episode.rows)
    assert episode.num_sampled_tokens == sum(len(turn.token_ids) for turn in made)
    counts = tokens_by_lag(episode, batch=1, max_staleness=1)
    old = sum(s.stop - s.start for t in made for s in t.weights_versions if s.version == VERSION)
    assert counts[1] == old
    for row in episode.rows:
        assert (row.logprobs[row.loss_mask] == -1).all()
        assert (row.logprobs[~row.loss_mask] == 0).all()


def test_what_is_read_between_turns_is_masked_and_a_rewritten_history_forks():
    story = [5], [("extend", [], [1, 2], 0), ("extend", [11], [3], 0), ("rewrite", [], [4], 0)]
    first, second = played(story)[0].rows
    assert (first.prompt_token_ids.tolist(), first.token_ids.tolist()) == ([5], [1, 2, 11, 3])
    assert first.loss_mask.tolist() == [True, True, False, True]
    assert (second.prompt_token_ids.tolist(), second.token_ids.tolist()) == ([99, 5], [4])


@pytest.mark.parametrize("constrains", [False, True])
def test_a_turn_under_a_grammar_is_read_and_not_trained(constrains):
    grammars, answers = [], iter([[1, 2], [3], [4, 5]])

    async def generate(history, sampling, prefer):
        grammars.append(sampling.grammar)
        return make_turn(next(answers))

    async def scene():
        policy = EpisodePolicy(
            generate, sampling=contract, max_row_tokens=99, constrains=constrains
        )
        await policy.sample([9])
        await policy.sample([9, 1, 2, 7], grammar="{}")
        await policy.sample([9, 1, 2, 7, 3])
        return policy.episode()

    contract = SamplingContract(1.0, (1,), 6)
    episode = asyncio.run(scene())
    (row,) = episode.rows
    assert row.token_ids.tolist() == [1, 2, 7, 3, 4, 5]
    assert row.loss_mask.tolist() == [True, True, False, not constrains, True, True]
    assert grammars == ["", "{}" if constrains else "", ""]
    assert episode.num_constrained_tokens == constrains
    assert not episode.is_forced
    assert episode.num_sampled_tokens == 5


def test_a_turn_that_ends_at_its_own_max_tokens_is_not_truncated_by_the_run():
    async def generate(history, sampling, prefer):
        return make_turn([9] * sampling.max_tokens, finish_reason="length")

    async def reasons(max_tokens):
        policy = EpisodePolicy(generate, sampling=sampling, max_row_tokens=64)
        turn = await policy.sample([5], max_tokens=max_tokens)
        return turn.finish_reason, policy.episode().finish_reason

    sampling = SamplingContract(1.0, (1,), 6)
    assert asyncio.run(reasons(5)) == ("length", "max_tokens")  # who asked reads OpenAI's word
    assert asyncio.run(reasons(None)) == asyncio.run(reasons(9)) == ("length", "length")


def test_a_turn_that_may_not_fit_is_not_asked_for():
    async def never(history, sampling, prefer):
        raise AssertionError("asked")

    policy = EpisodePolicy(never, sampling=SamplingContract(1.0, (1,), 6), max_row_tokens=10)
    with pytest.raises(NoRoom, match="5 tokens and an answer of up to 6 must fit 10"):
        asyncio.run(policy.sample(range(5)))


@settings(max_examples=100, deadline=None)
@given(stories(), st.integers(0, 6))
def test_a_row_has_the_experts_of_each_token_when_it_was_first_computed(story, unknown):
    prompt, turns = story
    made = [make_turn(sampled, cut=min(cut, len(sampled))) for *_, sampled, cut in turns]
    asked = []

    async def generate(history, sampling, prefer):
        number = len(asked)
        asked.append(history.tolist())
        length = len(history) + len(made[number].token_ids) - 1
        experts = None if number == unknown else np.full((length, 4), number, np.uint8)
        return replace(made[number], experts=experts)

    async def scenario():
        sampling = SamplingContract(1.0, (1,), 6)
        policy = EpisodePolicy(generate, sampling=sampling, max_row_tokens=10_000)
        history = list(prompt)
        for _, read, _, _ in turns:
            history = history + read if asked else history
            turn = await policy.sample(history)
            history = [*history, *turn.token_ids.tolist()]
        return policy.episode()

    (row,) = asyncio.run(scenario()).rows
    if unknown < len(turns):
        assert row.experts is None
        return
    assert len(row.experts) == row.num_tokens - 1
    first = np.zeros(0, int)
    for number, history in enumerate(asked):
        length = len(history) + len(made[number].token_ids) - 1
        first = np.append(first, np.full(length - len(first), number))
    assert np.array_equal(row.experts, np.repeat(first[:, None], 4, axis=1))
