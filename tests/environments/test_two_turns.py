"""An environment of two turns, in a file of its own, trains as the float64 oracle says."""

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
from learners import make_learner
from oracle import oracle_gradient, oracle_twin, relative_difference, sent
from players import OracleEngine, make_request, play
from two_turns import HIGHER

from async_grpo.environments.find import make_environment, users_environment
from async_grpo.model.policy import hf_named_parameters
from async_grpo.types import EndOfStep, Group, Minibatch, Question, Sample

HERE = Path(__file__).parent
OPTIONS = {
    "max_generation_tokens": 12,
    "max_tokens_per_gpu": 64,
    "ratio_mode": "behaviour",
    "kl_coefficient": 0.0,
    "entropy_coefficient": 0.01,
}


def sampled_group(learner, environment, ordinal):
    """One group of the policy of this moment, with advantages."""
    rng = np.random.default_rng(ordinal)
    prompt = rng.integers(2, 50, size=3).astype(np.int32)
    question = Question(prompt, "guess", str(rng.integers(5, 50)), {})
    engine = OracleEngine(oracle_twin(learner.policy.model), seed=ordinal)
    group = asyncio.run(play(environment, engine, make_request(question, constrains=True)))
    samples = [
        Sample(ordinal, index, question, episode, verdict, advantage=0.0)
        for index, (episode, verdict) in enumerate(zip(group.episodes, group.verdicts, strict=True))
    ]
    return learner.algorithm.finish_group(Group(ordinal, 0, tuple(samples))).samples


@pytest.mark.parametrize("name", ["TwoTurns", "Forgetful", "Structured"])
@pytest.mark.parametrize("aggregation", ["sample-mean", "token-mean"])
def test_steps_over_two_turns_have_the_oracle_s_gradient(name, aggregation, tmp_path):
    environment = make_environment(users_environment(f"{HERE}/two_turns.py:{name}"))
    learner = make_learner(tmp_path, aggregation=aggregation, **OPTIONS)
    for number in range(3):
        groups = [sampled_group(learner, environment, 2 * number + n) for n in range(2)]
        samples = [sample for group in groups for sample in group]
        expected = oracle_gradient(learner.policy.model, samples, learner.config)
        before = copy.deepcopy(learner.policy.model.state_dict())
        parts = [part for sample in samples for part in sample.parts()]
        cut = np.random.default_rng(number).integers(1, len(parts))
        for index, minibatch in enumerate((parts[cut:], [], parts[:cut])):
            learner.accumulate(Minibatch(index, tuple(minibatch)))
        num_tokens = sum(sample.num_trained_tokens for sample in samples)
        end = EndOfStep(
            number // 2,
            number % 2,
            number % 2 == 1,
            len(samples),
            num_tokens,
            sent=sent(samples, aggregation=aggregation),
        )
        divisor = learner.denominator(end)
        got = {n: p.grad.double() / divisor for n, p in hf_named_parameters(learner.policy)}
        assert relative_difference(got, expected) < 1e-5
        assert learner.update(end).skipped == ""
        after = learner.policy.model.state_dict()
        assert any(not after[key].equal(before[key]) for key in before)


def test_what_the_environment_says_is_read_and_not_trained(tmp_path):
    environment = make_environment(users_environment(f"{HERE}/two_turns.py:TwoTurns"))
    learner = make_learner(tmp_path, **OPTIONS)
    samples = sampled_group(learner, environment, 3)
    for sample in samples:
        (row,) = sample.episode.rows
        sampled = np.concatenate([turn.token_ids for turn in sample.episode.turns])
        assert row.token_ids[row.loss_mask].tolist() == sampled.tolist()
        assert (row.token_ids[~row.loss_mask] >= HIGHER).all()
    assert any(len(sample.episode.turns) == 2 for sample in samples)


def test_an_episode_with_constrained_tokens_trains_exactly_the_others(tmp_path):
    environment = make_environment(users_environment(f"{HERE}/two_turns.py:Structured"))
    for sample in sampled_group(make_learner(tmp_path, **OPTIONS), environment, 3):
        (row,) = sample.episode.rows
        _, second = sample.episode.turns
        assert row.token_ids[row.loss_mask].tolist() == second.token_ids.tolist()
        assert sample.num_trained_tokens == len(second.token_ids)


def test_the_parts_of_an_episode_carry_the_weight_of_the_whole(tmp_path):
    environment = make_environment(users_environment(f"{HERE}/two_turns.py:Forgetful"))
    sample = sampled_group(make_learner(tmp_path, **OPTIONS), environment, 3)[0]
    first, second = sample.parts()
    assert first.num_trained_tokens == second.num_trained_tokens == sample.num_trained_tokens
    assert (first.row, second.row) == (0, 1)
    assert first.num_tokens + second.num_tokens == sample.num_tokens
