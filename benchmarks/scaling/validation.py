"""The same simulation with this machine's rates, beside what was measured here.

Everything about a kind of lengths comes from its real run at staleness 0: what generating, training
and the services computed. Staleness 1 and 2 are then predicted, and so is the wall time of 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import Figure
from benchmarks.scaling.engine import EngineRates
from benchmarks.scaling.outcome import Outcome
from benchmarks.scaling.scenario import ControlCosts, Lengths, Scenario, SyncRates, TrainerRates
from benchmarks.scaling.service import simulate
from benchmarks.scaling.shared_cores import SharedCores

UNIT = "predicted / measured"  # not a ratio of the guard's: the other half is another file
LONGEST = 64
PROMPT_TOKENS = 21
MAX_TOKENS = 4_096  # --max-tokens-per-gpu of the runs

# vLLM on one core with the tiny model, CPU seconds: python -m benchmarks.scaling.engine_probe.
PROBED = EngineRates(
    step_s=2.7e-3, per_sequence_s=88e-6, per_prefill_token_s=35e-6, capacity=256,
    shares_prompts=False,  # they are shorter than a block of the cache
)  # fmt: skip
# Of the runs at staleness 0, from their metrics: `sync_pause_seconds`, `sync_seconds` less that.
LOAD_S, TRANSFER_S = 0.045, 0.022
# Samples of the tiny model by output tokens, of 2,048 at temperature 1; the mean is 11.8.
NATURAL = {
    3: 1, 6: 1, 8: 669, 9: 751, 10: 52, 16: 66, 17: 184, 18: 127, 19: 21, 20: 1, 24: 17, 25: 44,
    26: 66, 27: 38, 28: 7, 36: 1, 37: 1, 52: 1,
}  # fmt: skip


def even(_rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Every output is as long as allowed."""
    return np.full(count, LONGEST)


def natural(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """The tiny model ends its outputs itself."""
    counts = np.array(list(NATURAL.values()))
    return rng.choice(list(NATURAL), count, p=counts / counts.sum())


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of lengths of benchmarks/staleness.py."""

    name: str
    lengths: Lengths
    batch_size: int
    samples_per_question: int = 8

    @property
    def samples(self) -> int:
        return self.batch_size * self.samples_per_question


KINDS = (Kind("even", even, 16), Kind("natural", natural, 32))


@dataclass(frozen=True, slots=True)
class AtZero:
    """A kind's real run at staleness 0, seconds a batch."""

    generating: float
    training: float
    services: float
    wall: float

    @classmethod
    def of(cls, kind: str, values: Mapping[str, float]) -> AtZero:
        g = values[f"{kind}, generating (g) at staleness 0"]
        t = values[f"{kind}, training (t) at staleness 0"]
        wall = values[f"{kind}, staleness 0, wall time"]
        busy = values[f"{kind}, staleness 0, both cores busy"] * 2 * wall
        return cls(g, t, max(busy - g - t, 0.0), wall)


@dataclass(frozen=True, slots=True)
class Services:
    """What Ray, batcher and verifiers compute: at all times, and for each sample."""

    background: float  # share of a core
    sample_s: float


def services_of(runs: Sequence[tuple[Kind, AtZero]]) -> Services:
    """Two kinds of runs tell the two apart.

    >>> kinds = Kind("a", even, 1, 100), Kind("b", even, 1, 300)
    >>> zeros = AtZero(1, 1, 0.2, 2.0), AtZero(1, 1, 0.4, 2.0)
    >>> found = services_of(list(zip(kinds, zeros)))
    >>> round(found.background, 6), round(found.sample_s, 6)
    (0.05, 0.001)
    """
    walls_and_samples = np.array([(run.wall, kind.samples) for kind, run in runs])
    spent = np.array([run.services for _, run in runs])
    background, sample_s = np.linalg.lstsq(walls_and_samples, spent, rcond=None)[0]
    if background < 0:  # noise: all of it is the samples'
        background, sample_s = 0.0, spent.sum() / walls_and_samples[:, 1].sum()
    return Services(float(background), float(sample_s))


def scenario_of(kind: Kind, run: AtZero, services: Services, *, max_staleness: int) -> Scenario:
    """One engine, one rank, everything else on the same two cores."""
    means = [_mean_batch(kind, seed) for seed in range(8)]
    steps, tokens = np.mean(means, axis=0)
    probed_s = PROBED.step_s * steps + PROBED.per_sequence_s * tokens
    probed_s += kind.samples * PROMPT_TOKENS * PROBED.per_prefill_token_s
    slower = float((run.generating - LOAD_S) / probed_s)
    trained = tokens + kind.samples * PROMPT_TOKENS
    return Scenario(
        num_engines=1,
        engine=dataclasses.replace(
            PROBED,
            step_s=PROBED.step_s * slower,
            per_sequence_s=PROBED.per_sequence_s * slower,
            per_prefill_token_s=PROBED.per_prefill_token_s * slower,
        ),
        num_ranks=1,
        trainer=TrainerRates(
            cost_per_second=float(trained / run.training),
            attention_ratio=1e9,
            max_tokens=MAX_TOKENS,
            round_overhead_s=0.0,
            step_s=0.0,
        ),
        sync=SyncRates(gather_s=0.0, transfer_s=TRANSFER_S, load_s=LOAD_S),
        control=ControlCosts(pool_sample_s=services.sample_s),
        lengths=kind.lengths,
        batch_size=kind.batch_size,
        samples_per_question=kind.samples_per_question,
        prompt_tokens=PROMPT_TOKENS,
        max_staleness=max_staleness,
        num_warm_up=3,
        num_measured=48,
        num_verifiers=1,
    )


def _mean_batch(kind: Kind, seed: int) -> tuple[float, float]:
    """Engine steps and tokens of one batch that starts at once."""
    rng = np.random.default_rng(seed)
    lengths = kind.lengths(rng, kind.samples)
    return float(lengths.max()), float(lengths.sum())


def predict(
    values: Mapping[str, float], *, bounds: Sequence[int] = (0, 1, 2)
) -> dict[tuple[str, int], Outcome]:
    """By kind and staleness, from the figures of staleness.json at staleness 0 alone."""
    runs = [(kind, AtZero.of(kind.name, values)) for kind in KINDS]
    services = services_of(runs)
    return {
        (kind.name, bound): simulate(
            scenario_of(kind, run, services, max_staleness=bound),
            cores=SharedCores(background=services.background),
        )
        for kind, run in runs
        for bound in bounds
    }


def validation_figures(
    values: Mapping[str, float], *, bounds: Sequence[int] = (0, 1, 2)
) -> list[Figure]:
    """Predicted wall time of a batch by the measured one, and of a bound by staleness 0's."""
    predicted = predict(values, bounds=bounds)
    figures = []
    for (kind, bound), outcome in predicted.items():
        at = f"real run, {kind} lengths, staleness {bound}"
        wall = values[f"{kind}, staleness {bound}, wall time"]
        figures.append(Figure(f"{at}: wall time", outcome.seconds_per_batch / wall, UNIT))
        if bound:
            zero = predicted[kind, 0].seconds_per_batch
            ratio = outcome.seconds_per_batch / zero
            measured = values[f"{kind}, staleness {bound}, wall time / staleness 0's"]
            figures.append(Figure(f"{at}: wall time by staleness 0's", ratio / measured, UNIT))
    return figures
