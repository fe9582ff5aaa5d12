"""Services of a run that follow a story: who answers what, how late, with whose numbers.

A real controller leases them, real trainers use them; only vLLM, the verifiers and the
reference model are played. Started by the test, they serve one story after another.
"""

import asyncio
import hashlib
import random
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import ray
import ray.cloudpickle

from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.rollout.weights_update import fetch_bytes
from async_grpo.types import Pulse, Turn, Verdict, WeightsAck, WeightsVersion, WorkerInfo
from async_grpo.util.errors import AsyncGrpoError, WorkerError
from async_grpo.weight_sync.buckets import unpack

TIMEOUT_S = 120.0
ROLES = ("generation", "reference", "verifier")
POLL_INTERVAL_S = 0.2
UNWITNESSED_TICKS = 2  # seconds, of a trainer that was killed; users' ends after ten
WORKERS = ("first", "second")


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
    kills: frozenset[tuple[str, int]] = frozenset()  # of the controller: see scripted_loop.Killer
    slow_load_s: float = 0.0  # of the second worker: the first has new weights before


class ScriptedWorker:
    """Generation, verification and reference in one; every answer takes its random time."""

    def __init__(self, worker_id, vocab_size):
        self._worker_id = worker_id
        self._info = WorkerInfo(worker_id, "generation", "node", 0, "model", vocab_size,
                                capacity=10_000.0, overhead=0.0, max_model_len=512,
                                sleeps=True)  # fmt: skip
        self._is_asleep = False
        self._news = asyncio.Condition()
        self._loaded = []

    async def tell(self, story):
        self._story, self._tried = story, set()
        self._random = random.Random(story.latency_seed)
        self._version = None
        self._load_s = story.slow_load_s if self._worker_id == "second" else 0.0

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

    async def sleep(self):
        self._is_asleep = True

    async def load_weights(self, snapshot):
        self._is_asleep = False
        data = [await fetch_bytes(bucket) for bucket in snapshot.buckets]
        weights = dict(unpack(snapshot, data))
        digest = hashlib.sha256(
            b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
        )
        loaded = (snapshot.version, digest.hexdigest())
        if loaded not in self._loaded:
            self._loaded.append(loaded)
            await asyncio.sleep(self._load_s)
        async with self._news:  # one actor plays both roles: an older reference may come later
            self._version = max(snapshot.version, self._version or snapshot.version)
            self._news.notify_all()
        return WeightsAck(self._worker_id, snapshot.version, 0.0, 0.0)

    async def generate(self, request):
        story, ordinal = self._story, request.ordinal
        if self._is_asleep:  # a loss that the run's rows would tell
            raise WorkerError("it sleeps")
        completions = story.groups[ordinal, request.attempt].completions
        newest = max(span.version.batches for c in completions for span in c.weights_versions)
        is_evaluation = bool(request.priority)  # of whatever weights are served
        async with self._news:
            await self._news.wait_for(lambda: is_evaluation or self._version.batches >= newest)
        await self._pause()
        is_first = ordinal not in self._tried
        self._tried.add(ordinal)
        if is_first and ordinal in story.unlucky:
            raise WorkerError("the story wants it")
        older = story.config.sampling.max_staleness + 1 if is_first and ordinal in story.lies else 0
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

    async def verify(self, request, lease_id=0):
        requests = getattr(request, "outputs", request)
        await self._pause()
        told = self._told([request.completion.token_ids for request in requests])
        return tuple(Verdict.scored(reward, adapter="story") for reward, _ in told)

    async def try_out(self, request):
        return (Verdict.scored(1.0, adapter="story"),)

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
def scripted_services(address, *, namespace, vocab_size, names=WORKERS[:1]):
    """Workers of every role, which register again with every new controller."""
    _send_code()
    Cluster.join(address, namespace=namespace)
    workers = [
        ray.remote(ScriptedWorker)
        .options(name=name, num_cpus=0, max_concurrency=1000)
        .remote(name, vocab_size)
        for name in names
    ]
    infos = ray.get([w.info.remote(role) for w in workers for role in ROLES], timeout=TIMEOUT_S)
    ended = threading.Event()
    registrar = threading.Thread(
        target=_keep_registered, args=(infos, dict(zip(names, workers, strict=True)), ended)
    )
    registrar.start()
    try:
        yield workers
    finally:
        ended.set()
        registrar.join()
        if controller := Cluster().find_actor(CONTROLLER):
            ray.kill(controller)
        ray.shutdown()


def _keep_registered(infos, handles, ended):
    """What dispatchers do for their workers."""
    known = None
    while not ended.wait(POLL_INTERVAL_S):
        try:
            controller = find_or_make_controller(Cluster())
            if controller == known:
                continue
            for info in infos:
                call = controller.register.remote(info, handles[info.worker_id])
                Cluster().wait(call, timeout_s=TIMEOUT_S, who="the controller")
            hurry = controller.__ray_call__.remote(hurried(UNWITNESSED_TICKS))
            Cluster().wait(hurry, timeout_s=TIMEOUT_S, who="the controller")
            known = controller
        except AsyncGrpoError:  # it is lost, and made again
            known = None


def hurried(ticks):
    """What makes a controller give up a silent trainer without its witness after `ticks`."""

    def hurry(_):  # local: Ray sends its code
        from async_grpo.controller import controller

        controller.UNWITNESSED_TICKS = ticks

    return hurry


def _send_code():
    """Ray's workers cannot import this module."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def tell(story):
    """The services play this story from now on; the caller is a driver in their namespace."""
    _send_code()
    workers = filter(None, map(Cluster().find_actor, WORKERS))
    ray.get([worker.tell.remote(story) for worker in workers], timeout=TIMEOUT_S)
