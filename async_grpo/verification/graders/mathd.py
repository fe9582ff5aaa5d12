"""Equality of answers as normalised strings: fast, and strict but for differences of spelling."""

from __future__ import annotations

import re

from async_grpo.verification.graders.answers import ground_truth, require_boxed

# LaTeX without meaning, in which writers of the same answer differ.
NOISE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:$% ]|[$%]|\^\s*\{?\s*\\circ\s*\}?")
TEXT = r"\\(?:text(?:rm|bf|it|normal)?|mbox|math(?:rm|bf|it))\s*\{([^{}]*)\}"
WORDS = re.compile(TEXT)
UNIT = re.compile(rf"(?<=[^\s])\s*{TEXT}(?:\^\{{?\d\}}?)?$")
# Words and signs that no unit has, as they name another number or deny the answer.
NO_UNIT = re.compile(r"[,;=]|(?<![A-Za-z^])\d|\b(?:and|or|nor|not|no|but|is|wrong|maybe)\b")
PERCENT_WORD = re.compile(
    r"\\(?:text(?:rm|bf|it|normal)?|mbox|math(?:rm|bf|it))\s*\{\s*(?:\\?%|percent|pct)\s*\}"
)
THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?:[, ]\d{3})+(?:\.\d+)?", re.ASCII)
VARIABLE = re.compile(r"^[A-Za-z]\s*=(?!=)")

MAX_CHARACTERS = 1000  # a longer answer that is also over twice the expected one's length is wrong

CANONICAL = (
    (re.compile(r"(\\frac)\s*(\d)\s*(\d)"), r"\1\2\3"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<!\d) | (?!\d)"), ""),  # 1 5 is not 15
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
    text = percent_signs(answer).strip().rstrip(".").replace("{,}", ",").replace("−", "-")
    text = re.sub(r"\\[dtc]frac", r"\\frac", NOISE.sub("", text)).strip()
    text = VARIABLE.sub("", WORDS.sub(r"\1", without_unit(text))).strip()
    return re.sub("[, ]", "", text) if THOUSANDS.fullmatch(text) else text


def without_unit(text: str) -> str:
    r"""The text without a unit at its end; the second of two words is no unit.

    >>> without_unit(r"5 \text{ cm}^2"), without_unit(r"5 \text{ or 6}")
    ('5', '5 \\text{ or 6}')
    """
    unit = UNIT.search(text)
    if unit is None or NO_UNIT.search(unit[1]) or WORDS.search(text[: unit.start()]):
        return text
    return text[: unit.start()]


def percent_signs(text: str) -> str:
    r"""The text with a percent sign for each `\text{percent}`."""
    return PERCENT_WORD.sub(r"\\%", text)


def is_other_percentage(given: str, *, expected: str) -> bool:
    """Whether only the given answer has a percent sign: 5% is not 5, nor is 100% both 1 and 100."""
    return "%" in percent_signs(given) and "%" not in percent_signs(expected)


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
    expected, given = ground_truth(answer), require_boxed(output)
    if cannot_be(given, expected=expected):
        return 0.0
    return float(normalise(given) == normalise(expected))


def cannot_be(given: str, *, expected: str) -> bool:
    """Whether `given` is wrong although its normalised form may equal that of `expected`."""
    return (
        is_too_long(given, expected=expected)
        or is_about_another(given, expected=expected)
        or is_other_percentage(given, expected=expected)
    )


def is_about_another(given: str, *, expected: str) -> bool:
    """Whether the two answers give values of different variables.

    >>> is_about_another("y=5", expected="x = 5"), is_about_another("5", expected="x=5")
    (True, False)
    """
    names = [VARIABLE.match(text.strip(" $")) for text in (given, expected)]
    return all(names) and len({name.group()[0] for name in names if name}) == 2


def is_too_long(given: str, *, expected: str) -> bool:
    """Whether `given` is too long for a spelling of `expected`; patterns would be slow on it."""
    return len(given) > max(MAX_CHARACTERS, 2 * len(expected))
