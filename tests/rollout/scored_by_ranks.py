"""Scores by a worker of T ranks, in a process that may end with one of them: FOLDER T OUT.

OUT gets the numbers; with `kill` as a fourth argument a rank is killed in the midst of requests.
"""

import asyncio
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from async_grpo.config.roles import REFERENCE, teacher
from async_grpo.model.weight_files import local_part
from async_grpo.rollout.logprob_worker import LogprobWorker
from async_grpo.types import HeadRequest, LogprobRequest, Payload, WeightsVersion
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.buckets import pack

VERSION, TEMPERATURE = WeightsVersion(4, 0), 0.7
PAYLOADS = (Payload("topk", 5, 1.7), Payload("logits", 0, 1.0), Payload("hidden", 0, 1.0))


class Reference:
    """The reference to an object in the store."""

    def __init__(self, value):
        self.value = value

    def __await__(self):
        yield from ()
        return self.value


def snapshot(seed, version, vocab_names=lambda name: name):
    from oracle import tiny_model

    named = tiny_model(tied=True, seed=seed).named_parameters()
    tensors = ((vocab_names(name), parameter) for name, parameter in named)
    return pack(tensors, put=lambda d: Reference(d.copy()), version=version, bucket_bytes=8_000)


def request(seed, *, version, vocab_size, groups=1, samples=3, longest=20, payload=None):
    """`groups` prompts with `samples` outputs each."""
    rng = np.random.default_rng(seed)
    ids = lambda: rng.integers(vocab_size, size=rng.integers(1, longest)).astype(np.int32)  # noqa: E731
    prompts = [prompt for prompt in (ids() for _ in range(groups)) for _ in range(samples)]
    outputs = tuple(ids() for _ in prompts)
    return LogprobRequest(tuple(prompts), outputs, TEMPERATURE, version, payload=payload)


def held_bytes(scorer):
    """Of the parameters that lie on this rank, between two forwards."""
    return sum(local_part(each).nbytes for each in scorer.policy.parameters())


def cpu_seconds(scorer):
    return time.process_time()


def process_id(scorer):
    return os.getpid()


def of_each(worker, task):
    return worker._ranks.run(task, [()] * worker._ranks.num_ranks)


async def answers(worker, vocab_size):
    """Log-probabilities of requests that come together and of one output, payloads, the head."""
    ask = [
        request(seed, version=worker._version, vocab_size=vocab_size, groups=1 + seed % 3)
        for seed in range(9)
    ]
    one = request(99, version=worker._version, vocab_size=vocab_size, samples=1)
    scores = [*await asyncio.gather(*map(worker.logprobs, ask)), await worker.logprobs(one)]
    taught = [
        (await worker.teach(request(7, version=None, vocab_size=vocab_size, payload=each)))[1:]
        for each in PAYLOADS
        if worker._info.role != REFERENCE
    ]
    return {"scores": scores, "taught": taught, "head": (await worker.head(HeadRequest()))[1]}


async def reference(folder, num_ranks, vocab_size):
    """Whose weights move, and stay where an update is refused."""
    worker = LogprobWorker(folder, worker_id="r", max_tokens=100, num_ranks=num_ranks)
    await worker.load_weights(snapshot(1, VERSION))
    try:
        renamed = lambda name: name.replace("layers.1.", "layers.7.")  # noqa: E731
        await worker.load_weights(snapshot(2, WeightsVersion(4, 1), renamed))
        refused = ""
    except WeightSyncError as error:
        refused = str(error)
    found = await answers(worker, vocab_size)
    return found | {"refused": refused, "bytes": of_each(worker, held_bytes)}


async def teachers(folder, num_ranks, vocab_size):
    worker = LogprobWorker(
        folder, worker_id="t", max_tokens=200, num_ranks=num_ranks, role=teacher("math")
    )
    return await answers(worker, vocab_size)


async def timed(folder, num_ranks, vocab_size):
    """CPU seconds of each rank for the second of two like loads."""
    worker = LogprobWorker(
        folder, worker_id="t", max_tokens=4096, num_ranks=num_ranks, role=teacher("math")
    )
    load = [
        request(s, version=None, vocab_size=vocab_size, groups=24, samples=4, longest=256)
        for s in range(2)
    ]
    await worker.logprobs(load[0])
    before = of_each(worker, cpu_seconds)
    scores = await worker.logprobs(load[1])
    after = of_each(worker, cpu_seconds)
    spent = [late - early for late, early in zip(after, before, strict=True)]
    return {"scores": [scores], "cpu_s": spent, "bytes": of_each(worker, held_bytes)}


async def express(folder, num_ranks, vocab_size):
    """The logits that one trainer rank gets of several sequences, and of one."""
    from async_grpo.algorithms.express import ExpressGroup, keep_in, open_meeting
    from async_grpo.algorithms.express_plan import Reading, plan_round

    worker = LogprobWorker(
        folder, worker_id="t", max_tokens=60, num_ranks=num_ranks, role=teacher("math")
    )
    meeting, _store = open_meeting("127.0.0.1", num_members=num_ranks + 1, dtype=torch.float32)
    joined = asyncio.create_task(worker.join_express(meeting, 0))
    cpu = torch.device("cpu")
    group = await asyncio.to_thread(ExpressGroup, meeting, rank=num_ranks, device=cpu)
    await joined
    received = []
    for number in (9, 1):
        asked = request(number, version=None, vocab_size=vocab_size, groups=number, samples=1)
        readings = [
            Reading((index, 0, 0, 0), prompt, output, np.arange(len(output)))
            for index, (prompt, output) in enumerate(
                zip(asked.prompt_token_ids, asked.output_token_ids, strict=True)
            )
        ]
        work = plan_round([readings], teachers=(num_ranks, 1), width=vocab_size)
        cells = torch.full((sum(len(each.output) for each in readings), vocab_size), torch.nan)
        served = asyncio.create_task(worker.serve_express(*work))
        await asyncio.to_thread(group.exchange, work[0].sends(4), give=None, take=keep_in(cells))
        await served
        received.append([cells.numpy()])
    return {"scores": received, "num_tokens": (await worker.ping()).num_tokens}


async def killed(folder, num_ranks, vocab_size):
    """A rank is killed while requests are under way; this process must end by itself."""
    worker = LogprobWorker(
        folder, worker_id="t", max_tokens=100, num_ranks=num_ranks, role=teacher("math")
    )
    last = of_each(worker, process_id)[-1]
    print(*of_each(worker, process_id), flush=True)
    ask = [request(s, version=None, vocab_size=vocab_size, groups=8) for s in range(400)]
    asyncio.get_running_loop().call_later(0.3, os.kill, last, signal.SIGKILL)
    await asyncio.gather(*map(worker.logprobs, ask))
    await asyncio.sleep(60)
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, num_ranks, what, out = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
    vocab_size = int(sys.argv[5])
    found = asyncio.run(globals()[what](folder, num_ranks, vocab_size))
    Path(out).write_bytes(pickle.dumps(found))
    os._exit(0)  # the other ranks end with this process
