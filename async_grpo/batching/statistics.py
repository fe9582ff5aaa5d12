"""Sums over the samples of each gradient step, and over the seconds in each stage. Pure.

docs/metrics.md lists the metrics that they become.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from async_grpo.batching.admission import StepKey
from async_grpo.types import Episode, Group, Sample

Sums = dict[str, float]
FAILED = -1  # instead of an attempt: the slot has no group to keep
STAGES = ("generating", "verifying", "in_reference")
NOTHING = {"pipeline_seconds": 0.0} | {
    f"{stage}_{kind}": 0.0 for stage in STAGES for kind in ("idle_seconds", "seconds")
}


class StalenessError(RuntimeError):
    """A token is older than --max-staleness allows, or from the future: a bug, never trained on."""


@dataclass(slots=True)
class _Step:
    # By (ordinal, attempt), and added up in that order: the last bit of a metric does not depend on
    # which group was faster.
    sums: dict[tuple[int, int], Sums] = field(default_factory=dict)
    lag_max: int = 0
    num_samples: int = 0  # D
    num_tokens: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class SampleSums:
    """Numerators and denominators of the open steps. Order of arrival does not matter."""

    staleness_of: Callable[[int], int]  # of a batch: the largest lag that its samples may have
    of_scoring: Callable[[Sequence[Sample]], Sums] = lambda samples: {}  # sums of a trained group
    types: Collection[str] = ()  # of questions, which have sums of their own: `reward_sum/TYPE`
    _steps: dict[StepKey, _Step] = field(default_factory=dict)

    def add(self, step: StepKey, group: Group) -> None:
        """Count a finished group, which is trained, replaced or given.

        Raises `StalenessError` for a token that is older than the run allows.
        """
        opened, samples = self._steps.setdefault(step, _Step()), group.samples
        if group.is_given:
            sums = given_sums(samples) | self.of_scoring(samples)
        else:
            most = self.staleness_of(step.batch)
            lags = [
                tokens_by_lag(sample.episode, batch=step.batch, max_staleness=most)
                for sample in samples
            ]
            sampled = group.sampled
            if group.is_replaced:
                sums = replaced_sums((*sampled, *group.left_out))
            else:
                sums = group_sums(sampled)
                num_given = len(samples) - len(sampled)
                sums["finished_samples"] += len(group.left_out) + num_given
                sums["given_samples"] += num_given
                sums |= reference_sums(samples, group.references)
            sums = self._with_own(sums, samples[0].question.dataset_type)
            if not group.is_replaced:
                sums |= self.of_scoring(samples) | _lag_sums(lags, most)
                opened.lag_max = max(opened.lag_max, *map(_oldest, lags))
        opened.sums[group.ordinal, group.attempt] = sums

    def add_failed(
        self, step: StepKey, ordinal: int, *, num_samples: int, dataset_type: str = ""
    ) -> None:
        """Count the samples of a failed slot, which are in no other sum."""
        failed: Sums = {"failed_samples": num_samples, "finished_samples": num_samples}
        failed = self._with_own(failed, dataset_type)
        self._steps.setdefault(step, _Step()).sums[ordinal, FAILED] = failed

    def _with_own(self, sums: Sums, dataset_type: str) -> Sums:
        """The sums of a group, and the same ones under the names of its type."""
        if dataset_type not in self.types:
            return sums
        return sums | {f"{name}/{dataset_type}": value for name, value in sums.items()}

    def count_denominator(self, step: StepKey, sample: Sample) -> None:
        """The sample belongs to D: it was trained, or contributes exactly zero."""
        opened = self._steps.setdefault(step, _Step())
        opened.num_samples += 1
        opened.num_tokens += sample.num_trained_tokens

    def current_reward(self) -> tuple[float, float]:
        """(sum of rewards, number of samples) of the oldest open step, for the status."""
        if not self._steps:
            return 0.0, 0.0
        sums = _total(self._steps[min(self._steps)])
        return sums.get("reward_sum", 0.0), sums.get("num_samples", 0.0)

    def close(self, step: StepKey) -> tuple[int, int, Sums]:
        """Forget a step; return (D in samples, D in tokens, all sums)."""
        closed = self._steps.pop(step, _Step())
        return closed.num_samples, closed.num_tokens, _total(closed)


def group_sums(samples: Sequence[Sample]) -> Sums:
    """The sums of one trained group."""
    rewards = [sample.verdict.reward for sample in samples]
    formats = [s.verdict.format_reward for s in samples if s.verdict.format_reward is not None]
    return {
        "num_samples": len(samples),
        "finished_samples": len(samples),
        "num_groups": 1,
        "reward_sum": sum(rewards),
        "correct_samples": sum(reward >= 1.0 for reward in rewards),
        "max_reward_in_group_sum": max(rewards),
        "format_reward_sum": sum(formats),
        "format_reward_samples": len(formats),
        "overlong_penalty_sum": sum(sample.overlong_penalty for sample in samples),
        "kl_penalty_sum": sum(sample.kl_penalty for sample in samples),
        "output_tokens": sum(sample.episode.num_sampled_tokens for sample in samples),
        "constrained_tokens": sum(sample.episode.num_constrained_tokens for sample in samples),
        "prompt_tokens": sum(
            sample.num_tokens - sample.episode.num_sampled_tokens for sample in samples
        ),
        "truncated_samples": sum(s.episode.finish_reason == "length" for s in samples),
        "masked_samples": sum(sample.num_trained_tokens == 0 for sample in samples),
        "zero_advantage_samples": sum(not sample.has_advantage for sample in samples),
        "unscorable_samples": sum(s.verdict.status == "unscorable" for s in samples),
        "overrun_samples": sum(s.verdict.cause == "overrun" for s in samples),
        "failed_samples": 0,
        "given_samples": 0,
        "num_replacements": 0,
        "replaced_tokens": 0,
    }


def given_sums(samples: Sequence[Sample]) -> Sums:
    """The sums of a group of given pairs, which has no rewards, lengths or lags."""
    number = len(samples)
    zeros = dict.fromkeys(("num_samples", "num_groups", "failed_samples"), 0)
    return {"given_samples": number, "finished_samples": number, **zeros}


def reference_sums(*groups: Iterable[Sample]) -> Sums:
    """The sums of the reference answers among samples; none without --use-ref-answers."""
    rewards = [s.verdict.reward for samples in groups for s in samples if s.episode.is_given]
    return {"ref_answers": len(rewards), "ref_reward_sum": sum(rewards)} if rewards else {}


def replaced_sums(samples: Sequence[Sample]) -> Sums:
    """The sums of a group whose slot draws another question."""
    return {
        "num_replacements": 1,
        "replaced_samples": len(samples),
        "replaced_reward_sum": sum(sample.verdict.reward for sample in samples),
        "replaced_tokens": sum(sample.episode.num_sampled_tokens for sample in samples),
    }


def tokens_by_lag(episode: Episode, *, batch: int, max_staleness: int) -> Counter[int]:
    """Sampled tokens by their lag; raises `StalenessError` outside 0..max_staleness.

    The lag is the number of batches between the weights that sampled a token and those with which
    its batch starts. Drift between the gradient steps of one batch is not part of it.

    >>> import numpy as np
    >>> from async_grpo.types import Turn, VersionSpan, WeightsVersion
    >>> spans = tuple(VersionSpan(WeightsVersion(0, b), 5 * b, 5 * b + 5) for b in (0, 1))
    >>> turn = Turn(np.arange(10, dtype=np.int32), np.zeros(10, np.float32), spans, "stop", "")
    >>> tokens_by_lag(Episode.of_turn(turn.token_ids[:1], turn), batch=1, max_staleness=1)
    Counter({1: 5, 0: 5})
    """
    counts: Counter[int] = Counter()
    for row in episode.rows:
        for span in row.weights_versions:
            if span.stop > span.start:
                counts[batch - span.version.batches] += span.stop - span.start
    for lag in counts:
        if not 0 <= lag <= max_staleness:
            raise StalenessError(
                f"lag must be in 0..{max_staleness} (--max-staleness), got {lag}: tokens of "
                f"version {batch - lag} reached batch {batch}, which is a bug in admission"
            )
    return counts


def _lag_sums(lags: Sequence[Counter[int]], max_staleness: int) -> Sums:
    """Numbers of samples by the lag of their oldest token, and of tokens by lag; with zeros."""
    samples = Counter(map(_oldest, filter(None, lags)))  # given samples have no lags
    tokens = sum(lags, Counter[int]())
    bins = range(max_staleness + 1)
    return {
        "sampled_samples": samples.total(),
        "lag_sum": sum(lag * count for lag, count in samples.items()),
        "token_lag_sum": sum(lag * count for lag, count in tokens.items()),
        **{f"lag_{lag}_samples": samples[lag] for lag in bins},
        **{f"lag_{lag}_tokens": tokens[lag] for lag in bins},
    }


def _oldest(tokens: Counter[int]) -> int:
    return max(tokens, default=0)


def _total(step: _Step) -> Sums:
    total: Counter[str] = Counter()
    for key in sorted(step.sums):
        total.update(step.sums[key])
    if not total:
        return {}
    return {**total, "lag_max": step.lag_max} if total["num_groups"] else dict(total)


class StageClock:
    """The number of samples in each stage of the pipeline, and the seconds without any.

    Idle seconds of generation are the price of a small staleness window, or of a straggler at its
    edge. The caller passes the time.
    """

    def __init__(self, now_s: float) -> None:
        self.counts = Counter(dict.fromkeys(STAGES, 0))
        self._changed_s = now_s
        self._sums = dict(NOTHING)

    def add(self, stage: str, num_samples: int, *, now_s: float) -> None:
        """Samples enter a stage, or leave it (negative)."""
        self._advance(now_s)
        self.counts[stage] += num_samples

    def take(self, now_s: float) -> dict[str, float]:
        """Seconds since the last call, and for each stage the idle ones, and sample-seconds.

        >>> clock = StageClock(0.0)
        >>> clock.add("generating", 8, now_s=1.0)
        >>> clock.add("generating", -8, now_s=3.0)
        >>> sums = clock.take(4.0)
        >>> sums["pipeline_seconds"], sums["generating_idle_seconds"], sums["generating_seconds"]
        (4.0, 2.0, 16.0)
        """
        self._advance(now_s)
        sums, self._sums = self._sums, dict(NOTHING)
        return sums

    def _advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._changed_s
        self._changed_s = now_s
        self._sums["pipeline_seconds"] += elapsed_s
        for stage, count in self.counts.items():
            self._sums[f"{stage}_seconds"] += elapsed_s * count
            if not count:
                self._sums[f"{stage}_idle_seconds"] += elapsed_s
