"""Says in words that a run has fallen apart, or learns nothing, from its lines of metrics. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

Row = Mapping[str, float | int | None]

NUM_STEPS = 5  # in a row: fewer may be chance
REPEAT_STEPS = 200  # of a condition that lasts
MAX_MISMATCH_KL = 3.0  # nats a token: more than lag, rounding or one odd token make of it


class Health:
    """Follows a run by its metrics; a sentence when a condition begins, then seldom."""

    def __init__(self) -> None:
        self._lasted: Counter[Callable[[Row, int], str]] = Counter()  # steps in a row

    def see_row(self, row: Row) -> list[str]:
        """Warnings about the step that has just ended."""
        sentences = []
        for tell, num_steps in CONDITIONS.items():
            sentence = tell(row, self._lasted[tell] + 1)
            self._lasted[tell] = self._lasted[tell] + 1 if sentence else 0
            since = self._lasted[tell] - num_steps
            if since >= 0 and since % REPEAT_STEPS == 0:
                sentences.append(sentence)
        return sentences


def _apart(row: Row, num_steps: int) -> str:
    """Trainer and engine disagree about what was sampled by more than any lag explains."""
    mismatch = row.get("mismatch_kl")
    was_measured = bool(row.get("trained_tokens")) and row.get("avg_reward") is not None
    if not was_measured or (mismatch is not None and mismatch <= MAX_MISMATCH_KL):
        return ""
    size = "more than floats hold" if mismatch is None else f"{mismatch:.3g} nats a token"
    return (
        "the policy has collapsed: between sampling and training the probabilities of its own "
        f"outputs moved by {size} (mismatch_kl, usually below 0.1); the learning rate was "
        f"{row.get('learning_rate') or 0.0:.3g}: lower --learning-rate and start again from an "
        "earlier checkpoint"
    )


def _cut(row: Row, num_steps: int) -> str:
    if row.get("perc_truncated_samples") != 1.0:
        return ""
    return (
        f"every output of the last {num_steps} steps was cut at --max-generation-tokens "
        f"({row.get('avg_output_tokens') or 0.0:.0f}): none came to its end; raise it, or, if "
        "outputs used to end, the policy has collapsed: read some in the dump of samples"
    )


def _even(row: Row, num_steps: int) -> str:
    mean, best = row.get("avg_reward") or 0.0, row.get("avg_max_reward_in_group") or 0.0
    if not row.get("num_samples") or row.get("perc_with_0_advantage") != 1.0:
        return ""
    if not math.isclose(mean, best, abs_tol=1e-9):  # an algorithm without advantages
        return ""
    if row["num_samples"] == row.get("num_groups"):  # of one sample each: a teacher's alone
        return ""
    return (
        f"in the last {num_steps} steps all samples of a question had the same reward (mean "
        f"{mean:.3g}): nothing is learnt from rewards; look at the reward "
        "function and at some outputs in the dump of samples: the task may be solved, too hard, "
        "or its answers not found"
    )


# {what to say of a row, nothing where all is well: for how many steps it must have held}
CONDITIONS: Mapping[Callable[[Row, int], str], int] = {_apart: 1, _cut: NUM_STEPS, _even: NUM_STEPS}
