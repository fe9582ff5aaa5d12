"""Whole gradient steps as the trainer takes them, and where the memory goes.

A step is `Learner.accumulate` and `Learner.update`: packing, copying to the device, forward, the
GRPO loss, backward, clipping, AdamW. Rows of equal total but other lengths take turns, as they do
in a run. `bf16 weights` leaves sharding and float32 master weights out: what remains is arithmetic.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.attention import choose_attention
from async_grpo.model.collate import collate, to_device
from async_grpo.model.fused import fault, fuse
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import compute_dtype, iter_full_tensors, shard
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep, Minibatch, tally
from benchmarks.gpu import clock, rows
from benchmarks.gpu.isolation import NotHereError
from benchmarks.gpu.shapes import Shape, random_policy, step_flops
from benchmarks.results import Figure, median

NUM_ROWS = 3  # of other lengths; the warm-up meets each once


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train one model."""

    shape: Shape
    num_tokens: int
    checkpointing: bool = False
    compiled: bool = False
    bf16_weights: bool = False
    fused: bool = False  # by Liger's kernels
    collects: bool = False  # also gather all weights, as after each batch

    @property
    def name(self) -> str:
        """
        >>> from benchmarks.gpu.shapes import TOY
        >>> Variant(TOY, 16_384, checkpointing=True).name
        'toy, 16384 tokens, FSDP2, checkpointing'
        """
        parts = [self.shape.name, f"{self.num_tokens} tokens"]
        parts.append("bf16 weights" if self.bf16_weights else "FSDP2")
        parts += ["checkpointing"] if self.checkpointing else []
        parts += ["Liger"] if self.fused else []
        parts += ["compiled"] if self.compiled else []
        return ", ".join(parts)


def measure(variant: Variant, *, repeats: int = 6) -> Iterator[Figure]:
    """Speed and memory of one variant, on a process group of one rank."""
    ranks = Ranks.start(timeout_s=300.0, device_index=0 if torch.cuda.is_available() else None)
    with tempfile.TemporaryDirectory() as folder:
        learner = _learner(variant, ranks, folder)
        yield from _speed(variant, learner, repeats=repeats)
        yield from _memory(variant, learner)
        if variant.collects:
            yield from _collecting(variant, learner.policy)
    ranks.stop()


def _learner(variant: Variant, ranks: Ranks, folder: str) -> Learner:
    config = TrainConfig.from_options(
        {
            "model_name_or_path": variant.shape.name,
            "data_path": "none",
            "output_dir": folder,
            "max_tokens_per_gpu": variant.num_tokens,
            "max_generation_tokens": variant.num_tokens // 2,
            "activation_checkpointing": "on" if variant.checkpointing else "off",
            "use_torch_compile": variant.compiled,
            "trackers": "",
        }
    )
    return Learner(_policy(variant, config, ranks), config, ranks)


def _policy(variant: Variant, config: TrainConfig, ranks: Ranks) -> PolicyModel:
    """As `Learner.build` makes it, but for where the weights come from."""
    dtype = compute_dtype(config.memory.mixed_precision, ranks.device)
    weights = dtype if variant.bf16_weights else torch.float32
    policy = random_policy(
        variant.shape,
        device=ranks.device,
        dtype=weights,
        attention=choose_attention(ranks.device, dtype=dtype),
    )
    if variant.fused:
        if reason := fault(policy.model.config, device=ranks.device, dtype=dtype, give=fuse):
            raise NotHereError(f"Liger's kernels {reason}")
        fuse(policy)
    if not variant.bf16_weights:
        return shard(
            policy,
            ranks.mesh,
            mixed_precision=config.memory.mixed_precision,
            activation_checkpointing=variant.checkpointing,
            compile=variant.compiled,
        )
    if variant.checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.compile_logprobs = variant.compiled
    for layer in policy.layers if variant.compiled else ():
        layer.compile(dynamic=True)
    return policy.train()


def lengths(variant: Variant) -> list[list[int]]:
    """Of the segments of each row."""
    return [rows.heavy_tailed(variant.num_tokens, seed=seed) for seed in range(NUM_ROWS)]


def minibatches(variant: Variant) -> list[Minibatch]:
    return [
        rows.minibatch(segments, vocabulary=variant.shape.vocabulary, seed=seed)
        for seed, segments in enumerate(lengths(variant))
    ]


def flops(variant: Variant) -> list[float]:
    """Of a step on each row."""
    return [
        step_flops(variant.shape, segments, num_scored=_num_scored(minibatch))
        for segments, minibatch in zip(lengths(variant), minibatches(variant), strict=True)
    ]


def _num_scored(minibatch: Minibatch) -> int:
    return sum(sample.num_trained_tokens for sample in minibatch.samples)


def step(learner: Learner, minibatch: Minibatch) -> None:
    """One gradient step; raises RuntimeError when the trainer would have skipped it."""
    learner.accumulate(minibatch)
    sent = tally(
        minibatch.samples,
        incarnation=0,
        aggregation=learner.algorithm.aggregation,
        constant_length=learner.config.objective.constant_length_samples,
    )
    end = EndOfStep(0, 0, True, sent.num_samples, sent.num_tokens, sent=(sent,))
    result = learner.update(end)
    if result.skipped:
        raise RuntimeError(f"the step was skipped: {result.skipped}")


def _speed(variant: Variant, learner: Learner, *, repeats: int) -> Iterator[Figure]:
    device, name = learner.device, variant.name
    every = minibatches(variant)
    for minibatch in every:
        step(learner, minibatch)
    times: list[float] = []
    turns = [index % NUM_ROWS for index in range(repeats)]

    def run() -> None:
        for turn in turns:
            times.append(clock.seconds(lambda row=every[turn]: step(learner, row), device=device))

    peak = clock.peak_bytes(run, device=device)
    counted = flops(variant)
    rates = [counted[turn] / time / 1e12 for turn, time in zip(turns, times, strict=True)]
    yield median(f"{name}, step", times, "s")
    speeds = [variant.num_tokens / time for time in times]
    yield median(f"{name}, speed", speeds, "tokens/s", better="higher")
    yield median(f"{name}, model arithmetic", rates, "TFLOP/s", better="higher")
    at_rest = clock.allocated_bytes(device)
    yield from clock.memory_figure(f"{name}, peak of tensors", peak + at_rest, device=device)
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        yield from clock.memory_figure(f"{name}, peak reserved", reserved, device=device)


def _memory(variant: Variant, learner: Learner) -> Iterator[Figure]:
    """What stays, and what one row adds between its forward and its backward pass."""
    device, policy, name = learner.device, learner.policy, variant.name
    states = learner.step.optimizer.state.values()
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    packed = collate(minibatches(variant)[0].samples, aggregation=learner.algorithm.aggregation)
    packed = to_device(packed, device)
    before = clock.allocated_bytes(device)
    scored = policy(packed, temperature=1.0, chunk_size=learner.config.chunk_size)
    held = clock.allocated_bytes(device) - before
    scored.logprobs.sum().backward()
    del scored
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    parts = {
        "weights": _size_bytes(list(policy.parameters())),
        "optimizer": _size_bytes(moments),
        "gradients": _size_bytes(gradients),
        "held between forward and backward": held,
    }
    learner.discard()
    for part, size_bytes in parts.items():
        yield from clock.memory_figure(f"{name}, {part}", size_bytes, device=device)


def _size_bytes(tensors: Sequence[Tensor]) -> int:
    """Of what this rank holds of them."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(tensor.nbytes for tensor in local)


def _collecting(variant: Variant, policy: PolicyModel) -> Iterator[Figure]:
    """Weights to the host, as before each publication."""
    device = next(policy.parameters()).device
    sizes: list[int] = []

    def collect() -> None:
        sizes.append(sum(tensor.nbytes for _, tensor in iter_full_tensors(policy)))

    times = clock.repeated(collect, device=device, warmups=1, repeats=2)
    speeds = [sizes[-1] / time / 1e9 for time in times]
    yield median(f"{variant.name}, weights to the host", speeds, "GB/s", better="higher")
