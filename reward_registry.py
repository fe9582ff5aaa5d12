"""The rewards of a run: the file to edit, or to copy and name with `--reward-registry`.

An adapter is a function `(sample, **kwargs) -> {"reward": float, "format_reward": float}`, the
second entry optional; a number or a boolean alone is a reward too. `--reward-fns a,b` runs several
on every sample and keeps the best verdict.

`sample` is a dict: every column of the question's data line, and

    input             the prompt as text
    answer            the expected answer, as text; None when the data has none
    output            the generated text: the only place where an answer may be looked for
    sample_text       input + output
    output_token_ids  the generated tokens, a list of int
    finish_reason     "stop", "length" (cut at the limit) or "abort"

An adapter runs in a process of its own with a time and a memory limit. An exception in it is an
error of verification: the sample is graded once more, then its group is dropped and counted, and
the trainer says why. It is called once on the first line of the data before a run begins.
Raise `UnscorableError(reason)` when the output holds no answer: reward 0, counted as such. An
adapter whose best reward is not 1.0 says so: `my_adapter.max_reward = 2.0`.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from async_grpo.verification.graders.answers import without_prompt
from async_grpo.verification.graders.code_execution import grade_code
from async_grpo.verification.graders.countdown import grade_countdown
from async_grpo.verification.graders.library import math_verify_reward
from async_grpo.verification.graders.mathd import mathd_reward
from async_grpo.verification.graders.symbolic import sympy_reward
from async_grpo.verification.jailer import require_jail


class RewardType(StrEnum):
    """What `--reward-fns` calls the adapters of this file."""

    MATHD = "mathd"
    SYMPY = "sympy"
    COUNTDOWN = "countdown"
    MATH_VERIFY = "math_verify"
    CODE_EXECUTION = "code_execution"


def mathd(sample: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    r"""The last \boxed{} is the answer, as normalised strings."""
    return {"reward": mathd_reward(_said(sample), sample["answer"])}


def sympy(sample: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    r"""The last \boxed{} is the answer, as mathematics."""
    return {"reward": sympy_reward(_said(sample), sample["answer"])}


def math_verify(sample: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    """The math-verify library finds the answer in the output."""
    return {"reward": math_verify_reward(_said(sample), sample["answer"])}


def countdown(sample: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    """An equation that hits `target` with every number of `nums` used exactly once."""
    numbers = sample["nums"] if "nums" in sample else sample["numbers"]
    grade = grade_countdown(_said(sample), numbers=numbers, target=sample["target"])
    return {"reward": grade.reward, "format_reward": grade.format_reward}


def code_execution(sample: dict[str, Any], **kwargs: Any) -> dict[str, float]:
    """The last fenced block of Python passes all tests of the question: docs/verification.md."""
    return {"reward": grade_code(sample["output"], sample)}


code_execution.prepare = require_jail  # type: ignore[attr-defined]  # or the run ends at its start


def _said(sample: dict[str, Any]) -> str:
    """What the model added: a prompt that it repeats may hold an answer."""
    return without_prompt(sample["output"], sample.get("input") or "")


REWARD_ADAPTERS: dict[RewardType, Callable[..., float | dict[str, float]]] = {
    RewardType.MATHD: mathd,
    RewardType.SYMPY: sympy,
    RewardType.COUNTDOWN: countdown,
    RewardType.MATH_VERIFY: math_verify,
    RewardType.CODE_EXECUTION: code_execution,
}
