import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_sample
from scripted_run import make_config

from async_grpo.algorithms.grpo import kl_penalty, overlong_penalty, shaped
from async_grpo.types import WeightsVersion

VERSION = WeightsVersion(0, 0)


def equation_13(length, longest, cache):
    """R_length of DAPO (arXiv 2503.14476), as the paper writes it: a reward, not a penalty."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 500), st.floats(0, 5))
def test_the_overlong_penalty_follows_equation_13_of_dapo(cache, rest, length, largest):
    longest = cache + rest
    got = overlong_penalty(length, max_tokens=longest, buffer_tokens=cache, largest=largest)
    assert got == pytest.approx(-largest * equation_13(length, longest, cache))


def test_the_papers_numbers():
    def at(length):
        return overlong_penalty(length, max_tokens=20480, buffer_tokens=4096, largest=1.0)

    assert [at(n) for n in (1, 16384, 17408, 18432, 20480)] == [0.0, 0.0, 0.25, 0.5, 1.0]


def test_without_a_buffer_length_costs_nothing():
    assert overlong_penalty(999, max_tokens=10, buffer_tokens=0, largest=1.0) == 0.0


logprobs = st.floats(-20, 0, width=32)


@settings(deadline=None)
@given(st.lists(st.tuples(logprobs, logprobs, st.booleans()), min_size=1, max_size=20))
def test_the_kl_penalty_is_k1_of_the_unmasked_tokens(tokens):
    behaviour, reference, mask = (np.array(column) for column in zip(*tokens, strict=True))
    got = kl_penalty(
        behaviour.astype(np.float32),
        reference.astype(np.float32),
        loss_mask_L=mask,
        coefficient=0.25,
    )
    expected = 0.25 * sum(b - r for b, r, unmasked in tokens if unmasked)
    assert got == pytest.approx(expected, abs=1e-12)


K1 = make_config(
    max_generation_tokens=8,
    overlong_buffer_tokens=4,
    overlong_penalty=1.0,
    kl_coefficient=0.5,
    kl_estimator="k1",
)


def test_the_verifiers_reward_stays_and_the_shaped_one_has_every_penalty():
    sample = make_sample(
        VERSION, num_tokens=6, num_masked=2, scores={"reference": np.full(6, -1.0, np.float32)}
    )
    found = shaped(sample, K1.objective, max_tokens=K1.sampling.max_generation_tokens)
    assert found.verdict is sample.verdict
    assert (found.overlong_penalty, found.kl_penalty) == (0.5, 0.5 * 4 * 0.5)
    assert found.shaped_reward == 1.0 - 0.5 - 1.0
    assert sample.shaped_reward == 1.0


def test_what_has_no_trained_token_needs_no_reference():
    found = shaped(make_sample(VERSION, num_tokens=4, num_masked=4), K1.objective, max_tokens=8)
    assert found.kl_penalty == 0.0
