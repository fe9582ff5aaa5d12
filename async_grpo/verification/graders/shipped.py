"""The shipped rewards as adapters: without network, and without a file that they could write."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from async_grpo.verification.graders.answers import without_prompt
from async_grpo.verification.graders.boxed import UnscorableError
from async_grpo.verification.graders.code_execution import grade_code
from async_grpo.verification.graders.countdown import grade_countdown
from async_grpo.verification.graders.library import math_verify_reward
from async_grpo.verification.graders.mathd import mathd_reward
from async_grpo.verification.graders.symbolic import sympy_reward
from async_grpo.verification.jailer import require_jail

FORMS = (
    "12", "-3", "0.75", "1,234", "3.5%", r"\frac{3}{4}", r"-\frac{17}{12}", r"\sqrt{5}+2",
    r"\frac{1+\sqrt{5}}{2}", r"3\sqrt[3]{2}", "x^2+3x-1", r"2x(x+3)", r"x=\frac{7}{2}", "y=2x+1",
    r"x^{10}", r"2^{n+1}", r"\{1,2,3\}", "(1,5)", r"(3,\frac{\pi}{4})", r"[0,\infty)",
    r"(-\infty,2)\cup(3,5]", r"x>5", r"1\le x<4", r"2\pi", r"\sin x", r"\log_2 8", "e^{2x}", "3+4i",
    r"90^\circ", r"\text{Monday}", r"5\text{ cm}", r"\$20", "f(x)=2x",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
)  # fmt: skip


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


@functools.cache
def warm_up(grade: Callable[[str, str], float]) -> None:
    """Have a parser of mathematics build its tables, which forked requests then share.

    They grow with every form of answer that is met: 20 to 80 ms for the first of its kind.
    """
    for text in FORMS:
        with contextlib.suppress(UnscorableError, ValueError):
            grade(rf"\boxed{{{text}}}", text)
            grade(rf"\boxed{{{text}}}", f"1+{text}")


def _said(sample: dict[str, Any]) -> str:
    """What the model added: a prompt that it repeats may hold an answer."""
    return without_prompt(sample["output"], sample.get("input") or "")


math_verify.prepare = functools.partial(warm_up, math_verify_reward)  # type: ignore[attr-defined]
sympy.prepare = functools.partial(warm_up, sympy_reward)  # type: ignore[attr-defined]
code_execution.prepare = require_jail  # type: ignore[attr-defined]  # or the run ends at its start

SHIPPED = {
    "mathd": mathd,
    "sympy": sympy,
    "countdown": countdown,
    "math_verify": math_verify,
    "code_execution": code_execution,
}
