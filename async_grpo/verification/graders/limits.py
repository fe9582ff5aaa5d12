r"""Limits on answers before they are computed: refuse bombs, and answers that are not worked out.

A line of text can keep a computer algebra system busy for ever, and the system finds the question's
own expression equal to its result. The expected answer is trusted and sets the limits: a given
answer need not hold what the expected one does not hold. `within_cpu` bounds the processor time of
texts that no rule foresees.
"""

from __future__ import annotations

import re
import signal
import threading
import unicodedata
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from async_grpo.verification.graders.answers import UnscorableError
from async_grpo.verification.graders.mathd import clean, is_too_long

MAX_DEPTH = 20  # of brackets
MAX_DIGITS = 200  # in a row
MAX_VARIABLES = 2  # beyond those of the expected answer
MAX_EXPONENT = 30  # a written exponent, unless the expected answer has a larger one
MAX_TOWER = 2  # powers in exponents of powers
AGAIN_S = 0.05  # between signals after the processor time is used up

OPENING, CLOSING = "([{", ")]}"
COMMAND = re.compile(r"\\([A-Za-z]+)")
DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1},}}")
# How often a kind of sign may occur, in addition to twice its number in the expected answer.
COUNTED = (
    ("parts", 20, re.compile(r"[,;=<>]|\\(?:le|ge|ne|leq|geq|neq|lt|gt|in|cup|cap|mid)\b")),
    ("signs", 60, re.compile(r"[-+*/]")),
    ("brackets", 40, re.compile(r"[(\[]|\\frac")),
    ("functions", 6, re.compile(r"\\?\b(?:sqrt|sin|cos|tan|cot|sec|csc|arc|log|lg|ln|exp)|√")),
)
POWER = re.compile(r"\^|\*\*|\bexp(?=\W)")
WRITTEN_POWER = re.compile(r"(?P<base>[)\]}])?\s*(?:\^|\*\*)\s*[({]*\s*-?\s*(?P<exponent>\d+)")
VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
GIVEN_IF_EXPECTED = (
    ("a factorial", re.compile(r"(?<!\\)!(?!=)")),
    ("a large factorial", re.compile(r"!\s*!|\d{4,}\s*!|[)\]}]\s*!")),
    ("a derivative", re.compile(r"frac\s*\{\s*d\s*[\^}]|d\s*/\s*d[a-z]|'\s*\(")),
    ("permutations", re.compile(r"\)\s*_")),  # as math-verify reads it
    ("signs in a row", re.compile(r"(?:[-+]\s*){5}")),
    ("a letter that is a function", re.compile(r"\\Gamma|\\zeta")),
)
BASE = re.compile(r"\d\s*_")  # of a number: 204_5
BARE_TOWER = re.compile(r"(?:\^|\*\*)\s*-?[\w.]+\s*(?:\^|\*\*)")

# Spelling, numbers, comparison, elementary functions: commands that are quick to compute.
NOTATION = """
    left right big Big bigg Bigg text textbf textrm textit textnormal mbox mathrm mathbf mathit
    mathbb mathcal rm bf displaystyle boxed fbox quad qquad space ldots dots cdots frac dfrac
    tfrac cfrac circ degree pm mp infty pi le ge ne leq geq neq lt gt leqslant geqslant approx in
    cup cap setminus emptyset varnothing mid colon to lbrace rbrace langle rangle lvert rvert
    vert angle dollar pounds euro percent"""
ELEMENTARY = """
    sqrt cdot times div ast sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg
    exp alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu
    xi rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi
    Psi Omega imath prime vec hat bar overline wedge vee land lor ell Re Im"""
NUMERIC_COMMANDS = frozenset(NOTATION.split())
HARMLESS_COMMANDS = NUMERIC_COMMANDS | frozenset(ELEMENTARY.split())

LITERAL = re.compile(r"(?:\\frac|\\[{}]|[\d.,;/()\[\]{}\s]|(?:^|(?<=[(\[{,;]))\s*[-+])+", re.ASCII)
SCIENTIFIC = re.compile(r"(?:\\times|\\cdot|\*|×|·)\s*10\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d)")
OPERATION = re.compile(
    r"[\w.)\]}!]\s*[-+]"  # a sum
    r"|[*×·÷√!|^]|(?<=[\d)])\s*\(|\)\s*\d"  # products, powers, factorials
)
DIVISION = re.compile(r"/|\\frac")
DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\s*\^\s*\{?\s*[23]\s*\}?\s*$")
T = TypeVar("T")


def cost(given: str, *, expected: str) -> str:
    r"""The reason why `given` must not be computed; empty if it is harmless.

    >>> cost("9^{9^{9}}", expected="5"), cost(r"\frac{1}{2}", expected="5")
    ('a tower of powers', '')
    """
    if is_too_long(given, expected=expected):
        return f"an answer of {len(given)} characters"
    if any(unicodedata.category(c)[0] == "C" and c not in "\n\t\r" for c in given):
        return "control characters"
    if _depth(given) > MAX_DEPTH:
        return f"brackets more than {MAX_DEPTH} deep"
    if DIGITS.search(given) and not DIGITS.search(expected):
        return f"more than {MAX_DIGITS} digits in a row"
    for kind, limit, pattern in COUNTED:
        if _count(pattern, given) > limit + 2 * _count(pattern, expected):
            return f"too many {kind}"
    if len(set(VARIABLE.findall(given)) - set(VARIABLE.findall(expected))) > MAX_VARIABLES:
        return "too many variables"
    commands = set(COMMAND.findall(given)) - HARMLESS_COMMANDS - set(COMMAND.findall(expected))
    if commands:
        return f"\\{min(commands)}, which the expected answer does not have"
    for kind, pattern in GIVEN_IF_EXPECTED:
        if pattern.search(given) and not pattern.search(expected):
            return f"{kind}, which the expected answer does not have"
    largest = max((int(power["exponent"]) for power in WRITTEN_POWER.finditer(expected)), default=0)
    return _cost_of_powers(given, max_exponent=max(MAX_EXPONENT, largest))


def is_worked_out(given: str, *, expected: str) -> bool:
    r"""Whether `given` is a result; false if a number is expected and it must still be computed.

    Without this check a policy learns to box the question. A fraction is a result unless the
    expected number is whole.

    >>> is_worked_out("12 * 37", expected="444"), is_worked_out("1/2", expected="0.5")
    (False, True)
    """
    if bool(BASE.search(given)) != bool(BASE.search(expected)):
        return False  # math-verify overlooks the base of a number
    expected = _fractions(clean(expected))
    if not LITERAL.fullmatch(expected) or not any(c.isdigit() for c in expected):
        return True
    answer = clean(re.split(r"\\approx|≈", given)[0].rsplit("=", 1)[-1])
    answer = _fractions(UNIT_POWER.sub("", DEGREES.sub("", SCIENTIFIC.sub("", answer))))
    if OPERATION.search(answer) or set(COMMAND.findall(answer)) - NUMERIC_COMMANDS:
        return False
    num_divisions = _count(DIVISION, answer)
    is_whole = not (DIVISION.search(expected) or "." in expected)
    return num_divisions == 0 or (not is_whole and num_divisions <= 1 + expected.count(","))


def is_word(expected: str) -> bool:
    r"""Whether the answer is one or more words, which other orders of its letters do not equal.

    >>> is_word(r"\text{Monday}"), is_word("xy"), is_word("2ab")
    (True, False, False)
    """
    letters = re.sub(r"\s", "", clean(expected))
    return len(letters) >= 3 and letters.isalpha()


def _fractions(text: str) -> str:
    return re.sub(r"\\[dtc]frac", r"\\frac", text).replace("−", "-")


def _count(pattern: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in pattern.finditer(text))


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in OPENING) - (character in CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _cost_of_powers(text: str, *, max_exponent: int) -> str:
    if BARE_TOWER.search(text) or _tower(text) > MAX_TOWER:
        return "a tower of powers"
    total = 1
    for power in WRITTEN_POWER.finditer(text):
        exponent = int(power["exponent"])
        total *= max(1, exponent) if power["base"] else 1
        if max(exponent, total) > max_exponent:
            return f"a power beyond {max_exponent}"
    return ""


def _tower(text: str) -> int:
    """The depth of powers in exponents; a power of numbers alone in an exponent counts twice."""
    highest = 0
    groups: list[bool] = []  # for each open bracket: is it an exponent?
    signs = {match.start(): match.end() for match in POWER.finditer(text)}
    exponent_at = -1
    for position, character in enumerate(text):
        if position in signs:
            numeric = sum(groups) and not re.match(r"[^)}\]]*[A-Za-z]", text[position:])
            highest = max(highest, 1 + sum(groups) + bool(numeric))
            exponent_at = signs[position]
        elif character in OPENING:
            groups.append(text[exponent_at:position].strip() == "" and exponent_at >= 0)
            exponent_at = -1
        elif character in CLOSING and groups:
            groups.pop()
        elif not character.isspace() and position >= exponent_at:
            exponent_at = -1
    return highest


class _SpentError(BaseException):
    """The processor time is used up. No `Exception`, as libraries of mathematics catch those."""


def within_cpu(seconds: float, compute: Callable[[], T]) -> T:
    """Call `compute`; raises `UnscorableError` once it has used `seconds` of processor time.

    math-verify's grammar takes time exponential in a dozen kinds of repetition (`a_a_a`, `9:9:9`,
    `{{{9}}}`, `9/9/9`), each of which is short and looks harmless. Signals reach only the main
    thread, in which verifiers grade; another thread has no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        return compute()
    before = signal.signal(signal.SIGPROF, _spent)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)  # again: a library may catch it
            return compute()
        finally:  # Python handles signals after a call: none arrives before the timer is off
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _SpentError:
        reason = f"takes more than {seconds:g} s of processor time"
        raise UnscorableError(f"not computed: {reason}") from None
    finally:
        signal.signal(signal.SIGPROF, before)


def _spent(number: int, frame: FrameType | None) -> None:
    raise _SpentError
