r"""Where an answer stands in an output that need not have a `\boxed{}`: read, never evaluated.

The last box counts; without one, what follows the last word "answer", else the last mathematics.
Answers that a comma, "and" or "or" joins are one answer, so that naming several earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from async_grpo.verification.graders.boxed import UnscorableError, boxes

TAIL_CHARACTERS = 1000  # where an answer without a box is looked for
NEAR_CHARACTERS = 60  # how far behind the word "answer" it may start
MIN_PROMPT_CHARACTERS = 8  # a shorter one may well be part of an answer
MAX_BOXES = 50  # that are one answer
GAP_CHARACTERS = 40  # between two boxes that are one answer

JOINED = re.compile(r"(?:[\s$,;]|\\[()\[\]]|\b(?:and|or)\b)*(?:[,;]|\b(?:and|or)\b)[\s\S]*")
JOIN_NOISE = re.compile(r"[\s$,;]|\\[()\[\]]|\b(?:and|or)\b")
SUM = r"[(\d][\d\s().]*(?:[-+*/^×·÷−]\s*[(\d.][\d().]*(?:\s+(?=[-+*/^×·÷−)]))?)+"  # of numbers
NUMBER = (
    r"(?<![\w.,])(?<![\w)][-+*/^×·÷−])(?<![\w)] [-+*/^×·÷−] )"  # not within a sum
    r"[-+−]?[$€£¥]?(?:[1-9]\d{0,2}(?:[ ,\u00a0\u202f]\d{3})+(?!\d)|\d+)?"
    r"(?:(?<=\d)(?:[.]\d+|,\d{1,2}(?![\d,])(?!\s*,)|/\d+)|(?<![\d.])[.]\d+|(?<=\d))"
    r"(?!,?\d)"  # nor the first of a list
)
MATHEMATICS = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|(?<!\\)\$(?P<inline>(?:\\\$|[^$\n])+?)(?<!\\)\$"
    r"|\\\[(?P<bracket>[\s\S]+?)\\\]|\\\((?P<parenthesis>[^\n]+?)\\\)"
    r"|(?P<fraction>-?\\[dt]?frac\{-?\d+\}\{\d+\})"
    rf"|(?<![\w.,])(?P<sum>{SUM})|(?P<number>{NUMBER})",
    re.ASCII,
)
BOX = re.compile(r"\\(?:boxed|fbox)\b")
PERCENT = re.compile(r"\s*(?:\\?%|percent\b|percentage\b|pct\b)", re.IGNORECASE)


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
    if closed := list(boxes(output)):
        answer = _boxed_answer(output, closed)
    elif BOX.search(output):
        raise UnscorableError("a \\boxed{} that is not closed")
    else:
        answer = _loose_answer(output[-TAIL_CHARACTERS:])
    if not answer:
        raise UnscorableError("no answer in the output")
    return answer


def _boxed_answer(output: str, closed: Sequence[tuple[int, int, int]]) -> str:
    start, first, end = closed[-1]
    parts = [output[first:end]]
    percent = PERCENT.match(output[end + 1 : end + 20].lstrip("$"))
    for earlier_start, earlier_first, earlier_end in reversed(closed[-MAX_BOXES:-1]):
        gap = output[max(earlier_end + 1, start - GAP_CHARACTERS - 1) : start]
        if len(gap) > GAP_CHARACTERS or not _joins(gap):
            break
        parts.append(output[earlier_first:earlier_end])
        start = earlier_start
    return _tidy(",".join(reversed(parts))) + (r"\%" if percent and len(parts) == 1 else "")


def _loose_answer(text: str) -> str:
    matches = list(MATHEMATICS.finditer(text))
    if not matches:
        return ""
    groups = [[matches[0]]]
    for left, right in pairwise(matches):
        gap = text[left.end() : right.start()]
        if _joins(gap):
            groups[-1].append(right)
        elif gap.strip() == "=":  # what it comes to counts
            groups[-1][-1] = right
        else:
            groups.append([right])
    chosen = _after_the_word(text, groups) or groups[-1]
    answer = ",".join(_tidy(_content(match)) for match in chosen)
    return answer + (r"\%" if PERCENT.match(text, chosen[-1].end()) else "")


def _after_the_word(text: str, groups: Sequence[list[re.Match[str]]]) -> list[re.Match[str]] | None:
    """The first group that starts close behind the last "answer"."""
    word = text.lower().rfind("answer")
    near = (group for group in groups if 0 <= group[0].start() - word <= NEAR_CHARACTERS)
    return next(near, None) if word >= 0 else None


def _content(match: re.Match[str]) -> str:
    if match["number"] is None:
        return next(content for content in match.groups() if content is not None)
    number = re.sub(r"[$€£¥]|(?<=\d)[ \u00a0\u202f](?=\d)", "", match["number"])
    return re.sub(r"^([-+]?\d+),(\d{1,2})$", r"\1.\2", number)


def _joins(gap: str) -> bool:
    return bool(JOINED.fullmatch(gap)) and not JOIN_NOISE.sub("", gap)


def _tidy(answer: str) -> str:
    """Without delimiters, the full stop of the sentence, and typographic minus signs."""
    answer = re.sub(r"(?<!\\)\$+$", "", answer.replace("−", "-").strip().lstrip("$")).strip()
    answer = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", answer, flags=re.DOTALL)
    return re.sub(r"(?<!\\left)(?<!\\right)(?<!\.)\.$", "", answer).strip()
