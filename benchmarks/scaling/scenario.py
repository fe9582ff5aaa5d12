"""What one simulated run is made of: who there is, how fast, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.packing import DEFAULT_ATTENTION_RATIO
from benchmarks.scaling.engine import EngineRates
from benchmarks.scaling.references import ReferenceRates

Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRates:
    """How fast the ranks train; they go through rounds in lock step."""

    cost_per_second: float  # of one rank, in units of one token's matrix products
    max_tokens: int = 32_768  # of a rank's minibatch
    attention_ratio: float = DEFAULT_ATTENTION_RATIO
    round_overhead_s: float = 0.05
    round_floor_s: float = 0.0  # gathering and reducing shards, which computing hides if longer
    step_s: float = 0.1  # clipping and the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRates:
    """What one version of the weights costs."""

    gather_s: float  # trainers stand still: full tensors, packed by rank 0 into the object store
    transfer_s: float  # to all nodes, while everything goes on
    load_s: float  # an engine stands still, beside what it then reads again


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCosts:
    """CPU seconds of the processes that carry no device."""

    registry_call_s: float = 0.0  # of which a lease needs LEASE_CALLS
    ping_s: float = 0.0  # of the registry, a worker and PING_INTERVAL_S
    batcher_group_s: float = 0.0  # the calls for one group: lease, generate, verify
    batcher_sample_s: float = 0.0  # received, graded, booked, packed, sent
    batcher_item_s: float = 0.0  # a rank's request for its minibatch
    batcher_token_s: float = 0.0  # bytes of a sample, in and out
    pool_sample_s: float = 0.0  # of the pool's actor
    verification_s: float = 0.0  # of a verifier process
    poll_s: float = 0.02  # how often the batcher looks whether a round is due


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run."""

    num_engines: int
    engine: EngineRates
    overhead_seqs: int = 8  # leased to an engine beyond its places: --overhead-seqs
    num_ranks: int
    trainer: TrainerRates
    sync: SyncRates
    control: ControlCosts
    lengths: Lengths
    batch_size: int
    samples_per_question: int = 8
    prompt_tokens: int = 200
    max_staleness: int = 1
    num_warm_up: int = 2  # batches that are not measured, beside max_staleness more
    num_measured: int = 4
    num_verifiers: int = 8
    reference: ReferenceRates | None = None  # none: no KL
    num_registries: int = 1
    num_batchers: int = 1
    seed: int = 0

    @property
    def first_measured(self) -> int:
        """The batch with which measuring begins."""
        return self.num_warm_up + self.max_staleness

    @property
    def num_batches(self) -> int:
        """The last ones are not measured: nothing is generated behind them any more."""
        return self.first_measured + self.num_measured + self.max_staleness + 1

    @property
    def samples_per_batch(self) -> int:
        return self.batch_size * self.samples_per_question

    def drawn(self, ordinal: int) -> list[int]:
        """Output tokens of a question's samples, whenever they are generated."""
        rng = np.random.default_rng([self.seed, ordinal])
        lengths: list[int] = self.lengths(rng, self.samples_per_question).tolist()
        return lengths
