"""Pairs: the completion is given, so that there is nothing to sample, to lease or to grade."""

from __future__ import annotations

import numpy as np

from async_grpo.types import Episode, Row, TrainingPair


def given_episode(pair: TrainingPair) -> Episode:
    """One row, all of whose completion is trained; nobody sampled it, with whatever weights."""
    completion = pair.completion_token_ids
    mask = np.ones(len(completion), np.bool_)
    return Episode((Row(pair.prompt_token_ids, completion, None, mask, ()),))
