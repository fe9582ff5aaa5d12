"""The policy's weights on their way out: gathered by all ranks, announced by rank 0."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from async_grpo.checkpoint.resume import Start
from async_grpo.model.collate import collate_pairs, split_by_row, to_device
from async_grpo.training.fsdp import compute_dtype, iter_full_tensors
from async_grpo.training.learner import Learner
from async_grpo.types import CanaryRow

if TYPE_CHECKING:
    from async_grpo.run.main_rank import MainRank, OtherRank

CANARY_TEMPERATURE = 1.0  # vLLM scores prompts at no other


class Weights:
    """Publishes versions in order; collective, every rank has one."""

    def __init__(self, learner: Learner, main: MainRank | OtherRank) -> None:
        self._learner = learner
        self._main = main
        self._num_updates = -1  # of the parameters, when they were gathered last

    def publish(self, num_batches: int) -> float:
        """Gather the weights after `num_batches` batches; rank 0 then announces them in a thread.

        Returns the seconds that this rank stood still for it. Raises what went wrong with the
        previous announcement.
        """
        started = time.monotonic()
        self._main.wait_announced()
        # Where every step of the batch was skipped, its version is another name of the weights
        # that are out; the ranks agree on it, for they skip together.
        if self._num_updates != self._learner.step.clocks.steps:
            self._num_updates = self._learner.step.clocks.steps
            canary = self._score_canary()
            tensors = iter_full_tensors(self._learner.policy)
            self._main.collect(tensors, canary, num_batches=num_batches)
        self._main.announce(num_batches)
        return time.monotonic() - started

    def restore_references(self, start: Start) -> None:
        """Restore what the reference serves, before the first publication of a resumed run.

        The policy must still be what the model folder holds.
        """
        config = self._learner.config
        if not self._learner.algorithm.needs_reference:
            return
        if config.reference_of(start.batches) == 0:
            self._main.restore_first_reference(iter_full_tensors(self._learner.policy))
        self._main.restore_moved_references(start)

    @torch.no_grad()
    def _score_canary(self) -> tuple[CanaryRow, ...]:
        """Score the canary under the weights of this moment; ranks without rows fill in.

        Leaves the root gathered, which `iter_full_tensors` undoes.
        """
        config, device = self._learner.config, self._learner.device
        dtype = str(compute_dtype(config.mixed_precision, device)).removeprefix("torch.")
        rows = self._main.canary
        packed = to_device(collate_pairs([(row[:1], row[1:]) for row in rows]), device)
        scored = self._learner.policy(
            packed, temperature=CANARY_TEMPERATURE, chunk_size=config.chunk_size
        )
        parts = split_by_row(scored.logprobs, packed)
        return tuple(
            CanaryRow(row, part.float().cpu().numpy(), dtype)
            for row, part in zip(rows, parts, strict=True)
        )
