"""Variants of the same work, measured in turns: what disturbs the machine meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(names: Sequence[str], *, repeats: int) -> Iterator[str]:
    """Every name `repeats` times, each turn beginning with another one.

    >>> list(turns(["a", "b"], repeats=2))
    ['a', 'b', 'b', 'a']
    """
    for turn in range(repeats):
        first = turn % len(names)
        yield from [*names[first:], *names[:first]]


def alternate(
    variants: Mapping[str, Callable[[], T]], *, repeats: int, warmups: int = 1
) -> dict[str, list[T]]:
    """What each variant returned, in turns; the first `warmups` turns are not kept."""
    measured: dict[str, list[T]] = {name: [] for name in variants}
    for name in turns(list(variants), repeats=warmups + repeats):
        measured[name].append(variants[name]())
    return {name: values[warmups:] for name, values in measured.items()}


def ratios(values: Sequence[float], by: Sequence[float]) -> list[float]:
    """Of each turn: a ratio of two neighbours in time is worth more than one of two medians.

    >>> ratios([2.0, 3.0], by=[1.0, 2.0])
    [2.0, 1.5]
    """
    return [value / other for value, other in zip(values, by, strict=True)]
