"""Equality of answers by the math-verify library, guarded so that it neither hangs nor is fooled.

output --answers--> one short answer --limits--> math-verify --> equal, within closer bounds

The library's limits are off: they count wall-clock time, which runs out for a good answer on a busy
machine.
"""

from __future__ import annotations

import logging
import re

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef

from async_grpo.verification.graders.answers import UnscorableError, find_answer, ground_truth
from async_grpo.verification.graders.limits import cost, is_word, is_worked_out, within_cpu
from async_grpo.verification.graders.mathd import (
    WORDS,
    clean,
    is_other_percentage,
    percent_signs,
    without_unit,
)

# The whole answer as LaTeX: by default the library takes a number out of a text it cannot read.
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)
MAX_RELATIVE_ERROR = 1e-3  # the library rounds to six places, which makes small numbers equal
MAX_ROUNDING = 0.02  # between the sides of an equation of numbers: 1/3 = 0.33
# For one answer: ordinary ones take 0.002, the worst of the golden table 0.13, on a starved core
# 0.6. A slow machine must never be the reason to refuse a good answer.
MAX_CPU_S = 2.0
EQUALITY = re.compile(r"(?<![<>!:\\])=|\\approx\b|≈")

# The library warns once a process that its limits are off, which is intended.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify_reward(output: str, answer: object) -> float:
    r"""1.0 when the answer in the output, in a `\boxed{}` or elsewhere, equals `answer`, else 0.0.

    Raises `UnscorableError` when there is no answer or only one that takes too long to compute,
    ValueError when the expected answer is missing or cannot be parsed.
    """
    truth = percent_signs(ground_truth(answer).strip("$"))
    given = percent_signs(find_answer(output))
    if reason := cost(given, expected=truth):
        raise UnscorableError(f"not computed: {reason}")
    expected = _parse(truth)
    if not expected:
        raise ValueError(f"math-verify cannot parse the expected answer {truth[:80]!r}")
    if is_word(truth):
        return float(_letters(given) == _letters(truth))
    if not is_worked_out(given, expected=truth) or _is_commented(given, expected=truth):
        return 0.0
    return float(within_cpu(MAX_CPU_S, lambda: _is_right(given, truth, expected)))


def _is_right(given: str, truth: str, expected: list[object]) -> bool:
    parsed = _parse(given)
    if not parsed:
        raise UnscorableError("math-verify cannot read the answer in the output")
    if _contradicts_itself(given) or not verify(expected, parsed, timeout_seconds=None):
        return False
    if is_other_percentage(given, expected=truth):
        # To the library 100% equals 1 and 100; for a plain number it must be the hundredth.
        return _value(parsed[0]) is not None and _is_close(expected[0], parsed[0])
    return "%" in truth or _is_close(expected[0], parsed[0])


def _parse(text: str) -> list[object]:
    box = f"\\boxed{{{text}}}"
    return parse(box, EXTRACTION, extraction_mode="first_match", parsing_timeout=None)


def _is_commented(given: str, *, expected: str) -> bool:
    """Whether words stand between formulas: the library skips them and all that follows."""
    words = WORDS.findall(without_unit(given.strip()))
    if all(word.strip() in ("and", "or") for word in words):
        return False
    has_words = WORDS.search(without_unit(expected.strip()))
    return not (has_words or WORDS.fullmatch(given.strip()))


def _contradicts_itself(given: str) -> bool:
    """Whether it equates different numbers: the library reads only the last of `6=5`."""
    for part in re.split("[,;]", given):
        sides = EQUALITY.split(part)
        if len(sides) > 1:
            numbers = [_value(side) for text in sides for side in _parse(text) if _is_number(side)]
            if any(not _is_near(number, numbers[0]) for number in numbers):
                return True
    return False


def _is_number(expression: object) -> bool:
    """Whether it stands for one number, 0/0 included; f(2) may have any value."""
    if not isinstance(expression, sympy.Expr):
        return False
    return not expression.free_symbols and not expression.has(AppliedUndef)


def _is_near(left: complex | None, right: complex | None) -> bool:
    if left is None or right is None:
        return left is right
    return abs(left - right) <= MAX_ROUNDING * max(abs(left), abs(right))


def _letters(text: str) -> str:
    return re.sub(r"\s", "", clean(text)).casefold()


def _is_close(expected: object, given: object) -> bool:
    """False where the library equates too much: tiny numbers, and equations without a solution."""
    if isinstance(expected, sympy.Eq) and isinstance(given, sympy.Eq):
        return expected == given or bool(sympy.solve(expected, expected.free_symbols))
    left, right = _value(expected), _value(given)
    if left is None or right is None:
        return True
    return abs(left - right) <= MAX_RELATIVE_ERROR * max(abs(left), abs(right))


def _value(expression: object) -> complex | None:
    """The value of an expression; None if it is no finite number."""
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    try:
        value = complex(expression.doit().evalf())
    except (ArithmeticError, TypeError, ValueError):
        return None
    return value if abs(value) < float("inf") else None
