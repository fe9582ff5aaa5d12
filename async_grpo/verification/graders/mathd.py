"""Equality of answers as normalised strings: strict, fast, and blind to spelling only."""

from __future__ import annotations

import re

from async_grpo.verification.graders.boxed import ground_truth, require_boxed

# Spelling without meaning, in LaTeX that people write around one and the same answer.
NOISE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:$% ]|[$%]|\^\s*\{?\s*\\circ\s*\}?")
UNIT = re.compile(r"(?<=[^\s])\s*\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")
WORDS = re.compile(r"\\(?:text|mbox|textrm|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
VARIABLE = re.compile(r"^[A-Za-z]\s*=(?!=)")

CANONICAL = (
    (re.compile(r"\s+"), ""),
    (re.compile(r"(?<![\d.])\.(?=\d)"), "0."),
    (re.compile(r"(?<=\d)\.0+(?!\d)"), ""),
    (re.compile(r"\\frac(\d)(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac(\d)\{"), r"\\frac{\1}{"),
    (re.compile(r"\\sqrt(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"^(-?)(\d+)/(\d+)$"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"^(-?)0\.5$"), r"\1\\frac{1}{2}"),
)


def clean(answer: str) -> str:
    r"""The answer without dollars, percent signs, degrees, units, thousands separators, `x=`.

    >>> clean(r"$x = 1{,}250 \text{ cm}^2$.")
    '1250'
    """
    text = answer.strip().rstrip(".").replace("{,}", ",").replace("−", "-")
    text = re.sub(r"\\[dtc]frac", r"\\frac", NOISE.sub("", text)).strip()
    text = VARIABLE.sub("", WORDS.sub(r"\1", UNIT.sub("", text))).strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def normalise(answer: str) -> str:
    r"""One spelling for answers that differ in spelling only.

    >>> normalise(r"\dfrac 12"), normalise(" 1/2 ")
    ('\\frac{1}{2}', '\\frac{1}{2}')
    """
    text = clean(answer)
    for pattern, replacement in CANONICAL:
        text = pattern.sub(replacement, text)
    return text


def mathd_reward(output: str, answer: object) -> float:
    r"""1.0 when the last `\boxed{}` of the output is `answer` up to spelling, else 0.0.

    Raises `UnscorableError` without a `\boxed{}`, ValueError without an answer to compare with.
    """
    expected = normalise(ground_truth(answer))
    return float(normalise(require_boxed(output)) == expected)
