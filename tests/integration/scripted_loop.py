"""Run by torchrun: whole training runs of the real trainer, one a story, in order.

    scripted_loop.py stories.pt

A story that is marked synchronous is trained by the plain program below instead, which has neither
batcher nor pipeline nor Ray: each step's samples in the order of their ordinals, packed at once.
"""

import os
import signal
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import ray
import torch
from scripted_services import TIMEOUT_S, tell

from async_grpo import cluster
from async_grpo.algorithms.advantages import group_advantages
from async_grpo.algorithms.base import REFERENCE
from async_grpo.batching.packing import Item, estimate_cost, pack_rounds
from async_grpo.checkpoint.exports import Exports
from async_grpo.model.folder import check_model_folder
from async_grpo.run import recovery
from async_grpo.run.loop import train_grpo, train_steps
from async_grpo.run.preparation import load_data, plan_run
from async_grpo.run.report import Report, silent
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep, Episode, Minibatch, Sample, Verdict


def train_synchronously(story, ranks):
    """Generate, pack, step; then the next step."""
    config = story.config
    learner = Learner.build(config, ranks)
    exports = Exports(config, learner, doing=silent)
    items = synchronous_items(story, ranks)
    if not ranks.is_main:
        train_steps(items, learner, None, exports, after_batch=lambda _: exports.export_if_due())
        return
    with Report(config) as report:
        train_steps(items, learner, report, exports, after_batch=lambda _: exports.export_if_due())


def synchronous_items(story, ranks):
    """What one rank trains: all of a step's samples, known before its first round is packed."""
    config = story.config
    facts = check_model_folder(config.model_name_or_path)
    plan = plan_run(config, facts, *load_data(config, facts), num_ranks=ranks.world_size)
    num_questions = config.num_training_batches * config.batch_size
    for first in range(0, num_questions, config.questions_per_step):
        ordinals = range(first, first + config.questions_per_step)
        samples = [sample for ordinal in ordinals for sample in group(story, plan, ordinal)]
        contributing = {(s.ordinal, s.index): s for s in samples if s.num_trained_tokens}
        lengths = {key: sample.num_tokens for key, sample in contributing.items()}
        packed = pack_rounds(
            [
                Item(key, n, estimate_cost(n, attention_ratio=plan.attention_ratio))
                for key, n in lengths.items()
            ],
            num_ranks=ranks.world_size,
            max_tokens=config.max_tokens_per_gpu,
        )
        for index, bins in enumerate(packed):
            yield Minibatch(index, tuple(contributing[key] for key in bins[ranks.rank]))
        batch, slot = divmod(first, config.batch_size)
        yield EndOfStep(
            batch=batch,
            step_in_batch=slot // config.questions_per_step,
            is_last_of_batch=slot + config.questions_per_step == config.batch_size,
            num_samples=len(samples),
            num_tokens=sum(sample.num_trained_tokens for sample in samples),
        )


def group(story, plan, ordinal):
    """The samples of one slot: its first question with variance, or its last one.

    A KL penalty is on, so that a sample with an advantage of 0 is trained too.
    """
    attempt, config = 0, story.config
    while len(set(story.groups[ordinal, attempt].rewards)) == 1 and (
        attempt < config.dynamic_sampling
    ):
        attempt += 1
    question, _ = plan.draw(ordinal, attempt=attempt)
    told = story.groups[ordinal, attempt]
    advantages = group_advantages(told.rewards, method=config.advantage)
    for index, completion in enumerate(told.completions):
        yield Sample(
            ordinal,
            index,
            question,
            Episode.of_turn(question.input_token_ids, completion),
            Verdict("scored", told.rewards[index], None, "story", "", 0.0),
            float(advantages[index]),
            {REFERENCE: told.references[index]},
        )


class Killer:
    """Sends SIGKILL to the batcher of a run at the moments of its story, once each.

    ("minibatch", n) and ("end", n): when rank 0 has been given its n-th minibatch or end of a step,
    those that it is given again counted too; ("evaluate", n): while the n-th one is running.
    """

    def __init__(self, kills):
        self._kills, self._num = set(kills), Counter()

    @contextmanager
    def at_work(self):
        take, evaluate = recovery.LastingStream.__next__, recovery.BatcherKeeper.evaluate

        def next_item(stream):
            item = take(stream)
            self._strike("minibatch" if isinstance(item, Minibatch) else "end")
            return item

        def evaluate_and_strike(keeper, **options):
            timer = threading.Timer(0.3, self._strike, ["evaluate"])
            timer.start()
            try:
                return evaluate(keeper, **options)
            finally:
                timer.join()

        with (
            patch.object(recovery.LastingStream, "__next__", next_item),
            patch.object(recovery.BatcherKeeper, "evaluate", evaluate_and_strike),
        ):
            yield
        assert not self._kills, f"these moments never came: {self._kills}"

    def _strike(self, kind):
        self._num[kind] += 1
        moment = kind, self._num[kind]
        if moment in self._kills:
            self._kills.remove(moment)
            batcher = cluster.find_actor(cluster.BATCHER)
            pid = ray.get(batcher.__ray_call__.remote(lambda _: os.getpid()), timeout=TIMEOUT_S)
            os.kill(pid, signal.SIGKILL)


def train_asynchronously(story, ranks):
    """The trainer as its command starts it."""
    if ranks.is_main:
        cluster.connect(story.config.ray_address, namespace=story.config.namespace)
        tell(story)
        ray.shutdown()
    torch.distributed.barrier()
    with Killer(story.kills if ranks.is_main else ()).at_work():
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
