"""One gradient step: minibatches add plain sums, then one division and one update.

Losses are not scaled against underflow: gradients are summed in float32 (`training/fsdp.py`), and
bfloat16, the only lower precision, has float32's exponents. fp16 would need scaling; it is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from async_grpo.algorithms.base import Algorithm, LossSums
from async_grpo.algorithms.grpo_loss import mismatch
from async_grpo.config.roles import REFERENCE
from async_grpo.config.sampling_options import BatchingOptions
from async_grpo.config.training_options import MemoryOptions, OptimizerOptions
from async_grpo.model.collate import collate, to_device
from async_grpo.model.experts import load_metrics, shares_of
from async_grpo.model.policy import PolicyModel
from async_grpo.model.weight_files import local_part
from async_grpo.training import fsdp
from async_grpo.training.meters import Timers, peak_memory
from async_grpo.training.schedule import Clocks, learning_rate_after
from async_grpo.types import PackedMinibatch

OLD = "old"  # the score that `BatchStart` computes
NO_SAMPLES = "no samples"
NON_FINITE = "non-finite loss or gradient"
GAIN_EVERY_STEPS = 10  # the gain of replay is measured so often


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a gradient step did; the same on every rank, but for `suspects`."""

    skipped: str  # empty, or NO_SAMPLES or NON_FINITE: then neither weights nor clocks have moved
    grad_norm: float  # of the gradient after the division by D, before clipping
    learning_rate: float  # that the step used, or would have used
    num_minibatches: int  # over all ranks, fillers included
    clocks: Clocks  # after the step
    metrics: Mapping[str, float] = field(default_factory=dict)  # sums and maxima over all ranks
    # Seconds, arithmetic and memory of all ranks, which differ from run to run.
    meters: Mapping[str, float] = field(default_factory=dict, compare=False)
    suspects: tuple[int, ...] = ()  # if NON_FINITE, minibatches of this rank that may be the cause


@dataclass(frozen=True, slots=True, eq=False)
class TokenTerms:
    """Values of the N trained tokens of one minibatch, on the device; [N] each."""

    logprobs: Tensor  # under the policy that was trained
    old: Tensor | None  # under the policy at the start of the batch, where it may have moved since
    gradients: Tensor | None  # of the minibatch's plain sum, by each log-probability


def make_optimizer(
    policy: PolicyModel, options: OptimizerOptions, memory: MemoryOptions
) -> AdamW | fsdp.TwinAdamW:
    """AdamW over the (sharded) parameters, without weight decay for biases and norms."""
    make: Callable[..., AdamW | fsdp.TwinAdamW]
    make = fsdp.HostAdamW if memory.offload == "optimizer" else AdamW
    if memory.fsdp_sharding_strategy == "ZERO1":
        make = partial(fsdp.DividedAdamW, make=make)
    if options.optim != "adamw":
        make = partial(fsdp.LibraryAdamW, kind=options.optim)
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
    """Accumulates the minibatches of one gradient step, then takes it; one object serves all steps.

    With `--defer-gradient-sync` minibatches add to whole float32 gradients on their rank, and the
    backward pass of a filler at the end reduces them; otherwise each minibatch reduces its own.
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
        """`options` may be replaced between steps. `device` computes; None: the parameters'."""
        self.optimizer = make_optimizer(policy, options, memory)
        self.options = options
        self.clocks = Clocks()  # a resumed run sets them, and the optimizer's own state
        self._policy = policy
        self._batching = batching
        self._defers = memory.defer_gradient_sync
        self.offloads = memory.offload == "parameters"
        self._algorithm = algorithm
        self.head_terms = algorithm.terms  # the teachers' terms are added once they are known
        self._batch_start = None
        if algorithm.uses_old_policy:
            self._batch_start = BatchStart(policy, keeps=batching.steps_per_pass > 1)
        self._num_ended = 0  # steps, of whole batches and the current one
        self._first_policy = None
        if algorithm.config.trainer_scores_reference:
            self._first_policy = EarlierPolicy(policy)
            self._first_policy.keep()
        # Options of every forward of the policy.
        chunk_size = memory.chunk_size(batching.max_tokens_per_gpu)
        self._setting = {"temperature": algorithm.temperature, "chunk_size": chunk_size}
        self._device = device or next(policy.parameters()).device
        self.routing = policy.routing
        if self.routing is not None:
            self.routing.coefficient = algorithm.config.objective.balance_coefficient
        replay = algorithm.config.sampling.routing_replay
        self._replays = self.routing is not None and replay != "off"
        self.timers = Timers(self._device)
        self.timers.watch(policy)
        self.keeps_terms = False  # `training.recorder` sets it
        self._forget()

    def _forget(self) -> None:
        # Tensors stay on the device until the step ends: nothing waits for it between minibatches.
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []  # [] each, of the current step's minibatches
        self.terms: list[TokenTerms] = []  # of the current step's minibatches
        # Of the same minibatches, what later passes do not compute again: {name of the score: [N]}.
        self.held_scores: list[dict[str, Tensor]] = []
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._meters: defaultdict[str, float] = defaultdict(float)

    def accumulate(self, packed: PackedMinibatch) -> LossSums:
        """Back-propagate the minibatch's plain sum; all ranks must call it equally often."""
        earlier = self._by_earlier_policies(packed)
        packed = replace(packed, scores={**packed.scores, **earlier})
        own = self._by_own_experts(packed)
        scored = self._policy(packed, **self._setting, terms=self.head_terms)
        if self._first_policy and REFERENCE not in packed.scores:  # it is this policy
            scores = {**packed.scores, REFERENCE: scored.logprobs.detach()}
            packed = replace(packed, scores=scores)
        if self.keeps_terms:
            scored.logprobs.retain_grad()
        result = self._algorithm.loss(scored, packed)
        with fsdp.deferred_gradients(self._policy, defer=self._defers):
            result.loss.backward()
        old = packed.scores.get(OLD)
        if self.keeps_terms:
            logprobs = scored.logprobs
            self.terms.append(TokenTerms(logprobs.detach(), old, logprobs.grad))
        if self._batching.num_passes > 1:
            known = {OLD: scored.logprobs.detach(), **packed.scores}
            self.held_scores.append({name: known[name] for name in self._own_scores})
        loss, entropy = result.loss.detach(), scored.entropy.detach()
        sums = {"loss_sum": loss, "entropy_sum": entropy.sum(), **result.sums}
        maxima: dict[str, Tensor] = {}
        if not self._algorithm.learns_from_pairs:  # else no token was sampled
            mismatch_sums, maxima = mismatch(scored.logprobs, packed)
            sums |= mismatch_sums
            if own is not None:
                alone, _ = mismatch(own, packed)
                gain = alone["mismatch_kl_sum"] - mismatch_sums["mismatch_kl_sum"]
                sums |= {"replay_gain_sum": gain, "gain_tokens": alone["sampled_tokens"]}
        if self.routing is not None:
            sums |= self.routing.take()
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
        for name, value in maxima.items():
            number = value.detach().double()
            self._maxima[name] = torch.maximum(self._maxima.get(name, number), number)
        self.count(trained_tokens=entropy.numel(), trained_samples=packed.num_samples)
        self.losses.append(loss)
        return result

    def _by_earlier_policies(self, packed: PackedMinibatch) -> dict[str, Tensor]:
        """{name in `packed.scores`: [N]}, without policies that are still this one; collective."""
        found = {}
        if self._batch_start and self._batch_start.has_moved and not self.repeats:
            found[OLD] = self._batch_start.logprobs(packed, **self._setting)
        if self._first_policy and self.clocks.steps and not self.repeats:
            found[REFERENCE] = self._first_policy.logprobs(packed, **self._setting)
        return found

    @property
    def repeats(self) -> bool:
        """Whether the current step belongs to a later pass over its batch."""
        return self._batching.pass_of(self._num_ended % self._batching.steps_per_batch) > 1

    @property
    def held_columns(self) -> dict[str, int]:
        """{name in `packed.scores`: columns} of what the first pass has held for this step."""
        return dict.fromkeys(self._own_scores, 0) if self.repeats else {}

    @property
    def _own_scores(self) -> tuple[str, ...]:
        """The scores that this rank computes itself, with earlier weights of the policy."""
        by = {OLD: self._batch_start, REFERENCE: self._first_policy}
        return tuple(name for name, earlier in by.items() if earlier)

    @torch.no_grad()
    def _by_own_experts(self, packed: PackedMinibatch) -> Tensor | None:
        """Log-probabilities [N] with the policy's own choices of experts, to tell replay's gain.

        Of the first minibatch of some steps, else None; collective. Before the forward that is
        trained, since this one leaves the root gathered.
        """
        if not self._replays or self.losses or self.clocks.steps % GAIN_EVERY_STEPS:
            return None
        return self._policy(replace(packed, experts=None), **self._setting).logprobs

    @property
    def expert_shares(self) -> list[list[float]] | None:
        """What the balancing loss of the next step knows of this one, for a checkpoint."""
        return None if self.routing is None else self.routing.shares.tolist()

    @expert_shares.setter
    def expert_shares(self, shares: list[list[float]] | None) -> None:
        if self.routing is not None and shares is not None:
            self.routing.shares = torch.tensor(shares, dtype=torch.float64)

    @property
    def backpropagated(self) -> tuple[int, int]:
        """(samples, tokens) that this rank has trained in the current step so far."""
        counts = self._counts  # reading must not add metrics: without minibatches there are none
        return int(counts.get("trained_samples", 0)), int(counts.get("trained_tokens", 0))

    @property
    def held(self) -> Iterable[Tensor]:
        """All that stays on the device between two steps, the policy's frozen weights included."""
        for parameter in self._policy.parameters():
            yield local_part(parameter.detach())
        for state in self.optimizer.state.values():
            yield from map(local_part, filter(torch.is_tensor, state.values()))
        for earlier in filter(None, (self._batch_start, self._first_policy)):
            yield from earlier.kept

    def count(self, **amounts: int) -> None:
        """Add to sums of the step's metrics."""
        for name, amount in amounts.items():
            self._counts[name] += amount

    def measure(self, name: str, amount: float) -> None:
        """Add to a sum of the step's meters."""
        self._meters[name] += amount

    def finish(
        self, denominator: int, *, num_samples: int | None = None, num_tokens: int = 0
    ) -> StepResult:
        """Divide by D, clip and update, unless D is 0 or a loss or the gradient is not finite.

        Collective; all ranks take the step or none does. The clocks advance by `num_samples` and
        `num_tokens`; `num_samples` None: the `denominator`.
        """
        num_samples = denominator if num_samples is None else num_samples
        if denominator and self.losses and self._defers:
            self._reduce_gradients()
        metrics, meters = self._reduce_metrics()
        choices = self._reduce_choices()
        num_minibatches = int(metrics.pop("num_minibatches"))
        num_bad_losses = int(metrics.pop("num_bad_losses"))
        grad_norm = self._global_norm() / denominator if denominator else 0.0
        learning_rate = learning_rate_after(
            self.clocks,
            self.options,
            self._batching,
            num_samples=num_samples,
            num_tokens=num_tokens,
            samples_per_slot=self._algorithm.samples_per_slot,
        )
        skipped = ""
        suspects: tuple[int, ...] = ()
        if not denominator:
            skipped = NO_SAMPLES
        elif num_bad_losses or not math.isfinite(grad_norm):
            skipped, suspects = NON_FINITE, self._suspects(is_loss=num_bad_losses > 0)
        else:
            with self.timers.enqueuing("updating_seconds"):
                self._update(learning_rate, denominator=denominator, grad_norm=grad_norm)
            self.clocks = self.clocks.after(num_samples, num_tokens)
            if self.routing is not None and choices is not None:
                self.routing.shares = shares_of(choices)
        if choices is not None:
            metrics |= load_metrics(choices)
        self._num_ended += 1
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
        """Called before the first gradient step of a batch, when the one before has ended."""
        if self._batch_start is not None:
            self._batch_start.begin_batch()

    def discard(self) -> None:
        """Forget what was accumulated, gradients and metrics alike."""
        self.optimizer.zero_grad(set_to_none=True)
        fsdp.drop_local_gradients(self._policy)
        self._forget()

    def _reduce_gradients(self) -> None:
        """Run a filler forward and backward, which reduces the whole gradients of all ranks.

        It adds nothing to them, and is not counted.
        """
        filler = to_device(collate([], aggregation="sample-mean"), self._device)
        scored = self._policy(filler, **self._setting)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()

    def _update(self, learning_rate: float, *, denominator: int, grad_norm: float) -> None:
        """Divide by D and clip in one multiplication, then let the optimizer step."""
        if self._batch_start is not None:
            self._batch_start.before_update()
        limit = self.options.max_grad_norm
        clip = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
        torch._foreach_mul_(list(self._gradients()), clip / denominator)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def _suspects(self, *, is_loss: bool) -> tuple[int, ...]:
        """This rank's minibatches whose loss is not finite; all, if only the gradient is not."""
        if not is_loss:
            return tuple(range(len(self.losses)))
        return tuple(i for i, loss in enumerate(self.losses) if not loss.isfinite())

    def _global_norm(self) -> float:
        """Norm of the gradient of all ranks before the division by D; collective."""
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if not isinstance(norm, DTensor):
            return float(norm)
        with self.timers.agreeing():
            return float(norm.full_tensor())

    def _gradients(self) -> Iterable[Tensor]:
        """Yield every gradient; zeros for a trained parameter without one: its moments decay."""
        for parameter in self._policy.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                yield parameter.grad

    def _reduce_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """(metrics, meters): sums and maxima over all ranks, by one collective."""
        num_bad = sum(~loss.isfinite() for loss in self.losses)
        counts = {**self._counts, "num_minibatches": len(self.losses), "num_bad_losses": num_bad}
        meters = {**self._meters, **self.timers.take(), "num_ranks": 1.0}
        memory = peak_memory(self._device)
        sums = {**counts, **self._sums, **meters}
        entries = [*sorted(sums.items()), *sorted((self._maxima | memory).items())]
        number = partial(torch.as_tensor, dtype=torch.float64, device=self._device)
        local = torch.stack([number(value) for _, value in entries])
        with self.timers.agreeing():
            every = _all_gather(local)
        totals = torch.cat([every[:, : len(sums)].sum(0), every[:, len(sums) :].amax(0)])
        names = [name for name, _ in entries]
        metrics = dict(zip(names, totals.tolist(), strict=True))
        measured = {name: metrics.pop(name) for name in (*meters, *memory)}
        for name in memory:
            of_ranks = enumerate(every[:, names.index(name)].tolist())
            measured |= {f"{name}/rank_{rank}": value for rank, value in of_ranks}
        return metrics, measured

    def _reduce_choices(self) -> Tensor | None:
        """How often each expert was chosen, [R, E] over all ranks; None for a dense model."""
        if self.routing is None or not self.losses:
            return None
        choices = self.routing.take_choices().to(self._device)
        if dist.is_initialized():
            dist.all_reduce(choices)
        return choices.cpu()


def _all_gather(local: Tensor) -> Tensor:
    """Every rank's [K] vector, [R, K]."""
    if not dist.is_initialized():
        return local[None]
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts)


class EarlierPolicy:
    """Scores minibatches with weights that the policy had before.

    A copy of what trains of this rank's shards is kept.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self.kept: list[Tensor] = []

    def keep(self) -> None:
        """Take the current weights, in place of those kept before."""
        shards = fsdp.local_shards(self._policy)
        if not self.kept:
            self.kept = [torch.empty_like(shard) for shard in shards]
        torch._foreach_copy_(self.kept, shards)

    @torch.no_grad()
    def logprobs(self, packed: PackedMinibatch, *, temperature: float, chunk_size: int) -> Tensor:
        """[N] under the weights that were kept; collective, as every forward is."""
        self._exchange()
        try:
            scored = self._policy(packed, temperature=temperature, chunk_size=chunk_size)
        finally:
            self._exchange()
        return scored.logprobs.clone()

    def _exchange(self) -> None:
        """Swap the policy's weights and the kept ones, in place: FSDP gathers from its tensors."""
        for shard, kept in zip(fsdp.local_shards(self._policy), self.kept, strict=True):
            current = shard.clone()
            shard.copy_(kept)
            kept.copy_(current)


class BatchStart(EarlierPolicy):
    """Scores minibatches with the weights that the policy had at the start of the current batch.

    The mode `decoupled` with several steps a batch divides by these probabilities. A second copy of
    this rank's shards is kept, so that no step waits until the whole batch has been scored. With
    one step a pass there is none: the first pass is that policy's own, and later ones read what it
    has scored.
    """

    has_moved = False  # since the start of the batch; the same on all ranks

    def __init__(self, policy: PolicyModel, *, keeps: bool = True) -> None:
        """`keeps`: a step of the first pass may follow another."""
        super().__init__(policy)
        self._keeps = keeps

    def begin_batch(self) -> None:
        """Compare the steps that follow with the policy as it is now."""
        self.has_moved = False

    def before_update(self) -> None:
        """Keep the current weights, unless a step of this batch has moved them already."""
        if self._keeps and not self.has_moved:
            self.keep()
        self.has_moved = True
