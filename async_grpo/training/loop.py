"""The GRPO run, as the paper has it: sample a batch, step on it, publish, again.

for each batch:
    for each gradient step:
        back-propagate minibatches as they finish      (sums of per-sample losses)
        divide by D, clip, step                        (once)
    publish the new weights: the staleness window moves
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from async_grpo import cluster
from async_grpo.config.train import TrainConfig
from async_grpo.config.words import objective_in_words
from async_grpo.errors import ClusterError
from async_grpo.training.exports import Exports
from async_grpo.training.learner import Learner
from async_grpo.training.preparation import Run, open_run
from async_grpo.training.ranks import Ranks
from async_grpo.training.report import Report
from async_grpo.training.stream import RankStream
from async_grpo.training.watcher import watch_pipeline
from async_grpo.training.weights import WeightSync
from async_grpo.types import EndOfStep, Minibatch, StreamItem

logger = logging.getLogger(__name__)
EVALUATION_TIMEOUT_S = 1800.0


def train_grpo(config: TrainConfig, ranks: Ranks) -> None:
    """One whole run on one rank; rank 0 also owns the batcher, the report and the exports."""
    run = ranks.on_main(lambda: open_run(config, num_ranks=ranks.world_size))
    batcher = run.batcher if run else _find_batcher(config)
    if run:
        logger.info("outputs end with token ids %s", run.plan.sampling.stop_token_ids)
        for sentence in objective_in_words(config):
            logger.info("%s", sentence)
    learner = Learner.build(config, ranks)
    with ExitStack() as stack:
        if run:
            stack.callback(run.close)
        report = stack.enter_context(Report(config)) if run else None
        if report:
            stack.enter_context(watch_pipeline(batcher, report.console))
        sync = WeightSync(learner, run, on_synced=report.synced if report else None)
        stack.callback(sync.close)
        exports = Exports(config, learner)
        sync.publish(0)
        _evaluate(run, report, sync)

        def after_batch(end: EndOfStep) -> None:
            seconds = sync.publish(end.batch + 1)
            if report:
                report.publishing(seconds)
            exports.export_if_due()
            is_last = end.batch + 1 == config.num_training_batches
            if is_last or _is_due(end.batch + 1, config.eval_every_batches):
                _evaluate(run, report, sync)

        stream = RankStream(batcher, rank=ranks.rank, stall_timeout_s=config.stall_timeout_s)
        train_steps(stream, learner, report, exports, after_batch=after_batch)
        exports.export()
        sync.wait()


def train_steps(
    stream: Iterator[StreamItem],
    learner: Learner,
    report: Report | None,
    exports: Exports,
    *,
    after_batch: Callable[[EndOfStep], None],
) -> None:
    """Train on the items of a stream until the last batch of the run has ended."""
    for item in stream:
        if isinstance(item, Minibatch):
            learner.accumulate(item)
            continue
        result = learner.update(item)
        exports.count(item)
        if report:
            waited = getattr(stream, "take_seconds_waiting", float)()
            report.step(item, result, denominator=learner.denominator(item), waited=waited)
        if item.is_last_of_batch:
            after_batch(item)
            if item.batch + 1 == learner.config.num_training_batches:
                return


def _find_batcher(config: TrainConfig) -> object:
    cluster.connect(config.ray_address, namespace=config.namespace)
    batcher = cluster.find_actor(cluster.BATCHER)
    if batcher is None:
        raise ClusterError("rank 0's experience batcher has gone: look at rank 0's error")
    return batcher


def _is_due(num_batches: int, interval: int) -> bool:
    return bool(interval) and num_batches % interval == 0


def _evaluate(run: Run | None, report: Report | None, sync: WeightSync) -> None:
    if run is None or report is None or not run.plan.held_out:
        return
    sync.wait()
    result = cluster.wait(
        run.batcher.evaluate.remote(),
        timeout_s=EVALUATION_TIMEOUT_S,
        who="the evaluation of held-out questions",
    )
    report.evaluation(result)
