"""Supervised warm-start: the same packing, sums and steps as GRPO, on demonstrations."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from threading import Event

from transformers import AutoTokenizer

from async_grpo.batching.supervised import supervised_stream
from async_grpo.checkpoint.exports import Exports, export_finished
from async_grpo.checkpoint.resume import Start, find_start
from async_grpo.checkpoint.saving import Checkpoints
from async_grpo.checkpoint.tensors import restore_learner
from async_grpo.config.source import DataSource
from async_grpo.config.train import TrainConfig
from async_grpo.data.columns import parse_column_mapping
from async_grpo.data.questions import load_pairs
from async_grpo.data.stream import QuestionStream
from async_grpo.data.table import PairTable
from async_grpo.model.folder import ModelFacts, check_model_folder
from async_grpo.run.first_failure import RunRecord, first_failure_recorded
from async_grpo.run.loop import evaluation_is_due, train_steps
from async_grpo.run.preparation import hash_contents, read_attention_ratio, warn_of_few
from async_grpo.run.report import Report, silent
from async_grpo.run.stopping import polled, until_stopped
from async_grpo.training.held_out import HeldOutPairs
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep, StreamItem, TrainingPair

logger = logging.getLogger(__name__)


def train_sft(config: TrainConfig, ranks: Ranks, *, stop: Event | None = None) -> None:
    """One whole supervised run on one rank; needs neither Ray nor workers.

    All ranks leave together, before their next item, once `stop` is set on any of them.
    """
    stop = stop or Event()
    start = ranks.share(lambda: find_start(config))
    if start.is_finished:
        export_finished(config, ranks, start)
        return
    hashes = ranks.on_main(lambda: _check(config, start, num_ranks=ranks.world_size))
    pairs, held_out, _ = _load(config)
    learner = Learner.build(config, ranks)
    evaluation = HeldOutPairs(held_out, learner, ranks)
    stream = _stream(config, pairs, ranks, first_batch=start.batches)
    record = RunRecord(config.output_dir, rank=ranks.rank)
    if ranks.is_main:
        record.forget()
    with first_failure_recorded(record, ranks), ExitStack() as stack:
        report = stack.enter_context(Report(config, start=start)) if ranks.is_main else None
        doing = report.doing if report else silent
        exports = Exports(config, learner, doing=doing)
        checkpoints = Checkpoints(
            config, learner, ranks, exports=exports, report=report, hashes=hashes
        )
        if start.folder:
            restore_learner(learner, start)
            exports.restore(start.state["exports"])
        else:
            _evaluate(evaluation, report)

        def after_batch(end: EndOfStep) -> None:
            record.trained(end.batch + 1)
            exports.export_if_due()
            if evaluation_is_due(config, end.batch + 1):
                _evaluate(evaluation, report)
            checkpoints.batch_ended(end)

        items = until_stopped(stream, agree=ranks.agree, stop=stop)
        with polled(stop):
            train_steps(items, learner, report, exports, after_batch=after_batch)
        if not stop.is_set():
            exports.export()
        checkpoints.save_last()
        checkpoints.wait()
        if report:
            report.conclude()
        if not stop.is_set():
            ranks.on_main(lambda: exports.check_last(is_saved=checkpoints.is_complete))


def _stream(
    config: TrainConfig, pairs: Sequence[TrainingPair], ranks: Ranks, *, first_batch: int
) -> Iterator[StreamItem]:
    order = QuestionStream(len(pairs), seed=config.infinite_sampler_seed)
    return supervised_stream(
        pairs,
        stream_index=order.index,
        batch_size=config.batch_size,
        questions_per_step=config.questions_per_step,
        num_batches=config.num_training_batches,
        num_ranks=ranks.world_size,
        rank=ranks.rank,
        max_tokens=config.max_tokens_per_gpu,
        attention_ratio=read_attention_ratio(config),
        first_batch=first_batch,
    )


def _evaluate(held_out: HeldOutPairs, report: Report | None) -> None:
    """Collective."""
    if not held_out:
        return
    if report:
        report.doing(f"computing the loss of {len(held_out)} held-out pairs")
    loss = held_out.loss()
    if report:
        report.held_out_loss(loss)


def _check(config: TrainConfig, start: Start, *, num_ranks: int) -> Future[Mapping[str, str]]:
    pairs, _, facts = _load(config)
    num_tokens = sum(len(pair.completion_token_ids) for pair in pairs)
    logger.info("%d pairs with %d tokens to train on, %d ranks", len(pairs), num_tokens, num_ranks)
    warn_of_few(config, len(pairs))
    return hash_contents(config, facts, pairs, start=start)


def _load(config: TrainConfig) -> tuple[PairTable, PairTable, ModelFacts]:
    """What is trained and what is held out.

    Every rank reads the files itself; rank 0 checks them first, with everything else.
    """
    facts = check_model_folder(config.model_name_or_path)

    def load(source: DataSource) -> PairTable:
        return load_pairs(
            source.path,
            split=source.split,
            config=source.config,
            column_mapping=parse_column_mapping(config.column_mapping),
            tokenizer=AutoTokenizer.from_pretrained(config.model_name_or_path),
            vocab_size=facts.vocab_size,
            max_pair_tokens=min(config.max_tokens_per_gpu, facts.max_positions),
        )

    held_out = load(config.held_out) if config.held_out else PairTable.of(())
    return load(config.data), held_out, facts
