"""Rewards of which a benchmark knows what they cost.

`--reward-fns benchmarks/rewards.py:scattered`: it never repeats, so that every sample is trained
and the work does not depend on luck.
"""

from __future__ import annotations

import time
import zlib
from typing import Any


def scattered(sample: dict[str, Any], **_kwargs: Any) -> dict[str, float]:
    """A number in [0, 1) that the output's tokens decide.

    >>> scattered({"output_token_ids": [4, 5, 6]})
    {'reward': 0.24838435277342796}
    """
    return {"reward": zlib.crc32(repr(sample["output_token_ids"]).encode()) / 2**32}


def asleep(sample: dict[str, Any], **_kwargs: Any) -> dict[str, float]:
    """Ten milliseconds without a processor."""
    time.sleep(0.01)
    return {"reward": 1.0}


def busy(sample: dict[str, Any], **_kwargs: Any) -> dict[str, float]:
    """Ten milliseconds of a processor."""
    end = time.process_time() + 0.01
    while time.process_time() < end:
        pass
    return {"reward": 1.0}
