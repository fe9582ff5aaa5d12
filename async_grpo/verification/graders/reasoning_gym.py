"""Tasks of the package reasoning-gym, scored by their own scorers: some run what they read.

So they run here alone, in a confined process without network and files. What a text takes over
there can lie about itself, as about any reward of a user's own.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

from async_grpo.verification.graders.boxed import UnscorableError

# Makes questions of one task, scores none, and imports what wants a folder to write to.
UNUSED = "cellpylib"
MAX_CHARACTERS = 10_000  # of an answer


def reasoning_gym_reward(output: str, entry: Mapping[str, Any], *, config: str = "{}") -> float:
    """What the scorer of the entry's task says of the last `<answer>` of an output, in [0, 1].

    `config`: the task's, as JSON. Raises `UnscorableError` for an output without an answer, or one
    that the scorer cannot read.
    """
    answer = library().utils.extract_answer(output)
    if answer is None or len(answer) > MAX_CHARACTERS:
        raise UnscorableError(f"no <answer> of at most {MAX_CHARACTERS} characters")
    scorer = scorer_of(entry["metadata"]["source_dataset"], config)
    try:
        reward = float(scorer.score_answer(answer, dict(entry)))
    except (Exception, SystemExit) as error:  # the scorer may run the answer, which may raise
        raise UnscorableError(f"the scorer raised {error!r}") from error
    if not math.isfinite(reward):
        raise UnscorableError(f"the scorer said {reward}")
    return min(max(reward, 0.0), 1.0)


@functools.cache
def scorer_of(task: str, config: str) -> Any:
    """The task by its name; raises `ValueError` for one that is none."""
    return library().create_dataset(task, **json.loads(config))


@functools.cache
def library() -> Any:
    """The package; raises `ImportError` where it is not installed."""
    is_here = UNUSED in sys.modules
    sys.modules.setdefault(UNUSED, mock.MagicMock())
    try:
        import reasoning_gym
        import reasoning_gym.utils
    finally:
        if not is_here:
            del sys.modules[UNUSED]
    return reasoning_gym
