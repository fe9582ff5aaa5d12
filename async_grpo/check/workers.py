"""A worker as it would register, from its options and its model's folder. Pure."""

from __future__ import annotations

from async_grpo.config.worker import WorkerConfig
from async_grpo.model.folder import ModelFacts
from async_grpo.roles import GENERATION, JUDGE
from async_grpo.types import WorkerInfo


def as_registered(config: WorkerConfig, model: ModelFacts) -> WorkerInfo:
    """What the trainer would hear of it: enough for `run.recruitment.check_worker`."""
    if config.mode in (GENERATION, JUDGE):
        longest = config.max_model_len or model.max_positions
    else:
        longest = min(config.max_tokens_per_gpu, model.max_positions)
    return WorkerInfo(
        worker_id=f"of [[worker]] {config.role}",
        role=config.role,
        node_id="",
        pid=0,
        model_path=config.model_path,
        vocab_size=model.vocab_size,
        capacity=float(config.max_num_seqs),
        overhead=0.0,
        max_model_len=longest,
        tokenizer_hash=model.tokenizer_hash,
        temperature=config.temperature or None,
        devices=("its own",),
    )
