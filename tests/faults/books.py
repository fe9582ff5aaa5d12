"""What a run's files must show whatever has befallen it. Pure: rows and samples in, books out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FINAL = ("trained", "zero_contribution")  # fates that count in the gradient


@dataclass(frozen=True, slots=True)
class Work:
    """What every batch of the run must hold."""

    batch_size: int
    group: int  # samples a question
    max_staleness: int


@dataclass(frozen=True, slots=True)
class Books:
    """Findings over all batches that ended; a run without fault has only zeroes."""

    num_batches: int
    lost: int  # samples of an ended batch without any fate
    doubled: int  # samples that count twice
    stale: int  # samples with tokens of weights that are too old, or not of their run
    failed: int  # dropped after all tries, and counted as such
    discarded: int  # work done again, and counted as such
    problems: tuple[str, ...]  # everything else that does not add up

    @property
    def are_balanced(self) -> bool:
        return not (self.lost or self.doubled or self.stale or self.problems)


def audit(
    rows: Sequence[Mapping[str, Any]], samples: Iterable[Mapping[str, Any]], *, work: Work
) -> Books:
    """Compare the metrics and the samples of a run, one gradient step a batch, with its work."""
    ended = {row["iteration"]: row for row in rows}
    counted: Counter[tuple[int, int, int]] = Counter()
    tokens: Counter[int] = Counter()
    stale, strangers = 0, 0
    for sample in samples:
        if sample["fate"] in FINAL and sample["batch"] in ended:
            counted[sample["batch"], sample["ordinal"], sample["index"]] += 1
            tokens[sample["batch"]] += sample["num_output_tokens"]
            stale += _is_stale(sample, work)
            strangers += sample["ordinal"] // work.batch_size != sample["batch"]
    by_batch = Counter(batch for batch, _, _ in counted)
    failed = sum(row.get("fate_failed", 0) for row in rows)
    due = {b: work.batch_size * work.group - r.get("fate_failed", 0) for b, r in ended.items()}
    problems = [*_row_problems(rows, work)]
    for batch, row in ended.items():
        if (num := sum(row[f"token_fate_{fate}"] for fate in FINAL)) != tokens[batch]:
            problems.append(f"batch {batch}: {tokens[batch]} tokens, {num} in the ledger")
    if strangers:
        problems.append(f"{strangers} samples in a batch that their ordinal does not belong to")
    return Books(
        num_batches=len(ended),
        lost=sum(max(0, due[batch] - by_batch[batch]) for batch in ended),
        doubled=sum(count - 1 for count in counted.values()),
        stale=stale,
        failed=failed,
        discarded=sum(row.get("fate_discarded", 0) for row in rows),
        problems=tuple(problems),
    )


def _row_problems(rows: Sequence[Mapping[str, Any]], work: Work) -> Iterable[str]:
    total = 0
    for number, row in enumerate(rows, start=1):
        if row["step"] != number:
            yield f"line {number} of the metrics is step {row['step']}"
        if row["iteration"] != number - 1:
            yield f"line {number} of the metrics is of batch {row['iteration']}"
        final = row["fate_trained"] + row["fate_zero_contribution"] + row["fate_failed"]
        if final != work.batch_size * work.group:
            yield f"step {row['step']}: {final} samples have a final fate, not all that it has"
        if row["trained_samples"] != row["fate_trained"]:
            yield f"step {row['step']}: {row['trained_samples']} trained, not as in the ledger"
        total += row["num_samples"]
        if row["total_samples_accumulated"] != total:
            yield f"step {row['step']}: {row['total_samples_accumulated']} samples, not {total}"


def _is_stale(sample: Mapping[str, Any], work: Work) -> bool:
    """Whether a token is not covered by weights of at most S batches before, of one incarnation."""
    spans = [span for row in sample["weights_versions"] for span in row]
    versions = [tuple(map(int, version.split("."))) for version, _, _ in spans]
    covered = 0
    for _, start, stop in spans:
        if start != covered:
            return True
        covered = stop
    lags = [sample["batch"] - batches for _, batches in versions]
    return (
        covered != sample["num_output_tokens"]
        or len({incarnation for incarnation, _ in versions}) > 1
        or not all(0 <= lag <= work.max_staleness for lag in lags)
    )
