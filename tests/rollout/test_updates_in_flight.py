"""A real engine takes new weights while it serves, and is caught when it serves anything else."""

import asyncio
import dataclasses

import numpy as np
import pytest
from effort import updates
from engine_stack import (
    CANARY_TOKENS,
    FIRST,
    LONG_PROMPT,
    MAX_NUM_SEQS,
    SECOND,
    TOLERANCE,
    fetch,
    make_request,
    num_sampled,
    until_all_have_tokens,
    until_sampled,
)

from async_grpo.types import VersionSpan, WeightsVersion
from async_grpo.weight_sync.sync_report import canary_complaint, canary_differences

pytestmark = pytest.mark.integration
PROMPT = LONG_PROMPT[:8]
NUM_UPDATES = updates(3)
MAX_TOKENS = 400  # so many that some sample sees three updates, however late we look


class Traffic:
    """Requests that keep an engine more than full; each that ends is followed by another."""

    def __init__(self, engine):
        self.engine = engine
        self.completions = []
        self._running = set()
        self._is_open = True

    def start(self, num_requests):
        request = make_request(prompt=PROMPT, max_tokens=MAX_TOKENS, stop=())
        for _ in range(num_requests):
            task = asyncio.create_task(self.engine.generate(request))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task):
        self._running.discard(task)
        if task.cancelled():  # the scenario has failed
            return
        self.completions.extend(task.result())
        if self._is_open:
            self.start(1)

    def num_tokens(self, running):
        return sum(running) + sum(len(completion.token_ids) for completion in self.completions)

    async def move_on(self, num_tokens):
        goal = self.num_tokens(await num_sampled(self.engine)) + num_tokens
        await until_sampled(self.engine, lambda counts: self.num_tokens(counts) >= goal)

    async def end(self):
        self._is_open = False
        while self._running:
            await asyncio.wait(self._running)
        return self.completions


def test_every_token_of_running_requests_is_of_the_weights_that_its_span_names(stack):
    versions = [WeightsVersion(0, batches) for batches in range(1, NUM_UPDATES + 1)]
    snapshots = [stack.snapshot(version) for version in versions]  # traffic would end meanwhile

    async def update_in_flight():
        traffic = Traffic(stack.engine)
        traffic.start(MAX_NUM_SEQS // 4 + 2)  # of 4 samples each: some always wait in line
        for snapshot in snapshots:
            await traffic.move_on(20 * MAX_NUM_SEQS)
            loaded = await stack.engine.load(snapshot, fetch)
            assert loaded.canary_problem == ""
            assert canary_differences(snapshot.canary, loaded.canary).max() <= TOLERANCE
            assert loaded.recomputed_tokens > 0
            assert loaded.pause_seconds > 0
        await traffic.move_on(20 * MAX_NUM_SEQS)
        return await traffic.end()

    stack.serve(FIRST)
    completions = stack.run(update_in_flight())
    seen = set()
    for completion in completions:
        spans = completion.weights_versions
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == len(completion.token_ids) == MAX_TOKENS
        assert sorted(span.version for span in spans) == [span.version for span in spans]
        assert len({span.version for span in spans}) == len(spans)
        for version, start, stop in spans:
            where = {"prompt": PROMPT, "start": start, "stop": stop}
            assert stack.error_of(completion, version, **where) <= TOLERANCE
            if stop - start >= 10 and version != FIRST:  # otherwise the cut could be anywhere
                previous = version._replace(batches=version.batches - 1)
                assert stack.error_of(completion, previous, **where) > 0.1
            seen.add(version)
    assert seen == {FIRST, *versions}
    assert max(len(completion.weights_versions) for completion in completions) >= 4


def test_what_an_update_throws_away_is_what_running_requests_had_computed(stack):
    stack.serve(FIRST)
    request = make_request(prompt=PROMPT, max_tokens=300, stop=())

    async def update_in_flight():
        running = [asyncio.create_task(stack.engine.generate(request)) for _ in range(4)]
        await until_all_have_tokens(stack.engine, 20)
        loaded = await stack.engine.load(stack.snapshot(SECOND), fetch)
        return loaded, [completion for task in running for completion in await task]

    loaded, completions = stack.run(update_in_flight())
    assert len(completions) == MAX_NUM_SEQS
    cuts = []
    for completion in completions:
        first, second = completion.weights_versions
        assert (first.version, second.version) == (FIRST, SECOND)
        cuts.append(first.stop)
    # Four prompts that four samples each share, and all output tokens but each one's last.
    assert loaded.recomputed_tokens == 4 * len(PROMPT) + sum(cut - 1 for cut in cuts)
    assert stack.serve(SECOND).recomputed_tokens == 0


def test_no_prefix_cache_outlives_its_weights(stack):
    for version in (FIRST, SECOND, FIRST):
        stack.serve(version)
        for _ in range(2):  # the second time from the cache, which must be of these weights
            (completion,) = stack.generate(prompt=LONG_PROMPT, num_samples=1)
            assert completion.weights_versions[0].version == version
            assert stack.error_of(completion, version) <= TOLERANCE


def test_a_full_engine_replays_the_canary_at_once(stack):
    stack.serve(FIRST)
    request = make_request(prompt=PROMPT, max_tokens=400, stop=(), num_samples=2 * MAX_NUM_SEQS)

    async def update_in_flight():
        running = asyncio.create_task(stack.engine.generate(request))
        await until_sampled(stack.engine, lambda counts: max(counts, default=0) >= 10)
        loaded = await stack.engine.load(stack.snapshot(SECOND), fetch)
        num_left = [400 - count for count in await num_sampled(stack.engine)]
        await stack.engine.abort()
        await running
        return loaded, num_left

    loaded, num_left = stack.run(update_in_flight())
    assert len(loaded.canary) == len(CANARY_TOKENS)
    assert len(num_left) == 2 * MAX_NUM_SEQS, "it waited until some sequences had ended"
    assert min(num_left) > 200


def test_a_canary_tells_weights_that_are_not_the_ones_scored(stack):
    stack.serve(FIRST)
    wrong = dataclasses.replace(stack.snapshot(SECOND), canary=stack.snapshot(FIRST).canary)
    loaded = stack.load(wrong)
    differences = canary_differences(wrong.canary, loaded.canary)
    assert differences.shape == (sum(len(row) - 1 for row in CANARY_TOKENS),)
    assert differences.max() > 0.1
    assert "rounding explains 0.001" in canary_complaint(
        wrong.canary, loaded.canary, dtype=stack.engine.dtype
    )


def test_a_canary_that_vllm_refuses_loses_neither_the_update_nor_the_reason(stack):
    stack.serve(FIRST)
    snapshot = stack.snapshot(SECOND)
    beyond = dataclasses.replace(snapshot.canary[1], token_ids=np.full(600, 3, np.int32))
    loaded = stack.load(dataclasses.replace(snapshot, canary=(snapshot.canary[0], beyond)))
    assert loaded.canary == () and "512" in loaded.canary_problem
    assert stack.run(stack.engine.pulse()).serves == str(SECOND)
    assert stack.error_of(stack.generate()[0], SECOND) <= TOLERANCE
    assert not stack.engine._llm.output_processor.request_states


def test_an_alias_renames_what_is_served_and_keeps_its_caches(stack):
    stack.serve(FIRST)
    renamed = WeightsVersion(0, 7)
    request = make_request(prompt=PROMPT, max_tokens=300, stop=())

    async def rename_in_flight():
        running = asyncio.create_task(stack.engine.generate(request))
        await until_all_have_tokens(stack.engine, 20)
        await stack.engine.rename(renamed)
        return await running

    completions = stack.run(rename_in_flight())
    for completion in completions:
        cut = completion.weights_versions[0].stop
        assert completion.weights_versions == (
            VersionSpan(FIRST, 0, cut),
            VersionSpan(renamed, cut, 300),
        )
        assert stack.error_of(completion, FIRST, prompt=PROMPT) <= TOLERANCE
