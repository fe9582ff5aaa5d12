"""How near packing comes to what no packing can beat, and what simpler rules lose.

The time of a plan is the sum over its rounds of the slowest rank's estimated FLOPs: wasted budget,
imbalance and fillers all end in it. It is divided by a lower bound for the same samples
(packing_bound.py), which knows the token budget, and so are the rounds. Nothing here but the items
a second depends on a clock: the same seeds give the same figures on every machine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.packing import Item, estimate_cost, pack_rounds
from benchmarks import results
from benchmarks.packing_bound import fewest_rounds, least_time
from benchmarks.packing_rules import LONGEST, RULES, Case, Outcome, outcome
from benchmarks.results import Figure, median

NAME = "packing"
GOAL = 1.03  # by the lower bound
GOAL_ITEMS = 50_000.0  # a second
GROUP = 8  # samples of a question
RANKS = (1, 2, 8, 64, 512)
BUDGETS = (16_384, 32_768, 65_536)
SIZES = (64, 256, 1024, 4096)
ATTENTION_RATIOS = {"0.5B": 22_973.0, "7B": 70_447.0}  # Qwen2.5's, see packing.attention_ratio

Lengths = NDArray[np.float64]


def reasoning(rng: np.random.Generator, count: int) -> Lengths:
    """Lognormal with a median of 1,500 tokens."""
    return rng.lognormal(np.log(1_500), 1.0, count)


def long_reasoning(rng: np.random.Generator, count: int) -> Lengths:
    """Late in a run: a median of 4,000 tokens, some cut."""
    return rng.lognormal(np.log(4_000), 0.8, count)


def by_question(rng: np.random.Generator, count: int) -> Lengths:
    """The samples of one question arrive together and are alike."""
    question = np.repeat(rng.lognormal(np.log(1_500), 0.9, count // GROUP + 1), GROUP)[:count]
    return question * rng.lognormal(0.0, 0.4, count)


def bimodal(rng: np.random.Generator, count: int) -> Lengths:
    """Half answer at once, half think for 9,000 tokens."""
    fast, slow = rng.normal(900, 250, count), rng.normal(9_000, 2_500, count)
    return np.where(rng.random(count) < 0.5, fast, slow)


def mostly_cut(rng: np.random.Generator, count: int) -> Lengths:
    """Seven of ten samples are truncated."""
    ended = rng.lognormal(np.log(6_000), 0.6, count)
    return np.where(rng.random(count) < 0.7, LONGEST, ended)


def short(rng: np.random.Generator, count: int) -> Lengths:
    """Answers of 200 tokens."""
    return rng.lognormal(np.log(200), 0.5, count)


SHAPES: Mapping[str, Callable[[np.random.Generator, int], Lengths]] = {
    "reasoning": reasoning,
    "long reasoning": long_reasoning,
    "by question": by_question,
    "bimodal": bimodal,
    "mostly cut": mostly_cut,
    "short": short,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set of samples under every rule, and what no rule can beat."""

    least_time: float
    fewest_rounds: int
    by_rule: Mapping[str, Outcome]

    def slowness(self, rule: str) -> float:
        return self.by_rule[rule].time / self.least_time

    def round_excess(self, rule: str) -> float:
        return self.by_rule[rule].num_rounds / self.fewest_rounds


@click.command()
@click.option("--quick", is_flag=True, help="up to 256 samples")
@click.option("--results-dir", default=str(results.FOLDER), help="where packing.json goes")
def main(quick: bool, results_dir: str) -> None:
    """Compare packing with simpler rules and with a lower bound."""
    click.echo(f"{results.machine()}, {results.load()}; times are estimated FLOPs")
    sizes = tuple(size for size in SIZES if size <= 256) if quick else SIZES
    figures: list[Figure] = []
    everything: list[Comparison] = []
    for shape, num_ranks in itertools.product(SHAPES, RANKS):
        found = [compare(case) for case in cases(shape, num_ranks, sizes)]
        everything += found
        figures += report(f"{shape}, {num_ranks} ranks", found)
    figures += summary(everything)
    figures.append(speed(num_items=max(sizes), num_ranks=64, repeats=3 if quick else 9))
    click.echo(f"\n{results.show(figures[-4:])}")
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


def cases(shape: str, num_ranks: int, sizes: Sequence[int]) -> list[Case]:
    """Every budget, number of samples and model for one shape of lengths."""
    made = []
    for max_tokens, size in itertools.product(BUDGETS, sizes):
        lengths = lengths_of(shape, size)
        made += [Case(lengths, num_ranks, max_tokens, ratio) for ratio in ATTENTION_RATIOS.values()]
    return made


def lengths_of(shape: str, count: int, *, seed: int = 0) -> list[int]:
    """Tokens with the prompt, from 16 to LONGEST."""
    rng = np.random.default_rng([seed, count])
    drawn = np.clip(SHAPES[shape](rng, count), 16, LONGEST)
    return [int(length) for length in drawn]


def compare(case: Case, *, rules: Sequence[str] = tuple(RULES)) -> Comparison:
    """All rules on one case."""
    tokens = np.sort(np.array(case.lengths))[::-1]
    costs = tokens + tokens**2 / case.attention_ratio
    limits = {"num_ranks": case.num_ranks, "max_tokens": case.max_tokens}
    return Comparison(
        least_time=least_time(tokens, costs, **limits),
        fewest_rounds=fewest_rounds(tokens, **limits),
        by_rule={rule: outcome(case, rule) for rule in rules},
    )


def report(title: str, found: Sequence[Comparison]) -> list[Figure]:
    """One table on the screen, and its figures."""
    header = (
        *("rule", "time / least", "worst", "rounds / fewest"),
        *("budget share", "slowest / mean rank", "fillers"),
    )
    rows = [(rule, *(f"{value:.3f}" for value in _row(rule, found))) for rule in RULES]
    click.echo(f"\n{title}, medians of {len(found)} sets\n{results.table(header, rows)}")
    return [*_figures(title, found), *_by_ours(title, found)]


def _row(rule: str, found: Sequence[Comparison]) -> list[float]:
    slowness = [comparison.slowness(rule) for comparison in found]
    outcomes = [comparison.by_rule[rule] for comparison in found]
    return [
        statistics.median(slowness),
        max(slowness),
        statistics.median(comparison.round_excess(rule) for comparison in found),
        statistics.median(out.budget_share for out in outcomes),
        statistics.median(out.imbalance for out in outcomes),
        statistics.median(out.num_fillers for out in outcomes),
    ]


def _figures(title: str, found: Sequence[Comparison]) -> list[Figure]:
    slowness = [comparison.slowness("ours") for comparison in found]
    excess = [comparison.round_excess("ours") for comparison in found]
    outcomes = [comparison.by_rule["ours"] for comparison in found]
    shares = [out.budget_share for out in outcomes]
    return [
        median(f"{title}, time / lower bound", slowness, "x", goal=GOAL),
        Figure(f"{title}, worst time / lower bound", max(slowness), "x", goal=GOAL),
        median(f"{title}, rounds / lower bound", excess, "x", goal=GOAL),
        median(f"{title}, share of the token budget", shares, "fraction", better="higher"),
        median(f"{title}, slowest rank / mean rank", [out.imbalance for out in outcomes], "x"),
        median(f"{title}, fillers", [float(out.num_fillers) for out in outcomes], "fillers"),
    ]


def _by_ours(title: str, found: Sequence[Comparison]) -> list[Figure]:
    """What each other rule loses, set by set."""
    return [
        median(
            f"{title}, {rule} / ours, time",
            [c.by_rule[rule].time / c.by_rule["ours"].time for c in found],
            "x",
            better="higher",
        )
        for rule in RULES
        if rule != "ours"
    ]


def summary(found: Sequence[Comparison]) -> list[Figure]:
    """Over every set of samples: the goal holds for each of them, or does not."""
    met = [comparison.slowness("ours") <= GOAL for comparison in found]
    fewest = [comparison.round_excess("ours") == 1 for comparison in found]
    return [
        Figure("sets within 3 % of the least time", float(np.mean(met)), "fraction", "higher", 1.0),
        median("all sets, time / lower bound", [c.slowness("ours") for c in found], "x", goal=GOAL),
        Figure("sets in the fewest rounds", float(np.mean(fewest)), "fraction", "higher"),
    ]


def speed(*, num_items: int, num_ranks: int, repeats: int) -> Figure:
    """Items packed in a second of the processor."""
    ratio = ATTENTION_RATIOS["0.5B"]
    items = [
        Item((index, 0), length, estimate_cost(length, attention_ratio=ratio))
        for index, length in enumerate(lengths_of("reasoning", num_items))
    ]
    rates = []
    for _ in range(repeats):
        begin = time.process_time()
        pack_rounds(items, num_ranks=num_ranks, max_tokens=BUDGETS[0])
        rates.append(num_items / (time.process_time() - begin))
    name = f"{num_items} samples to {num_ranks} ranks, packed"
    return median(name, rates, "items/s", better="higher", goal=GOAL_ITEMS)


if __name__ == "__main__":
    main()
