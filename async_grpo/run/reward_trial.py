"""Every reward is called once on the first line of its data, before anything of a run is made.

consumes:     the verifier pools; the first question of each data file, with its own answer as if it
              were an output
produces:     nothing, or the sentence that refuses the run
waits for:    the verdicts
unblocked by: the pools, whose every verification has a limit
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from async_grpo.config.data_files import DataOptions
from async_grpo.config.evaluation_sets import EvaluationOptions, EvaluationSet
from async_grpo.config.roles import VERIFIER
from async_grpo.environments.find import grades_itself
from async_grpo.types import (
    GradingRequest,
    Question,
    Rewards,
    Turn,
    Verdict,
    VerificationRequest,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.batching.records import BatcherPlan
    from async_grpo.cluster.handles import ControllerClient

logger = logging.getLogger(__name__)


def try_all_rewards(
    client: ControllerClient, plan: BatcherPlan, questions: Sequence[Question] | None = None
) -> None:
    """See `try_rewards`: of the first questions of data files, and those of each set."""
    config = plan.config
    try_of = partial(
        try_rewards, client, data=config.data, evaluation=config.evaluation,
        timeout_s=config.places.stall_timeout_s,
    )  # fmt: skip
    if questions is not None:
        try_of(questions)
    for each in plan.sets:
        try_of([each.questions[0]], found=each.config)


def try_rewards(
    client: ControllerClient,
    questions: Sequence[Question],
    *,
    data: DataOptions,
    evaluation: EvaluationOptions,
    timeout_s: float,
    found: EvaluationSet | None = None,
) -> None:
    """Raise `ConfigError` for a reward that cannot grade one of `questions`, or is not there.

    They are the first of each data file, or of `found`, and each is graded by the rewards of its
    type, or of the set, unless its environment grades it.

    Every pool is asked: a later overrun is measured by what its pool graded here. A connection
    that fails may be back in time, and a process that was lost is nobody's fault: both are only
    warned of.
    """
    pools = client.answer(deadlines.ANSWER_S, client.controller.receivers, VERIFIER)
    questions = [
        question
        for question in questions
        if not grades_itself(
            (found and found.environment) or data.environment_of(question.dataset_type)
        )
    ]
    alike = pools[0][0].rewards if pools else None
    requests = [
        request_of(question, data, evaluation, found, rewards=alike) for question in questions
    ]
    for info, _ in pools:
        check_names(info.rewards.names if info.rewards else (), data, evaluation)
    calls = [
        (f"worker {info.worker_id}", question, pool.try_out.remote(request))
        for info, pool in pools
        for question, request in zip(questions, requests, strict=True)
    ]
    warnings: set[str] = set()
    for who, question, call in calls:
        for verdict in client.cluster.wait(call, timeout_s=timeout_s, who=who):
            if verdict.status == "error":
                warnings.add(refuse_or_describe(verdict, question, data, found))
    for sentence in sorted(warnings):
        logger.warning("%s; the run starts all the same", sentence)


def request_of(
    question: Question,
    data: DataOptions,
    evaluation: EvaluationOptions,
    found: EvaluationSet | None = None,
    *,
    rewards: Rewards | None = None,
) -> GradingRequest:
    """A question's own answer, to be graded by the rewards of its type, or of its set.

    `rewards`: what the verifiers have; a groupwise one that another type names is not for this one.
    """
    output = VerificationRequest(0, 0, question, example_output(question))
    asked = (found.rewards if found else ()) or data.rewards_of(question.dataset_type)
    if not asked and rewards and rewards.groupwise:
        of_others = [file.rewards for file in data.data_files]
        of_others += [each.rewards for each in evaluation.eval]
        elsewhere = {*chain.from_iterable(of_others)}.intersection(rewards.groupwise)
        asked = tuple(name for name in rewards.names if name not in elsewhere)
    return GradingRequest((output,), rewards=asked)


def check_names(known: Sequence[str], data: DataOptions, evaluation: EvaluationOptions) -> None:
    """Raise `ConfigError` for a reward of a data file or set that the verifiers do not have."""
    named = [(f"--data of {file.type}", file.rewards) for file in data.data_files]
    named += [(f"--eval of {found.name}", found.rewards) for found in evaluation.eval]
    for whose, names in named:
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{whose} must name rewards that verifiers have, got {name!r}: add it to "
                    f"--reward-fns of their dispatcher, which has {', '.join(known)}"
                )


def refuse_or_describe(
    verdict: Verdict, question: Question, data: DataOptions, found: EvaluationSet | None = None
) -> str:
    """Raise `ConfigError` for a reward that is at fault, else say what has happened."""
    named = found.source if found else None
    path = named.path if named else data.file_of(question.dataset_type).source.path
    sentence = (
        f"reward {verdict.reason}: it must grade the first line of {path}, which has "
        f"{', '.join(question.columns)}"
    )
    if verdict.cause == "overrun":
        raise ConfigError(f"{sentence}: raise the limit, or have the reward do less")
    if verdict.cause not in ("connection", "lost"):
        raise ConfigError(f"{sentence}: correct the reward, the data, or --column-mapping")
    return sentence


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
