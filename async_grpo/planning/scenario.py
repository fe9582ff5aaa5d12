"""What one simulated run is made of: who there is, how fast, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.packing import DEFAULT_ATTENTION_RATIO
from async_grpo.planning.engine import EngineRates

LONGEST = 16_384
Lengths = Callable[[np.random.Generator, int], NDArray[np.int64]]  # output tokens of some samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRates:
    """How fast the ranks train; they go through rounds in lock step with the slowest."""

    cost_per_second: float  # of one rank, in units of one token's matrix products
    max_tokens: int = 32_768  # of a rank's minibatch
    attention_ratio: float = DEFAULT_ATTENTION_RATIO
    round_overhead_s: float = 0.05
    round_floor_s: float = 0.0  # gathering and reducing shards, which computing hides if longer
    step_s: float = 0.1  # clipping and the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerRates:
    """How fast one worker scores given outputs, as the reference model or a teacher does."""

    cost_per_second: float  # in units of one token's matrix products
    group_s: float = 0.02  # of a question's outputs, whatever they hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """The workers of one such role."""

    rates: ScorerRates
    num_workers: int = 1
    share: float = 1.0  # of the questions that they score: of several teachers each has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRates:
    """What one version of the weights costs."""

    gather_s: float = 0.0  # trainers stand still: full tensors, packed by rank 0
    transfer_s: float = 0.0  # to all nodes, while everything goes on
    load_s: float = 0.0  # an engine stands still, beside what it then reads again


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCosts:
    """CPU seconds of the process of registry and batcher; latency of verifiers."""

    group_s: float = 0.0  # the calls for one group: lease, generate, verify
    sample_s: float = 0.0  # received, graded, booked, packed, sent
    item_s: float = 0.0  # a rank's request for its minibatch
    ping_s: float = 0.0  # a worker and PING_INTERVAL_S
    verification_s: float = 0.0  # of a group
    poll_s: float = 0.05  # how often it looks whether a round is due


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who there is, how fast, and what they do."""

    engine: EngineRates
    trainer: TrainerRates
    lengths: Lengths
    num_engines: int = 1
    overhead_seqs: int = 8  # leased to an engine beyond its places: --overhead-seqs
    num_ranks: int = 8
    scorers: tuple[Scorers, ...] = ()
    sync: SyncRates = SyncRates()
    control: ControlCosts = ControlCosts()
    num_batches: int = 8
    batch_size: int = 128
    steps_per_batch: int = 1
    samples_per_question: int = 8
    prompt_tokens: int = 200
    max_staleness: int = 0
    contributing: float = 1.0  # share of the questions whose samples are trained, not only counted
    seed: int = 0

    def drawn(self, ordinal: int) -> list[int]:
        """Output tokens of a question's samples, whenever they are generated."""
        rng = np.random.default_rng([self.seed, ordinal])
        return [int(length) for length in self.lengths(rng, self.samples_per_question)]

    def chance(self, ordinal: int, number: int = 0) -> float:
        """Of a question, in [0, 1): what shares of the questions are told by."""
        return float(np.random.default_rng([self.seed, ordinal, number + 1]).random())


def even(_rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Every output is as long as the next."""
    return np.full(count, 2_000)


def heavy_tail(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Lognormal, median 1,500 tokens, cut at LONGEST: reasoning runs."""
    return np.clip(rng.lognormal(np.log(1_500), 1.0, count), 16, LONGEST).astype(np.int64)
