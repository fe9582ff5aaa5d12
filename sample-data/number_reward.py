"""A reward of one's own, as the README has it: any number in the output equals the answer.

Use it with `--reward-fns sample-data/number_reward.py:any_number`.
"""

from __future__ import annotations

import re
from typing import Any


def any_number(sample: dict[str, Any], **_: object) -> dict[str, float]:
    """1 when a whole number in the output is the answer, else 0."""
    numbers = re.findall(r"\d+", sample["output"])
    return {"reward": float(sample["answer"] in numbers)}
