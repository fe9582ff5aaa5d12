"""Supervised warm-start: the same packing, sums and steps as GRPO, on demonstrations."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from threading import Event

from async_grpo.batching.supervised import supervised_stream
from async_grpo.checkpoint.export import export_finished
from async_grpo.checkpoint.resume import Start, find_start
from async_grpo.config.train_config import TrainConfig
from async_grpo.data.order import QuestionStream
from async_grpo.data.table import PairTable
from async_grpo.model.model_folder import ModelFacts, check_model_folder
from async_grpo.run.data import load_pairs, warn_of_few
from async_grpo.run.first_failure import RunRecord, first_failure_recorded
from async_grpo.run.loop import train
from async_grpo.run.preparation import hash_code, hash_contents, read_attention_ratio
from async_grpo.run.report import Report
from async_grpo.run.stopping import until_stopped
from async_grpo.training.learner import HeldOutPairs, Learner
from async_grpo.training.ranks import Absent, Ranks
from async_grpo.types import StreamItem, WeightsSnapshot

logger = logging.getLogger(__name__)


def train_sft(config: TrainConfig, ranks: Ranks, *, stop: Event | None = None) -> None:
    """Train one whole supervised run on one rank; needs neither Ray nor workers.

    All ranks leave together, before their next item, once `stop` is set on any of them.
    """
    stop = stop or Event()
    start = ranks.share(lambda: find_start(config))
    if start.is_finished:
        export_finished(config, ranks, start)
        return
    pairs, held_out, facts = ranks.on_main(lambda: _load(config)) or _load(config)
    hashes = ranks.on_main(lambda: hash_contents(config, facts, pairs, start=start))
    record = RunRecord(config.output_dir, rank=ranks.rank)
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


class Demonstrations:
    """A supervised run's minibatches, which every rank forms itself; see `loop.Data`."""

    def __init__(
        self,
        pairs: PairTable,
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
        order = QuestionStream(len(self._pairs), seed=config.infinite_sampler_seed)
        items = supervised_stream(
            self._pairs,
            config=config,
            stream_index=order.index,
            num_ranks=self._ranks.world_size,
            rank=self._ranks.rank,
            attention_ratio=read_attention_ratio(config),
            first_batch=self._first_batch,
        )
        return until_stopped(items, agree=self._ranks.agree, stop=self._stop)

    @property
    def is_stopped(self) -> bool:
        """Whether the ranks were asked to stop."""
        return self._stop.is_set()

    def restore(self, start: Start) -> None:
        """Begin after the batches of a checkpoint."""
        self._first_batch = self._resumed_at = start.batches

    def publish(self, num_batches: int, *, evaluates: bool = False) -> float:
        """Report the loss on the held-out pairs, where it is due; collective.

        No worker serves these weights.
        """
        sets = self._config.evaluation_sets
        is_due = any(evaluates or self._config.evaluates(each, num_batches) for each in sets)
        if is_due and num_batches != self._resumed_at:  # a checkpoint's has been told
            started = time.monotonic()
            self._report.doing(f"computing the loss of {len(self._held_out)} held-out pairs")
            self._report.held_out_loss(self._held_out.loss())
            self._report.stood_still("seconds_evaluating", time.monotonic() - started)
        return 0.0

    def finish(self) -> None:
        """Wait for nothing."""

    def finish_evaluations(self) -> None:
        """Wait for nothing: each was over before training went on."""

    def references_to_save(self, batches: int) -> tuple[WeightsSnapshot, ...]:
        """Save none: no reference scores a demonstration."""
        return ()


def _load(config: TrainConfig) -> tuple[PairTable, PairTable, ModelFacts]:
    """What is trained, what is held out, and the model; every rank reads the files itself."""
    facts = check_model_folder(config.model_name_or_path)
    return *load_pairs(config, facts), facts
