"""A batcher that dies at any moment: another one goes on at the latest end of a step."""

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import replace

import pytest
from effort import histories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from script import Script
from scripted import run
from scripted_run import Run, make_config
from test_histories import identity, scripts

from async_grpo.batching.admission import StepKey
from async_grpo.batching.ledger import Ledger
from async_grpo.types import EndOfStep
from async_grpo.util.errors import ProcessLostError


@pytest.fixture(autouse=True, scope="module")
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Dead:
    """What is left of a batcher."""

    async def published(self, version):
        raise ProcessLostError("the experience batcher died")


class Trainer:
    """All ranks of a run at once: they hear of a death before the same item."""

    def __init__(self, script, kills):
        self.running = Run(script)
        self.script, self.kills = script, sorted(kills, reverse=True)
        self.steps, self.unfinished = [], []  # what was trained; what a death would throw away
        self.announced = None
        self.num_restarts = 0

    async def train(self):
        await self.running.publish(0)
        index, ranks = 0, range(self.script.num_ranks)
        while len(self.steps) < len(self.script.steps):
            batcher = self.running.batcher
            await batcher.hungry(index)
            asked = asyncio.gather(*(batcher.next_items(rank, index) for rank in ranks))
            if not await self.comes_before_death(asked):
                await self.restart()
                index = 0
                continue
            index += 1
            for items in zip(*asked.result(), strict=True):
                await self.take(items)
        await self.announced
        return self

    async def comes_before_death(self, asked):
        if not self.kills:
            await asked
            return True
        left = max(self.kills[-1] - asyncio.get_running_loop().time(), 0.0)
        await asyncio.wait({asked}, timeout=left)
        return asked.done()

    async def take(self, items):
        if not isinstance(items[0], EndOfStep):
            self.unfinished.append(items)
            await asyncio.sleep(self.script.seconds("train", len(self.unfinished)) / 5)
            return
        end, *others = items
        assert all(other == end and other.resume is None for other in others)
        self.steps.append((self.unfinished, end))
        self.unfinished = []
        if end.is_last_of_batch:
            if self.announced:
                await self.announced
            self.announced = asyncio.ensure_future(self.publish(end.batch + 1))

    async def publish(self, batches):
        with contextlib.suppress(ProcessLostError):
            await self.running.publish(batches)

    async def restart(self):
        """As recovery.py does it."""
        self.kills.pop()
        self.num_restarts += 1
        self.running.batcher = self.running.served.batcher = Dead()
        tasks = list(self.running.served._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(2.0)  # leases that were on their way to it come back too
        assert not self.running.generation.open
        if self.announced:
            await self.announced
        self.unfinished = []
        resume = self.steps[-1][1].resume if self.steps else None
        self.running.serve(resume)
        await self.running.served.published(self.running.cluster.version)


def trained(script, kills=()):
    return run(Trainer(script, kills).train(), limit_s=20_000)


def samples(step):
    minibatches, _ = step
    return sorted(identity(s) for items in minibatches for item in items for s in item.samples)


@pytest.mark.timeout(1800)
@settings(max_examples=histories(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(scripts(), st.lists(st.floats(0.0, 80.0), min_size=1, max_size=4))
def test_a_run_whose_batcher_dies_at_any_moment_trains_the_same_samples_once(script, kills):
    """Held fixed: completions and rewards, by slot and attempt; not held: who is ready when."""
    script = replace(script, loses_a_lease=False)
    plain, disturbed = trained(script), trained(script, kills)
    assert len(plain.steps) == len(disturbed.steps) == len(script.steps)
    for first, second, key in zip(plain.steps, disturbed.steps, script.steps, strict=True):
        assert samples(first) == samples(second)
        end, again = first[1], second[1]
        assert (again.batch, again.step_in_batch) == key
        assert (again.num_samples, again.num_tokens) == (end.num_samples, end.num_tokens)
        without_lag = [{k: v for k, v in e.sums.items() if "lag" not in k} for e in (end, again)]
        assert without_lag[0] == without_lag[1]
        check_fates(end, again)
    check_books(disturbed)


def check_fates(end, again):
    """A death discards what was finished of later steps, and nothing else changes fate.

    A worker that is flaky at its first try is not so again, for the next batcher.
    """
    for fate in ("trained", "zero_contribution", "failed", "replaced"):
        assert again.fates[fate] == end.fates[fate]
    lost = again.reasons.get("discarded: restart", 0)
    assert 0 <= again.fates["discarded"] - lost <= end.fates["discarded"]


def check_books(disturbed):
    ledger = disturbed.running.batcher._ledger
    ledger.check()
    assert ledger.in_flight == 0
    totals = Counter()
    for _, end in disturbed.steps:
        totals.update(end.fates)
    assert ledger.fates.samples == totals
    assert ledger.admitted_slots == sum(map(len, (step_ordinals(disturbed))))


def step_ordinals(disturbed):
    config = disturbed.script.config
    return [range(config.batching.questions_per_step)] * len(disturbed.script.steps)


def test_a_restart_counts_what_was_finished_of_later_steps_and_admits_it_again():
    """S = 1: while batch 0 is trained, batch 1 is generated; then the batcher dies."""
    config = make_config(max_staleness=1, num_training_batches=3, batch_size=2)
    script = Script(config=config, slowest_s=0.0)
    disturbed = trained(script, kills=[0.0])
    assert disturbed.num_restarts == 1
    ledger = Ledger.restore(disturbed.steps[0][1].resume.ledger)
    assert ledger.fates.samples["discarded"] == 2 * 3  # batch 1, as far as the first cut knows
    assert tuple(ledger.open_slots) == (2, 3)
    assert ledger.admitted_samples == 2 * 3 + 2 * (2 * 3)


def test_a_death_before_the_first_step_has_ended_starts_the_run_again():
    script = Script(config=make_config(num_training_batches=1))
    disturbed = trained(script, kills=[0.5, 1.0, 1.5])
    assert disturbed.num_restarts == 3
    assert samples(disturbed.steps[0]) == samples(trained(script).steps[0])
    assert disturbed.steps[0][1].fates["discarded"] == 0  # nobody knows of what the dead had


def test_the_questions_in_quarantine_are_known_to_the_next_batcher():
    script = Script(config=make_config())
    running = Run(script)
    running.served.pipeline.workers.quarantine.questions.update((9, 8, 4))
    running.batcher._rounds.current_step = StepKey(0, 0)
    resume = running.batcher._resume_point()
    assert resume.quarantined == (4, 8, 9)
    running.serve(resume)
    assert running.served.pipeline.workers.quarantine.questions == {4, 8, 9}
