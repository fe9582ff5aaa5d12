"""One model over two processes of an engine: the same log-probabilities as one process has."""

import asyncio

import numpy as np
import pytest
from conftest import open_stack
from engine_stack import (
    FIRST,
    LONG_PROMPT,
    SECOND,
    TOLERANCE,
    fetch,
    make_request,
    until_all_have_tokens,
)

# Two engines for each model, one of them of two processes.
pytestmark = [pytest.mark.integration, pytest.mark.slow]
PROMPT = LONG_PROMPT[:40]
NUM_TOKENS = 400  # so many that the update comes before the last of them, on a busy machine too


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request):
    tied = request.param == "tied"
    return request.getfixturevalue("model_folder" if tied else "untied_model_folder")


def scores_of_an_update_in_flight(stack):
    """The canary under FIRST, the canary under SECOND, and what ran while SECOND came."""
    before, second = stack.serve(FIRST), stack.snapshot(SECOND)  # sampling would end meanwhile
    request = make_request(prompt=PROMPT, max_tokens=NUM_TOKENS, stop=())

    async def scenario():
        running = asyncio.create_task(stack.engine.generate(request))
        await until_all_have_tokens(stack.engine, 10)
        loaded = await stack.engine.load(second, fetch)
        return loaded, await running

    loaded, completions = stack.run(scenario())
    return before.canary, loaded.canary, completions


def test_two_processes_score_as_one_before_and_after_an_update_in_flight(folder):
    scores = []
    for size in (1, 2):
        with open_stack(folder, tensor_parallel_size=size) as stack:
            before, after, completions = scores_of_an_update_in_flight(stack)
            for completion in completions:
                first, second = completion.weights_versions
                assert (first.version, second.version) == (FIRST, SECOND)
                options = {"prompt": PROMPT}
                assert stack.error_of(completion, FIRST, stop=first.stop, **options) <= TOLERANCE
                assert stack.error_of(completion, SECOND, start=first.stop, **options) <= TOLERANCE
            scores.append(np.concatenate(before + after))
    one, two = scores
    assert np.abs(one - two).max() <= TOLERANCE
    half = len(one) // 2
    assert np.abs(one[:half] - one[half:]).max() > 0.1, "the update has changed nothing"
