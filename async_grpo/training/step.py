"""One gradient step: plain sums go in, one division, one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from async_grpo.config.train import TrainConfig
from async_grpo.model.logprobs import TokenLogprobs
from async_grpo.model.policy import PolicyModel
from async_grpo.training.loss import LossSums, Objective, grpo_loss, sft_loss
from async_grpo.training.schedule import make_lr_lambda
from async_grpo.types import PackedMinibatch

LossFunction = Callable[[TokenLogprobs, PackedMinibatch], LossSums]

NO_SAMPLES = "no samples"
NON_FINITE = "non-finite gradient"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a gradient step did; the same on every rank."""

    skipped: str  # empty, NO_SAMPLES or NON_FINITE: nothing was updated, nor the schedule moved
    grad_norm: float  # of the gradient after the division by D, before clipping
    learning_rate: float  # that the step used
    num_minibatches: int  # over all ranks, fillers included
    metrics: Mapping[str, float] = field(default_factory=dict)  # sums and maxima over all ranks


def make_loss(config: TrainConfig) -> LossFunction:
    """The objective of the run as a function of the policy's answer and its minibatch."""
    if config.objective == "sft":
        return lambda scored, packed: sft_loss(scored.logprobs, scored.entropy, packed)
    objective = Objective.from_config(config)
    return lambda scored, packed: grpo_loss(
        scored.logprobs, scored.entropy, packed, objective=objective
    )


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


def make_scheduler(optimizer: Optimizer, config: TrainConfig) -> LambdaLR:
    """The schedule over the gradient steps that are really taken."""
    return LambdaLR(optimizer, make_lr_lambda(config))


class GradientStep:
    """Accumulates the minibatches of one gradient step, then takes it; reusable step after step."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        loss: LossFunction,
        temperature: float,
        chunk_size: int,
        max_grad_norm: float,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._loss = loss
        self._temperature = temperature
        self._chunk_size = chunk_size
        self._max_grad_norm = max_grad_norm
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._num_minibatches = 0

    def accumulate(self, packed: PackedMinibatch) -> LossSums:
        """Back-propagate the minibatch's plain sum; every rank must call it equally often."""
        scored = self._policy(packed, temperature=self._temperature, chunk_size=self._chunk_size)
        result = self._loss(scored, packed)
        result.loss.backward()
        for name, value in result.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        for name, value in result.maxima.items():
            previous = self._maxima.get(name, value.double())
            self._maxima[name] = torch.maximum(previous, value.double())
        self._num_minibatches += 1
        return result

    def count(self, **amounts: float) -> None:
        """Add to the metric sums of the step."""
        device = next(self._policy.parameters()).device
        for name, amount in amounts.items():
            value = torch.tensor(float(amount), dtype=torch.float64, device=device)
            self._sums[name] = self._sums.get(name, 0.0) + value

    def finish(self, denominator: int) -> StepResult:
        """Divide by D, clip and update, unless D is 0 or the gradient is not finite."""
        metrics = self._reduce_metrics()
        num_minibatches = int(metrics.pop("num_minibatches"))
        learning_rate = self._scheduler.get_last_lr()[0]
        grad_norm = self._global_norm() / denominator if denominator else 0.0
        skipped = NO_SAMPLES if not denominator else ""
        if not math.isfinite(grad_norm):
            skipped = NON_FINITE
        if not skipped:
            self._update(grad_norm, denominator)
        self.discard()
        return StepResult(skipped, grad_norm, learning_rate, num_minibatches, metrics)

    def discard(self) -> None:
        """Forget what was accumulated, gradients and metrics alike."""
        self._optimizer.zero_grad(set_to_none=True)
        self._sums, self._maxima, self._num_minibatches = {}, {}, 0

    def _update(self, grad_norm: float, denominator: int) -> None:
        """One multiplication does both the division by D and the clipping."""
        limit = self._max_grad_norm
        clip = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
        torch._foreach_mul_(list(self._gradients()), clip / denominator)
        self._optimizer.step()
        self._scheduler.step()

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
        names = [*sorted(self._sums), "num_minibatches", *sorted(self._maxima)]
        device = next(self._policy.parameters()).device
        local = torch.stack(
            [
                *(self._sums[name] for name in sorted(self._sums)),
                torch.tensor(self._num_minibatches, dtype=torch.float64, device=device),
                *(self._maxima[name] for name in sorted(self._maxima)),
            ]
        )
        every = _all_gather(local)
        num_sums = len(self._sums) + 1
        totals = torch.cat([every[:, :num_sums].sum(0), every[:, num_sums:].amax(0)])
        return dict(zip(names, totals.tolist(), strict=True))


def _all_gather(local: Tensor) -> Tensor:
    """[R, K] of every rank's [K] vector."""
    if not dist.is_initialized():
        return local[None]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts)
