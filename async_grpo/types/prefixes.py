"""Sequences that begin alike, as a trie: each shared token has one place in a packed row. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.intp]  # of the tokens of one sequence, in the order of the row
# The (first place, number of tokens) of each stretch of a sequence in which none parts or ends.
Segments = tuple[tuple[int, int], ...]
Ids = NDArray[np.integer]
Keys = NDArray[np.generic]  # one a token, whose bytes sort as they do


def as_keys(
    sequences: Iterable[tuple[Ids, Ids | None]],
) -> list[Keys]:
    """One key a token, which sort as ids do, of sequences of (ids [L], experts [<= L, K]).

    Computed with other experts a token is another one; where none are known, the model chooses.
    """
    sequences = list(sequences)
    width = max((known.shape[1] for _, known in sequences if known is not None), default=0)
    if not width:
        return [ids.astype(">u4") for ids, _ in sequences]
    keys: list[Keys] = []
    for ids, known in sequences:
        whole = np.full((len(ids), width), -1, np.int16)
        if known is not None:
            whole[: len(known)] = known[: len(ids)]
        of_ids = ids.astype(">u4")[:, None].view(np.uint8)
        rows = np.ascontiguousarray(np.concatenate([of_ids, whole.view(np.uint8)], axis=1))
        keys.append(rows.view(np.dtype((np.void, rows.shape[1])))[:, 0])
    return keys


def places_of(keys: Sequence[Keys]) -> list[Places]:
    """The place of each token: new ones in the order of their first sequence.

    >>> [places.tolist() for places in places_of([np.array([5, 6, 7]), np.array([5, 6, 8, 9])])]
    [[0, 1, 2], [0, 1, 3, 4]]
    """
    places: list[Places] = []
    earlier: list[tuple[bytes, int]] = []  # sorted: who begins most alike is a neighbour
    end = 0
    for number, key in enumerate(keys):
        entry = key.tobytes(), number
        at, shared = bisect.bisect(earlier, entry), places[0][:0] if places else np.arange(0)
        for _, other in earlier[max(at - 1, 0) : at + 1]:
            alike = _num_alike(key, keys[other])
            if alike > len(shared):
                shared = places[other][:alike]
        earlier.insert(at, entry)
        places.append(np.concatenate([shared, np.arange(end, end + len(key) - len(shared))]))
        end += len(key) - len(shared)
    return places


def _num_alike(one: Keys, other: Keys) -> int:
    """Entries at the beginning that two arrays have in common."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def with_whole_prompts(keys: Sequence[Keys], num_prompt: Iterable[int]) -> int:
    """Tokens of a row in which sequences share whole prompts alone, each of so many tokens.

    >>> with_whole_prompts([np.array([5, 6, 7]), np.array([5, 6, 7]), np.array([5, 8])], [2, 2, 2])
    6
    """
    prompts = [key[:num] for key, num in zip(keys, num_prompt, strict=True)]
    distinct = {prompt.tobytes(): len(prompt) for prompt in prompts}
    return sum(map(len, keys)) - sum(map(len, prompts)) + sum(distinct.values())


def segments_of(places: Sequence[Places]) -> list[Segments]:
    """The segments of each sequence, whose lengths add up to its own.

    >>> segments_of([np.array([0, 1, 2]), np.array([0, 1, 3, 4])])
    [((0, 2), (2, 1)), ((0, 2), (3, 2))]
    """
    total = 1 + max(int(each[-1]) for each in places)
    before = np.full(total, -1)
    for each in places:
        before[each[1:]] = each[:-1]
    followers = np.bincount(before[before >= 0], minlength=total)
    is_end = np.zeros(total, bool)
    is_end[[each[-1] for each in places]] = True
    parts = is_end | (followers > 1)
    begins = (before < 0) | parts[before]
    found = []
    for each in places:
        starts = np.flatnonzero(begins[each])
        lengths = np.diff(starts, append=len(each))
        found.append(tuple(zip(each[starts].tolist(), lengths.tolist(), strict=True)))
    return found
