"""One gradient step: plain sums go in, one division, one update.

Losses need no scaling against underflow: gradients are summed in float32 (`training/fsdp.py`), and
bfloat16, the only lower precision, has float32's exponents. fp16 would need it, and is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from async_grpo.algorithms.base import Algorithm, LossSums
from async_grpo.config.train import TrainConfig
from async_grpo.model.collate import collate, to_device
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import deferred_gradients, drop_local_gradients
from async_grpo.training.old_policy import BatchStart
from async_grpo.training.schedule import Clocks, Scheduler
from async_grpo.types import PackedMinibatch

NO_SAMPLES = "no samples"
NON_FINITE = "non-finite loss or gradient"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a gradient step did; the same on every rank, but for `suspects`."""

    skipped: str  # empty, NO_SAMPLES or NON_FINITE: nothing was updated, nor the schedule moved
    grad_norm: float  # of the gradient after the division by D, before clipping
    learning_rate: float  # that the step used, or would have used
    num_minibatches: int  # over all ranks, fillers included
    clocks: Clocks  # after the step
    metrics: Mapping[str, float] = field(default_factory=dict)  # sums and maxima over all ranks
    suspects: tuple[int, ...] = ()  # NON_FINITE: which of this rank's minibatches may be the cause


def make_optimizer(policy: PolicyModel, config: TrainConfig) -> AdamW:
    """AdamW over the (sharded) parameters; weight decay spares biases and norms."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


class GradientStep:
    """Accumulates the minibatches of one gradient step, then takes it; reusable step after step.

    `defer_gradient_sync`: minibatches leave whole gradients on their rank, in float32, and one
    inert closing minibatch reduces them; otherwise each minibatch reduces its own.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        optimizer: Optimizer,
        scheduler: Scheduler,
        algorithm: Algorithm,
        chunk_size: int,
        max_grad_norm: float,
        batch_start: BatchStart | None = None,
        defer_gradient_sync: bool = False,
    ) -> None:
        """`batch_start` serves the mode `decoupled` with several steps a batch."""
        self._policy = policy
        self._batch_start = batch_start
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._algorithm = algorithm
        self._chunk_size = chunk_size
        self._max_grad_norm = max_grad_norm
        self._defer_gradient_sync = defer_gradient_sync
        # Tensors stay on the device until the step ends: nothing waits for it between minibatches.
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._losses: list[Tensor] = []  # [] each
        self._counts: Counter[str] = Counter()

    @property
    def num_updates(self) -> int:
        """Of the parameters; the same on every rank."""
        return self._scheduler.clocks.steps

    @property
    def clocks(self) -> Clocks:
        """How far the optimizer has come."""
        return self._scheduler.clocks

    @property
    def optimizer(self) -> Optimizer:
        """Its state is what a checkpoint holds beside the policy."""
        return self._optimizer

    def restore_clocks(self, clocks: Clocks) -> None:
        """A resumed run: the optimizer's own state is put in place by whoever loads it."""
        self._scheduler.clocks = clocks

    @property
    def _setting(self) -> dict[str, Any]:
        """Of every forward of the policy."""
        return {"temperature": self._algorithm.temperature, "chunk_size": self._chunk_size}

    @property
    def _device(self) -> torch.device:
        return next(self._policy.parameters()).device

    def accumulate(self, packed: PackedMinibatch) -> LossSums:
        """Back-propagate the minibatch's plain sum; every rank must call it equally often."""
        old = self._batch_start.logprobs(packed, **self._setting) if self._batch_start else None
        if old is not None:
            packed = replace(packed, scores={**packed.scores, "old": old})
        scored = self._policy(packed, **self._setting, terms=self._algorithm.terms)
        result = self._algorithm.loss(scored, packed)
        with deferred_gradients(self._policy, defer=self._defer_gradient_sync):
            result.loss.backward()
        loss, entropy = result.loss.detach(), scored.entropy.detach()
        common = {"loss_sum": loss, "entropy_sum": entropy.sum()}
        for name, value in {**common, **result.sums}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
        for name, value in result.maxima.items():
            number = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima.get(name, number), number)
        self.count(trained_tokens=entropy.numel(), trained_samples=packed.num_samples)
        self._losses.append(loss)
        return result

    def count(self, **amounts: int) -> None:
        """Add to the metric sums of the step."""
        self._counts.update(amounts)

    def finish(self, denominator: int, *, num_samples: int | None = None) -> StepResult:
        """Divide by D, clip and update, unless D is 0 or the loss or gradient is not finite.

        Collective; all ranks take the step or none does. `num_samples` moves the clock of samples;
        None: `denominator` counts samples.
        """
        num_samples = denominator if num_samples is None else num_samples
        if denominator and self._losses and self._defer_gradient_sync:
            self._reduce_gradients()
        metrics = self._reduce_metrics()
        num_minibatches = int(metrics.pop("num_minibatches"))
        num_bad_losses = int(metrics.pop("num_bad_losses"))
        grad_norm = self._global_norm() / denominator if denominator else 0.0
        learning_rate = self._scheduler.learning_rate(num_samples)
        skipped = ""
        suspects: tuple[int, ...] = ()
        if not denominator:
            skipped = NO_SAMPLES
        elif num_bad_losses or not math.isfinite(grad_norm):
            skipped, suspects = NON_FINITE, self._suspects(is_loss=num_bad_losses > 0)
        else:
            self._update(grad_norm, denominator, num_samples)
        self.discard()
        return StepResult(
            skipped=skipped,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_minibatches=num_minibatches,
            clocks=self._scheduler.clocks,
            metrics=metrics,
            suspects=suspects,
        )

    def begin_batch(self) -> None:
        """The gradient steps that follow belong to another batch."""
        if self._batch_start is not None:
            self._batch_start.begin_batch()

    def discard(self) -> None:
        """Forget what was accumulated, gradients and metrics alike."""
        self._optimizer.zero_grad(set_to_none=True)
        drop_local_gradients(self._policy)
        self._sums, self._maxima, self._losses, self._counts = {}, {}, [], Counter()

    def _reduce_gradients(self) -> None:
        """One more pass, over a filler, that reduces every rank's whole gradients.

        It trains nothing and is counted nowhere.
        """
        filler = to_device(collate([], aggregation="sample-mean"), self._device)
        scored = self._policy(filler, **self._setting)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()

    def _update(self, grad_norm: float, denominator: int, num_samples: int) -> None:
        """One multiplication does both the division by D and the clipping."""
        if self._batch_start is not None:
            self._batch_start.before_update()
        limit = self._max_grad_norm
        clip = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
        torch._foreach_mul_(list(self._gradients()), clip / denominator)
        self._scheduler.set_rate(num_samples)
        self._optimizer.step()
        self._scheduler.stepped(num_samples)

    def _suspects(self, *, is_loss: bool) -> tuple[int, ...]:
        """This rank's minibatches with a bad loss; all of them where only the gradient is bad."""
        if not is_loss:
            return tuple(range(len(self._losses)))
        return tuple(i for i, loss in enumerate(self._losses) if not loss.isfinite())

    def _global_norm(self) -> float:
        """Norm of the summed, undivided gradient over all ranks."""
        norm = torch.nn.utils.get_total_norm(self._gradients())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _gradients(self) -> Iterable[Tensor]:
        """Every parameter's gradient; zeros where none came, so that moments decay."""
        for parameter in self._policy.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                yield parameter.grad

    def _reduce_metrics(self) -> dict[str, float]:
        """Sums and maxima over all ranks, in one collective."""
        counts = {**self._counts, "num_minibatches": len(self._losses)}
        sums = {**self._sums, "num_bad_losses": self._num_bad_losses()}
        names = [*sorted(counts), *sorted(sums), *sorted(self._maxima)]
        host = torch.tensor([float(counts[name]) for name in sorted(counts)], dtype=torch.float64)
        local = torch.stack(
            [
                *host.to(self._device),
                *(sums[name] for name in sorted(sums)),
                *(self._maxima[name] for name in sorted(self._maxima)),
            ]
        )
        every = _all_gather(local)
        num_sums = len(counts) + len(sums)
        totals = torch.cat([every[:, :num_sums].sum(0), every[:, num_sums:].amax(0)])
        return dict(zip(names, totals.tolist(), strict=True))

    def _num_bad_losses(self) -> Tensor:
        """[] float64: this rank's minibatches with a loss that is not finite."""
        bad = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in self._losses:
            bad += ~loss.isfinite()
        return bad


def _all_gather(local: Tensor) -> Tensor:
    """[R, K] of every rank's [K] vector."""
    if not dist.is_initialized():
        return local[None]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts)
