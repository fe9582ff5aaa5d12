"""Every reward is called once on the first line of the data, before anything of a run is made.

consumes:     the verifier pool; the first question, with its own answer as if it were an output
produces:     nothing, or the sentence that refuses the run
waits for:    the verdicts
unblocked by: the pool, whose every verification has a limit
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from async_grpo import cluster
from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError
from async_grpo.types import Question, Turn, Verdict, VerificationRequest

logger = logging.getLogger(__name__)


def try_rewards(pool: Any, question: Question, config: TrainConfig) -> None:
    """Raise `ConfigError` for a reward that cannot grade `question`, the first of the data.

    A connection that fails may be back in time, and a process that was lost is nobody's fault:
    both are only warned of.
    """
    verdicts: tuple[Verdict, ...] = cluster.wait(
        pool.try_out.remote(VerificationRequest(0, 0, question, example_output(question))),
        timeout_s=config.stall_timeout_s,
        who="the verifier pool",
    )
    for verdict in verdicts:
        if verdict.status != "error":
            continue
        columns = ", ".join(question.columns)
        sentence = (
            f"reward {verdict.reason}: it must grade the first line of {config.data_path}, which "
            f"has {columns}"
        )
        if verdict.cause == "overrun":
            raise ConfigError(f"{sentence}: raise the limit, or have the reward do less")
        if verdict.cause not in ("connection", "lost"):
            raise ConfigError(f"{sentence}: correct the reward, the data, or --column-mapping")
        logger.warning("%s; the run starts all the same", sentence)


def example_output(question: Question) -> Turn:
    """The expected answer as a model may give it; the prompt again where there is none."""
    token_ids = question.input_token_ids
    return Turn(
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), np.float32),
        weights_versions=(),
        finish_reason="stop",
        text=question.answer or question.input,
    )
