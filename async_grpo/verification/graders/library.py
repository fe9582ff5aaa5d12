"""Equality of answers as the math-verify library sees it.

Its own limits are off: they need SIGALRM, and the sandbox bounds time and memory from outside.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

from async_grpo.verification.graders.boxed import UnscorableError, ground_truth

# It warns once a process that its limits are off, which is our intention.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify_reward(output: str, answer: object) -> float:
    r"""1.0 when math-verify finds `answer` in the output, in a `\boxed{}` or elsewhere, else 0.0.

    Raises `UnscorableError` when it finds no answer at all, ValueError when the expected answer is
    missing or cannot be parsed.
    """
    truth = ground_truth(answer).strip("$")
    expected = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify cannot parse the expected answer {truth[:80]!r}")
    given = parse(output, parsing_timeout=None)
    if not given:
        raise UnscorableError("math-verify found no answer in the output")
    return float(verify(expected, given, timeout_seconds=None))
