r"""Where an answer stands in an output that need not have a `\boxed{}`: read, never evaluated.

The last box counts; without one, what follows the last word "answer", else the last mathematics.
What blanks, a comma, "and" or "or" join is one answer, and what the text denies is none, so that
naming several earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from async_grpo.verification.graders.boxed import (
    PERCENT,
    UnscorableError,
    boxes,
    is_denied,
    is_join,
    require_boxed,
)

TAIL_CHARACTERS = 1000  # where an answer without a box is looked for
NEAR_CHARACTERS = 60  # how far behind the word "answer" it may start
MIN_PROMPT_CHARACTERS = 8  # a shorter one may well be part of an answer

SUM = r"[(\d][\d\s().]*(?:[-+*/^×·÷−]\s*[(\d.][\d().]*(?:\s+(?=[-+*/^×·÷−)]))?)+"  # of numbers
NUMBER = (
    r"(?<![\w.,])(?<![\w)][-+*/^×·÷−])(?<![\w)] [-+*/^×·÷−] )"  # not within a sum
    r"[-+−]?[$€£¥]?(?:[1-9]\d{0,2}(?:[ ,\u00a0\u202f]\d{3})+(?!\d)|\d+)?"
    r"(?:(?<=\d)(?:[.]\d+|,\d{1,2}(?![\d,])(?!\s*,)|/\d+)|(?<![\d.])[.]\d+|(?<=\d))"
    r"(?!,?\d|\s+,\d)"  # nor the first of a list
)
MATHEMATICS = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|(?<!\\)\$(?P<inline>(?:\\\$|[^$\n])+?)(?<!\\)\$"
    r"|\\\[(?P<bracket>[\s\S]+?)\\\]|\\\((?P<parenthesis>[^\n]+?)\\\)"
    r"|(?P<fraction>-?\\[dt]?frac\{-?\d+\}\{\d+\})"
    rf"|(?<![\w.,])(?P<sum>{SUM})|(?P<number>{NUMBER})",
    re.ASCII,
)
BOX = re.compile(r"\\(?:boxed|fbox)\b")


def without_prompt(output: str, prompt: str) -> str:
    """The output less whole repetitions of the prompt, which may hold an answer of its own.

    >>> without_prompt("Name a prime below 4. It is 3.", "Name a prime below 4. ")
    '  It is 3.'
    """
    prompt = prompt.strip()
    return output.replace(prompt, " ") if len(prompt) >= MIN_PROMPT_CHARACTERS else output


def find_answer(output: str) -> str:
    r"""The answer of an output as LaTeX without delimiters; raises `UnscorableError` without one.

    >>> find_answer("first 41, then the answer is 42."), find_answer(r"\boxed{1} or \boxed{2}")
    ('42', '1,2')
    """
    if next(boxes(output), None):
        answer = _tidy(require_boxed(output))
    elif BOX.search(output):
        raise UnscorableError("a \\boxed{} that is not closed")
    else:
        answer = _loose_answer(output[-TAIL_CHARACTERS:])
    if not answer:
        raise UnscorableError("no answer in the output")
    return answer


class _Found(NamedTuple):
    """Mathematics in a text, or several that are one answer."""

    start: int
    end: int
    parts: tuple[str, ...]


def _loose_answer(text: str) -> str:
    found: list[_Found] = []
    for match in MATHEMATICS.finditer(text):
        here = _Found(match.start(), match.end(), (_tidy(_content(match)),))
        gap = text[found[-1].end : here.start] if found else ""
        if found and gap.strip() == "=":  # what it comes to counts, if it is true
            before = found.pop()
            last = f"{before.parts[-1]}={here.parts[0]}"
            here = _Found(before.start, here.end, (*before.parts[:-1], last))
        elif found and is_join(gap):
            before = found.pop()
            here = _Found(before.start, here.end, before.parts + here.parts)
        found.append(here)
    found = [here for here in found if not is_denied(text, at=here.start)]
    if not found:
        return ""
    chosen = _after_the_word(text, found) or found[-1]
    answer = ",".join(dict.fromkeys(chosen.parts))
    return answer + (r"\%" if PERCENT.match(text, chosen.end) else "")


def _after_the_word(text: str, found: Sequence[_Found]) -> _Found | None:
    """The first that starts close behind the last "answer"."""
    word = text.lower().rfind("answer")
    near = (here for here in found if 0 <= here.start - word <= NEAR_CHARACTERS)
    return next(near, None) if word >= 0 else None


def _content(match: re.Match[str]) -> str:
    if match["number"] is None:
        return next(content for content in match.groups() if content is not None)
    number = re.sub(r"[$€£¥]|(?<=\d)[ \u00a0\u202f](?=\d)", "", match["number"])
    return re.sub(r"^([-+]?\d+),(\d{1,2})$", r"\1.\2", number)


def _tidy(answer: str) -> str:
    """Without delimiters, the full stop of the sentence, and typographic minus signs."""
    answer = re.sub(r"(?<!\\)\$+$", "", answer.replace("−", "-").strip().lstrip("$")).strip()
    answer = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", answer, flags=re.DOTALL)
    return re.sub(r"(?<!\\left)(?<!\\right)(?<!\.)\.$", "", answer).strip()
