"""Outputs of any length are trained, those that stop are tried elsewhere: with a real registry."""

import asyncio
from dataclasses import dataclass, field

from script import Script
from scripted import Handle, run
from scripted_run import Cluster, Run, make_config, split_steps

from async_grpo.config.roles import role_of
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import Pulse, RequestPulse, WeightsAck, WeightsSnapshot, WorkerInfo

STALL_S = 60.0
TOKENS_A_SECOND = 10.0
FOREVER_S = 100_000.0


@dataclass
class Worker:
    """Makes tokens for what it has, and is cancelled as Ray cancels: by the end of the await."""

    name: str
    cluster: Cluster
    seconds: float = 1.0  # of each output
    stuck: frozenset[int] = frozenset()  # ordinals for which no token comes
    is_stuck: bool = False  # for all
    capacity: float = 1000.0
    began: dict[int, tuple[int, float]] = field(default_factory=dict)  # lease -> ordinal, when
    sampled: list[int] = field(default_factory=list)  # ordinals
    cancelled: list[int] = field(default_factory=list)
    num_tokens: float = 0.0
    asked_at: float = 0.0

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        seconds, self.asked_at = now_s() - self.asked_at, now_s()
        requests = {
            lease: RequestPulse(self._tokens(*it), False) for lease, it in self.began.items()
        }
        if any(request.num_tokens for request in requests.values()):
            self.num_tokens += TOKENS_A_SECOND * seconds
        return Pulse("served", int(self.num_tokens), requests)

    def _tokens(self, ordinal, began_at):
        if self.is_stuck or ordinal in self.stuck:
            return 0
        return int(TOKENS_A_SECOND * (now_s() - began_at))

    async def generate(self, request):
        self.sampled.append(request.ordinal)
        self.began[request.lease_id] = request.ordinal, now_s()
        is_stuck = self.is_stuck or request.ordinal in self.stuck
        try:
            await asyncio.sleep(FOREVER_S if is_stuck else self.seconds)
            return await self.cluster.generate(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.ordinal)
            raise
        finally:
            del self.began[request.lease_id]

    async def load_weights(self, snapshot):
        return WeightsAck(self.name, snapshot.version, 0.0, 0.0)

    async def abort_all(self):
        pass


class LongRun(Run):
    """Its generation workers are registered with a real registry."""

    def __init__(self, *workers, **changes):
        options = {"stall_timeout_s": STALL_S, "num_training_batches": 1} | changes
        super().__init__(Script(config=make_config(**options), slowest_s=0.0))
        self.workers = [make(self.cluster) for make in workers]
        self.registry = WorkerRegistry(role_of("generation"), kill=lambda handle: None)
        self.generation = self.registry
        self.serve()

    async def publish(self, batches):
        if not batches:
            for worker in self.workers:
                info = WorkerInfo(
                    worker.name, "generation", "node", 1, "m", 64, worker.capacity, 0.0, 512
                )
                await self.registry.register(info, Handle(worker))
        version = self.cluster.version
        await super().publish(batches)
        if self.cluster.version != version:
            await self.registry.publish(WeightsSnapshot(self.cluster.version, ()), timeout_s=60.0)

    async def looking(self, seconds):
        """`train`, with the status looked at as a rank does that waits, from time to time."""
        training, moves = asyncio.ensure_future(self.train()), []
        while not training.done():
            moves.append(self.served.status().moves)
            await asyncio.wait({training}, timeout=seconds)
        return await training, moves


def worker(name, **options):
    return lambda cluster: Worker(name, cluster, **options)


def now_s():
    return asyncio.get_running_loop().time()


def test_an_output_of_five_times_the_stall_timeout_is_sampled_once_and_trained():
    running = LongRun(worker("w0", seconds=5 * STALL_S))
    (items, _), moves = run(running.looking(STALL_S))
    ((_, end),) = split_steps(items)
    assert (end.fates["trained"] + end.fates["zero_contribution"], end.reasons) == (12, {})
    assert sorted(running.workers[0].sampled) == [0, 1, 2, 3]
    assert len(set(moves)) == len(moves) == 6  # no rank that looks so rarely gives up


def test_a_line_behind_long_outputs_is_no_standstill():
    running = LongRun(worker("w0", seconds=5 * STALL_S, capacity=1.0))
    items, _ = run(running.train())
    ((_, end),) = split_steps(items)
    assert end.reasons == {}
    assert running.workers[0].sampled == [0, 1, 2, 3]


def test_a_request_without_tokens_is_ended_in_its_worker_and_sampled_elsewhere():
    running = LongRun(
        worker("w0", seconds=5 * STALL_S, stuck=frozenset({0, 1})), worker("w1", seconds=1.0)
    )
    first, second = running.workers

    async def scenario():
        items, _ = await running.train()
        return items, set(first.cancelled), dict(first.began)

    items, given_up, still_running = run(scenario())
    ((_, end),) = split_steps(items)
    assert given_up == {0, 1} & set(first.sampled) and given_up
    assert still_running == {}
    assert end.reasons == {"discarded: stalled": 3 * len(given_up)}
    assert given_up <= set(second.sampled)
    assert end.fates["trained"] + end.fates["zero_contribution"] == 12
