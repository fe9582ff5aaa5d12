"""Episodes of several rows and of many turns: the float64 oracle's gradient, each as one sample."""

import asyncio
import itertools

import numpy as np
import pytest
from learners import make_learner
from oracle import oracle_gradient, oracle_twin, relative_difference, sent
from players import OracleEngine, make_request, play

from async_grpo.environments.base import Environment
from async_grpo.model.policy import hf_named_parameters
from async_grpo.types import EndOfStep, Group, Minibatch, Question, Sample, Verdict

SHAPES = [(1, 1), (2, 1), (5, 4), (1, 20)]  # rows, and turns of each, by episode of a group
PROMPT, TOOL = [7, 8], [60, 61, 62]
OPTIONS = {
    "max_generation_tokens": 12,
    "max_tokens_per_gpu": 256,
    "ratio_mode": "behaviour",
    "kl_coefficient": 0.0,
    "entropy_coefficient": 0.01,
}


class Story(Environment):
    """Between two turns a tool speaks; at the end of a row the history is rewritten."""

    def __init__(self):
        self._shapes = iter(SHAPES)

    async def play(self, question, policy, services):
        num_rows, num_turns = next(self._shapes)
        for row in range(num_rows):
            history = np.array([row + 2, *question.input_token_ids], np.int32)
            for _ in range(num_turns):
                turn = await policy.sample(history, max_tokens=4)
                history = np.concatenate([history, turn.token_ids, TOOL])
        return policy.episode()

    async def grade(self, question, episodes, services):
        return [Verdict.scored(0.7**n, adapter="n") for n in range(len(episodes))]


def sampled_group(learner, ordinal=0):
    question = Question(np.array(PROMPT, np.int32), "", None, {})
    engine = OracleEngine(oracle_twin(learner.policy.model), seed=ordinal)
    request = make_request(question, num_samples=len(SHAPES), max_row_tokens=256)
    group = asyncio.run(play(Story(), engine, request))
    samples = [
        Sample(ordinal, index, question, episode, verdict, advantage=0.0)
        for index, (episode, verdict) in enumerate(zip(group.episodes, group.verdicts, strict=True))
    ]
    return learner.algorithm.finish_group(Group(ordinal, 0, tuple(samples))).samples


def gradient(learner, samples, *, seed=0):
    """Of one step, whose rows come in any order in three minibatches."""
    for _, parameter in hf_named_parameters(learner.policy):
        parameter.grad = None
    parts = [part for sample in samples for part in sample.parts()]
    rng = np.random.default_rng(seed)
    rng.shuffle(parts)
    first, second = sorted(rng.integers(len(parts) + 1, size=2))
    for index, some in enumerate((parts[:first], parts[first:second], parts[second:])):
        learner.accumulate(Minibatch(index, tuple(some)))
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    own = sent(samples, aggregation=learner.config.objective.aggregation)
    end = EndOfStep(0, 0, False, len(samples), num_tokens, sent=own)
    divisor = learner.denominator(end)
    return {n: p.grad.double() / divisor for n, p in hf_named_parameters(learner.policy)}


def test_the_episodes_have_the_rows_and_turns_that_are_meant(tmp_path):
    samples = sampled_group(make_learner(tmp_path, **OPTIONS))
    for (num_rows, num_turns), sample in zip(SHAPES, samples, strict=True):
        assert len(sample.episode.rows) == num_rows
        assert len(sample.episode.turns) == num_rows * num_turns
        turns = iter(sample.episode.turns)
        for row in sample.episode.rows:
            own = [turn.token_ids.tolist() for turn in itertools.islice(turns, num_turns)]
            assert row.token_ids[row.loss_mask].tolist() == list(itertools.chain(*own))
            assert row.token_ids[~row.loss_mask].tolist() == TOOL * (num_turns - 1)


@pytest.mark.parametrize("aggregation", ["sample-mean", "token-mean"])
@pytest.mark.parametrize("chosen", [[0], [1], [2], [3], [0, 1, 2, 3]])
def test_any_shape_of_episode_has_the_oracle_s_gradient(chosen, aggregation, tmp_path):
    learner = make_learner(tmp_path, aggregation=aggregation, **OPTIONS)
    group = sampled_group(learner)
    samples = [group[number] for number in chosen]
    expected = oracle_gradient(learner.policy.model, samples, learner.config)
    for seed in range(3):
        assert relative_difference(gradient(learner, samples, seed=seed), expected) < 1e-5


def test_an_episode_weighs_as_one_sample_whatever_its_rows_and_turns(tmp_path):
    learner = make_learner(tmp_path, **OPTIONS)
    samples = sampled_group(learner)
    alone = [gradient(learner, [sample]) for sample in samples]
    mean = {name: sum(each[name] for each in alone) / len(alone) for name in alone[0]}
    assert relative_difference(gradient(learner, samples), mean) < 1e-5
