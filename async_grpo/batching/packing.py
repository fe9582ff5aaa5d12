"""Which samples each rank trains in one round: full bins, balanced by estimated FLOPs. Pure.

A rank's bin holds at most `max_tokens` tokens. Ranks wait for the slowest at every round, so bins
are balanced by estimated FLOPs, which grow with the square of a sample's length, not by tokens.
The rule: samples go from the longest to the shortest, each to the least costly bin that has room.
If that needs more rounds than the tokens do, they go to the fullest bin that has room instead: this
balances worse, but may save a whole round.

Where a question's rows begin alike beyond their prompts, a bin computes each shared token once, and
only what a row adds to a bin counts. Then rows are also placed question by question, each where it
adds fewest tokens until that bin has its share of the work, and the faster of both plans is taken.

Legend: B bins.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import Sample
from async_grpo.types.prefixes import (
    Segments,
    as_keys,
    places_of,
    segments_of,
    with_whole_prompts,
)

Key = tuple[int, ...]  # (ordinal, index in group, row)
Bins = tuple[tuple[Key, ...], ...]  # the keys of each rank
DEFAULT_ATTENTION_RATIO = 8192.0  # 12 times the hidden size of a model of a few 100M parameters


# Less work than this share of it is worth a change: of a question's tokens, to pack its rows as a
# trie, where others count whole, as if they shared nothing; of a plan's time, to make more rounds.
WORTH = 0.95


class Segment(NamedTuple):
    """A stretch of a row that is whole in each row of its question that has any of it."""

    key: Key  # (ordinal, its first place in the question's trie)
    num_tokens: int
    cost: float  # of computing it behind what precedes it


class Item(NamedTuple):
    """One row to pack."""

    key: Key
    num_tokens: int  # prompt + output
    cost: float  # relative FLOPs, see estimate_cost; grows with the tokens
    segments: tuple[Segment, ...] = ()  # whose tokens and costs add up to these; (): shares nothing
    num_trained: int = 0  # tokens that are scored, whoever computes them

    @property
    def parts(self) -> Sequence[Segment | Item]:
        """What is computed once for all rows that have it."""
        return self.segments or (self,)


class TokenCount:
    """Tokens of the items that are here, those that several share counted once."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self.total = 0
        self._held: Counter[Key] = Counter()
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """An item has come."""
        for part in item.parts:
            self.total += 0 if self._held[part.key] else part.num_tokens
            self._held[part.key] += 1

    def remove(self, item: Item) -> None:
        """An item that is here has gone."""
        for part in item.parts:
            self._held[part.key] -= 1
            if not self._held[part.key]:
                del self._held[part.key]
                self.total -= part.num_tokens


class _Rule(Enum):
    """Which bin an item goes to, of those that have room."""

    EVEN = 0  # the least costly with it
    TOGETHER = 1  # where it adds fewest tokens, until a bin has its share of work; else as EVEN
    TIGHT = 2  # where it adds fewest tokens, of these to the fullest


class _Placed(NamedTuple):
    bins: list[list[Item]]
    costs: list[float]  # of the bins
    leftover: list[Item]

    def seconds(self, num_ranks: int) -> float:
        """Relative time of its rounds: each takes as long as its most costly bin."""
        return sum(sorted(self.costs, reverse=True)[::num_ranks])


class PackedRound(NamedTuple):
    """One bin of keys for each rank, sorted, and the items that wait for a later round."""

    bins: Bins
    leftover: tuple[Item, ...]


def attention_ratio(*, num_parameters: int, num_layers: int, attention_width: int) -> float:
    """The length in tokens at which causal attention costs as much as the matrix products.

    A forward pass costs 2 * num_parameters FLOPs a token (parameters with the output layer, without
    the embedding), and attention 2 * num_layers * attention_width * tokens**2 (queries by keys and
    weights by values, half of the square; width = heads * head size).

    >>> attention_ratio(num_parameters=12 * 24 * 1024**2, num_layers=24, attention_width=1024)
    12288.0
    """
    return num_parameters / max(num_layers * attention_width, 1)  # some models have no attention


def estimate_cost(num_tokens: int, *, attention_ratio: float = DEFAULT_ATTENTION_RATIO) -> float:
    """Relative FLOPs of one sample, in units of one token's matrix products.

    >>> estimate_cost(1000, attention_ratio=10_000)
    1100.0
    """
    return num_tokens + num_tokens**2 / attention_ratio


def items_of(
    parts: Sequence[Sample],
    *,
    attention_ratio: float = DEFAULT_ATTENTION_RATIO,
    shares_prefixes: bool = False,
) -> list[Item]:
    """The items of one question's rows, with segments where they begin alike beyond their prompts.

    `shares_prefixes`: the policy computes a beginning that several rows of a bin share once.
    """

    def cost(num_tokens: int) -> float:
        return estimate_cost(num_tokens, attention_ratio=attention_ratio)

    branches = _branches(parts) if shares_prefixes else [()] * len(parts)
    items = []
    for part, branch in zip(parts, branches, strict=True):
        ends = accumulate(length for _, length in branch)
        segments = (
            Segment((part.ordinal, place), length, cost(end) - cost(end - length))
            for (place, length), end in zip(branch, ends, strict=True)
        )
        [row] = part.episode.rows
        key, total = (part.ordinal, part.index, part.row), row.num_tokens
        items.append(Item(key, total, cost(total), tuple(segments), row.num_trained_tokens))
    return items


def _branches(parts: Sequence[Sample]) -> Sequence[Segments]:
    """The segments of each row; none where the trie is hardly smaller than with whole prompts."""
    rows = [part.episode.rows[0] for part in parts]
    whole = (np.concatenate([row.prompt_token_ids, row.token_ids]) for row in rows)
    keys = as_keys(zip(whole, (row.experts for row in rows), strict=True))
    places = places_of(keys)
    num_tokens = 1 + max((int(each[-1]) for each in places), default=0)
    most = WORTH * with_whole_prompts(keys, (len(row.prompt_token_ids) for row in rows))
    return segments_of(places) if num_tokens <= most else [()] * len(rows)


def pack_round(items: Sequence[Item], *, num_ranks: int, max_tokens: int) -> PackedRound:
    """Fill one bin for each rank; the result does not depend on the order of `items`.

    If all items fit, all are packed, balanced; otherwise the largest come first and smaller ones
    fill the gaps, so that later rounds are few. A bin is empty only if there are fewer items than
    ranks. Raises `ValueError` for an item that fits no bin.

    >>> items = [Item((0, i), n, n) for i, n in enumerate([70, 60, 30, 15])]
    >>> pack_round(items, num_ranks=2, max_tokens=100)
    PackedRound(bins=(((0, 0), (0, 3)), ((0, 1), (0, 2))), leftover=())
    """
    ordered = _longest_first(items, num_ranks, max_tokens)
    placed = min(
        _loosely(ordered, num_ranks, max_tokens),
        key=lambda each: (TokenCount(each.leftover).total, each.seconds(num_ranks)),
    )
    if placed.leftover and TokenCount(items).total <= num_ranks * max_tokens:
        tight = _place(ordered, num_ranks, max_tokens=max_tokens, rule=_Rule.TIGHT)
        if not tight.leftover:
            placed = tight
    return PackedRound(tuple(map(_keys, placed.bins)), tuple(placed.leftover))


def pack_rounds(items: Sequence[Item], *, num_ranks: int, max_tokens: int) -> list[Bins]:
    """Pack all items into few, fast rounds: the bins of keys of each, the longest round first.

    Ranks wait for each other within a round only, so the time is the sum over rounds of the most
    costly bin. Bins of similar cost share a round, which no other grouping of them beats. The
    result does not depend on the order of `items`.

    >>> items = [Item((0, i), n, n) for i, n in enumerate([90, 60, 50, 30, 10])]
    >>> pack_rounds(items, num_ranks=2, max_tokens=100)
    [(((0, 0),), ((0, 1),)), (((0, 2),), ((0, 3), (0, 4)))]
    """
    ordered = _longest_first(items, num_ranks, max_tokens)
    if not ordered:
        return []
    placed = _fewest_bins(ordered, num_ranks, max_tokens)
    by_cost = sorted(range(len(placed.bins)), key=placed.costs.__getitem__, reverse=True)
    keys = [_keys(placed.bins[number]) for number in by_cost]
    return [tuple(keys[at : at + num_ranks]) for at in range(0, len(keys), num_ranks)]


def _fewest_bins(ordered: list[Item], num_ranks: int, max_tokens: int) -> _Placed:
    """The bins of the fewest rounds for which a rule finds room; tokens set the least number.

    Where items share tokens, a few more rounds may be faster: they repeat less.
    """
    num_large = sum(2 * item.num_tokens > max_tokens for item in ordered if not item.segments)
    num_tokens = TokenCount(ordered).total
    num_rounds = math.ceil(max(num_tokens / max_tokens, num_large) / num_ranks)
    while not (best := _whole(ordered, num_rounds * num_ranks, max_tokens, num_ranks)):
        num_rounds += 1
    if any(item.segments for item in ordered):
        for more in sorted({num_rounds + math.ceil(num_rounds / part) for part in (8, 4)}):
            num_bins = more * num_ranks
            is_filled = num_bins <= len(ordered)
            found = _whole(ordered, num_bins, max_tokens, num_ranks) if is_filled else None
            if found and found.seconds(num_ranks) < WORTH * best.seconds(num_ranks):
                best = found
    return best


def _whole(
    ordered: Sequence[Item], num_bins: int, max_tokens: int, num_ranks: int
) -> _Placed | None:
    """All items placed into so many bins; None where no rule finds room."""
    found = [each for each in _loosely(ordered, num_bins, max_tokens) if not each.leftover]
    if found:
        return min(found, key=lambda placed: placed.seconds(num_ranks))
    tight = _place(ordered, num_bins, max_tokens=max_tokens, rule=_Rule.TIGHT)
    return None if tight.leftover else tight


def _loosely(ordered: Sequence[Item], num_bins: int, max_tokens: int) -> list[_Placed]:
    """The items placed for balance; if any share tokens, also question by question."""
    found = [_place(ordered, num_bins, max_tokens=max_tokens, rule=_Rule.EVEN)]
    if any(item.segments for item in ordered):
        together = _by_question(ordered)
        found.append(_place(together, num_bins, max_tokens=max_tokens, rule=_Rule.TOGETHER))
    return found


def _by_question(items: Sequence[Item]) -> list[Item]:
    """The most costly questions first, and of each its rows along the branches of its trie."""
    of_questions: defaultdict[int, float] = defaultdict(float)
    for part in _distinct(items):
        of_questions[part.key[0]] += part.cost

    def order(item: Item) -> tuple[float, int, tuple[Key, ...], Key]:
        question = item.key[0]
        branch = tuple(segment.key for segment in item.segments)
        return -of_questions[question], question, branch, item.key

    return sorted(items, key=order)


def _distinct(items: Iterable[Item]) -> Collection[Segment | Item]:
    return {part.key: part for item in items for part in item.parts}.values()


def _place(ordered: Sequence[Item], num_bins: int, *, max_tokens: int, rule: _Rule) -> _Placed:
    """Put each item into a bin that has room, by the rule."""
    bins: list[list[Item]] = [[] for _ in range(num_bins)]
    leftover, num_empty = [], num_bins
    room_B, cost_B = np.full(num_bins, max_tokens), np.zeros(num_bins)
    has_B: dict[Key, NDArray[np.bool_]] = {}  # by segment
    share = 0.0
    if rule is _Rule.TOGETHER:
        share = sum(part.cost for part in _distinct(ordered)) / num_bins
    for index, item in enumerate(ordered):
        tokens_B, more_B = _added(item, has_B, num_bins)
        fits_B = room_B >= tokens_B
        if num_empty >= len(ordered) - index:  # no rank is without work
            fits_B &= room_B == max_tokens
        # Where all bins gain alike, the sum may round two costs to one.
        by_B: NDArray[np.number] = cost_B + more_B if item.segments else cost_B
        if rule is _Rule.TOGETHER:
            joins_B = fits_B & (tokens_B < item.num_tokens) & (cost_B < share)
            if joins_B.any():
                fits_B, by_B = joins_B, tokens_B
        elif rule is _Rule.TIGHT and index >= num_bins:  # the first go to empty bins
            by_B = tokens_B * max_tokens + room_B
        number = int(np.where(fits_B, by_B, np.inf).argmin())
        if not fits_B[number]:
            leftover.append(item)
            continue
        num_empty -= not bins[number]
        bins[number].append(item)
        room_B[number] -= tokens_B[number]
        cost_B[number] += more_B[number]
        for segment in item.segments:
            has_B.setdefault(segment.key, np.zeros(num_bins, bool))[number] = True
    return _Placed(bins, cost_B.tolist(), leftover)


def _added(
    item: Item, has_B: Mapping[Key, NDArray[np.bool_]], num_bins: int
) -> tuple[NDArray[np.int_], NDArray[np.float64]]:
    """Tokens [B] that count against the budget of each bin, and cost [B], if it gets the item.

    What is scored takes memory at the head, however often it is computed.
    """
    tokens_B, cost_B = np.full(num_bins, item.num_tokens), np.full(num_bins, item.cost)
    for segment in item.segments:
        has = has_B.get(segment.key)
        if has is None:  # then none has what is behind it
            break
        tokens_B -= has * segment.num_tokens
        cost_B -= has * segment.cost
    return (np.maximum(tokens_B, item.num_trained) if item.segments else tokens_B), cost_B


def _longest_first(items: Sequence[Item], num_ranks: int, max_tokens: int) -> list[Item]:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    for item in items:
        require_fit(item, max_tokens)
    return sorted(items, key=lambda item: (-item.num_tokens, item.key))


def require_fit(item: Item, max_tokens: int) -> None:
    """Raise `ValueError` for an item that fits no bin."""
    if item.num_tokens > max_tokens:
        raise ValueError(
            f"a sample must fit max_tokens_per_gpu ({max_tokens}), got {item.num_tokens} "
            f"tokens in sample {item.key}: raise --max-tokens-per-gpu or shorten the sample"
        )


def _keys(members: Sequence[Item]) -> tuple[Key, ...]:
    return tuple(sorted(item.key for item in members))
