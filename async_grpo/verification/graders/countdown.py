"""Countdown: reach a target with every given number used exactly once. Parsed, never evaluated."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from async_grpo.verification.graders.answers import UnscorableError, last_boxed

WELL_FORMED_REWARD = 0.1
MAX_CHARACTERS = 500
MAX_DEPTH = 50  # of parentheses

SPELLINGS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-"}
EQUATION = re.compile(r"([0-9+\-*/() ]+)(?:=([ ]*-?[ ]*[0-9]+[ ]*))?", re.ASCII)
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class MalformedError(ValueError):
    """A text that is not an equation of integers, + - * / and parentheses."""


@dataclass(frozen=True, slots=True)
class Equation:
    """`left`, optionally followed by `= claim`."""

    numbers: tuple[int, ...]  # in the order of the left side
    value: Fraction | None  # of the left side; None: it divides by zero
    claim: int | None  # the right side; None: there is none


@dataclass(frozen=True, slots=True)
class CountdownGrade:
    reward: float  # 1.0 solved, 0.1 well-formed, else 0.0
    format_reward: float  # 1.0 well-formed, else 0.0


def grade_countdown(
    output: str, *, numbers: Sequence[int | float | str], target: float | str
) -> CountdownGrade:
    """Grade the answer in `output`; raises `UnscorableError` when the output is empty.

    Well-formed: it parses, and uses only given numbers, each at most once. Solved: it uses all of
    them, its value is the target, and its claim after `=` is true. Raises ValueError when the
    data's numbers or target are not whole; 2, 2.0 and "2" are.

    >>> grade_countdown("8 - 2 + 9 = 15", numbers=[2, 9, 8], target=15)
    CountdownGrade(reward=1.0, format_reward=1.0)
    >>> grade_countdown("8 + 2 + 9 = 15", numbers=[2, 9, 8], target=15)
    CountdownGrade(reward=0.1, format_reward=1.0)
    """
    given, goal = Counter(map(whole_number, numbers)), whole_number(target)
    try:
        equation = parse_equation(find_answer(output))
    except MalformedError:
        return CountdownGrade(0.0, 0.0)
    used = Counter(equation.numbers)
    if not used <= given:
        return CountdownGrade(0.0, 0.0)
    claim = goal if equation.claim is None else equation.claim
    solved = used == given and equation.value == goal == claim
    return CountdownGrade(1.0 if solved else WELL_FORMED_REWARD, 1.0)


def whole_number(value: float | str) -> int:
    """A number of the data as an int; raises ValueError for one that is not whole.

    >>> whole_number("15"), whole_number(15.0)
    (15, 15)
    """
    try:
        number = Fraction(value)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        number = Fraction(1, 2)
    if number.denominator != 1 or isinstance(value, bool):
        raise ValueError(
            f"numbers and target of a countdown must be whole, got {value!r}: correct the data"
        )
    return int(number)


def find_answer(output: str) -> str:
    r"""The last `<answer>` element, else the last `\boxed{}`, else the last line with text."""
    end = output.rfind("</answer>")
    start = output.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return output[start + len("<answer>") : end].strip()
    answer = last_boxed(output) or output.strip().rsplit("\n", 1)[-1].strip()
    if not answer:
        raise UnscorableError("the output is empty", format_reward=0.0)
    return answer


def parse_equation(text: str) -> Equation:
    """Parse an equation; raises `MalformedError` for another text, and a too long or deep one."""
    if len(text) > MAX_CHARACTERS or text.count("(") > MAX_DEPTH:
        raise MalformedError("too long or too deep")
    for spelling, sign in SPELLINGS.items():
        text = text.replace(spelling, sign)
    match = EQUATION.fullmatch(text.strip(" $."))
    if match is None:
        raise MalformedError("characters that no equation has")
    left, claim = match.groups()
    try:
        body = ast.parse(left.strip(), mode="eval").body
    except SyntaxError as error:
        raise MalformedError(str(error)) from error
    constants = (node.value for node in ast.walk(body) if isinstance(node, ast.Constant))
    numbers = tuple(value for value in constants if isinstance(value, int))
    return Equation(numbers, _value(body), None if claim is None else int(claim.replace(" ", "")))


def _value(node: ast.expr) -> Fraction | None:
    try:
        return _exact(node)
    except ZeroDivisionError:
        return None


def _exact(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.UnaryOp):
            return -_exact(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_exact(left), _exact(right))
    raise MalformedError(f"{type(node).__name__} is not allowed")
