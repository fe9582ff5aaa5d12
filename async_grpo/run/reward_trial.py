"""Tries every reward on the first line of its data, before the run begins.

consumes:     the verifier pools; the first question of each data file, with its expected answer as
              the output
produces:     nothing, or the error that refuses the run
waits for:    the verdicts
unblocked by: the pools, where every verification has a time limit
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
from async_grpo.types import GradingRequest, Question, Rewards, Turn, Verdict, VerificationRequest
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.batching.records import BatcherPlan
    from async_grpo.cluster.handles import ControllerClient

logger = logging.getLogger(__name__)


def try_all_rewards(
    client: ControllerClient, plan: BatcherPlan, questions: Sequence[Question] = ()
) -> None:
    """Call `try_rewards` for the first questions of data files, and for the first of each set."""
    config = plan.config
    try_of = partial(
        try_rewards, client, data=config.data, evaluation=config.evaluation,
        timeout_s=config.places.stall_timeout_s,
    )  # fmt: skip
    if questions:
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
    """Raise `ConfigError` for a reward that is missing, or cannot grade one of `questions`.

    They are the first of each data file, or of the set `found`; the rewards of its type, or of the
    set, grade each one, unless its environment does.

    Every pool grades them: later overruns are judged by what the pool graded here. A connection
    that fails may recover, and a lost process need not be the reward's fault: both only warn.
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
    """A request to grade a question's expected answer, by the rewards of its type or set.

    `rewards`: those that the verifiers have. Without rewards of its own, a question is graded by
    all of them, except groupwise ones that another type or set names.
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
    """Raise `ConfigError` for an error of the reward, else return a warning."""
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
    """The expected answer as a model's output; the prompt where there is none."""
    token_ids = question.input_token_ids
    return Turn(
        token_ids=token_ids,
        logprobs=np.zeros(len(token_ids), np.float32),
        weights_versions=(),
        finish_reason="stop",
        text=question.answer or question.input,
    )
