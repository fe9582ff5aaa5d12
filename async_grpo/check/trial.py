"""The rewards' first call, as a run's verifiers make it, in processes of this command alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.environments.find import grades_itself
from async_grpo.run.reward_trial import check_names, request_of
from async_grpo.types import Question, Verdict
from async_grpo.types.roles import GENERATION, VERIFIER
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig, verifier_config
from async_grpo.verification.confinement import wanted_isolation, why_unconfined
from async_grpo.verification.sandbox import Sandbox
from async_grpo.verification.tasks import adapter_sample

TRIAL_S = 4.0  # of all rewards of a dispatcher on one line, beyond which the rest is the run's


@dataclass(frozen=True, slots=True)
class Trial:
    """What one reward of a dispatcher said of the expected answer of a question."""

    worker: WorkerConfig
    question: Question
    verdict: Verdict | None  # None: none came within `TRIAL_S`


@dataclass(frozen=True, slots=True)
class Tried:
    """What all rewards said, and how they ran."""

    trials: tuple[Trial, ...] = ()
    confinement: Mapping[str, str] = field(default_factory=dict)  # see `types.worker_info`
    unseen: tuple[str, ...] = ()  # sentences on rewards that were not imported


def try_here(
    workers: Sequence[WorkerConfig],
    questions: Sequence[Question],
    config: TrainConfig,
    *,
    trusted: bool,
) -> Tried:
    """Have the rewards of each dispatcher grade what verifiers grade of these questions.

    Without questions they are only loaded. Unless they are `trusted` they have no network, and are
    left out where they cannot be confined, though the run may permit that. Raises `ConfigError` for
    a reward that cannot be, or that no dispatcher brings.
    """
    if all(map(grades_itself, config.environments)):
        return Tried()
    graded = [q for q in questions if not grades_itself(config.environment_of(q.dataset_type))]
    pools = [w for w in workers if w.role in (GENERATION, VERIFIER) and w.reward_names]
    for worker in pools:
        check_names(worker.reward_names, config)
    tried = []
    for worker in pools:
        found = verifier_config(worker)
        if not trusted:
            found = replace(found, network=False, unconfined_rewards=False, unconfined_code=False)
        try:
            tried.append(asyncio.run(_try(found, worker, graded, config)))
        except ConfigError:
            why = why_unconfined(wanted_isolation(found, shipped=False))
            if trusted or not why or not (worker.unconfined_rewards or worker.unconfined_code):
                raise
            tried.append(Tried(unseen=(f"{worker.reward_fns} will run UNCONFINED ({why})",)))
    return Tried(
        tuple(trial for each in tried for trial in each.trials),
        {what: why for each in tried for what, why in each.confinement.items()},
        tuple(sentence for each in tried for sentence in each.unseen),
    )


async def _try(
    found: VerifierConfig, worker: WorkerConfig, questions: Sequence[Question], config: TrainConfig
) -> Tried:
    sandbox = Sandbox(found, num_processes=os.cpu_count() or 1)
    try:
        async with asyncio.timeout(found.start_timeout_s):
            await sandbox.start()
        rewards = replace(found.rewards(num_cores=1), groupwise=sandbox.groupwise)
        trials: list[Trial] = []
        for question in questions:
            request = request_of(question, config, rewards=rewards)
            sample = adapter_sample(request.outputs[0])
            verdicts: Sequence[Verdict | None] = (None,)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRIAL_S):
                    verdicts = await sandbox.grade_with_each(sample, request.rewards)
            trials += [Trial(worker, question, verdict) for verdict in verdicts]
        return Tried(tuple(trials), sandbox.confinement)
    except TimeoutError:
        raise ConfigError(
            f"--reward-fns {worker.reward_fns} must be imported within {found.start_timeout_s:g} "
            "s, but were not: have their file do less when it is imported"
        ) from None
    finally:
        await sandbox.close()
