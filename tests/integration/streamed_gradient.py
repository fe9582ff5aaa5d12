"""Run by torchrun: a batch streamed from a real controller to real ranks, its gradients kept.

    streamed_gradient.py host:port story.pt result.pt

The services behind the batcher are Ray actors that follow a story: which completions each question
gets, how they are graded, and who fails. Nothing is ever updated, so that every step of the batch
has the gradient of the model in the folder.
"""

import asyncio
import random
import sys
from dataclasses import dataclass

import ray
import torch

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import RunClient
from async_grpo.config.roles import GENERATION, REFERENCE, VERIFIER
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.model.policy import hf_named_parameters
from async_grpo.run.companions import start_witness
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.training.stream import RankStream
from async_grpo.types import (
    EndOfStep,
    Pulse,
    Question,
    RunId,
    SamplingContract,
    Turn,
    Verdict,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import WorkerError

VERSION = WeightsVersion(1, 0)
TIMEOUT_S = 120.0
LATENCY_S = 0.3


@dataclass(frozen=True)
class Story:
    """What happens to each question; its ordinal is its index."""

    config: TrainConfig
    questions: tuple[Question, ...]
    completions: tuple[tuple[Turn, ...], ...]
    verdicts: tuple[tuple[Verdict, ...], ...]
    references: tuple[tuple[object, ...], ...]
    unlucky: frozenset[int]  # the first try to generate these fails


class Actor:
    """Every service of a run; answers after a random time, so in a random order."""

    def __init__(self, worker_id: str, stories: list[Story]) -> None:
        self.worker_id, self.stories = worker_id, stories
        self.story, self.failed = stories[0], set()

    async def tell(self, number):
        self.story, self.failed = self.stories[number], set()

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self):
        return None

    async def load_weights(self, snapshot):
        return WeightsAck(self.worker_id, snapshot.version, 0.0, 0.0)

    async def generate(self, request):
        await asyncio.sleep(random.random() * LATENCY_S)
        if request.ordinal in self.story.unlucky - self.failed:
            self.failed.add(request.ordinal)
            raise WorkerError("the story wants it")
        return self.story.completions[request.ordinal]

    async def verify(self, request, lease_id=0):
        requests = getattr(request, "outputs", request)
        await asyncio.sleep(random.random() * LATENCY_S)
        return self.story.verdicts[requests[0].ordinal]

    async def logprobs(self, request):
        await asyncio.sleep(random.random() * LATENCY_S)
        asked = [ids.tobytes() for ids in request.output_token_ids]
        for completions, scores in zip(self.story.completions, self.story.references, strict=True):
            if [completion.token_ids.tobytes() for completion in completions] == asked:
                return scores
        raise WorkerError("these outputs are not in the story")


def start_workers(controller, stories):
    """Two actors, registered for all that a run needs."""
    actor = ray.remote(Actor).options(num_cpus=0, max_concurrency=1000)
    first, second = (actor.remote(name, stories) for name in ("first", "second"))
    for role, name, handle in (
        (GENERATION, "first", first),
        (GENERATION, "second", second),
        (REFERENCE, "third", first),
        (VERIFIER, "fourth", second),
    ):
        info = WorkerInfo(name, role, "node", 0, "model", 64, capacity=8.0, overhead=8.0,
                          max_model_len=256)  # fmt: skip
        ray.get(controller.register.remote(info, handle), timeout=TIMEOUT_S)
    return first, second


def begin_run(controller, story, num_ranks, witness):
    """The run of a story, whose workers serve the version."""
    plan = BatcherPlan(
        config=story.config,
        rules=LocalRules(find_algorithm(story.config)),
        questions=story.questions,
        held_out=(),
        order=lambda ordinal: ordinal,
        replacement=lambda slot, *, attempt: slot,
        seed_of=None,
        sampling=SamplingContract(story.config.sampling.temperature, (1,), 64),
        num_ranks=num_ranks,
        incarnation=VERSION.incarnation,
        shares_prefixes=True,
    )
    epoch = ray.get(controller.begin_run.remote(plan, witness, None), timeout=TIMEOUT_S)
    client = RunClient(Cluster(), controller, RunId(plan.incarnation, epoch))
    calls = controller.publish.remote(
        client.run, WeightsSnapshot(VERSION, ()), (GENERATION, REFERENCE), TIMEOUT_S
    )
    ray.get(calls, timeout=TIMEOUT_S)
    ray.get(controller.published.remote(client.run, VERSION), timeout=TIMEOUT_S)
    return client


def stream_batch(learner, stream):
    """[(gradient, end of step, samples of each minibatch of this rank)] of one batch."""
    steps, sizes = [], []
    for item in stream:
        if isinstance(item, EndOfStep):
            steps.append((gradient(learner, item), item, sizes))
            sizes = []
            if item.is_last_of_batch:
                break
        else:
            learner.accumulate(item)
            sizes.append(len(item.samples))
    return steps


def gradient(learner, end):
    """Collective: the whole gradient of the step, which is then forgotten."""
    summed = {name: p.grad.full_tensor() for name, p in hf_named_parameters(learner.policy)}
    learner.step.discard()
    return {name: value / learner.denominator(end) for name, value in summed.items()}


def main(address, story_path, result_path):
    stories = torch.load(story_path, weights_only=False)
    Cluster.join(address, namespace="streamed-gradient")
    ranks = Ranks.start(timeout_s=TIMEOUT_S)
    actors, witness, client, results = (), None, None, []
    if ranks.is_main:
        controller = find_or_make_controller(Cluster())
        actors = start_workers(controller, stories)
        witness = start_witness(Cluster())
    for number, story in enumerate(stories):
        if ranks.is_main:
            ray.get([actor.tell.remote(number) for actor in actors], timeout=TIMEOUT_S)
            client = begin_run(controller, story, ranks.world_size, witness)
        found = ranks.share(lambda client=client: client)
        stream = RankStream(found, rank=ranks.rank, stall_timeout_s=TIMEOUT_S)
        results.append(stream_batch(Learner.build(story.config, ranks), stream))
        torch.distributed.barrier()
    torch.save(results, f"{result_path}.{ranks.rank}")
    if ranks.is_main:
        ray.kill(controller)
    ranks.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
