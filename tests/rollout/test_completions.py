"""Nothing that cannot be trained on passes for a completion."""

from types import SimpleNamespace

import numpy as np
import pytest

from async_grpo.rollout.vllm_requests import read_completion
from async_grpo.types import VersionSpan, WeightsVersion
from async_grpo.util.errors import WorkerError


def output(**changes):
    """One output as vLLM reports it: 3 tokens, new weights after the first."""
    fields = {
        "token_ids": [7, 5, 1],
        "logprobs": SimpleNamespace(token_ids=[7, 5, 1], logprobs=[-0.5, -1.5, -0.25]),
        "routed_experts": None,
        "weight_versions": [span("2.3", 0, 1), span("2.4", 1, 3)],
        "finish_reason": "stop",
    }
    return SimpleNamespace(**(fields | changes))


def span(version, start, end):
    return SimpleNamespace(version=version, start=start, end=end)


def flat(token_ids, logprobs):
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs)


def test_tokens_logprobs_and_versions_are_kept():
    completion = read_completion(output())
    assert completion.token_ids.tolist() == [7, 5, 1]
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.tolist() == [-0.5, -1.5, -0.25]
    assert completion.logprobs.dtype == np.float32
    assert completion.weights_versions == (
        VersionSpan(WeightsVersion(2, 3), 0, 1),
        VersionSpan(WeightsVersion(2, 4), 1, 3),
    )
    assert (completion.finish_reason, completion.text) == ("stop", "")


@pytest.mark.parametrize(
    "logprobs", [None, flat([7, 5], [-0.5, -1.5]), flat([7, 6, 1], [-0.5, -1.5, -0.25])]
)
def test_every_sampled_token_needs_its_own_logprob(logprobs):
    with pytest.raises(WorkerError, match="every sampled token"):
        read_completion(output(logprobs=logprobs))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_is_named_with_its_position(bad):
    with pytest.raises(WorkerError, match=rf"got {bad} at output token 1"):
        read_completion(output(logprobs=flat([7, 5, 1], [-0.5, bad, -0.25])))


@pytest.mark.parametrize("versions", [None, [span("default", 0, 3)]])
def test_tokens_of_weights_that_nobody_published_are_no_completion(versions):
    with pytest.raises(WorkerError):
        read_completion(output(weight_versions=versions))
