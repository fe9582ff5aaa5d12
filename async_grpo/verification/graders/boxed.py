r"""Where answers stand: the last `\boxed{}` of an output; a ground truth with or without one."""

from __future__ import annotations

import re

BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


class UnscorableError(Exception):
    """An output in which no answer can be found: worth 0, and reported apart from wrong answers."""

    def __init__(self, reason: str, *, format_reward: float | None = None) -> None:
        super().__init__(reason)
        self.format_reward = format_reward


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{}` that closes last; None without one, or when it is empty.

    One pass over the text, however many braces a model leaves open.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}} } {")
    '\\frac{1}{2}'
    """
    content = None
    open_braces: list[int | None] = []  # where a box's content starts; None: another brace
    for brace in BRACES.finditer(text):
        token = brace.group()
        if token in ("\\{", "\\}"):
            continue
        if token != "}":
            open_braces.append(brace.end() if len(token) > 1 else None)
        elif open_braces and (start := open_braces.pop()) is not None:
            content = text[start : brace.start()].strip()
    return content or None


def require_boxed(output: str) -> str:
    r"""The content of the last `\boxed{}`; raises `UnscorableError` without one."""
    answer = last_boxed(output)
    if answer is None:
        raise UnscorableError("no \\boxed{} answer in the output")
    return answer


def ground_truth(answer: object) -> str:
    r"""The expected answer without its `\boxed{}`; raises ValueError when the data has none."""
    text = "" if answer is None else str(answer)
    truth = last_boxed(text) or text.strip()
    if not truth:
        raise ValueError(
            "the question has no answer to compare with: give the data an `answer` column, "
            "or name it with --column-mapping answer=..."
        )
    return truth
