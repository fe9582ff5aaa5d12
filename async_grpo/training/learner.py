"""The model, its optimizer, and what a rank does with the items of a stream."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from async_grpo.algorithms.base import Algorithm
from async_grpo.algorithms.find import check_source, find_algorithm, source_hash
from async_grpo.config.train import TrainConfig
from async_grpo.model.attention import choose_attention
from async_grpo.model.collate import collate, to_device
from async_grpo.model.loading import load_policy
from async_grpo.model.policy import PolicyModel
from async_grpo.training.audit import Audit
from async_grpo.training.fsdp import compute_dtype, shard
from async_grpo.training.old_policy import BatchStart
from async_grpo.training.ranks import Ranks
from async_grpo.training.replay import Replay
from async_grpo.training.schedule import Scheduler
from async_grpo.training.step import GradientStep, StepResult, make_optimizer
from async_grpo.types import EndOfStep, Minibatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Learner:
    """One rank's share of the policy and of its updates."""

    config: TrainConfig
    algorithm: Algorithm
    device: torch.device
    policy: PolicyModel
    step: GradientStep
    replay: Replay
    audit: Audit = field(default_factory=Audit)

    @classmethod
    def build(cls, config: TrainConfig, ranks: Ranks) -> Learner:
        """Load, shard and equip the policy; float32 master weights."""
        find_algorithm(config)  # before the minutes in which a model loads
        check_source(config.algorithm, ranks.share(lambda: source_hash(config.algorithm)))
        dtype = compute_dtype(config.mixed_precision, ranks.device)
        policy = load_policy(
            config.model_name_or_path,
            attention=choose_attention(ranks.device, dtype=dtype),
            dtype=torch.float32,
        )
        policy = shard(
            policy.to(ranks.device),
            ranks.mesh,
            mixed_precision=config.mixed_precision,
            keep_gathered=config.fsdp_sharding_strategy == "SHARD_GRAD_OP",
            activation_checkpointing=config.activation_checkpointing,
            compile=config.use_torch_compile,
        )
        learner = cls.equip(policy, config, ranks)
        logger.info("policy and optimizer are ready")
        return learner

    @classmethod
    def equip(cls, policy: PolicyModel, config: TrainConfig, ranks: Ranks) -> Learner:
        """Give a policy that is where and as it shall be trained its optimizer and its step."""
        algorithm = find_algorithm(config)
        optimizer = make_optimizer(policy, config)
        step = GradientStep(
            policy,
            optimizer=optimizer,
            scheduler=Scheduler(optimizer, config, samples_per_slot=algorithm.samples_per_slot),
            algorithm=algorithm,
            chunk_size=config.chunk_size,
            max_grad_norm=config.max_grad_norm,
            batch_start=BatchStart(policy) if algorithm.uses_old_policy else None,
            defer_gradient_sync=config.defer_gradient_sync,
        )
        replay = Replay(config.output_dir, rank=ranks.rank)
        return cls(config, algorithm, ranks.device, policy, step, replay)

    def accumulate(self, minibatch: Minibatch) -> None:
        """Back-propagate one minibatch's plain sum; a filler when it is empty."""
        self.replay.keep(minibatch)
        packed = collate(
            minibatch.samples,
            aggregation=self.algorithm.aggregation,
            constant_length=self.config.constant_length_samples,
            scores=self.algorithm.score_columns,
            scores_of_given=self.algorithm.scores_of_given,
            share_prompts=self.policy.shares_prompts,
        )
        self.audit.trained(minibatch, packed)
        self.step.accumulate(to_device(packed, self.device))
        self.step.count(
            num_fillers=not minibatch.samples,
            packed_tokens=sum(sample.num_tokens for sample in minibatch.samples),
            budget_tokens=self.config.max_tokens_per_gpu,
        )

    def update(self, end: EndOfStep) -> StepResult:
        """Divide by D, once, and step; what made a step impossible is kept for replay.

        Raises `AuditError` when a rank has trained other samples than it was sent.
        """
        step = end.batch * self.config.steps_per_batch + end.step_in_batch + 1
        self.audit.end_step(end, step=step)
        result = self.step.finish(self.denominator(end), num_samples=end.num_samples)
        self.replay.end_step(step, suspects=result.suspects)
        if end.is_last_of_batch:
            self.step.begin_batch()
        return result

    def discard(self) -> None:
        """Forget the minibatches of an unfinished step, which will all come again."""
        self.step.discard()
        self.replay.discard()
        self.audit.discard()

    def denominator(self, end: EndOfStep) -> int:
        """D of the aggregation (design, section 4)."""
        return end.num_tokens if self.algorithm.aggregation == "token-mean" else end.num_samples
