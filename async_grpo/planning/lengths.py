"""How long prompts and outputs are: assumed, given, or as an earlier run had them. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
from numpy.typing import NDArray

SPREAD = 1.0  # sigma of the logarithm, as of reasoning runs: an assumption
ASSUMED_SHARE = 0.25  # of the longest output, the median where nobody says anything
NUM_DRAWN = 20_000


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Output tokens of independent samples, cut at the longest."""

    median: float
    longest: int
    spread: float = SPREAD

    def __call__(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = rng.lognormal(log(self.median), self.spread, count)
        return np.clip(drawn, 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Seen:
    """Those of the groups of an earlier run, each drawn whole: samples of a question are alike."""

    groups: tuple[tuple[int, ...], ...]

    def __call__(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        group = self.groups[int(rng.integers(len(self.groups)))]
        chosen = [*group] if len(group) == count else rng.choice(group, count)
        return np.asarray(chosen, np.int64)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a run's samples, in tokens."""

    prompt: int
    outputs: LogNormal | Seen
    source: str

    def moments(self) -> tuple[float, float]:
        """Mean output, and mean of the squares."""
        return _moments(self.outputs)

    def context(self) -> float:
        """Tokens of a running sequence, seen at random."""
        mean, square = self.moments()
        return self.prompt + square / mean / 2


@functools.lru_cache(256)
def _moments(outputs: LogNormal | Seen) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    drawn = np.concatenate([outputs(rng, 8) for _ in range(NUM_DRAWN // 8)]).astype(float)
    return float(drawn.mean()), float((drawn**2).mean())


def assumed_lengths(*, longest: int, prompt: int, mean: float = 0.0) -> Lengths:
    """Lognormal outputs of a given mean; without one, of a median of a quarter of the longest.

    >>> found = assumed_lengths(longest=10_000, prompt=100, mean=800)
    >>> abs(found.moments()[0] - 800) < 20
    True
    """
    if not mean:
        median = max(1.0, ASSUMED_SHARE * longest)
        said = f"assumed: lognormal outputs, median a quarter of {longest}, sigma {SPREAD:g}"
        return Lengths(prompt, LogNormal(median, longest), said)
    low, high = 1e-3, max(1e3 * longest, 1.0)  # of the median: the cut takes from the mean
    for _ in range(60):
        middle = exp((log(low) + log(high)) / 2)
        found = Lengths(prompt, LogNormal(middle, longest), "")
        low, high = (middle, high) if found.moments()[0] < mean else (low, middle)
    said = f"given: lognormal outputs of mean {mean:g}, cut at {longest}"
    return Lengths(prompt, LogNormal(low, longest), said)


def seen_lengths(groups: Sequence[Sequence[int]], *, prompt: float, source: str) -> Lengths:
    """Of an earlier run."""
    whole = tuple(tuple(map(int, group)) for group in groups)
    return Lengths(max(1, round(prompt)), Seen(whole), source)
