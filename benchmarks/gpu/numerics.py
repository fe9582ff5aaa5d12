"""Whether the device computes the right thing: distances from float64 on the host.

Gradients of the GRPO loss through the trainer's own path, as ‖g - g64‖ / ‖g64‖ over all parameters,
and each way of attention likewise. On-policy, where no clip makes the loss jump.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.attention import PACKED, choose_attention
from async_grpo.model.collate import collate, to_device
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import shard
from async_grpo.training.ranks import Ranks
from async_grpo.types import Minibatch
from benchmarks.gpu import attention, clock, rows
from benchmarks.gpu.isolation import NotHereError
from benchmarks.gpu.shapes import Shape, random_policy
from benchmarks.results import Figure

EXACTNESS = ", from float64"  # how these figures end
SHAPE = Shape("numerics", 256, 512, 4, 4, 2, 4096, is_tied=True)
SEGMENTS = [150, 1, 40, 2, 63]
FLOAT32_GOAL = 1e-5
BF16_GOAL = 0.05  # a rounding is 0.4 %; every layer adds some
CHUNK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Way:
    """How the gradient is computed on the device."""

    name: str
    precision: str  # as --mixed-precision says it
    checkpointing: bool = False
    compiled: bool = False

    @property
    def goal(self) -> float:
        return BF16_GOAL if self.precision == "bf16" else FLOAT32_GOAL


WAYS = (
    Way("float32", "no"),
    Way("bf16", "bf16"),
    Way("bf16, checkpointing", "bf16", checkpointing=True),
    Way("bf16, compiled", "bf16", compiled=True),
)


def measure(shape: Shape = SHAPE, *, compiles: bool = True) -> Iterator[Figure]:
    """How far every way is from float64."""
    ranks = Ranks.start(timeout_s=300.0, device_index=0 if torch.cuda.is_available() else None)
    for way in WAYS:
        if compiles or not way.compiled:
            found = gradient_distance(way, shape, ranks)
            yield Figure(f"gradient, {way.name}{EXACTNESS}", found, "", goal=way.goal)
    ranks.stop()
    for name in attention.WAYS:
        if name != "padded":  # SDPA as it is
            with contextlib.suppress(NotHereError):
                found = attention_distance(name, shape)
                yield Figure(f"attention, {name}{EXACTNESS}", found, "", goal=attention_goal())


def gradient_distance(way: Way, shape: Shape, ranks: Ranks) -> float:
    """Of the gradient that the trainer would take from one packed row."""
    origin = peaked_policy(shape)
    minibatch = rows.minibatch(SEGMENTS, vocabulary=shape.vocabulary, seed=0)
    exact = gradient(copy.deepcopy(origin).double(), minibatch, dtype=torch.float64)
    return distance(gradient(_on_device(origin, way, ranks), minibatch), exact)


def attention_distance(name: str, shape: Shape) -> float:
    """Of output and gradients of one way, in the type in which the trainer would use it."""
    device, host = clock.find_device(), torch.device("cpu")
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row = attention.random_row(shape, sum(SEGMENTS), device=device, dtype=dtype)
    attend = attention.WAYS[name](SEGMENTS, device)
    exact_row = [tensor.detach().cpu().double().requires_grad_() for tensor in row]
    exact = _output_and_gradients(attention.by_sequence(SEGMENTS, host), exact_row)
    return distance(_output_and_gradients(attend, row), exact)


def attention_goal() -> float:
    return BF16_GOAL if clock.find_device().type == "cuda" else FLOAT32_GOAL


def peaked_policy(shape: Shape) -> PolicyModel:
    """On the host, with weights large enough that some tokens are far likelier than others."""
    policy = random_policy(shape, device=torch.device("cpu"), dtype=torch.float32, attention=PACKED)
    for parameter in policy.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return policy


def _on_device(origin: PolicyModel, way: Way, ranks: Ranks) -> PolicyModel:
    policy = copy.deepcopy(origin).to(ranks.device)
    dtype = torch.bfloat16 if way.precision == "bf16" else torch.float32
    policy.model.set_attn_implementation(choose_attention(ranks.device, dtype=dtype))
    return shard(
        policy,
        ranks.mesh,
        mixed_precision=way.precision,
        activation_checkpointing=way.checkpointing,
        compile=way.compiled,
    )


def gradient(
    policy: PolicyModel, minibatch: Minibatch, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """All parameters' gradients as one float64 vector on the host."""
    config = TrainConfig.from_options(
        {"model_name_or_path": "random", "data_path": "none", "max_staleness": 0}
    )
    device = next(policy.parameters()).device
    packed = collate(minibatch.samples, aggregation=config.objective.aggregation, dtype=dtype)
    packed = to_device(packed, device)
    scored = policy(packed, temperature=1.0, chunk_size=CHUNK_SIZE)
    find_algorithm(config).loss(scored, packed).loss.backward()
    return flat([parameter.grad for parameter in policy.parameters()])


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    """One float64 vector on the host."""
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in whole])


def distance(found: Tensor, exact: Tensor) -> float:
    """
    >>> distance(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0]))  # 0.1 of 5
    0.01999...
    """
    return float((found - exact).norm() / exact.norm())


def _output_and_gradients(attend: attention.Attend, row: attention.Row) -> Tensor:
    output = attend(row)
    return flat([output, *torch.autograd.grad(output.float().sin().sum(), row)])
