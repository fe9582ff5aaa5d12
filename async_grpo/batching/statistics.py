"""The sums of each gradient step, over all its samples; docs/metrics.md says what they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from async_grpo.batching.admission import StepKey
from async_grpo.types import Sample


class StepSums:
    """Numerators and denominators of the open steps. Order of arrival does not matter."""

    def __init__(self) -> None:
        self._sums: dict[StepKey, Counter[str]] = {}
        self._maxima: dict[StepKey, dict[str, float]] = {}
        self._denominators: dict[StepKey, Counter[str]] = {}

    def add(self, step: StepKey, samples: Sequence[Sample], *, batch: int) -> None:
        """A finished group; `batch` is its own, so that lag counts batches behind it."""
        sums, maxima = group_sums(samples, batch=batch)
        self._sums.setdefault(step, Counter()).update(sums)
        known = self._maxima.setdefault(step, {})
        for name, value in maxima.items():
            known[name] = max(value, known.get(name, value))

    def count_denominator(self, step: StepKey, sample: Sample) -> None:
        """The sample belongs to D: it was trained, or contributes exactly zero."""
        counts = self._denominators.setdefault(step, Counter())
        counts["samples"] += 1
        counts["tokens"] += sample.num_trained_tokens

    def current_reward(self) -> tuple[float, float]:
        """(sum, number of samples) of the oldest open step, for people who watch."""
        if not self._sums:
            return 0.0, 0.0
        sums = self._sums[min(self._sums)]
        return sums["reward_sum"], sums["num_samples"]

    def close(self, step: StepKey) -> tuple[int, int, dict[str, float]]:
        """(D in samples, D in tokens, all sums) of a step; forgets it."""
        counts = self._denominators.pop(step, Counter())
        sums = {**self._sums.pop(step, Counter()), **self._maxima.pop(step, {})}
        return counts["samples"], counts["tokens"], sums


def group_sums(
    samples: Sequence[Sample], *, batch: int
) -> tuple[dict[str, float], dict[str, float]]:
    """(sums, maxima) of one finished group."""
    rewards = [sample.verdict.reward for sample in samples]
    formats = [s.verdict.format_reward for s in samples if s.verdict.format_reward is not None]
    lags = [batch - _oldest(sample, batch) for sample in samples]
    sums = {
        "num_samples": len(samples),
        "num_groups": 1,
        "reward_sum": sum(rewards),
        "max_reward_in_group_sum": max(rewards),
        "format_reward_sum": sum(formats),
        "format_reward_samples": len(formats),
        "output_tokens": sum(len(sample.completion.token_ids) for sample in samples),
        "prompt_tokens": sum(len(sample.question.input_token_ids) for sample in samples),
        "truncated_samples": sum(s.completion.finish_reason == "length" for s in samples),
        "zero_advantage_samples": sum(sample.advantage == 0.0 for sample in samples),
        "unscorable_samples": sum(s.verdict.status == "unscorable" for s in samples),
        "lag_sum": sum(lags),
    }
    return sums, {"lag_max": max(lags)}


def _oldest(sample: Sample, batch: int) -> int:
    """Batches in the weights that sampled the sample's first tokens."""
    spans = sample.completion.weights_versions
    return min((span.version.batches for span in spans), default=batch)
