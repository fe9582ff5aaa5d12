"""Equality of answers as the math-verify library sees it, where it can neither hang nor be fooled.

output --answers--> one short answer --limits--> math-verify --> equal, and closer than it asks

Its own limits are off: they count time on the wall, which a busy machine takes from a good answer.
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

# All of the answer, as LaTeX: by default it also takes a number out of what it cannot read.
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)
MAX_RELATIVE_ERROR = 1e-3  # the library rounds to six places, which makes small numbers equal
MAX_ROUNDING = 0.02  # between the sides of what is said to be one number: 1/3 = 0.33
# Of a given answer: ordinary ones take 0.002, the worst of the golden table 0.13. A starved core
# took 0.6 for that one, and what a good answer is refused for must never be the machine.
MAX_CPU_S = 2.0
EQUALITY = re.compile(r"(?<![<>!:\\])=|\\approx\b|≈")

# It warns once a process that its limits are off, which is our intention.
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
        # The library takes 100% for 1 and for 100; said of a plain number it is a hundredth.
        return _value(parsed[0]) is not None and _is_close(expected[0], parsed[0])
    return "%" in truth or _is_close(expected[0], parsed[0])


def _parse(text: str) -> list[object]:
    box = f"\\boxed{{{text}}}"
    return parse(box, EXTRACTION, extraction_mode="first_match", parsing_timeout=None)


def _is_commented(given: str, *, expected: str) -> bool:
    """Whether words stand between mathematics: the library skips them and all that follows."""
    words = WORDS.findall(without_unit(given.strip()))
    joins = all(word.strip() in ("and", "or") for word in words)
    speaks = WORDS.search(without_unit(expected.strip())) or WORDS.fullmatch(given.strip())
    return not joins and not speaks


def _contradicts_itself(given: str) -> bool:
    """Whether different numbers are said to be equal: the library reads the last of `6=5`."""
    for part in re.split("[,;]", given):
        sides = EQUALITY.split(part)
        if len(sides) > 1:
            numbers = [_value(side) for text in sides for side in _parse(text) if _is_number(side)]
            if any(not _is_near(number, numbers[0]) for number in numbers):
                return True
    return False


def _is_number(expression: object) -> bool:
    """Whether it is meant as a number, be it 0/0; f(2) may have any value."""
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
    """False where the library is too generous: tiny numbers, and equations nothing solves."""
    if isinstance(expected, sympy.Eq) and isinstance(given, sympy.Eq):
        return expected == given or bool(sympy.solve(expected, expected.free_symbols))
    left, right = _value(expected), _value(given)
    if left is None or right is None:
        return True
    return abs(left - right) <= MAX_RELATIVE_ERROR * max(abs(left), abs(right))


def _value(expression: object) -> complex | None:
    """The number that an expression is; None when it is something else."""
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    try:
        value = complex(expression.doit().evalf())
    except (ArithmeticError, TypeError, ValueError):
        return None
    return value if abs(value) < float("inf") else None
