"""Services of a run that follow a story: who answers what, how late, with whose numbers.

Real registries lease them, real batchers and trainers use them; only vLLM, the verifiers and the
reference model are played. Started by the test, they serve one story after another.
"""

import asyncio
import hashlib
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import ray
import ray.cloudpickle

from async_grpo import cluster
from async_grpo.config.train import TrainConfig
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.errors import WorkerError
from async_grpo.types import Pulse, Turn, Verdict, WeightsAck, WeightsVersion, WorkerInfo
from async_grpo.weight_sync.buckets import unpack_bucket

TIMEOUT_S = 120.0
ROLES = ("generation", "logprob")


@dataclass(frozen=True)
class Told:
    """What becomes of one question: tuples with an entry a sample.

    The completions name their weights by batches; the run's incarnation is put in. They are handed
    out when these weights have come.
    """

    completions: tuple[Turn, ...]
    rewards: tuple[float, ...]
    references: tuple[np.ndarray, ...] = ()  # [L] float32


@dataclass(frozen=True, kw_only=True)
class Story:
    """What becomes of every question of a run.

    `unlucky`: ordinals whose first try fails; `lies`: whose first answer claims weights that are
    older than the window allows.
    """

    config: TrainConfig
    groups: dict[tuple[int, int], Told]  # by ordinal and attempt
    latency_seed: int = 0
    latency_s: float = 0.15
    unlucky: frozenset[int] = frozenset()
    lies: frozenset[int] = frozenset()
    is_synchronous: bool = False  # told without services, by the plain program
    kills: frozenset[tuple[str, int]] = frozenset()  # of the batcher: see scripted_loop.Killer


class ScriptedWorker:
    """Generation, verification and reference in one; every answer takes its random time."""

    def __init__(self, worker_id, vocab_size):
        self._worker_id = worker_id
        self._info = WorkerInfo(worker_id, "generation", "node", 0, "model", vocab_size,
                                capacity=10_000.0, overhead=0.0, max_model_len=512)  # fmt: skip
        self._news = asyncio.Condition()
        self._loaded = []

    async def tell(self, story):
        self._story, self._tried = story, set()
        self._random = random.Random(story.latency_seed)
        self._version = None

    async def info(self, role):
        return replace(self._info, role=role)

    async def loaded(self):
        """(version, sha256) of all weights, in order."""
        return self._loaded

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self):
        return None

    async def load_weights(self, snapshot):
        weights = {}
        for bucket in snapshot.buckets:
            weights |= dict(unpack_bucket(bucket, await cluster.fetch_bytes(bucket)))
        digest = hashlib.sha256(
            b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
        )
        self._loaded.append((snapshot.version, digest.hexdigest()))
        async with self._news:  # one actor plays both roles: an older reference may come later
            self._version = max(snapshot.version, self._version or snapshot.version)
            self._news.notify_all()
        return WeightsAck(self._worker_id, snapshot.version, 0.0, 0.0)

    async def generate(self, request):
        story, ordinal = self._story, request.ordinal
        completions = story.groups[ordinal, request.attempt].completions
        newest = max(span.version.batches for c in completions for span in c.weights_versions)
        is_evaluation = request.seed == ordinal  # of whatever weights are served
        async with self._news:
            await self._news.wait_for(lambda: is_evaluation or self._version.batches >= newest)
        await self._pause()
        is_first = ordinal not in self._tried
        self._tried.add(ordinal)
        if is_first and ordinal in story.unlucky:
            raise WorkerError("the story wants it")
        older = story.config.max_staleness + 1 if is_first and ordinal in story.lies else 0
        if is_evaluation:
            older = newest - self._version.batches
        return tuple(self._of_this_run(completion, older) for completion in completions)

    def _of_this_run(self, completion, older):
        """The completion with spans of the run's incarnation, `older` batches before its truth."""
        return replace(
            completion,
            weights_versions=tuple(
                span._replace(
                    version=WeightsVersion(self._version.incarnation, span.version.batches - older)
                )
                for span in completion.weights_versions
            ),
        )

    async def verify(self, requests):
        await self._pause()
        told = self._told([request.completion.token_ids for request in requests])
        return tuple(Verdict("scored", reward, None, "story", "", 0.0) for reward, _ in told)

    async def try_out(self, request):
        return (Verdict("scored", 1.0, None, "story", "", 0.0),)

    async def logprobs(self, request):
        await self._pause()
        return tuple(reference for _, reference in self._told(request.output_token_ids))

    def _told(self, outputs):
        """(reward, reference scores) of each output; all are of one group, and may not be all."""
        asked = [ids.tobytes() for ids in outputs]
        for told in self._story.groups.values():
            own = [completion.token_ids.tobytes() for completion in told.completions]
            if set(asked) <= set(own):
                return [
                    (told.rewards[number], told.references and told.references[number])
                    for number in map(own.index, asked)
                ]
        raise WorkerError("these outputs are not in the story")

    async def _pause(self):
        await asyncio.sleep(self._random.random() * self._story.latency_s)


@contextmanager
def scripted_services(address, *, namespace, vocab_size):
    """Registries with a worker each and a pool, under the names that a trainer looks for."""
    _send_code()
    cluster.connect(address, namespace=namespace)
    try:
        yield _start(vocab_size)
    finally:
        ray.shutdown()


def _start(vocab_size):
    """Handles, which must be kept for the services to live."""
    options = {"num_cpus": 0, "max_concurrency": 1000}
    registries = [
        ray.remote(WorkerRegistry)
        .options(name=cluster.registry_name(role), **options)
        .remote(role, idle_exit_s=600.0)
        for role in ROLES
    ]
    player = ray.remote(ScriptedWorker).options(name=cluster.VERIFIER_POOL, **options)
    worker = player.remote("scripted", vocab_size)
    for role, registry in zip(ROLES, registries, strict=True):
        info = ray.get(worker.info.remote(role), timeout=TIMEOUT_S)
        ray.get(registry.register.remote(info, worker), timeout=TIMEOUT_S)
    return (*registries, worker)


def _send_code():
    """Ray's workers cannot import this module."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def tell(story):
    """The services play this story from now on; the caller is a driver in their namespace."""
    _send_code()
    worker = cluster.find_actor(cluster.VERIFIER_POOL)
    ray.get(worker.tell.remote(story), timeout=TIMEOUT_S)
