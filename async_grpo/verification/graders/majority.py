"""The majority of a group's answers as the expected one: test-time reinforcement learning (TTRL).

Zuo et al., 2025 (arXiv 2504.16084): the answer that most outputs of a question give stands for the
answer that nobody knows. Where several are the most frequent, none is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from async_grpo.verification.graders.answers import find_answer
from async_grpo.verification.graders.boxed import UnscorableError
from async_grpo.verification.graders.mathd import normalise


def majority_rewards(outputs: Sequence[str]) -> list[float | UnscorableError]:
    r"""1.0 for each output whose answer is the single most frequent one, else 0.0.

    >>> majority_rewards([r"\boxed{4}", r"it is \boxed{4.0}", r"\boxed{5}", ""])
    [1.0, 1.0, 0.0, UnscorableError('no answer in the output')]
    >>> majority_rewards([r"\boxed{4}", r"\boxed{5}"])
    [0.0, 0.0]
    """
    answers = [_answer(output) for output in outputs]
    counts = Counter(answer for answer in answers if isinstance(answer, str)).most_common(2)
    is_tie = len(counts) == 2 and counts[0][1] == counts[1][1]
    majority = counts[0][0] if counts and not is_tie else None
    return [float(a == majority) if isinstance(a, str) else a for a in answers]


def _answer(output: str) -> str | UnscorableError:
    try:
        return normalise(find_answer(output))
    except UnscorableError as error:
        return error
