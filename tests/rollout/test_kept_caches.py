"""A real engine whose running sequences keep their KV cache over an update."""

import asyncio

import numpy as np
import pytest
import torch
from engine_stack import (
    FIRST,
    LONG_PROMPT,
    SECOND,
    TEMPERATURE,
    TOLERANCE,
    fetch,
    make_request,
    until_all_have_tokens,
)

from async_grpo.types import VersionSpan

# An engine of its own; tests/rollout/test_schedulers.py has what it decides in `make test`.
pytestmark = [pytest.mark.integration, pytest.mark.slow]
NUM_TOKENS = 200


def update_in_flight(stack, prompt, *, then=None):
    """Serve SECOND while sequences run that began under FIRST; `then` is generated beside them."""
    stack.serve(FIRST)
    request = make_request(prompt=prompt, max_tokens=NUM_TOKENS, stop=())

    async def scenario():
        running = asyncio.create_task(stack.engine.generate(request))
        await until_all_have_tokens(stack.engine, 20)
        loaded = await stack.engine.load(stack.snapshot(SECOND), fetch)
        beside = await stack.engine.generate(then) if then is not None else ()
        return loaded, beside, await running

    return stack.run(scenario())


@torch.no_grad()
def mixed_logprobs(stack, prompt, completion, cut):
    """[L] where the first `cut` outputs are FIRST's, and SECOND goes on with FIRST's cache."""
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
    seen = len(prompt) + cut - 1  # the last token before the cut is computed after it
    old = stack.models[FIRST](ids[:, :seen], use_cache=True)
    new = stack.models[SECOND](ids[:, seen:], past_key_values=old.past_key_values, use_cache=True)
    logits = torch.cat([old.logits, new.logits], dim=1)[0, len(prompt) - 1 : -1] / TEMPERATURE
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_running_sequences_go_on_with_new_weights_upon_old_caches(keeping_stack):
    prompt = LONG_PROMPT[:40]
    loaded, _, completions = update_in_flight(keeping_stack, prompt)
    cuts = [completion.weights_versions[0].stop for completion in completions]
    assert (loaded.recomputed_tokens, loaded.kept_tokens) == (
        0,
        len(prompt) + sum(cut - 1 for cut in cuts),
    )
    for cut, completion in zip(cuts, completions, strict=True):
        assert completion.weights_versions == (
            VersionSpan(FIRST, 0, cut),
            VersionSpan(SECOND, cut, NUM_TOKENS),
        )
        expected = mixed_logprobs(keeping_stack, prompt, completion, cut)
        assert np.abs(expected - completion.logprobs).max() <= TOLERANCE
        pure = keeping_stack.error_of(completion, SECOND, prompt=prompt, start=cut)
        assert pure > 1e-3, "these caches make no difference, so the test shows nothing"


def test_new_prompts_find_no_cache_of_old_weights(keeping_stack):
    then = make_request(prompt=LONG_PROMPT, num_samples=2, stop=())
    _, beside, completions = update_in_flight(keeping_stack, LONG_PROMPT, then=then)
    for completion in beside:
        assert completion.weights_versions[0].version == SECOND
        assert keeping_stack.error_of(completion, SECOND) <= TOLERANCE
    # A next turn begins with tokens of which the engine has caches upon old ones.
    turn = np.concatenate([LONG_PROMPT, completions[0].token_ids[: NUM_TOKENS - 40]])
    for _ in range(2):
        (again,) = keeping_stack.generate(prompt=turn, num_samples=1, stop=())
        assert keeping_stack.error_of(again, SECOND, prompt=turn) <= TOLERANCE
