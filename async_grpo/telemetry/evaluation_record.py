"""The evaluations of a run: which are due, and each one's rates, pass@k and their intervals.

Each evaluation that is due gets exactly one line in `evaluation_metrics.jsonl`, under the step of
its weights.

Legend: Q graded questions, M statistics.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.config.evaluation_sets import EvaluationSet
from async_grpo.telemetry.progress import HELD_OUT, in_brackets, number
from async_grpo.types import EvaluationResult, QuestionOutcome, WeightsVersion

logger = logging.getLogger(__name__)
Floats = NDArray[np.float64]
Row = dict[str, Any]
WITH_INTERVAL = ("eval_accuracy", "eval_reward", "eval_solved")
NUM_RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class DueEvaluation:
    """An evaluation that is due, and the run's totals when its weights were published."""

    set: str
    batch: int
    step: int
    total_samples_accumulated: int
    total_tokens: int
    total_seconds: float


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The best evaluation so far, as best_checkpoint.json holds it."""

    metric: str
    value: float
    batch: int  # completed batches of its weights


class EvaluationRecord:
    """The evaluations of a run, on rank 0. Checkpoints keep its `state` for a resumed run."""

    def __init__(
        self,
        sets: Iterable[EvaluationSet],
        *,
        is_due: Callable[[EvaluationSet, int], bool],
        best_set: EvaluationSet | None,
        metric: str,
        has_types: bool,
        saved: Mapping[str, Any],
        write: Callable[[Row], None],
        write_best: Callable[[BestEvaluation], None],
    ) -> None:
        """`is_due(set, batches)`: whether to evaluate a set after so many batches.

        The best evaluation is that of `best_set` with the largest `metric`; `write_best` is called
        with each new one. `saved`: the `state` of a run that is resumed.
        """
        self._is_due, self._best_set, self._metric = is_due, best_set, metric
        self._has_types = has_types
        self._best = BestEvaluation(**saved["best"]) if saved.get("best") else None
        self._write_best = write_best
        self._sets = {found.name: found for found in sets}
        self._write = write
        self._open = {
            (due["set"], due["batch"]): DueEvaluation(**due) for due in saved.get("open", ())
        }
        self.newest = 0  # completed batches of the weights that were published last
        # Batches whose checkpoints are kept: the best one, and each that may become it. Replaced
        # with every change, because another thread reads it.
        self.spared = self._to_spare()

    def state(self) -> dict[str, object]:
        """The evaluations that are due and have no line, and the best so far."""
        best = dataclasses.asdict(self._best) if self._best else None
        return {"open": [dataclasses.asdict(due) for due in self._open.values()], "best": best}

    def published(self, batches: int, *, evaluates: bool = False, **totals: Any) -> None:
        """Weights are published: note the evaluations that are due, with the run's `totals`.

        `evaluates`: all sets are due, by a user's request.
        """
        self.newest = batches
        for name, found in self._sets.items():
            if evaluates or self._is_due(found, batches):
                self._open[name, batches] = DueEvaluation(name, batches, **totals)
        self.spared = self._to_spare()

    def ended(self, result: EvaluationResult) -> Row | None:
        """Write the line of a result and return it; None if it has one already.

        That happens when a new controller evaluates again the weights that it is given.
        """
        due = self._open.pop((result.name, result.version.batches), None)
        if due is None:
            return None
        found = self._sets[result.name]
        measured = evaluation_row(result, found, has_types=self._has_types)
        row = dataclasses.asdict(due) | measured
        self._write(row)
        self._compare(row)
        if result.skipped:
            logger.warning("%s", in_words(row))
        else:
            logger.info("%s", in_words(row).replace("held-out", HELD_OUT, 1))
        return row

    def lost(self, reason: str, *, but: int | None = None) -> None:
        """Write a line for each open evaluation, with the `reason` why it was not done.

        `but`: completed batches of weights that will be evaluated again.
        """
        for due in list(self._open.values()):
            found = self._sets.get(due.set)
            if found and (due.batch != but or not self._is_due(found, due.batch)):
                version = WeightsVersion(0, due.batch)
                self.ended(EvaluationResult.without(due.set, version, found.samples, why=reason))

    def _compare(self, row: Row) -> None:
        """Keep the best evaluation; of two equal ones, the earlier."""
        metric = self._metric
        value = row.get(metric) if metric else None
        if value is not None and (
            self._best is None or self._best.metric != metric or value > self._best.value
        ):
            self._best = BestEvaluation(metric, float(value), row["batch"])
            self._write_best(self._best)
            logger.info("the best checkpoint so far is after batch %d: %s %.4g",
                        row["batch"], metric, value)  # fmt: skip
        self.spared = self._to_spare()

    def _to_spare(self) -> frozenset[int]:
        found = self._best_set
        if found is None:
            return frozenset()
        waiting = {due.batch for due in self._open.values() if due.set == found.name}
        return frozenset(waiting | ({self._best.batch} if self._best else set()))


def evaluation_row(result: EvaluationResult, found: EvaluationSet, *, has_types: bool) -> Row:
    """The numbers of one set in a line of evaluation_metrics.jsonl.

    Names of a named set end in /NAME. `has_types`: the unnamed set also has numbers of each type of
    questions, whose names end in /TYPE.
    """
    span = dict.fromkeys((str(result.oldest), str(result.newest)))
    row: Row = {
        "set": result.name,
        "batch": result.version.batches,
        "weights": "..".join(span),
        "samples_per_question": result.samples_per_question,
    }
    if result.skipped:
        return row | {"skipped": result.skipped}
    row |= _with_suffix(_measured(result, found), result.name)
    if has_types and not result.name:
        for kind, own in result.by_type.items():
            row |= _with_suffix(_measured(own, found), kind)
    counts = ("num_questions", "num_samples", "num_failed", "num_correct", "num_solved")
    row |= {name: getattr(result, name) for name in (*counts, "reward_sum", "seconds")}
    return row | {"failures": dict(result.failures)}


def in_words(row: Row) -> str:
    """A row of `evaluation_row` as a sentence.

    >>> in_words({"set": "math", "batch": 20, "skipped": "it was not done"})
    'nothing is evaluated of math after batch 20: it was not done'
    """
    name = row.get("set", "")
    end, when = f"/{name}" if name else "", f" after batch {row['batch']}" if "batch" in row else ""
    if "skipped" in row:
        what = name or "the held-out questions"
        return f"nothing is evaluated of {what}{when}: {row['skipped']}"
    accuracy, low, high = (row[f"eval_accuracy{each}{end}"] for each in ("", "_low", "_high"))
    found = (re.fullmatch(rf"eval_pass_at_(\d+){end}", key) for key in row)
    passes = [f"pass@{each[1]} {number(row[each[0]])}" for each in found if each]
    of_types = "" if name else in_brackets(row, "eval_accuracy")
    whose = f" of {name}" if name else ""
    sampled = row["num_samples"] + row["num_failed"]
    graded = f", graded {row['num_samples']} of {sampled}" if row["num_failed"] else ""
    return (
        f"held-out accuracy{whose} {number(accuracy)}{of_types}{when} "
        f"({number(low)} to {number(high)}), mean reward {number(row[f'eval_reward{end}'])}"
        f", {', '.join(passes)}{graded}"
    )


def _measured(result: EvaluationResult, found: EvaluationSet) -> Row:
    graded, ks = result.graded, found.pass_ks
    names = [*WITH_INTERVAL, *(f"eval_pass_at_{k}" for k in ks)]
    values = _values(graded, ks)
    low, high = bootstrap_intervals(values, seed=found.seed)
    means = values.mean(0) if len(graded) else np.full(len(names), np.nan)
    row: Row = {}
    for name, mean, least, most in zip(names, means, low, high, strict=True):
        row |= {name: _known(mean), f"{name}_low": _known(least), f"{name}_high": _known(most)}
    num_samples = result.num_samples
    num_tokens = sum(each.num_tokens for each in graded)
    num_truncated = sum(each.num_truncated for each in graded)
    return row | {
        "eval_failed": result.num_failed / max(num_samples + result.num_failed, 1),
        "eval_output_tokens": num_tokens / num_samples if num_samples else None,
        "eval_truncated": num_truncated / num_samples if num_samples else None,
    }


def _values(graded: Sequence[QuestionOutcome], ks: Sequence[int]) -> Floats:
    """The statistics of each question, [Q, M]: `WITH_INTERVAL`, then pass@k for each k."""
    rows = [
        [
            each.num_correct / each.num_samples,
            each.reward_sum / each.num_samples,
            float(each.num_correct > 0),
            *(pass_at_k(each.num_samples, each.num_correct, k) for k in ks),
        ]
        for each in graded
    ]
    return np.array(rows, np.float64).reshape(len(rows), len(WITH_INTERVAL) + len(ks))


def _with_suffix(row: Row, suffix: str) -> Row:
    return {f"{name}/{suffix}" if suffix else name: value for name, value in row.items()}


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if np.isnan(value) else float(value)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of `k` samples is correct, unbiased (Chen et al. 2021, eq. 1).

    1 - C(n - c, k) / C(n, k), as a product of c factors, which cannot overflow.
    Raises `ValueError` unless 1 <= k <= n and 0 <= c <= n.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= samples and 0 <= correct <= samples, got k {k} of "
            f"{num_samples} samples, {num_correct} correct: sample more, or lower k"
        )
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    after_wrong = np.arange(num_wrong + 1, num_samples + 1)  # n - c + 1 ... n
    return float(1.0 - np.prod(1.0 - k / after_wrong))


def bootstrap_intervals(values: Floats, *, seed: int) -> tuple[Floats, Floats]:
    """95 % confidence intervals of the means of `values` [Q, M], as (low [M], high [M]).

    Percentiles of the means of resampled questions (Efron 1979): samples of one question depend on
    each other, questions do not. All statistics use the same resamples. NaN without questions.
    """
    num_questions, num_statistics = values.shape
    if not num_questions:
        return np.full(num_statistics, np.nan), np.full(num_statistics, np.nan)
    # Raw words, because only bit generators promise the same numbers in every version of numpy.
    words = np.random.Philox(key=seed)
    means = np.empty((NUM_RESAMPLES, num_statistics))
    for resample in means:
        drawn = (words.random_raw(num_questions) % num_questions).astype(np.int64)
        counts = np.bincount(drawn, minlength=num_questions)
        resample[:] = counts @ values / num_questions
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    return low, high
