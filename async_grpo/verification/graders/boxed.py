r"""Where answers stand: in the last `\boxed{}` of an output; a ground truth with or without one."""

from __future__ import annotations

import re
from collections.abc import Iterator

BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


class UnscorableError(Exception):
    """An output in which no answer can be found: worth 0, and reported apart from wrong answers."""

    def __init__(self, reason: str, *, format_reward: float | None = None) -> None:
        super().__init__(reason)
        self.format_reward = format_reward


def boxes(text: str) -> Iterator[tuple[int, int, int]]:
    r"""Where each `\boxed{}` starts, its content starts, and its content ends, in order of ends.

    One pass over the text, however many braces a model leaves open; nothing is copied.

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
    last = None
    for last in boxes(text):  # noqa: B007
        pass
    return None if last is None else text[last[1] : last[2]].strip() or None


def require_boxed(output: str) -> str:
    r"""The content of the last `\boxed{}`; raises `UnscorableError` without one."""
    answer = last_boxed(output)
    if answer is None:
        raise UnscorableError("no \\boxed{} answer in the output")
    return answer


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
