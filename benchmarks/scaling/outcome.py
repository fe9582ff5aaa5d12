"""What a simulated run tells: rates and shares over its measured batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scaling.clock import Actor, Slots
from benchmarks.scaling.engine import Engine
from benchmarks.scaling.references import References
from benchmarks.scaling.scenario import Scenario
from benchmarks.scaling.trainers import TrainerBooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Sums since the start of the run, at one moment."""

    at_s: float
    sequence_s: float  # in slots of engines
    engines_busy_s: float
    stalled_s: float
    recomputed_tokens: float
    trainers: TrainerBooks
    batchers_s: tuple[float, ...]
    registries_s: tuple[float, ...]
    pool_s: float
    verifiers_s: float
    references_s: float

    @classmethod
    def of(
        cls,
        at_s: float,
        *,
        engines: Sequence[Engine],
        trainers: TrainerBooks,
        batchers: Sequence[Actor],
        registries: Sequence[Actor],
        pool: Actor,
        verifiers: Slots,
        references: References | None,
    ) -> Books:
        return cls(
            at_s=at_s,
            sequence_s=sum(engine.sequence_s for engine in engines),
            engines_busy_s=sum(engine.busy_s for engine in engines),
            stalled_s=sum(engine.stalled_s for engine in engines),
            recomputed_tokens=sum(engine.recomputed_tokens for engine in engines),
            trainers=dataclasses.replace(trainers),
            batchers_s=tuple(actor.runner.worked_s for actor in batchers),
            registries_s=tuple(actor.runner.worked_s for actor in registries),
            pool_s=pool.runner.worked_s,
            verifiers_s=verifiers.worked_s,
            references_s=references.worked_s if references else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Means over the measured batches; shares of their time."""

    seconds_per_batch: float
    samples_per_second: float
    tokens_per_second: float  # prompts and outputs, as trained
    slots_filled: float  # share of the engines' places for sequences
    engines_busy: float  # share of the time in which an engine has any sequence
    engines_stalled: float  # of the engines' time: loading weights, reading prompts and caches
    trainers_busy: float  # in rounds
    trainers_balanced: float  # of that, what an average rank computes
    gathering: float
    waiting_for_sync: float
    batcher: float  # the busiest one
    registry: float
    pool: float
    verifiers: float
    references: float
    rounds_per_batch: float
    recomputed_per_batch: float  # tokens
    num_events: int
    batch_seconds: tuple[float, ...]

    @property
    def trainers_idle(self) -> float:
        """Waiting for samples."""
        return 1 - self.trainers_busy - self.gathering - self.waiting_for_sync


def measured(scenario: Scenario, books: Sequence[Books], *, num_events: int) -> Outcome:
    """Between the end of the last batch of the warm-up and that of the last measured one."""
    first, last = scenario.first_measured - 1, scenario.first_measured + scenario.num_measured - 1
    a, b = books[first], books[last]
    seconds, batches = b.at_s - a.at_s, scenario.num_measured
    engines_s = seconds * scenario.num_engines
    t, u = a.trainers, b.trainers
    computing_s = u.computing_s - t.computing_s
    return Outcome(
        seconds_per_batch=seconds / batches,
        samples_per_second=(u.num_samples - t.num_samples) / seconds,
        tokens_per_second=(u.num_tokens - t.num_tokens) / seconds,
        slots_filled=(b.sequence_s - a.sequence_s) / engines_s / scenario.engine.capacity,
        engines_busy=(b.engines_busy_s - a.engines_busy_s) / engines_s,
        engines_stalled=(b.stalled_s - a.stalled_s) / engines_s,
        trainers_busy=computing_s / seconds,
        trainers_balanced=(u.useful_s - t.useful_s) / computing_s,
        gathering=(u.gathering_s - t.gathering_s) / seconds,
        waiting_for_sync=(u.waiting_for_sync_s - t.waiting_for_sync_s) / seconds,
        batcher=_busiest(a.batchers_s, b.batchers_s, seconds),
        registry=_busiest(a.registries_s, b.registries_s, seconds),
        pool=(b.pool_s - a.pool_s) / seconds,
        verifiers=(b.verifiers_s - a.verifiers_s) / seconds / scenario.num_verifiers,
        references=(b.references_s - a.references_s)
        / seconds
        / (scenario.reference.workers if scenario.reference else 1),
        rounds_per_batch=(u.num_rounds - t.num_rounds) / batches,
        recomputed_per_batch=(b.recomputed_tokens - a.recomputed_tokens) / batches,
        num_events=num_events,
        batch_seconds=tuple(
            after.at_s - before.at_s
            for before, after in zip(books[first:last], books[first + 1 : last + 1], strict=True)
        ),
    )


def _busiest(before: Sequence[float], after: Sequence[float], seconds: float) -> float:
    return max((b - a) / seconds for a, b in zip(before, after, strict=True))
