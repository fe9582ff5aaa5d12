"""Run by torchrun: whole training runs of the real trainer, one a story, in order.

    scripted_loop.py stories.pt

A story that is marked synchronous is trained by the plain program below instead, which has neither
batcher nor pipeline nor Ray: each step's samples in the order of their ordinals, packed at once.
"""

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from unittest.mock import patch

import ray
import torch
from scripted_services import TIMEOUT_S, tell

from async_grpo.algorithms.base import REFERENCE
from async_grpo.algorithms.grpo import group_advantages
from async_grpo.batching.packing import Item, estimate_cost, pack_rounds
from async_grpo.checkpoint.export import Exports
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER
from async_grpo.model.model_folder import check_model_folder
from async_grpo.run import sampled_data as sampling
from async_grpo.run.data import load_data
from async_grpo.run.loop import train_grpo, train_steps
from async_grpo.run.main_rank import MainRank
from async_grpo.run.preparation import plan_run
from async_grpo.run.publication import Announcements
from async_grpo.run.report import Report
from async_grpo.run.sampled_data import SampledData
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.training.stream import RankStream
from async_grpo.types import EndOfStep, Episode, Minibatch, Sample, Tally, Verdict, tally

HALF_LOADED_S = 1.0  # one of two workers has new weights by then


def train_synchronously(story, ranks):
    """Generate, pack, step; then the next step."""
    config = story.config
    learner = Learner.build(config, ranks)
    exports = Exports(learner, doing=Absent().doing)
    items = synchronous_items(story, ranks)
    with Report(config) if ranks.is_main else Absent() as report:
        train_steps(items, learner, report, exports, after_batch=lambda _: exports.export_if_due())


def synchronous_items(story, ranks):
    """What one rank trains: all of a step's samples, known before its first round is packed."""
    config = story.config
    facts = check_model_folder(config.places.model_name_or_path)
    plan = plan_run(config, facts, *load_data(config, facts), num_ranks=ranks.world_size)
    num_questions = config.batching.num_training_batches * config.batching.batch_size
    for first in range(0, num_questions, config.batching.questions_per_step):
        ordinals = range(first, first + config.batching.questions_per_step)
        samples = [sample for ordinal in ordinals for sample in group(story, plan, ordinal)]
        contributing = {(s.ordinal, s.index): s for s in samples if s.num_trained_tokens}
        lengths = {key: sample.num_tokens for key, sample in contributing.items()}
        packed = pack_rounds(
            [
                Item(key, n, estimate_cost(n, attention_ratio=plan.attention_ratio))
                for key, n in lengths.items()
            ],
            num_ranks=ranks.world_size,
            max_tokens=config.batching.max_tokens_per_gpu,
        )
        sent = [Tally()] * ranks.world_size
        for index, bins in enumerate(packed):
            parts = [tuple(contributing[key] for key in keys) for keys in bins]
            sent = [
                known.plus(tally(part, incarnation=0, aggregation=config.objective.aggregation))
                for known, part in zip(sent, parts, strict=True)
            ]
            yield Minibatch(index, parts[ranks.rank])
        batch, slot = divmod(first, config.batching.batch_size)
        yield EndOfStep(
            batch=batch,
            step_in_batch=slot // config.batching.questions_per_step,
            is_last_of_batch=slot + config.batching.questions_per_step
            == config.batching.batch_size,
            num_samples=len(samples),
            num_tokens=sum(sample.num_trained_tokens for sample in samples),
            sent=tuple(sent),
        )


def group(story, plan, ordinal):
    """The samples of one slot: its first question with variance, or its last one.

    A KL penalty is on, so that a sample with an advantage of 0 is trained too; one that is wholly
    masked is counted in D alone.
    """
    attempt, config = 0, story.config
    while len(set(story.groups[ordinal, attempt].rewards)) == 1 and (
        attempt < config.objective.dynamic_sampling
    ):
        attempt += 1
    question, _ = plan.draw(ordinal, attempt=attempt)
    told = story.groups[ordinal, attempt]
    advantages = group_advantages(told.rewards, method=config.objective.advantage)
    for index, completion in enumerate(told.completions):
        episode = Episode.of_turn(question.input_token_ids, completion)
        if config.objective.mask_truncated_samples and completion.finish_reason == "length":
            episode = episode.untrained()
        yield Sample(
            ordinal,
            index,
            question,
            episode,
            Verdict.scored(told.rewards[index], adapter="story"),
            float(advantages[index]),
            {REFERENCE: told.references[index]},
            attempt=attempt,
        )


class Killer:
    """Sends SIGKILL to the controller of a run at the moments of its story, once each; rank 0's.

    ("minibatch", n) and ("end", n): when rank 0 has agreed on its n-th minibatch or end of a step,
    those that it is given again counted too; ("publish", n): before the weights after a batch are
    gathered for the n-th time; ("announce", n): while workers load them; ("evaluate", n): while it
    waits for the last evaluation for the n-th time; ("held end", n): when rank 0 has its n-th end
    of a step and no other rank has it, or, alone, when it has not told anybody.
    """

    def __init__(self, kills):
        self._kills, self._num = set(kills), Counter()

    @contextmanager
    def at_work(self):
        take, publish, begin = SampledData.__next__, SampledData.publish, Announcements.begin
        evaluate, receive = MainRank._evaluated, RankStream._take_next

        def next_item(data):
            item = take(data)
            self._strike("minibatch" if isinstance(item, Minibatch) else "end")
            return item

        def publish_and_strike(data, num_batches, **options):
            if num_batches:
                self._strike("publish")
            return publish(data, num_batches, **options)

        def begin_and_strike(announcements, client, due):
            begin(announcements, client, due)
            if announcements._has_served:
                self._strike("announce", after_s=HALF_LOADED_S)

        def evaluate_and_strike(main, *arguments):
            timer = threading.Timer(0.3, self._strike, ["evaluate"])
            timer.start()
            try:
                return evaluate(main, *arguments)
            finally:
                timer.join()

        def receive_and_strike(stream):
            items, proposal = receive(stream)
            if items and isinstance(items[-1], EndOfStep):
                self._strike("held end")
            return items, proposal

        def withhold_and_stream(client, **options):
            for kind, number in self._kills:
                if kind == "held end":
                    call = client.controller.__ray_call__.remote(withholding(number))
                    ray.get(call, timeout=TIMEOUT_S)
            return RankStream(client, **options)

        with (
            patch.object(SampledData, "__next__", next_item),
            patch.object(SampledData, "publish", publish_and_strike),
            patch.object(Announcements, "begin", begin_and_strike),
            patch.object(MainRank, "_evaluated", evaluate_and_strike),
            patch.object(sampling, "RankStream", withhold_and_stream),
            patch.object(RankStream, "_take_next", receive_and_strike),
        ):
            yield
        assert not self._kills, f"these moments never came: {self._kills}"

    def _strike(self, kind, *, after_s=0.0):
        self._num[kind] += 1
        moment = kind, self._num[kind]
        if moment in self._kills:
            self._kills.remove(moment)
            time.sleep(after_s)
            if pid := _serving_pid():
                os.kill(pid, signal.SIGKILL)
            else:  # ranks still have items from before: two deaths would be one loss
                self._kills.add((kind, self._num[kind] + 1))


def _serving_pid():
    """Of the controller that serves the run; None while there is none, after the kill before."""
    controller = Cluster().find_actor(CONTROLLER)
    if controller is None:
        return None
    call = controller.__ray_call__.remote(lambda c: os.getpid() if c._run else None)
    with suppress(ray.exceptions.RayActorError):
        return ray.get(call, timeout=TIMEOUT_S)
    return None


def withholding(number):
    """What makes a controller give its `number`-th end of a step, from 1, to rank 0 alone."""

    def withhold(controller):  # local: Ray sends its code, for it cannot import this module
        batcher, numbers = controller._run.batcher, itertools.count(1)
        take = batcher.next_items

        async def next_items(rank, index):
            items = await take(rank, index)
            if rank and hasattr(items[-1], "num_tokens") and next(numbers) == number:
                await asyncio.Event().wait()
            return items

        batcher.next_items = next_items

    return withhold


def train_asynchronously(story, ranks):
    """The trainer as its command starts it."""
    if ranks.is_main:
        Cluster.join(story.config.places.ray_address, namespace=story.config.places.namespace)
        tell(story)
        ray.shutdown()
    torch.distributed.barrier()
    if ranks.is_main:
        with Killer(story.kills).at_work():
            train_grpo(story.config, ranks)
    else:
        train_grpo(story.config, ranks)
    ray.shutdown()


def main(stories_path):
    ranks = Ranks.start(timeout_s=TIMEOUT_S)
    for story in torch.load(stories_path, weights_only=False):
        (train_synchronously if story.is_synchronous else train_asynchronously)(story, ranks)
        torch.distributed.barrier()
    ranks.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
