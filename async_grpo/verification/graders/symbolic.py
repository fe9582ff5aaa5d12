"""Equality of answers as mathematics: sympy decides whether two expressions are the same."""

from __future__ import annotations

from typing import Any

import sympy

from async_grpo.verification.graders.boxed import ground_truth, require_boxed
from async_grpo.verification.graders.expression import NotMathError, parse_expression
from async_grpo.verification.graders.mathd import clean, normalise


def sympy_reward(output: str, answer: object) -> float:
    r"""1.0 when the last `\boxed{}` of the output equals `answer` symbolically, else 0.0.

    Raises `UnscorableError` without a `\boxed{}`, ValueError without an answer to compare with.
    """
    expected = ground_truth(answer)
    return float(is_equal(require_boxed(output), expected))


def is_equal(given: str, expected: str) -> bool:
    r"""Whether two answers are the same value, or the same text up to spelling.

    >>> is_equal(r"\frac{\sqrt{8}}{2}", r"\sqrt 2")
    True
    """
    if normalise(given) == normalise(expected):
        return True
    try:
        return _same(parse_expression(clean(given)), parse_expression(clean(expected)))
    except NotMathError:
        return False


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, sympy.Tuple) or isinstance(right, sympy.Tuple):
        both = isinstance(left, sympy.Tuple) and isinstance(right, sympy.Tuple)
        return both and len(left) == len(right) and all(map(_same, left, right))
    difference = left - right
    return bool(difference == 0 or sympy.simplify(difference) == 0)
