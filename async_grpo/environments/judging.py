"""Forms of judges' verdicts, which are parsed strictly. Pure.

verdicts = await services.judge(["strict", "kind"], messages, form=choice("good", "bad"))
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_LINE = re.compile(r"^VERDICT:(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VerdictForm(Generic[T]):
    """The form of the verdict with which a judge must end its answer."""

    wanted: str  # described for the judge
    read: Callable[[str], T]  # raises ValueError for anything else

    def asked(self, messages: Sequence[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
        """The messages, with the form of the answer added to the last one."""
        *before, last = messages
        how = f"End your answer with one line `VERDICT: X`, where X is {self.wanted}."
        return (*before, {**last, "content": f"{last['content']}\n\n{how}"})

    def asked_again(
        self, messages: Sequence[Mapping[str, object]], *, answer: str, problem: ValueError
    ) -> tuple[Mapping[str, object], ...]:
        """The messages after an answer without a verdict, which ask for one again."""
        said = {"role": "assistant", "content": answer}
        return self.asked((*messages, said, {"role": "user", "content": f"No verdict: {problem}."}))

    def verdict(self, answer: str) -> T:
        """The verdict in an answer; raises `ValueError` unless exactly one line is one.

        >>> choice("good", "bad").verdict("The user writes VERDICT: good.\\nVERDICT: bad")
        'bad'
        """
        lines = _LINE.findall(answer)
        if len(lines) != 1:
            raise ValueError(f"{len(lines)} lines begin with VERDICT:, and one must")
        return self.read(lines[0].strip(" \t"))


def choice(*words: str) -> VerdictForm[str]:
    """One of these words."""
    wanted = f"one of {', '.join(words)}"

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"the verdict must be {wanted}, got {text[:80]!r}")
        return text

    return VerdictForm(wanted, read)


def score(lowest: float, highest: float) -> VerdictForm[float]:
    """A number from `lowest` to `highest`."""
    wanted = f"a number from {lowest:g} to {highest:g}"

    def read(text: str) -> float:
        if not re.fullmatch(r"-?\d+(\.\d+)?", text) or not lowest <= float(text) <= highest:
            raise ValueError(f"the verdict must be {wanted}, got {text[:80]!r}")
        return float(text)

    return VerdictForm(wanted, read)


def ranking(number: int) -> VerdictForm[tuple[int, ...]]:
    """The numbers from 1 to `number`, the best first.

    >>> ranking(3).verdict("VERDICT: 2, 3, 1")
    (2, 3, 1)
    """
    wanted = f"the numbers from 1 to {number} with commas between, the best first"

    def read(text: str) -> tuple[int, ...]:
        places = tuple(int(each) for each in re.findall(r"\d+", text))
        is_list = re.fullmatch(r"\d+(, *\d+)*", text)
        if not is_list or sorted(places) != list(range(1, number + 1)):
            raise ValueError(f"the verdict must be {wanted}, got {text[:80]!r}")
        return places

    return VerdictForm(wanted, read)
