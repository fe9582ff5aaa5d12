"""Supervised warm-start: the same packing, sums and steps as GRPO, on demonstrations."""

from __future__ import annotations

from contextlib import ExitStack

from transformers import AutoTokenizer

from async_grpo.batching.supervised import supervised_stream
from async_grpo.config.train import TrainConfig
from async_grpo.data.columns import parse_column_mapping
from async_grpo.data.questions import load_pairs
from async_grpo.data.stream import QuestionStream
from async_grpo.training.exports import Exports
from async_grpo.training.learner import Learner
from async_grpo.training.loop import train_steps
from async_grpo.training.preparation import check_run, read_attention_ratio
from async_grpo.training.ranks import Ranks
from async_grpo.training.report import Report
from async_grpo.types import EndOfStep, TrainingPair


def train_sft(config: TrainConfig, ranks: Ranks) -> None:
    """One whole supervised run on one rank; needs neither Ray nor workers."""
    ranks.on_main(lambda: _load_pairs(config))
    pairs = _load_pairs(config)
    learner = Learner.build(config, ranks)
    order = QuestionStream(len(pairs), seed=config.infinite_sampler_seed)
    stream = supervised_stream(
        pairs,
        stream_index=order.index,
        batch_size=config.batch_size,
        questions_per_step=config.questions_per_step,
        num_batches=config.num_training_batches,
        num_ranks=ranks.world_size,
        rank=ranks.rank,
        max_tokens=config.max_tokens_per_gpu,
        attention_ratio=read_attention_ratio(config),
    )
    with ExitStack() as stack:
        report = stack.enter_context(Report(config)) if ranks.is_main else None
        exports = Exports(config, learner)

        def after_batch(_end: EndOfStep) -> None:
            exports.export_if_due()

        train_steps(stream, learner, report, exports, after_batch=after_batch)
        exports.export()


def _load_pairs(config: TrainConfig) -> tuple[TrainingPair, ...]:
    """Every rank reads the file itself; rank 0 checks it first, with everything else."""
    facts = check_run(config)
    return load_pairs(
        config.data_path,
        split=config.data_split,
        column_mapping=parse_column_mapping(config.column_mapping),
        tokenizer=AutoTokenizer.from_pretrained(config.model_name_or_path),
        vocab_size=facts.vocab_size,
        max_pair_tokens=min(config.max_tokens_per_gpu, facts.max_positions),
    )
