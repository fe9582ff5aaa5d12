"""Encodes the changes between two versions of the same bytes. An add-on. Pure.

An update at a learning rate of 1e-6 leaves most numbers of a bfloat16 model as they were. Each
changed number is sent as its distance from the one before and its new value: 1 + 2 bytes for a
number of 2 bytes. Between numbers more than 256 apart, unchanged ones are sent as well:

    old 7 7 7 7     new 7 7 9 7     numbers 9       distances 3
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from async_grpo.util.errors import WeightSyncError

FARTHEST = 256  # one byte holds distances from 1 to 256


def encode(
    new: NDArray[np.uint8], old: NDArray[np.uint8], *, item_bytes: int
) -> NDArray[np.uint8] | None:
    """The delta from `old` to `new`; None where it is no smaller than `new` itself.

    >>> old, new = np.zeros(8, np.uint8), np.array([0, 0, 0, 0, 9, 1, 0, 0], np.uint8)
    >>> encode(new, old, item_bytes=2).tolist()
    [9, 1, 2]
    """
    numbers = _numbers(new, item_bytes)
    changed = np.flatnonzero(numbers != _numbers(old, item_bytes))
    if len(changed) * (item_bytes + 1) >= new.nbytes:
        return None
    distances = np.diff(changed, prepend=-1)
    between = (distances - 1) // FARTHEST  # unchanged numbers to send before each changed one
    last = np.repeat(changed, between + 1)
    steps_left = np.repeat(np.cumsum(between + 1), between + 1) - np.arange(1, len(last) + 1)
    first = np.repeat(changed - distances, between + 1)
    steps = np.repeat(between, between + 1) - steps_left + 1
    sent = np.where(steps_left == 0, last, first + steps * FARTHEST)
    if len(sent) * (item_bytes + 1) >= new.nbytes:
        return None
    distances = np.diff(sent, prepend=-1) - 1
    return np.concatenate([numbers[sent].view(np.uint8), distances.astype(np.uint8)])


def patch(data: NDArray[np.uint8], delta: NDArray[np.uint8], *, item_bytes: int) -> None:
    """Apply a delta to `data`, in place.

    Raises `WeightSyncError` for a delta that leads beyond the end of `data`.
    """
    count, rest = divmod(delta.nbytes, item_bytes + 1)
    places = np.cumsum(delta[count * item_bytes :].astype(np.int64) + 1) - 1
    numbers = _numbers(data, item_bytes)
    if rest or (count and places[-1] >= len(numbers)):
        raise WeightSyncError(f"a change of weights must lie within its {data.nbytes} bytes")
    numbers[places] = _numbers(delta[: count * item_bytes].copy(), item_bytes)


def _numbers(data: NDArray[np.uint8], item_bytes: int) -> NDArray[np.unsignedinteger]:
    return data.view(f"u{item_bytes}")
