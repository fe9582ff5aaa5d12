"""A reward of which a benchmark knows what it costs.

`--reward-fns benchmarks/rewards.py:scattered`: it never repeats, so that every sample is trained
and the work does not depend on luck.
"""

from __future__ import annotations

import zlib
from typing import Any


def scattered(sample: dict[str, Any], **_kwargs: Any) -> dict[str, float]:
    """A number in [0, 1) that the output's tokens decide.

    >>> scattered({"output_token_ids": [4, 5, 6]})
    {'reward': 0.24838435277342796}
    """
    return {"reward": zlib.crc32(repr(sample["output_token_ids"]).encode()) / 2**32}
