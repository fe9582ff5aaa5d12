"""The conditions of a run's alarms. Pure.

A condition takes the last rows of metrics, the newest last. It returns a sentence where it holds,
"" where it does not, and None where the newest row lacks what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

Row = Mapping[str, float | int | None]
Condition = Callable[[Sequence[Row]], "str | None"]

NUM_STEPS = 5  # in a row: fewer may be chance
MAX_MISMATCH_KL = 3.0  # nats a token: more than lag, rounding or one odd token cause
NUM_COMPARED = 20  # first and last steps whose medians or means are compared
MISMATCH_FACTOR, LEAST_MISMATCH_KL = 5.0, 0.02  # times the past value; nats a token
LENGTH_FACTOR = 1.5  # times the past value
MOST_TRUNCATED, MOST_EVEN = 0.9, 0.95  # shares of outputs, and of questions, that count as all
MOST_LOST = 0.1  # of the norm of an adapter's change, by rounding
NUM_NOW = 5  # last steps whose median is the present value
NOISE = 3.0  # deviations of one step: a median over several does not move that far by chance
REWARD_SHARE, LEAST_REWARD = 0.5, 0.01  # the fall as a share of the past value; the smallest fall
ENTROPY_FACTOR, LEAST_ENTROPY = 5.0, 0.5  # times the past value; nats a token
KL_FACTOR, LEAST_KL = 10.0, 0.5  # likewise
LEAST_PAST = 10  # fewest values in a median of the past
SPIKE_FACTOR = 10.0  # times the median gradient norm
NUM_DEAD_STEPS = 2  # steps in a row in which all groups of a type have failed


def _collapsed(rows: Sequence[Row]) -> str | None:
    """Trainer and engine disagree about the sampled tokens by more than any lag explains."""
    row = rows[-1]
    mismatch = row.get("mismatch_kl")
    if not row.get("trained_tokens") or row.get("avg_reward") is None:
        return None
    if mismatch is not None and mismatch <= MAX_MISMATCH_KL:
        return ""
    size = "more than floats hold" if mismatch is None else f"{mismatch:.3g} nats a token"
    return (
        "the policy has collapsed: between sampling and training the probabilities of its own "
        f"outputs moved by {size} (mismatch_kl, usually below 0.1); the learning rate was "
        f"{row.get('learning_rate') or 0.0:.3g}: lower --learning-rate and start again from an "
        "earlier checkpoint"
    )


def _mismatch_rises(rows: Sequence[Row]) -> str | None:
    """The mismatch of trainer and engine has grown, though not to that of a collapse."""
    compared = _past_and_now(rows, "mismatch_kl")
    if compared is None:
        return None
    before, now = map(median, compared)
    if now < LEAST_MISMATCH_KL or now < MISMATCH_FACTOR * before:
        return ""
    return (
        f"trainer and engine disagree more and more: mismatch_kl rose from {before:.2g} to "
        f"{now:.2g} nats a token; lower --learning-rate or --max-staleness, or correct for it "
        "by --importance-correction; if canary_mean rises too, engines serve other weights"
    )


def _lost_in_merging(rows: Sequence[Row]) -> str | None:
    """Rounding takes much of what the adapter changes, so that engines serve another policy."""
    share = rows[-1].get("merge_loss")
    if share is None or share <= MOST_LOST:
        return None if share is None else ""
    return (
        f"rounding takes {share:.0%} of what the adapter changes (merge_loss): engines sample from "
        "another policy than is trained; start workers with --max-lora-rank, which are sent the "
        "adapter alone, or with --dtype float32"
    )


def _not_finite(rows: Sequence[Row]) -> str | None:
    """A step was skipped because its loss or its gradient was not finite."""
    count = rows[-1].get("skipped_steps_non_finite")
    if count is None:
        return None
    # The first row of a resumed run also counts the skipped steps of its earlier parts.
    is_first = rows[-1].get("step") == 1
    before = rows[-2].get("skipped_steps_non_finite") if len(rows) > 1 else 0 if is_first else count
    if count <= (before or 0):
        return ""
    return (
        "a gradient step was skipped, for its loss or its gradient was not finite: its minibatches "
        "are in non_finite/; lower --learning-rate if it happens again"
    )


def _gradient_spikes(rows: Sequence[Row]) -> str | None:
    """The gradient norm is many times its median."""
    norm = rows[-1].get("grad_norm")
    usual = [before for row in list(rows)[:-1] if (before := row.get("grad_norm"))]
    if norm is None or len(usual) < LEAST_PAST:
        return None
    middle = median(usual)
    if norm < SPIKE_FACTOR * middle:
        return ""
    return (
        f"the gradient norm was {norm:.3g}, {norm / middle:.0f} times its median ({middle:.3g}); "
        "--max-grad-norm bounds what a step does of it: if it happens again, lower "
        "--learning-rate, and read the samples of such a step"
    )


def _all_truncated(rows: Sequence[Row]) -> str | None:
    row = rows[-1]
    share = row.get("perc_truncated_samples") or 0.0
    if share < MOST_TRUNCATED:
        return ""
    return (
        f"{share:.0%} of the outputs were cut at --max-generation-tokens, of "
        f"{row.get('avg_output_tokens') or 0.0:.0f} tokens on average, and so for {NUM_STEPS} "
        "steps: raise it, or, if outputs used to end, the policy has collapsed: read some in the "
        "dump of samples"
    )


def _no_signal(rows: Sequence[Row]) -> str | None:
    row = rows[-1]
    mean, share = row.get("avg_reward") or 0.0, row.get("perc_with_0_advantage") or 0.0
    if not row.get("num_samples") or share < MOST_EVEN:
        return ""
    best = row.get("avg_max_reward_in_group", mean) or 0.0
    if share == 1 and not math.isclose(mean, best, abs_tol=1e-9):
        return ""  # an algorithm without advantages
    if row["num_samples"] == row.get("num_groups"):  # groups of one sample, for a teacher alone
        return ""
    return (
        f"in the last {NUM_STEPS} steps the samples of {share:.0%} of the questions all had the "
        f"same reward (mean {mean:.3g}): little is learnt from rewards; look at the reward "
        "function and at some outputs in the dump of samples: the task may be solved, too hard, "
        "or its answers not found"
    )


def _length_bias(rows: Sequence[Row]) -> str | None:
    """Outputs grow while rewards do not."""
    lengths, rewards = _past_and_now(rows, "avg_output_tokens"), _past_and_now(rows, "avg_reward")
    if lengths is None or rewards is None:
        return None
    (length, longer), (reward, later) = map(_means, (lengths, rewards))
    if longer < LENGTH_FACTOR * length or later > reward:
        return ""
    return (
        f"outputs grow and rewards do not: from {length:.0f} to {longer:.0f} tokens, from "
        f"{reward:.3g} to {later:.3g}; a mean over each sample's own tokens favours long wrong "
        "outputs (--aggregation token-mean and constant do not), and --overlong-buffer-tokens "
        "makes length cost"
    )


def _reward_falls(rows: Sequence[Row]) -> str | None:
    """Rewards are far below what they were; the test does not depend on their scale."""
    course = _course(rows, "avg_reward")
    if course is None:
        return None
    early, late, now, noise = course
    usual = max(early, late)
    if usual - now < max(noise, REWARD_SHARE * abs(usual), LEAST_REWARD):
        return ""
    return (
        f"rewards fell from {usual:.3g} to {now:.3g}: read outputs of both times in the dump of "
        "samples; if those of now are worse, lower --learning-rate and start again from an earlier "
        "checkpoint, else look at what the reward function asks"
    )


def _entropy_falls(rows: Sequence[Row]) -> str | None:
    """Entropy fell; where rewards rose meanwhile, by more than learning explains."""
    course, rewards = _course(rows, "entropy"), _course(rows, "avg_reward")
    if course is None:
        return None
    early, _, now, _ = course
    has_learnt = rewards is not None and rewards[2] > rewards[0] + rewards[3]
    if not early or now * ENTROPY_FACTOR ** (1 + has_learnt) > early:
        return ""
    return (
        f"the policy's entropy fell from {early:.2g} to {now:.2g} nats a token: outputs become "
        "alike, and little is tried; lower --learning-rate or raise --clip-high, and start again "
        "from an earlier checkpoint"
    )


def _rises(name: str, *, factor: float, least: float, words: str) -> Condition:
    """The condition that the metric `name` is many times what it was; `words` is its sentence."""

    def tell(rows: Sequence[Row]) -> str | None:
        course = _course(rows, name)
        if course is None:
            return None
        early, _, now, noise = course
        is_high = now > max(factor * early, early + noise, least)
        return words.format(early=early, now=now) if is_high else ""

    return tell


def _course(rows: Sequence[Row], name: str) -> tuple[float, float, float, float] | None:
    """Medians of a metric over the early, the late and the present steps, and their noise.

    Noise is how far such a median may move by chance. It comes from differences of neighbours,
    which a trend hardly changes: of normal values their median is 0.95 deviations.

    >>> _course([{"x": value} for value in [2, 8] * 16 + [1] * 5], "x")
    (5.0, 5.0, 1.0, 18.0)
    """
    if rows[-1].get(name) is None:
        return None
    values = [float(value) for row in rows if (value := row.get(name)) is not None]
    past, now = values[:-NUM_NOW], values[-NUM_NOW:]
    if len(past) < LEAST_PAST:
        return None
    noise = NOISE * median(abs(after - before) for before, after in pairwise(past))
    return median(past[: len(past) // 2]), median(past[-NUM_COMPARED:]), median(now), noise


def _types_fail(rows: Sequence[Row]) -> str | None:
    """All groups of some type of questions fail."""
    start = "perc_failed_samples/"
    dead = []
    for name in (name for name in rows[-1] if name.startswith(start)):
        shares = [share for row in rows if (share := row.get(name)) is not None]
        if shares[-NUM_DEAD_STEPS:] == [1.0] * NUM_DEAD_STEPS:
            dead.append(name.removeprefix(start))
    if not dead:
        return ""
    return (
        f"all groups of the types {', '.join(dead)} failed in their last {NUM_DEAD_STEPS} steps: "
        "nothing is learnt of them; alarms of groups_fail, and lines of the dump whose fate is "
        "failed, say why; a type that goes on so ends the run"
    )


def _past_and_now(rows: Sequence[Row], name: str) -> tuple[list[float], list[float]] | None:
    """The first and the last `NUM_COMPARED` values of a metric; None before there are enough.

    >>> rows = [{"x": float(n)} for n in range(2 * NUM_COMPARED)]
    >>> past, now = _past_and_now(rows, "x")
    >>> past[0], past[-1], now[0], now[-1]
    (0.0, 19.0, 20.0, 39.0)
    """
    if rows[-1].get(name) is None:
        return None
    values = [float(value) for row in rows if (value := row.get(name)) is not None]
    if len(values) < 2 * NUM_COMPARED:
        return None
    return values[:NUM_COMPARED], values[-NUM_COMPARED:]


def _means(compared: tuple[list[float], list[float]]) -> tuple[float, float]:
    before, now = compared
    return sum(before) / len(before), sum(now) / len(now)


CONDITIONS: Mapping[str, tuple[int, Condition]] = {
    "collapsed": (1, _collapsed),
    "not_finite": (1, _not_finite),
    "gradient_spike": (1, _gradient_spikes),
    "lost_in_merging": (1, _lost_in_merging),
    "mismatch_rising": (NUM_STEPS, _mismatch_rises),
    "all_truncated": (NUM_STEPS, _all_truncated),
    "no_signal": (NUM_STEPS, _no_signal),
    "length_bias": (NUM_STEPS, _length_bias),
    "reward_fell": (NUM_STEPS, _reward_falls),
    "entropy_fell": (NUM_STEPS, _entropy_falls),
    "entropy_rose": (NUM_STEPS, _rises(
        "entropy", factor=ENTROPY_FACTOR, least=LEAST_ENTROPY,
        words="the policy's entropy rose from {early:.2g} to {now:.2g} nats a token: outputs turn "
        "into noise; lower --learning-rate and start again from an earlier checkpoint",
    )),
    "kl_rose": (NUM_STEPS, _rises(
        "kl", factor=KL_FACTOR, least=LEAST_KL,
        words="the policy left its reference: kl rose from {early:.2g} to {now:.2g} nats a token; "
        "lower --learning-rate or raise --kl-coefficient, and start again from an earlier "
        "checkpoint",
    )),
    "types_fail": (1, _types_fail),
}  # fmt: skip
"""{alarm: (for how many steps in a row its condition must hold, the condition)}"""
