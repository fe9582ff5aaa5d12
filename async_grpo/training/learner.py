"""A rank's model and optimizer, trained by the items of a stream, and its held-out loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.algorithms.find import find_algorithm, users_algorithm
from async_grpo.batching.supervised import pack_pairs
from async_grpo.config.sampling_options import BatchingOptions
from async_grpo.config.train_config import Settings, TrainConfig, with_settings
from async_grpo.devices.bill import GIB, trainer_bill, with_checkpointing_if_needed
from async_grpo.devices.current import free_bytes, memory_of_cpu
from async_grpo.model.adapters import Adapter, base_dtype
from async_grpo.model.attention import choose_attention, drop_flash, flash_in_use
from async_grpo.model.collate import collate, to_device
from async_grpo.model.fused import compiles, fuse, fuses
from async_grpo.model.loading import check_trainable, load_sharded
from async_grpo.model.model_folder import read_config
from async_grpo.model.policy import PolicyModel, model_shape, size_of, training_flops
from async_grpo.model.served import check_adapter
from async_grpo.training.billing import USED, as_billed, too_large
from async_grpo.training.fsdp import Parked, compute_dtype, reshard, shard
from async_grpo.training.meters import peak_tflops
from async_grpo.training.ranks import Ranks
from async_grpo.training.recorder import Recorder
from async_grpo.training.step import GradientStep, StepResult
from async_grpo.types import EndOfStep, Minibatch, Sample, StreamItem, TrainingPair
from async_grpo.util.run_folder import RUN_FILE

logger = logging.getLogger(__name__)
PACKED_TOGETHER = 256  # pairs; the time of packing grows faster than their number


class Learner:
    """One rank's share of the policy and of its updates."""

    def __init__(
        self, policy: PolicyModel, config: TrainConfig, ranks: Ranks, *, peak: float | None = None
    ) -> None:
        """`policy` is sharded, on its device; `peak`: TFLOP/s of this rank's device."""
        self.config = config
        self.policy = policy
        policy.gathered_tokens = config.batching.max_tokens_per_gpu  # as the bill counts
        self.device = ranks.device
        self.algorithm = find_algorithm(config)
        if policy.routing is None:
            check_dense(config)
        self.step = GradientStep(
            policy, self.algorithm, options=config.optimizer, batching=config.batching,
            memory=config.memory, device=ranks.device,
        )  # fmt: skip
        self.recorder = Recorder(policy, self.step)
        self._first_pass = FirstPass(config.batching) if config.batching.num_passes > 1 else None
        self.parked: Parked | None = None  # what others' use of the device has moved to the host
        self._parking: Sequence[torch.Tensor] = ()  # where it lay
        self.settings: dict[str, object] = {}  # see `set`
        self._size = size_of(policy.model)
        self._peak = peak

    @classmethod
    def build(cls, config: TrainConfig, ranks: Ranks) -> Learner:
        """Load and shard the policy, with float32 weights of what trains; collective.

        Raises `ConfigError` or `UnfitModel` on every rank for what cannot be trained.
        """
        code, memory = users_algorithm(config), config.memory
        config.check_devices(on_cpu=ranks.device.type == "cpu")
        find_algorithm(config, code)  # before the minutes in which a model loads
        if of_rank_0 := ranks.share(lambda: code):
            of_rank_0.require_same(code)
        dtype = compute_dtype(memory.mixed_precision, ranks.device)
        path = config.places.model_name_or_path
        attention = choose_attention(ranks.device, dtype=dtype, wanted=memory.attention)
        alone = ranks.share(
            lambda: check_trainable(path, attention=attention, device=ranks.device, dtype=dtype)
        )
        if not ranks.share(flash_in_use):  # what was asked of rank 0 counts for all
            drop_flash()

        def passes(probe: Callable[..., bool]) -> bool:
            own = {"device": ranks.device, "dtype": dtype}
            return ranks.share(lambda: probe(read_config(Path(path)), **own))

        fused = memory.use_liger_kernel and passes(fuses)
        compiled = memory.use_torch_compile and passes(compiles)
        adapter = None
        if config.adapter.trains_adapter:
            seed = config.data.infinite_sampler_seed
            adapter = ranks.share(lambda: Adapter.of(config.adapter, model=path, seed=seed))
            ranks.share(lambda: check_adapter(path, adapter))
        peak = peak_tflops(memory, ranks.device)  # before the model takes its memory
        policy = load_sharded(
            path,
            attention=attention,
            dtype=base_dtype(path, dtype) if adapter else torch.float32,
            device=ranks.device,
            shard=lambda policy: shard_as_billed(policy, config, ranks, compile=compiled),
            parameters_on=torch.device("cpu") if memory.offload == "parameters" else None,
            sequences_alone=alone,
            adapter=adapter,
            fuse=fuse if fused else None,
        )
        learner = cls(policy, config, ranks, peak=peak)
        logger.info("policy and optimizer are ready")
        return learner

    def accumulate(self, minibatch: Minibatch) -> None:
        """Back-propagate one minibatch's plain sum; a filler when it is empty."""
        packed = collate(
            minibatch.samples,
            aggregation=self.algorithm.aggregation,
            constant_length=self.config.objective.constant_length_samples,
            scores=self.algorithm.score_columns | self.step.held_columns,
            scores_of_given=self.algorithm.scores_of_given,
            share_prompts=self.policy.shares_prompts,
            dense=minibatch.dense,
        )
        if self.config.sampling.routing_replay == "on" and (
            packed.experts is None and packed.num_rows and not self.algorithm.learns_from_pairs
        ):
            raise self.config.sampling.refusal(
                "routing_replay",
                "must have samples whose engine tells which experts it chose, got none: the model "
                "has no experts, or an engine cannot tell (see its log)",
                "use auto",
            )
        with self.step.timers.enqueuing("copying_seconds"):
            moved = to_device(packed, self.device)
        self.step.accumulate(moved)
        self.recorder.keep(minibatch, packed)
        if self._first_pass and not self.step.repeats:
            self._first_pass.keep(minibatch)
        self.step.count(
            num_fillers=not minibatch.samples,
            rerouted_prompts=packed.num_rerouted,
            packed_tokens=packed.input_ids.numel() if packed.num_rows else 0,
            data_tokens=sum(sample.num_tokens for sample in minibatch.samples),
            budget_tokens=self.config.batching.max_tokens_per_gpu,
        )
        self.step.measure("model_tflop", training_flops(self._size, packed) / 1e12)

    def update(self, end: EndOfStep) -> StepResult:
        """Audit the step, divide by D and update, and let the recorder write it; collective.

        Raises `AuditError` when a rank has trained other samples than it was sent, or more than D.
        """
        number = end.batch * self.config.batching.steps_per_batch + end.step_in_batch + 1
        by_tokens = self.algorithm.aggregation == "token-mean"
        self.recorder.audit(end, number=number, by_tokens=by_tokens)
        if self._peak:
            self.step.measure("peak_tflops", self._peak)
        if self._first_pass and not self.step.repeats:
            self._first_pass.step_ended(end, self.step.held_scores)
        self.step.count(unrecorded_minibatches=self.recorder.take_lost())
        result = self.step.finish(
            self.denominator(end), num_samples=end.num_samples, num_tokens=end.num_tokens
        )
        self.recorder.end_step(end, result, number=number)
        if end.is_last_of_batch:
            self.step.begin_batch()
        return result

    def set(self, settings: Settings) -> None:
        """Set the options that differ from those at the run's start, for the steps that follow."""
        if self.settings == settings:
            return
        self.settings = dict(settings)
        self.step.options = with_settings(self.config, settings).optimizer

    def park(self) -> None:
        """Move what is held between two steps from the device to the host; others may use it."""
        if self.device.type != "cpu" and self.parked is None:
            torch.cuda.synchronize(self.device)
            reshard(self.policy)
            on_device = (each for each in self.step.held if each.device == self.device)
            self.parked = Parked(on_device, into=self._parking)
            self._parking = self.parked.memory

    def unpark(self) -> None:
        """Undo `park`."""
        if self.parked is not None:
            self.parked.restore()
            self.parked = None

    def discard(self) -> None:
        """Forget the minibatches of an unfinished step, which will all come again."""
        self.step.discard()
        self.recorder.discard()
        if self._first_pass:
            self._first_pass.discard()

    def in_passes(
        self,
        items: Iterable[StreamItem],
        *,
        while_going: Callable[[Iterable[StreamItem]], Iterable[StreamItem]] = lambda again: again,
    ) -> Iterator[StreamItem]:
        """The items of a run, and behind those of each batch the same of its later passes.

        Whoever iterates trains each item before the next. `while_going` may end a batch's later
        passes early, on all ranks before the same item.
        """
        for item in items:
            if self._first_pass and isinstance(item, EndOfStep) and item.is_last_of_batch:
                yield replace(item, is_last_of_batch=False)
                yield from while_going(self._first_pass.again(item))
            else:
                yield item

    def denominator(self, end: EndOfStep) -> int:
        """D of the aggregation (design, section 4)."""
        return end.num_tokens if self.algorithm.aggregation == "token-mean" else end.num_samples


class FirstPass:
    """The first pass over a batch, held in the host's memory for the later ones.

    Each of these trains the same minibatches of this rank in the same steps, with the D and against
    the tally that the batcher gave them: nothing is sent or asked for twice.
    """

    def __init__(self, batching: BatchingOptions) -> None:
        self._batching = batching
        self._steps: list[tuple[EndOfStep, list[Minibatch]]] = []
        self._kept: list[Minibatch] = []  # of the current step

    def keep(self, minibatch: Minibatch) -> None:
        """Hold a minibatch of the current step; what came by the device leaves it."""
        dense = {name: values.cpu() for name, values in minibatch.dense.items()}
        self._kept.append(replace(minibatch, dense=dense))

    def discard(self) -> None:
        """Forget the minibatches of an unfinished step, which will all come again."""
        self._kept = []

    def step_ended(self, end: EndOfStep, scores: Sequence[Mapping[str, Tensor]]) -> None:
        """Hold a step; `scores`: see `GradientStep.held_scores`. Waits for the device."""
        if not end.step_in_batch:
            self._steps = []  # of the batch before, which a replay does not take
        kept = zip(self._kept, scores, strict=True)
        self._steps.append((end, [on_host(minibatch, own) for minibatch, own in kept]))
        self._kept = []

    def again(self, last: EndOfStep) -> Iterator[StreamItem]:
        """Yield the items of all later passes; `last` ends the batch, as the batcher made it.

        Later ends count what is trained again, and describe it as the first one did; what became of
        other samples, and what has passed meanwhile, is told once.
        """
        steps, self._steps = self._steps, []
        per_pass, per_batch = self._batching.steps_per_pass, self._batching.steps_per_batch
        for number in range(per_pass, per_batch):
            end, minibatches = steps[number % per_pass]
            yield from minibatches
            is_last, num_sent = number + 1 == per_batch, sum(each.num_samples for each in end.sent)
            yield EndOfStep(
                end.batch,
                number,
                is_last_of_batch=is_last,
                num_samples=end.num_samples,
                num_tokens=end.num_tokens,
                incarnation=end.incarnation,
                sent=end.sent,
                fates={"trained": num_sent, "zero_contribution": end.num_samples - num_sent},
                sums=end.sums,
                resume=last.resume if is_last else None,
                controls=last.controls if is_last else (),
                settings=last.settings if is_last else {},
            )


def on_host(minibatch: Minibatch, scores: Mapping[str, Tensor]) -> Minibatch:
    """The minibatch in memory of this process alone, with further `scores` [N] of its samples.

    Until they are copied, those that teachers sent lie in Ray's object store.
    """
    parts = minibatch.parts()
    lengths = [part.episode.rows[0].num_trained_tokens for part in parts]
    columns = {name: values.cpu().split(lengths) for name, values in scores.items()}
    samples = []
    for number, part in enumerate(parts):
        (row,) = part.episode.rows
        own = {name: values.copy() for name, values in part.scores.items()}
        for name, column in columns.items():
            own[name] = np.zeros(len(row.token_ids), np.float32)
            own[name][row.loss_mask] = column[number].numpy()
        samples.append(replace(part, scores=own))
    return replace(minibatch, samples=tuple(samples))


def shard_as_billed(
    policy: PolicyModel, config: TrainConfig, ranks: Ranks, *, compile: bool
) -> None:
    """Shard an outlined policy as the options say, and log its memory bill; collective.

    Decides `--activation-checkpointing auto`: of as many layers as the rank needs that has least
    free memory. Raises `ConfigError` on every rank where one has too little.
    """
    model, memory, algorithm = model_shape(policy), config.memory, find_algorithm(config)
    dtype = compute_dtype(memory.mixed_precision, ranks.device)
    training = as_billed(
        memory, algorithm, number_bytes=dtype.itemsize,
        num_ranks=ranks.world_size, shard_ranks=ranks.mesh.size(-1),
        tokens=config.batching.max_tokens_per_gpu,
    )  # fmt: skip
    free = free_bytes(ranks.device, share=memory.gpus_per_rank)
    if memory.activation_checkpointing == "auto":
        wanted = with_checkpointing_if_needed(model, training, free_bytes=int(USED * free))
        above = model.num_layers + 1  # the more layers, the larger: 0, or `above` - one layer in n
        agreed = ranks.agree(wanted.checkpointing and above - wanted.checkpointing)
        training = replace(training, checkpointing=agreed and above - agreed)
    bill, one_in = trainer_bill(model, training), training.checkpointing
    file = Path(config.recording.output_dir, RUN_FILE)
    is_planned = file.exists() and not algorithm.learns_from_pairs  # plans are of runs with workers
    more = f"`async-grpo plan {file}`" if is_planned else "--logging-level DEBUG"
    logger.info(
        "memory of a trainer rank: %.2f of %.1f GiB that are free; activation checkpointing (%s) "
        "is %s; its parts: %s",
        bill.total / GIB, free / GIB, memory.activation_checkpointing,
        f"on for one layer in {one_in}" if one_in > 1 else "on" if one_in else "off", more,
    )  # fmt: skip
    logger.debug("%s", bill.in_words())
    host = memory_of_cpu()
    held = free if ranks.device.type == "cuda" else host  # what is free there changes
    lacks = bill.total > held or bill.on_host > host
    if ranks.agree(lacks) and not memory.unchecked_memory:
        raise too_large(model, training, free_bytes=held, host_bytes=host)
    shard(
        policy,
        ranks.mesh,
        mixed_precision=memory.mixed_precision,
        keep_gathered=training.keeps_gathered,
        offload=memory.offload == "parameters",
        activation_checkpointing=training.checkpointing,
        compile=compile,
    )


def check_dense(config: TrainConfig) -> None:
    """Raise `ConfigError` for options of mixtures of experts."""
    rule = f"is for a mixture of experts, {config.places.model_name_or_path} has no known router"
    if config.objective.balance_coefficient:
        raise config.objective.refusal("balance_coefficient", rule, "leave it out")
    if config.sampling.routing_replay == "on":
        raise config.sampling.refusal("routing_replay", rule, "use auto")


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The result of one pass over the held-out pairs."""

    loss_sum: float  # -log-probability of every trained token
    num_tokens: int
    num_pairs: int
    seconds: float

    @property
    def mean(self) -> float:
        """Mean -log-probability of a token, in nats."""
        return self.loss_sum / self.num_tokens


class HeldOutPairs:
    """This rank's minibatches of the held-out pairs, and the policy's loss on all pairs.

    The loss is one mean over all trained tokens: sum and number are added up over minibatches and
    ranks before the division, so that the mean depends on neither.
    """

    def __init__(self, pairs: Sequence[TrainingPair], learner: Learner, ranks: Ranks) -> None:
        self._num_pairs = len(pairs)
        self._learner = learner
        self._shares: list[tuple[Sample, ...]] = []  # of each round
        for first in range(0, len(pairs), PACKED_TOGETHER):
            rounds = pack_pairs(
                {i: pairs[i] for i in range(first, min(first + PACKED_TOGETHER, len(pairs)))},
                num_ranks=ranks.world_size,
                max_tokens=learner.config.batching.max_tokens_per_gpu,
            )
            self._shares += [parts[ranks.rank] for parts in rounds]

    def __len__(self) -> int:
        return self._num_pairs

    @torch.no_grad()
    def loss(self) -> HeldOutLoss:
        """The loss under the current weights, the same on every rank; collective."""
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
