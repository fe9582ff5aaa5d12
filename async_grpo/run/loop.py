"""The training loop, as in the paper: sample a batch, take its gradient steps, publish, repeat.

for each batch:
    for each gradient step:
        back-propagate minibatches as they finish      (sums of per-sample losses)
        divide by D, clip, step                        (once)
    the same steps again, of the minibatches held      (--num-passes - 1 times)
    publish the new weights: the staleness window moves

Supervised fine-tuning packs, sums and steps the same way, on demonstrations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Protocol

from async_grpo.batching.supervised import supervised_stream
from async_grpo.checkpoint.export import Exports, export_finished, initial_folder, write_initial
from async_grpo.checkpoint.resume import Start, find_start
from async_grpo.checkpoint.saving import Checkpoints, Read
from async_grpo.checkpoint.tensors import restore_learner
from async_grpo.cluster.cluster import Cluster
from async_grpo.config.train_config import TrainConfig
from async_grpo.data.shards import StreamedRecords
from async_grpo.data.table import PairTable
from async_grpo.devices.current import device_id
from async_grpo.model.model_folder import ModelFacts, check_model_folder
from async_grpo.model.policy import read_size
from async_grpo.run.data import Pairs, load_pairs, order_of, warn_of_few
from async_grpo.run.main_rank import MainRank, OtherRank
from async_grpo.run.preparation import attention_ratio_of, hash_code, hash_contents, open_run
from async_grpo.run.report import Report
from async_grpo.run.sampled_data import SampledData
from async_grpo.run.watch import RunRecord, first_failure_recorded
from async_grpo.training.learner import HeldOutPairs, Learner
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.training.recorder import writers_of
from async_grpo.types import EndOfStep, Minibatch, StreamItem
from async_grpo.util.stopping import polled, stop_in_order, until_stopped


def train_grpo(config: TrainConfig, ranks: Ranks, *, stop: Event | None = None) -> None:
    """Train a whole run on one rank; rank 0 also owns the run at the controller.

    All ranks leave together, before their next item, once `stop` is set on any of them.
    """
    stop = stop or Event()
    record = RunRecord(config.recording.output_dir, rank=ranks.rank)
    config, start = _begun(config, ranks)
    if start is None:
        return
    devices = ranks.gather(device_id())
    main: MainRank | OtherRank = (
        ranks.on_main(lambda: open_run(config, record, start=start, devices=devices)) or OtherRank()
    )
    with first_failure_recorded(record, ranks), main:
        cluster = Cluster.join(config.places.ray_address, namespace=config.places.namespace)
        learner = Learner.build(config, ranks)
        with main.reporting(partial(Report, config, start=start)) as report:
            data = SampledData(ranks, learner, main, cluster, stop)
            train(data, learner, ranks, report, record, start=start, hashes=main.hashes, stop=stop)
            report.conclude()


def train_sft(config: TrainConfig, ranks: Ranks, *, stop: Event | None = None) -> None:
    """Train a whole supervised run on one rank; needs neither Ray nor workers.

    All ranks leave together, before their next item, once `stop` is set on any of them.
    """
    stop = stop or Event()
    config, start = _begun(config, ranks)
    if start is None:
        return
    pairs, held_out, facts = ranks.on_main(lambda: _load(config)) or _load(config)
    hashes = ranks.on_main(lambda: hash_contents(config, facts, pairs, start=start))
    record = RunRecord(config.recording.output_dir, rank=ranks.rank)
    if ranks.is_main:
        num_tokens = sum(len(pair.completion_token_ids) for pair in pairs)
        logger.info(
            "%d pairs with %d tokens to train on, %d ranks",
            len(pairs),
            num_tokens,
            ranks.world_size,
        )
        warn_of_few(config, len(pairs))
        record.forget()
    learner = Learner.build(config, ranks)
    code = ranks.on_main(lambda: hash_code(config))
    with (
        first_failure_recorded(record, ranks),
        Report(config, start=start, code=code) if ranks.is_main else Absent() as report,
    ):
        data = Demonstrations(pairs, held_out, learner, ranks, report, stop=stop)
        train(data, learner, ranks, report, record, start=start, hashes=hashes, stop=stop)
        report.conclude()


class Data(Protocol):
    """Yields a run's minibatches and takes its weights; one on every rank.

    `publish` also starts the evaluations that are due with the weights; with `evaluates`, all.
    """

    def __iter__(self) -> Iterator[StreamItem]:
        """Yield the items that this rank trains; all ranks end before the same item."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the items ended before the last batch of the run."""
        ...

    def restore(self, start: Start) -> None: ...
    def publish(self, num_batches: int, *, evaluates: bool = False) -> float: ...
    def finish(self) -> None: ...
    def finish_evaluations(self) -> None: ...
    def references_to_save(self, batches: int) -> Mapping[int, Read]: ...


def train(
    data: Data,
    learner: Learner,
    ranks: Ranks,
    report: Report | Absent,
    record: RunRecord,
    *,
    start: Start,
    hashes: Future[Mapping[str, str]] | None,
    stop: Event,
) -> None:
    """Train from `start` to the last batch, or until all ranks have agreed to stop."""
    exports = Exports(learner, doing=report.doing, sends=ranks.is_main)
    checkpoints = Checkpoints(
        learner, ranks, exports=exports, report=report, hashes=hashes,
        references=data.references_to_save,
    )  # fmt: skip
    checkpoints.check_folder()
    recording, options = learner.config.recording, learner.config.options()
    writers = writers_of(recording, ranks, first=start.batches, options=options)
    learner.recorder.begin(*writers)
    if start.folder:
        data.restore(start)
        restore_learner(learner, start)
        exports.restore(start.state["exports"])
    learner.set(start.settings(learner.config))
    data.publish(start.batches)

    def after_batch(end: EndOfStep) -> None:
        record.trained(end.batch + 1)
        asked = {control.action for control in end.controls}
        seconds = data.publish(end.batch + 1, evaluates="evaluate" in asked)
        report.stood_still("seconds_publishing", seconds)
        exports.export_if_due()
        checkpoints.batch_ended(end)
        if "stop" in asked:  # on every rank: the checkpoint of this batch is the last
            stop_in_order(stop)

    while_going = partial(until_stopped, agree=ranks.agree, stop=stop)
    with polled(stop):
        items = learner.in_passes(data, while_going=while_going)
        train_steps(items, learner, report, exports, after_batch=after_batch)
    _keep_result(data, ranks, exports, checkpoints)


def train_steps(
    items: Iterable[StreamItem],
    learner: Learner,
    report: Report | Absent,
    exports: Exports,
    *,
    after_batch: Callable[[EndOfStep], None],
) -> None:
    """Train on the items of a stream until the last batch of the run has ended."""
    for item in items:
        if isinstance(item, Minibatch):
            report.minibatch()
            learner.accumulate(item)
        else:
            result = learner.update(item)
            if learner.config.batching.pass_of(item.step_in_batch) == 1:
                exports.count(item)
            report.step(item, result, denominator=learner.denominator(item))
            if item.is_last_of_batch:
                learner.set(item.settings)
                after_batch(item)
                if item.batch + 1 == learner.config.batching.num_training_batches:
                    return
        report.doing("waiting for samples")


def _begun(config: TrainConfig, ranks: Ranks) -> tuple[TrainConfig, Start | None]:
    """The options, with the folder of random weights that they ask for, and where the run starts.

    None where it is finished: then its last export is complete.
    """
    seed, source = config.data.infinite_sampler_seed, config.places.model_name_or_path
    if is_drawn := config.places.draws_weights:
        output = config.recording.output_dir
        folder = ranks.share(lambda: initial_folder(source, output_dir=output, seed=seed))
        config = config.but(model_name_or_path=folder)
    start = ranks.share(lambda: find_start(config))
    if is_drawn:
        ranks.on_main(lambda: write_initial(source, folder, seed=seed))
    if not start.is_finished:
        return config, start

    def restored() -> Learner:
        learner = Learner.build(config, ranks)
        restore_learner(learner, start)
        return learner

    output_dir = config.recording.output_dir
    export_finished(output_dir, ranks, start.state["exports"], restored=restored)
    return config, None


def _keep_result(data: Data, ranks: Ranks, exports: Exports, checkpoints: Checkpoints) -> None:
    """Save the run's end, and export the model unless the run was stopped before its last batch.

    Raises `CheckpointError` when neither an export nor a checkpoint of the trained model is there.
    """
    if not data.is_stopped:
        exports.export()
    checkpoints.save_last()
    checkpoints.wait()
    if not data.is_stopped:
        data.finish()
        ranks.on_main(lambda: exports.check_last(is_saved=checkpoints.is_complete))
        data.finish_evaluations()
        exports.finish_pushes()


logger = logging.getLogger(__name__)


class Demonstrations:
    """The `Data` of a supervised run: every rank forms its minibatches itself."""

    def __init__(
        self,
        pairs: Pairs,
        held_out: PairTable,
        learner: Learner,
        ranks: Ranks,
        report: Report | Absent,
        *,
        stop: Event,
    ) -> None:
        self._pairs = pairs
        self._held_out = HeldOutPairs(held_out, learner, ranks)
        self._config = learner.config
        self._ranks = ranks
        self._report = report
        self._stop = stop
        self._first_batch, self._resumed_at = 0, -1

    def __iter__(self) -> Iterator[StreamItem]:
        config = self._config
        order = order_of(config, self._pairs)
        items = supervised_stream(
            self._pairs,
            batching=config.batching,
            stream_index=order.index,
            num_ranks=self._ranks.world_size,
            rank=self._ranks.rank,
            attention_ratio=attention_ratio_of(read_size(config.places.model_name_or_path)),
            first_batch=self._first_batch,
        )
        items = map(self._with_refused, items)
        return until_stopped(items, agree=self._ranks.agree, stop=self._stop)

    def _with_refused(self, item: StreamItem) -> StreamItem:
        if isinstance(item, EndOfStep) and isinstance(self._pairs, StreamedRecords):
            return replace(item, clock={"refused_lines": self._pairs.take_refused()})
        return item

    @property
    def is_stopped(self) -> bool:
        """Whether the ranks were asked to stop."""
        return self._stop.is_set()

    def restore(self, start: Start) -> None:
        """Begin after the last batch of a checkpoint."""
        self._first_batch = self._resumed_at = start.batches

    def publish(self, num_batches: int, *, evaluates: bool = False) -> float:
        """Report the loss on the held-out pairs if it is due; collective. Publishes no weights."""
        sets = self._config.evaluation_sets
        is_due = any(evaluates or self._config.evaluates(each, num_batches) for each in sets)
        if is_due and num_batches != self._resumed_at:  # a checkpoint's was reported before
            started = time.monotonic()
            self._report.doing(f"computing the loss of {len(self._held_out)} held-out pairs")
            self._report.held_out_loss(self._held_out.loss())
            self._report.stood_still("seconds_evaluating", time.monotonic() - started)
        return 0.0

    def finish(self) -> None:
        """Wait for nothing."""

    def finish_evaluations(self) -> None:
        """Wait for nothing: `publish` evaluates before training continues."""

    def references_to_save(self, batches: int) -> Mapping[int, Read]:
        """Return {}: no reference scores a demonstration."""
        return {}


def _load(config: TrainConfig) -> tuple[Pairs, PairTable, ModelFacts]:
    """The trained pairs, the held-out ones, and the model; every rank reads the files itself."""
    facts = check_model_folder(config.places.model_name_or_path)
    return *load_pairs(config, facts), facts
