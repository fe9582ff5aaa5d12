"""The loss on held-out demonstrations: one mean over all their trained tokens, by all ranks.

The sum over tokens and their number are added up over minibatches and ranks before the division,
so that the mean depends on neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from async_grpo.batching.supervised import pack_pairs
from async_grpo.model.collate import collate, to_device
from async_grpo.training.fsdp import reshard
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import Sample, TrainingPair

PACKED_TOGETHER = 256  # pairs; packing takes longer than linear in them


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """What one pass over the held-out pairs found."""

    loss_sum: float  # -log-probability of every trained token
    num_tokens: int
    num_pairs: int
    seconds: float

    @property
    def mean(self) -> float:
        """A token's, in nats."""
        return self.loss_sum / self.num_tokens


class HeldOutPairs:
    """The held-out pairs as each rank's share of minibatches."""

    def __init__(self, pairs: Sequence[TrainingPair], learner: Learner, ranks: Ranks) -> None:
        self._num_pairs = len(pairs)
        self._learner = learner
        self._shares: list[tuple[Sample, ...]] = []  # of each round
        for first in range(0, len(pairs), PACKED_TOGETHER):
            rounds = pack_pairs(
                {i: pairs[i] for i in range(first, min(first + PACKED_TOGETHER, len(pairs)))},
                num_ranks=ranks.world_size,
                max_tokens=learner.config.max_tokens_per_gpu,
            )
            self._shares += [parts[ranks.rank] for parts in rounds]

    def __len__(self) -> int:
        return self._num_pairs

    @torch.no_grad()
    def loss(self) -> HeldOutLoss:
        """Collective; the weights of this moment, the same answer on every rank."""
        started = time.monotonic()
        policy, device = self._learner.policy, self._learner.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # Σ -lp, tokens
        for samples in self._shares:
            packed = collate(samples, aggregation="token-mean", share_prompts=policy.shares_prompts)
            scored = policy(
                to_device(packed, device),
                temperature=1.0,
                chunk_size=self._learner.config.chunk_size,
            )
            sums[0] -= scored.logprobs.double().sum()
            sums[1] += scored.logprobs.numel()
        reshard(policy)
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss_sum, num_tokens = sums.tolist()
        return HeldOutLoss(loss_sum, int(num_tokens), len(self), time.monotonic() - started)
