"""One gradient step: plain sums go in, one division, one update.

Losses need no scaling against underflow: gradients are summed in float32 (`training/fsdp.py`), and
bfloat16, the only lower precision, has float32's exponents. fp16 would need it, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from async_grpo.algorithms.base import Algorithm, LossSums
from async_grpo.algorithms.grpo_loss import mismatch
from async_grpo.config.sampling_options import BatchingOptions
from async_grpo.config.training_options import MemoryOptions, OptimizerOptions
from async_grpo.model.collate import collate, to_device
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import HostAdamW, deferred_gradients, drop_local_gradients, reshard
from async_grpo.training.meters import Collectives, peak_memory
from async_grpo.training.schedule import Clocks, learning_rate_after
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
    # Seconds, arithmetic and memory of all ranks: what no two runs share.
    meters: Mapping[str, float] = field(default_factory=dict, compare=False)
    suspects: tuple[int, ...] = ()  # NON_FINITE: which of this rank's minibatches may be the cause


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """Of the trained tokens of one minibatch, on the device; [N] each."""

    logprobs: Tensor  # the policy's, when it was trained
    old: Tensor | None  # the policy's at the start of the batch, where it has moved since
    gradients: Tensor | None  # of the minibatch's plain sum, by each log-probability


def make_optimizer(
    policy: PolicyModel, options: OptimizerOptions, *, on_host: bool
) -> AdamW | HostAdamW:
    """AdamW over the (sharded) parameters; weight decay spares biases and norms."""
    make = HostAdamW if on_host else AdamW
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return make(
        groups,
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
        fused=True,
    )


class GradientStep:
    """Accumulates the minibatches of one gradient step, then takes it; reusable step after step.

    With `--defer-gradient-sync` minibatches leave whole gradients on their rank, in float32, and
    one inert closing minibatch reduces them; otherwise each minibatch reduces its own.
    """

    def __init__(
        self,
        policy: PolicyModel,
        algorithm: Algorithm,
        *,
        options: OptimizerOptions,
        batching: BatchingOptions,
        memory: MemoryOptions,
        device: torch.device | None = None,
    ) -> None:
        """`options`: those of the steps that follow; whoever trains may set others between steps.
        `device` computes; None: it is where the parameters are.
        """
        self.optimizer = make_optimizer(policy, options, on_host=memory.offload == "optimizer")
        self.options = options
        self.clocks = Clocks()  # a resumed run sets them, and the optimizer's own state
        self._policy = policy
        self._batching = batching
        self._defers = memory.defer_gradient_sync
        self._algorithm = algorithm
        self.head_terms = algorithm.terms  # with those of its teachers, once they are met
        self._batch_start = BatchStart(policy) if algorithm.uses_old_policy else None
        # Of every forward of the policy.
        chunk_size = memory.chunk_size(batching.max_tokens_per_gpu)
        self._setting = {"temperature": algorithm.temperature, "chunk_size": chunk_size}
        self._device = device or next(policy.parameters()).device
        self.collectives = Collectives(self._device)
        self.collectives.watch(policy)
        # Tensors stay on the device until the step ends: nothing waits for it between minibatches.
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []  # [] each, of the current step's minibatches
        self.keeps_terms = False  # for `training.recorder`
        self.terms: list[TokenTerms] = []  # of the current step's minibatches
        self._counts: dict[str, float] = {}
        self._meters: dict[str, float] = {}

    def accumulate(self, packed: PackedMinibatch) -> LossSums:
        """Back-propagate the minibatch's plain sum; every rank must call it equally often."""
        old = self._batch_start.logprobs(packed, **self._setting) if self._batch_start else None
        if old is not None:
            packed = replace(packed, scores={**packed.scores, "old": old})
        scored = self._policy(packed, **self._setting, terms=self.head_terms)
        if self.keeps_terms:
            scored.logprobs.retain_grad()
        result = self._algorithm.loss(scored, packed)
        with deferred_gradients(self._policy, defer=self._defers):
            result.loss.backward()
        if self.keeps_terms:
            logprobs = scored.logprobs
            self.terms.append(
                TokenTerms(logprobs.detach(), packed.scores.get("old"), logprobs.grad)
            )
        loss, entropy = result.loss.detach(), scored.entropy.detach()
        sums = {"loss_sum": loss, "entropy_sum": entropy.sum(), **result.sums}
        maxima: dict[str, Tensor] = {}
        if not self._algorithm.learns_from_pairs:  # somebody sampled some of it
            mismatch_sums, maxima = mismatch(scored.logprobs, packed)
            sums |= mismatch_sums
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
        for name, value in maxima.items():
            number = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima.get(name, number), number)
        self.count(trained_tokens=entropy.numel(), trained_samples=packed.num_samples)
        self.losses.append(loss)
        return result

    @property
    def backpropagated(self) -> tuple[int, int]:
        """(samples, tokens) of this rank in the current step so far."""
        counts = self._counts
        return int(counts.get("trained_samples", 0)), int(counts.get("trained_tokens", 0))

    def count(self, **amounts: int) -> None:
        """Add to the metric sums of the step."""
        _add(amounts, self._counts)

    def measure(self, **amounts: float) -> None:
        """Add to its meters."""
        _add(amounts, self._meters)

    def finish(
        self, denominator: int, *, num_samples: int | None = None, num_tokens: int = 0
    ) -> StepResult:
        """Divide by D, clip and update, unless D is 0 or the loss or gradient is not finite.

        Collective; all ranks take the step or none does. `num_samples` and `num_tokens` move the
        clocks; None: `denominator` counts samples.
        """
        num_samples = denominator if num_samples is None else num_samples
        if denominator and self.losses and self._defers:
            self._reduce_gradients()
        metrics, meters = self._reduce_metrics()
        num_minibatches = int(metrics.pop("num_minibatches"))
        num_bad_losses = int(metrics.pop("num_bad_losses"))
        grad_norm = self._global_norm() / denominator if denominator else 0.0
        learning_rate = learning_rate_after(
            self.clocks,
            self.options,
            self._batching,
            num_samples=num_samples,
            samples_per_slot=self._algorithm.samples_per_slot,
        )
        skipped = ""
        suspects: tuple[int, ...] = ()
        if not denominator:
            skipped = NO_SAMPLES
        elif num_bad_losses or not math.isfinite(grad_norm):
            skipped, suspects = NON_FINITE, self._suspects(is_loss=num_bad_losses > 0)
        else:
            self._update(learning_rate, clip=self._clip(grad_norm), denominator=denominator)
            self.clocks = self.clocks.after(num_samples, num_tokens)
        self.discard()
        return StepResult(
            skipped=skipped,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_minibatches=num_minibatches,
            clocks=self.clocks,
            metrics=metrics,
            meters=meters,
            suspects=suspects,
        )

    def begin_batch(self) -> None:
        """The gradient steps that follow belong to another batch."""
        if self._batch_start is not None:
            self._batch_start.begin_batch()

    def discard(self) -> None:
        """Forget what was accumulated, gradients and metrics alike."""
        self.optimizer.zero_grad(set_to_none=True)
        drop_local_gradients(self._policy)
        self._sums, self._maxima, self.losses, self._counts = {}, {}, [], {}
        self._meters, self.terms = {}, []

    def _reduce_gradients(self) -> None:
        """One more pass, over a filler, that reduces every rank's whole gradients.

        It trains nothing and is counted nowhere.
        """
        filler = to_device(collate([], aggregation="sample-mean"), self._device)
        scored = self._policy(filler, **self._setting)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()

    def _clip(self, grad_norm: float) -> float:
        limit = self.options.max_grad_norm
        return min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0

    def _update(self, learning_rate: float, *, clip: float, denominator: int) -> None:
        """One multiplication does both the division by D and the clipping."""
        if self._batch_start is not None:
            self._batch_start.before_update()
        torch._foreach_mul_(list(self._gradients()), clip / denominator)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def _suspects(self, *, is_loss: bool) -> tuple[int, ...]:
        """This rank's minibatches with a bad loss; all of them where only the gradient is bad."""
        if not is_loss:
            return tuple(range(len(self.losses)))
        return tuple(i for i, loss in enumerate(self.losses) if not loss.isfinite())

    def _global_norm(self) -> float:
        """Norm of the summed, undivided gradient over all ranks."""
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if not isinstance(norm, DTensor):
            return float(norm)
        with self.collectives.agreeing():
            return float(norm.full_tensor())

    def _gradients(self) -> Iterable[Tensor]:
        """Every parameter's gradient; zeros where none came, so that moments decay."""
        for parameter in self._policy.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                yield parameter.grad

    def _reduce_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all ranks, in one collective: of what was trained, and by what."""
        num_bad = sum(~loss.isfinite() for loss in self.losses)
        counts = {**self._counts, "num_minibatches": len(self.losses), "num_bad_losses": num_bad}
        meters = {**self._meters, **self.collectives.take(), "num_ranks": 1.0}
        memory = peak_memory(self._device)
        sums = {**counts, **self._sums, **meters}
        entries = [*sorted(sums.items()), *sorted((self._maxima | memory).items())]
        local = torch.stack([self._number(value) for _, value in entries])
        with self.collectives.agreeing():
            every = _all_gather(local)
        totals = torch.cat([every[:, : len(sums)].sum(0), every[:, len(sums) :].amax(0)])
        names = [name for name, _ in entries]
        metrics = dict(zip(names, totals.tolist(), strict=True))
        measured = {name: metrics.pop(name) for name in (*meters, *memory)}
        for name in memory:
            of_ranks = enumerate(every[:, names.index(name)].tolist())
            measured |= {f"{name}/rank_{rank}": value for rank, value in of_ranks}
        return metrics, measured

    def _number(self, value: Tensor | float) -> Tensor:
        """[] float64 on the device."""
        return torch.as_tensor(value, dtype=torch.float64, device=self._device)


def _add(amounts: Mapping[str, float], sums: dict[str, float]) -> None:
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0) + amount


def _all_gather(local: Tensor) -> Tensor:
    """[R, K] of every rank's [K] vector."""
    if not dist.is_initialized():
        return local[None]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts)


class BatchStart:
    """Scores minibatches with the weights that the current batch started from.

    For the mode `decoupled` with several steps, in which these log-probabilities are the ratio's
    denominator. One more copy of this rank's shard is kept, so that samples still stream: no step
    waits for the whole batch to be scored beforehand.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._weights: list[Tensor] = []
        self._has_moved = False

    def begin_batch(self) -> None:
        """The policy of this moment is the one that later steps are compared with."""
        self._has_moved = False

    def before_update(self) -> None:
        """The policy is about to move: keep what it was, unless the batch has moved it already."""
        if self._has_moved:
            return
        reshard(self._policy)
        shards = _local_shards(self._policy)
        if not self._weights:
            self._weights = [torch.empty_like(shard) for shard in shards]
        torch._foreach_copy_(self._weights, shards)
        self._has_moved = True

    @torch.no_grad()
    def logprobs(
        self, packed: PackedMinibatch, *, temperature: float, chunk_size: int
    ) -> Tensor | None:
        """[N] under the batch's first weights; None while the policy still has them.

        Collective like every forward: all ranks have moved, or none.
        """
        if not self._has_moved:
            return None
        self._exchange()
        try:
            scored = self._policy(packed, temperature=temperature, chunk_size=chunk_size)
        finally:
            self._exchange()
        return scored.logprobs.clone()

    def _exchange(self) -> None:
        """The kept weights are the policy's, and the other way round."""
        # In place, because FSDP gathers from these very tensors; what it has gathered of the
        # other weights must not serve these.
        reshard(self._policy)
        for shard, kept in zip(_local_shards(self._policy), self._weights, strict=True):
            current = shard.clone()
            shard.copy_(kept)
            kept.copy_(current)


def _local_shards(policy: PolicyModel) -> list[Tensor]:
    """This rank's part of every trained parameter."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return [
        parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
        for parameter in parameters
    ]
