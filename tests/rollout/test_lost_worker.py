"""A real engine dies when all but one output of a group have ended; another samples the rest."""

import asyncio

import numpy as np
import psutil
import pytest
import ray
import torch
from local_ray import local_ray
from scripted import Handle, make_question, make_verdict
from scripted_run import make_config, make_plan
from staged import make_books
from tiny_models import load_model

from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.cluster.cluster import Cluster
from async_grpo.config.roles import GENERATION, VERIFIER, role_of
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.rollout.generation_worker import GenerationWorker, worker_environment
from async_grpo.types import (
    GenerationRequest,
    Pulse,
    Rewards,
    SamplingContract,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.types.samples import joined
from async_grpo.weight_sync.publisher import Publisher

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TIMEOUT_S = 240.0  # an engine starts in 20 s on an idle machine, in minutes on a busy one
VERSION = WeightsVersion(0, 0)
QUESTION = make_question(num_tokens=4)
NUM_SAMPLES = 4
CONTRACT = SamplingContract(1.0, (1,), 480)  # one token in 128 ends an output


class Pool:
    """A verifier pool that remembers what it graded."""

    def __init__(self):
        self.requests = []

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def verify(self, request):
        self.requests.append(request.outputs)
        return tuple(make_verdict(float(output.index)) for output in request.outputs)


@pytest.fixture
def workers(model_folder):
    with local_ray(num_cpus=8, object_store_mib=200):
        actor = ray.remote(GenerationWorker).options(
            num_cpus=1, max_concurrency=1000, runtime_env={"env_vars": worker_environment()}
        )
        config = WorkerConfig(model_path=model_folder, max_num_seqs=16)
        yield [actor.remote(config, worker_id=name) for name in ("first", "second")]


def make_request(seed):
    ids = QUESTION.input_token_ids
    return GenerationRequest(5, 0, ids, NUM_SAMPLES, CONTRACT, seed=seed)


async def lonely_seed(worker, *, among=24):
    """The seed whose longest output goes on for longest after the second longest has ended."""
    groups = await asyncio.gather(
        *(worker.generate.remote(make_request(1000 * seed)) for seed in range(among))
    )
    lengths = np.sort([[len(turn.token_ids) for turn in group] for group in groups])
    alone = lengths[:, -1] - lengths[:, -2]
    assert alone.max() > 200
    return 1000 * int(alone.argmax())


async def at_the_last(registry):
    """The only lease, once the cuts tell that all its outputs but one have ended."""
    while True:
        for lease in registry.members[0].leases.values():
            told = lease.cuts[-1].parts if lease.cuts else ()
            if sum(not part.is_finished for part in told) == 1:
                return lease
        await asyncio.sleep(0.005)


def engine_of(pid):
    (core,) = [
        process
        for process in psutil.Process(pid).children(recursive=True)
        if "EngineCore" in process.name()
    ]
    return core


async def num_tokens(worker):
    """Made by its engine since it began."""
    await worker.ping.remote()  # perhaps the answer to one that the registry has sent before
    return (await worker.ping.remote()).num_tokens


def errors_of(turn, model):
    """Of its log-probabilities, by transformers in float64."""
    prompt = QUESTION.input_token_ids
    ids = torch.from_numpy(np.concatenate([prompt, turn.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model.double()(ids[None]).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
    return np.abs(expected - turn.logprobs)


def test_a_group_whose_engine_dies_at_its_last_output_is_finished_by_another(workers, model_folder):
    first, second = workers
    model, pool = load_model(model_folder, noise_seed=1), Pool()

    async def scenario():
        registries = {
            name: WorkerRegistry(role_of(name), ping_interval_s=0.02)
            for name in (GENERATION, VERIFIER)
        }
        engines = registries[GENERATION]
        rewards = Rewards(("math",), "", {}, 1, 1)
        await registries[VERIFIER].register(
            WorkerInfo("pool", VERIFIER, "node", 1, capacity=64.0, rewards=rewards), Handle(pool)
        )
        info = await first.info.remote()
        await engines.register(info, first)
        publisher = Publisher(Cluster(), bucket_bytes=40_000)
        snapshot = publisher.pack(model.named_parameters(), version=VERSION)
        await engines.publish(snapshot, timeout_s=TIMEOUT_S)
        request = make_request(await lonely_seed(first))
        plan = make_plan(make_config(), sampling=CONTRACT, incarnation=0)
        pipeline, account = SlotPipeline(plan, registries.__getitem__), make_books(request)
        playing = asyncio.create_task(
            pipeline.play(QUESTION, request, oldest=VERSION, account=account)
        )
        lease = await at_the_last(engines)
        engine_of(info.pid).kill()
        before = await num_tokens(second)
        await engines.register(await second.info.remote(), second)
        played = await playing
        made = await num_tokens(second) - before
        pipeline.sampled(account)
        return lease.cuts, played, account, made, pipeline.take_clock()

    cuts, (episodes, verdicts), account, made, counts = asyncio.run(
        asyncio.wait_for(scenario(), 2 * TIMEOUT_S)
    )
    kept = [joined(parts) for parts in zip(*(cut.parts for cut in cuts), strict=True)]
    assert sum(turn.is_finished for turn in kept) == NUM_SAMPLES - 1
    turns = [episode.rows[0] for episode in episodes]
    assert len(turns) == NUM_SAMPLES
    more = 0
    for turn, known in zip(turns, kept, strict=True):
        length = len(known.token_ids)
        assert turn.token_ids[:length].tolist() == known.token_ids.tolist()
        assert turn.logprobs[:length].tolist() == known.logprobs.tolist()
        assert (len(turn.token_ids) == length) == known.is_finished
        assert errors_of(turn, model).max() < 2e-5
        more += len(turn.token_ids) - length
    assert made == more > 0, "the other engine sampled the rest of the last one, and nothing else"
    graded = [output for outputs in pool.requests for output in outputs]
    assert sorted(output.index for output in graded) == list(range(NUM_SAMPLES))
    assert [verdict.reward for verdict in verdicts] == list(range(NUM_SAMPLES))
    for output in graded:
        assert output.completion.token_ids.tolist() == turns[output.index].token_ids.tolist()
    assert account.continued == {"worker died": 1} and not account.resampled
    assert account.ledger.tokens_in_flight(account.ordinal) == sum(len(t.token_ids) for t in turns)
    # `perc_continued_groups` is their quotient.
    assert (counts["continued_groups"], counts["sampled_groups"]) == (1, 1)
    assert counts["resampled_groups"] == 0
