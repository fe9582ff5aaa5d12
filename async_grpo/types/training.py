"""What trainer ranks receive, and what they make of it.

Legend: T packed tokens of a minibatch, S packed sequences, N trained (unmasked output) tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.types.samples import Sample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """One rank's share of one round. No samples: the rank trains an inert filler."""

    round_index: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """Closes a gradient step on every rank, with the denominators nobody could know earlier."""

    batch: int
    step_in_batch: int
    is_last_of_batch: bool
    num_samples: int  # D of sample-mean and constant: trained + zero contribution
    num_tokens: int  # D of token-mean: unmasked output tokens of the same samples
    fates: Mapping[str, int] = field(default_factory=dict)  # samples by fate, this step
    sums: Mapping[str, float] = field(default_factory=dict)  # numerators and denominators
    # Seconds by stage since the step before; the only thing here that no two runs share.
    clock: Mapping[str, float] = field(default_factory=dict, compare=False)


StreamItem = Minibatch | EndOfStep


@dataclass(frozen=True, slots=True, eq=False)
class PackedMinibatch:
    """Samples of one rank laid end to end without padding, ready for the model.

    Position `logit_positions[n]` of the packed row predicts `target_ids[n]`; per-token arrays of
    length N follow that order, sample after sample.
    """

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, restarts at 0 with every sequence
    cu_seqlens: torch.Tensor  # [S+1] int32
    max_seqlen: int
    logit_positions: torch.Tensor  # [N] int64, in [0, T)
    target_ids: torch.Tensor  # [N] int64
    sample_index: torch.Tensor  # [N] int64, in [0, S)
    weights: torch.Tensor  # [N] float32, w_i of the aggregation; 0 in a filler
    advantages: torch.Tensor  # [N] float32
    behaviour_logprobs: torch.Tensor  # [N] float32
    reference_logprobs: torch.Tensor | None  # [N] float32
    num_samples: int  # 0 for a filler
