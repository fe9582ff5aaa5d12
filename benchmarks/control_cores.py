"""The pure deciders of the control plane, each behind as many samples in flight as one likes.

A core is filled once, and then works in a steady state: one sample ends for each that begins. What
it then spends on one more sample must not depend on how many there are.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from async_grpo.batching.admission import AdmissionWindow, StepKey
from async_grpo.batching.ledger import Ledger
from async_grpo.batching.packing import Item, estimate_cost
from async_grpo.batching.rounds import RoundFormer
from async_grpo.routing.balancer import Balancer
from async_grpo.routing.desk import LeaseDesk
from async_grpo.types import Lease, WeightsVersion, WorkerInfo

NUM_WORKERS = 1_000
GROUP = 8  # samples of a question
SAMPLES_PER_STEP = 4_096
NUM_RANKS, MAX_TOKENS = 64, 18_432
VERSION = WeightsVersion(0, 1)
Work = Callable[[int], int]  # so many samples more; the number of decisions that they took
Core = Callable[[int], Work]  # filled with so many samples in flight


def admission(num_in_flight: int) -> Work:
    """Ordinals, steps and oldest weights of slots, in a window that is as wide as it must be."""
    batch_size = SAMPLES_PER_STEP // GROUP
    window = AdmissionWindow(
        batch_size,
        questions_per_step=batch_size,
        max_staleness=num_in_flight // SAMPLES_PER_STEP + 1,
        num_batches=10**9,
    )

    def work(num_samples: int) -> int:
        for _ in range(num_samples // GROUP):
            if not window.admissible():
                window.batch_published(window.batches_published + 1)
            ordinal = window.next_ordinal
            window.start(ordinal)
            window.step_of(ordinal)
            window.oldest_weights(ordinal)
        return num_samples // GROUP

    work(num_in_flight)
    return work


def leases(num_in_flight: int) -> Work:
    """Leases on the least loaded of NUM_WORKERS workers, one a group; some serve older weights."""
    balancer = Balancer()
    capacity = max(1.0, 2 * num_in_flight / NUM_WORKERS)
    for number in range(NUM_WORKERS):
        version = VERSION if number % 4 else VERSION._replace(batches=0)
        balancer.add_worker(str(number), capacity=capacity, overhead=GROUP, version=version)
    held: deque[int] = deque()

    def acquire() -> None:
        grant = balancer.try_acquire(GROUP, VERSION)
        assert grant is not None
        held.append(grant.lease_id)

    def work(num_samples: int) -> int:
        for _ in range(num_samples // GROUP):
            acquire()
            balancer.release(held.popleft())
        return 2 * (num_samples // GROUP)

    for _ in range(num_in_flight // GROUP):
        acquire()
    return work


def ledger(num_in_flight: int) -> Work:
    """Every sample's fate in double entry; steps are closed, checked and rolled back to."""
    books, ends = Ledger(), itertools.count()
    begins = itertools.count()

    def step_of(ordinal: int) -> StepKey:
        return StepKey(ordinal * GROUP // SAMPLES_PER_STEP, 0)

    def admit() -> None:
        ordinal = next(begins)
        books.admit(ordinal, num_samples=GROUP, step=step_of(ordinal))

    def work(num_samples: int) -> int:
        for _ in range(num_samples // GROUP):
            admit()
            ordinal = next(ends)
            for _ in range(GROUP):
                books.settle(ordinal, fate="trained", num_samples=1)
            if step_of(ordinal + 1) != step_of(ordinal):
                books.check()
                books.close_step(step_of(ordinal))
        return num_samples + num_samples // GROUP

    for _ in range(num_in_flight // GROUP):
        admit()
    return work


def rounds(num_in_flight: int) -> Work:
    """Ready samples into rounds of NUM_RANKS minibatches."""
    former = RoundFormer(NUM_RANKS, max_tokens=MAX_TOKENS, steps_per_batch=1)
    lengths = _lengths()
    numbers = itertools.count()
    step = StepKey(0, 0)

    def offer() -> None:
        number, num_tokens = next(numbers), next(lengths)
        item = Item((number // GROUP, number % GROUP), num_tokens, estimate_cost(num_tokens))
        former.offer(step, item=item)

    def work(num_samples: int) -> int:
        for _ in range(num_samples):
            offer()
            if former.num_ready > num_in_flight:
                former.next_round(0.0, hungry=False)
        return num_samples

    for _ in range(num_in_flight):
        offer()
    return work


def _lengths() -> itertools.cycle[int]:
    """Lognormal, median 1,500 tokens, at most 16k: reasoning runs."""
    drawn = np.random.default_rng(0).lognormal(np.log(1_500), 1.0, 65_536)
    return itertools.cycle(np.clip(drawn, 16, 16_384).astype(int).tolist())


CORES: Mapping[str, Core] = {
    "admission": admission,
    "leases": leases,
    "ledger": ledger,
    "rounds": rounds,
}


async def desk_decisions(num_leases: int) -> int:
    """The lease desk as its registry uses it: some wait in line, and are served by a release."""
    desk = LeaseDesk()
    for number in range(NUM_WORKERS):
        desk.add(worker_info(number), None, version=VERSION)
    held: deque[Lease] = deque()
    for _ in range(num_leases):
        held.append(await desk.acquire(GROUP, VERSION, timeout_s=60))
        if len(held) >= NUM_WORKERS:
            desk.release(held.popleft().lease_id)
    await asyncio.sleep(0)
    return num_leases + max(0, num_leases - NUM_WORKERS + 1)


def worker_info(number: int, *, capacity: float = 256.0) -> WorkerInfo:
    """One of many generation workers."""
    return WorkerInfo(
        f"generation-{number}", "generation", "node", 0, "model", 128, capacity, GROUP, 512
    )
