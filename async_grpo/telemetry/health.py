"""Says in words that a run has fallen apart, or learns nothing, from its lines of metrics. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

Row = Mapping[str, float | int | None]

NUM_STEPS = 5  # in a row: fewer may be chance
REPEAT_STEPS = 200  # of a condition that lasts
MAX_MISMATCH_KL = 3.0  # nats a token: more than lag, rounding or one odd token make of it


class Health:
    """Follows a run by its metrics; a sentence when a condition begins, then seldom."""

    def __init__(self) -> None:
        self._lasted: Counter[str] = Counter()  # steps in a row, by condition

    def see_row(self, row: Row) -> list[str]:
        """Warnings about the step that has just ended."""
        sentences = []
        for name, (num_steps, holds, tell) in CONDITIONS.items():
            self._lasted[name] = self._lasted[name] + 1 if holds(row) else 0
            since = self._lasted[name] - num_steps
            if since >= 0 and since % REPEAT_STEPS == 0:
                sentences.append(tell(row, self._lasted[name]))
        return sentences


def _is_apart(row: Row) -> bool:
    """Trainer and engine disagree about what was sampled by more than any lag explains."""
    mismatch = row.get("mismatch_kl")
    was_measured = bool(row.get("trained_tokens")) and row.get("avg_reward") is not None
    return was_measured and (mismatch is None or mismatch > MAX_MISMATCH_KL)


def _tell_apart(row: Row, num_steps: int) -> str:
    mismatch = row.get("mismatch_kl")
    size = "more than floats hold" if mismatch is None else f"{mismatch:.3g} nats a token"
    return (
        "the policy has collapsed: between sampling and training the probabilities of its own "
        f"outputs moved by {size} (mismatch_kl, usually below 0.1); the learning rate was "
        f"{row.get('learning_rate') or 0.0:.3g}: lower --learning-rate and start again from an "
        "earlier checkpoint"
    )


def _is_cut(row: Row) -> bool:
    return row.get("perc_truncated_samples") == 1.0


def _tell_cut(row: Row, num_steps: int) -> str:
    return (
        f"every output of the last {num_steps} steps was cut at --max-generation-tokens "
        f"({row.get('avg_output_tokens') or 0.0:.0f}): none came to its end; raise it, or, if "
        "outputs used to end, the policy has collapsed: read some in the dump of samples"
    )


def _is_even(row: Row) -> bool:
    return bool(row.get("num_samples")) and row.get("perc_with_0_advantage") == 1.0


def _tell_even(row: Row, num_steps: int) -> str:
    return (
        f"in the last {num_steps} steps all samples of a question had the same reward (mean "
        f"{row.get('avg_reward') or 0.0:.3g}): nothing is learnt from rewards; look at the reward "
        "function and at some outputs in the dump of samples: the task may be solved, too hard, "
        "or its answers not found"
    )


# By name: steps that it must last, whether it holds, and what to say.
CONDITIONS: Mapping[str, tuple[int, Callable[[Row], bool], Callable[[Row, int], str]]] = {
    "apart": (1, _is_apart, _tell_apart),
    "cut": (NUM_STEPS, _is_cut, _tell_cut),
    "even": (NUM_STEPS, _is_even, _tell_even),
}
