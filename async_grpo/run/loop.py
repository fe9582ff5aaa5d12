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
from threading import Event

from async_grpo import cluster
from async_grpo.algorithms.base import Algorithm
from async_grpo.algorithms.find import find_algorithm
from async_grpo.checkpoint.exports import Exports, export_finished
from async_grpo.checkpoint.resume import Start, find_start
from async_grpo.checkpoint.saving import Checkpoints
from async_grpo.checkpoint.tensors import restore_learner
from async_grpo.config.train import TrainConfig
from async_grpo.run.first_failure import RunRecord, first_failure_recorded
from async_grpo.run.preparation import Run, open_run
from async_grpo.run.recovery import BatcherKeeper, LastingStream
from async_grpo.run.report import Report, silent
from async_grpo.run.stopping import polled
from async_grpo.run.watcher import watch_pipeline
from async_grpo.run.weights import WeightSync
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep, Minibatch, StreamItem

logger = logging.getLogger(__name__)
DONE, EVALUATING = range(2)  # what rank 0 tells the others while they wait for an evaluation


def train_grpo(config: TrainConfig, ranks: Ranks, *, stop: Event | None = None) -> None:
    """One whole run on one rank; rank 0 also owns the batcher, the report and the exports.

    All ranks leave together, before their next item, once `stop` is set on any of them.
    """
    record = RunRecord(config.output_dir, rank=ranks.rank)
    start = ranks.share(lambda: find_start(config))
    if start.is_finished:
        export_finished(config, ranks, start)
        return

    def prepare() -> Run:
        run = open_run(config, start=start, num_ranks=ranks.world_size)
        record.forget()
        return run

    run = ranks.on_main(prepare)
    with first_failure_recorded(record, ranks):
        _train(config, ranks, run, record, start=start, stop=stop)


def _train(
    config: TrainConfig,
    ranks: Ranks,
    run: Run | None,
    record: RunRecord,
    *,
    start: Start,
    stop: Event | None,
) -> None:
    if run is None:
        cluster.connect(config.ray_address, namespace=config.namespace)
    else:
        _describe(run, find_algorithm(config))
    learner = Learner.build(config, ranks)
    with ExitStack() as stack:
        if run:
            stack.callback(run.close)
        report = stack.enter_context(Report(config, start=start)) if run else None
        if report:
            stack.enter_context(watch_pipeline(report.console.status, record.incidents))
        sync = WeightSync(learner, run, on_synced=report.synced if report else None)
        stack.callback(sync.close)
        keeper = BatcherKeeper(run, sync, report.batcher_restarted) if run and report else None
        doing = report.doing if report else silent
        exports = Exports(config, learner, doing=doing)
        checkpoints = Checkpoints(
            config,
            learner,
            ranks,
            exports=exports,
            report=report,
            hashes=run.hashes if run else None,
            references=sync.references_to_save,
        )
        if start.folder:
            sync.restore_references(start)
            restore_learner(learner, start)
            exports.restore(start.state["exports"])
        doing("publishing weights")
        sync.publish(start.batches)
        if not start.folder:
            _evaluate(config, ranks, keeper, report, sync, stop)

        def after_batch(end: EndOfStep) -> None:
            record.trained(end.batch + 1)
            doing("publishing weights")
            seconds = sync.publish(end.batch + 1)
            if report:
                report.publishing(seconds)
            exports.export_if_due()
            if evaluation_is_due(config, end.batch + 1):
                _evaluate(config, ranks, keeper, report, sync, stop)
            checkpoints.batch_ended(end)

        stream = LastingStream(config, ranks, learner=learner, keeper=keeper, stop=stop)
        with polled(stop):
            train_steps(stream, learner, report, exports, after_batch=after_batch)
        _keep_result(ranks, sync, exports, checkpoints, is_trained=not stream.is_stopped)


def _keep_result(
    ranks: Ranks, sync: WeightSync, exports: Exports, checkpoints: Checkpoints, *, is_trained: bool
) -> None:
    """Save what the run has come to, and export it unless it was stopped before its end.

    Raises `CheckpointError` when the disk takes neither of the trained model.
    """
    if is_trained:
        exports.export()
        sync.wait()
    checkpoints.save_last()
    checkpoints.wait()
    if is_trained:
        ranks.on_main(lambda: exports.check_last(is_saved=checkpoints.is_complete))


def train_steps(
    stream: Iterator[StreamItem],
    learner: Learner,
    report: Report | None,
    exports: Exports,
    *,
    after_batch: Callable[[EndOfStep], None],
) -> None:
    """Train on the items of a stream until the last batch of the run has ended."""
    doing = report.doing if report else silent
    for item in stream:
        if isinstance(item, Minibatch):
            if report:
                report.minibatch()
            learner.accumulate(item)
        else:
            result = learner.update(item)
            exports.count(item)
            if report:
                waited = getattr(stream, "take_seconds_waiting", float)()
                report.step(item, result, denominator=learner.denominator(item), waited=waited)
            if item.is_last_of_batch:
                after_batch(item)
                if item.batch + 1 == learner.config.num_training_batches:
                    return
        doing("waiting for samples")


def _describe(run: Run, algorithm: Algorithm) -> None:
    """Say in words what will be trained."""
    logger.info("outputs end with token ids %s", run.plan.sampling.stop_token_ids)
    for sentence in algorithm.in_words():
        logger.info("%s", sentence)


def evaluation_is_due(config: TrainConfig, num_batches: int) -> bool:
    """After `num_batches` batches: `--eval-every-batches`, and at the end."""
    interval = config.eval_every_batches
    is_last = num_batches == config.num_training_batches
    return is_last or bool(interval and num_batches % interval == 0)


def _evaluate(
    config: TrainConfig,
    ranks: Ranks,
    keeper: BatcherKeeper | None,
    report: Report | None,
    sync: WeightSync,
    stop: Event | None,
) -> None:
    """Rank 0's; the others hear now and then that it goes on. A request to stop breaks it off."""
    if not config.eval_data_path:
        return
    if keeper is None or report is None:
        while ranks.agree(DONE) == EVALUATING:
            pass
        return
    report.doing(f"evaluating {len(keeper.run.plan.held_out)} held-out questions")
    sync.wait()
    result = keeper.evaluate(
        stall_timeout_s=config.stall_timeout_s,
        stop=stop or Event(),
        meanwhile=lambda: ranks.agree(EVALUATING),
    )
    ranks.agree(DONE)
    if result is not None:
        report.evaluation(result)
