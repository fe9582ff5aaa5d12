r"""Find the answer in an output: in its last `\boxed{}`, or without one; the text is never run.

The last box counts; without one, the mathematics after the last word "answer", else the last
mathematics. Parts joined by blanks, a comma, "and" or "or" are one answer, and a part that the text
denies is none, so that naming several earns nothing. A ground truth may have a box or none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_BOXES = 50  # of one answer
GAP_CHARACTERS = 40  # between two boxes of one answer
DENIAL_CHARACTERS = 60  # before an answer that are searched for a denial
TAIL_CHARACTERS = 1000  # of an output that are searched for an answer without a box
NEAR_CHARACTERS = 60  # from the word "answer" to the start of the answer
MIN_PROMPT_CHARACTERS = 8  # a shorter one may well be part of an answer

UNIT_WORDS = r"(?:[^\S\n]*[A-Za-z]+(?![A-Za-z])){0,2}\s*"
JOIN_NOISE = re.compile(r"\$|\\[()\[\]]|\*\*")
JOINED = re.compile(
    r"[ \t]*"  # 1 2 3
    rf"|{UNIT_WORDS}(?:[,;]|\band\b)(?:[\s,;]|\b(?:and|or)\b)*"  # 1 apple, 2 pears
    rf"|{UNIT_WORDS},?\s*\b(?:or|maybe|perhaps|possibly|alternatively)\b"  # 1, or maybe it is 2
    r"(?:[\s,:]|\b(?:or|maybe|even|else|also|the|answer|it|is|be|could|may|might)\b)*",
    re.IGNORECASE,
)
DENIAL = re.compile(
    r"(?:(?:\b(?:not|never|neither|nor|cannot|except)|n['’]t|\bother\s+than|\banything\s+but)\b"
    r"(?:\s+(?:be|is|it|equals?|to|the|an?|number|value|answer|only|just|simply|exactly))*"
    r"|≠|!=|\\neq?\b)"
    r"(?:[\s$*:]|\\[(\[])*",
    re.IGNORECASE,
)
PERCENT = re.compile(r"\s*(?:\\?%|percent\b|percentage\b|pct\b)", re.IGNORECASE)
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
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


class UnscorableError(Exception):
    """An output in which no answer can be found: worth 0, and reported apart from wrong answers."""

    def __init__(self, reason: str, *, format_reward: float | None = None) -> None:
        super().__init__(reason)
        self.format_reward = None if format_reward is None else float(format_reward)


def boxes(text: str) -> Iterator[tuple[int, int, int]]:
    r"""(start, start of content, end of content) of each `\boxed{}`, in order of their ends.

    It takes one pass over the text, however many braces a model leaves open, and copies nothing.

    >>> list(boxes(r"\boxed{1} \boxed{22}"))
    [(0, 7, 8), (10, 17, 19)]
    """
    open_braces: list[tuple[int, int] | None] = []  # box and content start; None: another brace
    first = re.search(r"\\(?:boxed|fbox)", text)
    for brace in BRACES.finditer(text, first.start()) if first else ():
        token = brace.group()
        if token in ("\\{", "\\}"):
            continue
        if token != "}":
            open_braces.append((brace.start(), brace.end()) if len(token) > 1 else None)
        elif open_braces and (start := open_braces.pop()) is not None:
            yield *start, brace.start()


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{}` that closes last; None without one, or when it is empty.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}} } {")
    '\\frac{1}{2}'
    """
    last = deque(boxes(text), maxlen=1)
    return text[last[0][1] : last[0][2]].strip() or None if last else None


def require_boxed(output: str) -> str:
    r"""The content of the last boxes that are one answer; raises `UnscorableError` without any.

    >>> require_boxed(r"\boxed{1}. No, \boxed{2} or \boxed{3}"), require_boxed(r"\boxed{4} percent")
    ('2,3', '4\\%')
    """
    closed = deque(boxes(output), maxlen=MAX_BOXES)
    if not closed:
        raise UnscorableError("no \\boxed{} answer in the output")
    start, first, end = closed.pop()
    parts = [output[first:end].strip()]
    is_percentage = PERCENT.match(output[end + 1 : end + 20].lstrip("$"))
    while closed and closed[-1][2] < start:
        earlier_start, earlier_first, earlier_end = closed.pop()
        if start - earlier_end > GAP_CHARACTERS or not is_join(output[earlier_end + 1 : start]):
            break
        parts.append(output[earlier_first:earlier_end].strip())
        start = earlier_start
    if not parts[0] or is_denied(output, at=start):
        raise UnscorableError("a \\boxed{} that is empty, or is said not to be the answer")
    several = dict.fromkeys(part for part in reversed(parts) if part)
    return ",".join(several) + (r"\%" if is_percentage and len(several) == 1 else "")


def is_join(gap: str) -> bool:
    """Whether `gap` joins the parts on both of its sides to one answer.

    >>> is_join(" or "), is_join(" apples, "), is_join(", I checked with "), is_join(". No: ")
    (True, True, False, False)
    """
    return bool(JOINED.fullmatch(JOIN_NOISE.sub("", gap)))


def is_denied(text: str, *, at: int) -> bool:
    """Whether the text denies that the answer is what stands at `at`; a bound is no denial.

    >>> is_denied("the answer is not 5", at=18), is_denied("not hard: it is 5", at=16)
    (True, False)
    """
    before = text[max(0, at - DENIAL_CHARACTERS) : at]
    return any(match.end() == len(before) for match in DENIAL.finditer(before))


def ground_truth(answer: object) -> str:
    r"""The expected answer without its `\boxed{}`; raises ValueError when the data has none."""
    if isinstance(answer, (list, tuple, set, dict)):
        raise ValueError(
            f"an expected answer must be one text or number, got {str(answer)[:80]}: write several "
            r"as one, \{1, 2\} or (1, 2), or copy reward_registry.py and choose among them there"
        )
    text = "" if answer is None else str(answer)
    truth = last_boxed(text) or text.strip()
    if not truth:
        raise ValueError(
            "the question has no answer to compare with: give the data an `answer` column, "
            "or name it with --column-mapping answer=..."
        )
    return truth


def without_prompt(output: str, prompt: str) -> str:
    """The output without whole repetitions of the prompt, which may hold another answer.

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
    """A piece of mathematics in a text, or several that are one answer."""

    start: int
    end: int
    parts: tuple[str, ...]


def _loose_answer(text: str) -> str:
    found: list[_Found] = []
    for match in MATHEMATICS.finditer(text):
        here = _Found(match.start(), match.end(), (_tidy(_content(match)),))
        gap = text[found[-1].end : here.start] if found else ""
        if found and gap.strip() == "=":  # the sides are compared later, the last one counts
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
    """The first one that starts within `NEAR_CHARACTERS` of the last word "answer"."""
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
