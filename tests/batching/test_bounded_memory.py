"""A long run leaves nothing behind: every container of the batcher stays as small as its window."""

import logging
from collections import deque

import pytest
from effort import FULL
from script import Script
from scripted import run
from scripted_run import Run, make_config

from async_grpo.types import EndOfStep

NUM_BATCHES = 5000 if FULL else 150
CONTAINERS = (dict, list, set, frozenset, tuple, deque)
OWN = "async_grpo.batching", "async_grpo.weight_sync"


class Every:
    """A set of ordinals without end."""

    def __init__(self, number):
        self._number = number

    def __contains__(self, ordinal):
        return ordinal % self._number == self._number - 1


def num_elements(root, *, without=()):
    """Elements of all containers that `root` holds, however deep, by the path to each."""
    found, seen, waiting = {}, set(map(id, without)), [("", root)]
    while waiting:
        path, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, CONTAINERS):
            found[path] = found.get(path, 0) + len(held)
            values = held.values() if isinstance(held, dict) else held
            waiting += [(path + "[]", value) for value in values]
        elif type(held).__module__.startswith(OWN):
            names = [name for cls in type(held).__mro__ for name in getattr(cls, "__slots__", ())]
            names += list(getattr(held, "__dict__", ()))
            waiting += [(f"{path}.{name}", getattr(held, name)) for name in names]
    return found


def test_the_counting_sees_into_everything():
    ledger = num_elements(Run(Script(config=make_config())).batcher._ledger)
    assert {"._open", "._steps", ".fates.reasons"} <= ledger.keys()


@pytest.mark.timeout(1800)
def test_containers_of_a_long_run_stay_as_small_as_those_of_a_short_one():
    """Groups fail, workers fail, leases are lost, questions are drawn again, all of the time."""
    logging.disable(logging.ERROR)
    config = make_config(
        batch_size=4,
        train_minibatch_size=2,
        samples_per_question=2,
        num_training_batches=NUM_BATCHES,
        max_staleness=1,
        dynamic_sampling=1,
        kl_coefficient=0.1,
    )
    script = Script(
        config=config, flaky=Every(5), failing=Every(11), dropped=Every(13), even=Every(7)
    )
    sizes = []
    run(Long(script, sizes).train(), limit_s=10**7)
    logging.disable(logging.NOTSET)
    half = len(sizes) // 2
    early, late = (
        {path: max(size.get(path, 0) for size in part) for size in part for path in size}
        for part in (sizes[:half], sizes[half:])
    )
    grown = {
        path: (early.get(path, 0), late[path])
        for path in late
        if late[path] > max(1.2 * early.get(path, 0), 64)
    }
    assert not grown
    assert sum(late.values()) <= 1.2 * sum(early.values())


class Long(Run):
    """A run that keeps nothing of what it is given, and looks into its batcher now and then."""

    def __init__(self, script, sizes):
        super().__init__(script)
        self.sizes = sizes
        self.cluster.references = deque(maxlen=1)

    async def rank(self, rank):
        index = 0
        while True:
            await self.batcher.hungry(index)
            *_, item = await self.batcher.next_items(rank, index)
            index += 1
            if not isinstance(item, EndOfStep) or not item.is_last_of_batch:
                continue
            if rank == 0:
                await self.publish(item.batch + 1)
                if item.batch % max(1, NUM_BATCHES // 100) == 0 and item.batch > 4:
                    parts = (self.plan, self.plan.questions)
                    self.sizes.append(num_elements(self.batcher, without=parts))
            if item.batch + 1 == self.config.batching.num_training_batches:
                return
