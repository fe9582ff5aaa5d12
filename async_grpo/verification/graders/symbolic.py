"""Equality of answers as mathematics: exact for fractions, else to 30 digits at fixed points.

Nothing is simplified: a computer algebra system can be kept busy for ever by a line of text, while
two expressions that agree at points which nobody chose for them are the same expression.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from async_grpo.verification.graders.boxed import UnscorableError, ground_truth, require_boxed
from async_grpo.verification.graders.expression import NotMathError, parse_expression
from async_grpo.verification.graders.limits import cost, is_word, is_worked_out
from async_grpo.verification.graders.mathd import cannot_be, clean, normalise

NUM_DIGITS = 50
TOLERANCE = sympy.Float(10, NUM_DIGITS) ** -30
# Irrational, of both signs, and small: powers of powers stay small too.
POINTS = tuple(
    tuple(sympy.sqrt(prime) / divisor for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))
    for divisor in (5, -7, 11)
)


def sympy_reward(output: str, answer: object) -> float:
    r"""1.0 when the last `\boxed{}` of the output equals `answer` symbolically, else 0.0.

    Raises `UnscorableError` without a `\boxed{}` or when its content takes too long to compute,
    ValueError without an answer to compare with.

    >>> sympy_reward(r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt 2")
    1.0
    """
    expected, given = ground_truth(answer), require_boxed(output)
    if cannot_be(given, expected=expected):
        return 0.0
    if normalise(given) == normalise(expected):
        return 1.0
    if reason := cost(given, expected=expected):
        raise UnscorableError(f"not computed: {reason}")
    if is_word(expected) or not is_worked_out(given, expected=expected):
        return 0.0
    try:
        return float(_same(parse_expression(clean(given)), parse_expression(clean(expected))))
    except NotMathError:
        return 0.0


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, sympy.Tuple) or isinstance(right, sympy.Tuple):
        both = isinstance(left, sympy.Tuple) and isinstance(right, sympy.Tuple)
        return both and len(left) == len(right) and all(map(_same, left, right))
    if left == right:
        return bool(left != sympy.nan and left != sympy.zoo)
    if left.is_Rational and right.is_Rational:
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if len(symbols) > len(POINTS[0]):
        return False
    points = POINTS if symbols else POINTS[:1]
    return all(_agree(left, right, dict(zip(symbols, point, strict=False))) for point in points)


def _agree(left: Any, right: Any, point: Mapping[Any, Any]) -> bool:
    """Whether the values at a point are finite and equal to 30 digits."""
    try:
        one, other = (side.evalf(NUM_DIGITS, subs=point) for side in (left, right))
        if not (one.is_number and other.is_number and one.is_finite and other.is_finite):
            return False
        scale = max(abs(one), abs(other), TOLERANCE)
        return bool(abs((one - other).evalf(NUM_DIGITS)) <= TOLERANCE * scale)
    except (ArithmeticError, TypeError, ValueError):  # no number there
        return False
