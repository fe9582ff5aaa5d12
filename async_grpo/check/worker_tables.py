"""What a run's [[worker]] tables would start: what each would register as, and what is refused.

`try_here` calls the rewards of dispatchers in processes of this command, as a run's verifiers do;
`room_in` compares what all workers take with what a cluster has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from async_grpo.check.finding import Finding, Known, Setup
from async_grpo.cluster.head import ClusterResources
from async_grpo.config.roles import ENGINES, GENERATION, VERIFIER
from async_grpo.config.worker_config import WorkerConfig, check_known
from async_grpo.environments.find import grades_itself
from async_grpo.model.model_folder import ModelFacts, engine_positions
from async_grpo.run.reward_trial import check_names, request_of
from async_grpo.types import Question, Verdict, WorkerInfo
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig, verifier_config
from async_grpo.verification.confinement import wanted_isolation, why_unconfined
from async_grpo.verification.sandbox import Sandbox
from async_grpo.verification.tasks import adapter_sample

TRIAL_S = 4.0  # longest wait for all rewards of a dispatcher on one line


@dataclass(frozen=True, slots=True)
class Trial:
    """The verdict of one reward of a dispatcher on the expected answer of a question."""

    worker: WorkerConfig
    question: Question
    verdict: Verdict | None  # None: none came within `TRIAL_S`


@dataclass(frozen=True, slots=True)
class Tried:
    """The verdicts of all rewards, and how they were confined."""

    trials: tuple[Trial, ...] = ()
    confinement: Mapping[str, str] = field(default_factory=dict)  # see `WorkerInfo`
    unseen: tuple[str, ...] = ()  # sentences on rewards that were not imported


def try_here(setup: Setup, questions: Sequence[Question]) -> Tried:
    """Have the rewards of each dispatcher grade what verifiers grade of these questions.

    Without questions they are only loaded. Unless they are trusted they have no network, and are
    left out where they cannot be confined, though the run may permit that. Raises `ConfigError` for
    a reward that cannot be, or that no dispatcher brings.
    """
    config, trusted = setup.train, setup.trusted
    if all(map(grades_itself, config.environments)):
        return Tried()
    graded = [q for q in questions if not grades_itself(config.data.environment_of(q.dataset_type))]
    pools = [w for w in setup.workers if w.role in (GENERATION, VERIFIER) and w.reward_names]
    for worker in pools:
        check_names(worker.reward_names, config.data, config.evaluation)
    tried = []
    for worker in pools:
        found = verifier_config(worker)
        if not trusted:
            found = replace(found, network=False, unconfined_rewards=False, unconfined_code=False)
        try:
            tried.append(asyncio.run(_try(found, worker, graded, setup)))
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
    found: VerifierConfig, worker: WorkerConfig, questions: Sequence[Question], setup: Setup
) -> Tried:
    sandbox = Sandbox(found, num_processes=os.cpu_count() or 1)
    try:
        async with asyncio.timeout(found.start_timeout_s):
            await sandbox.start()
        rewards = replace(found.rewards(num_cores=1), groupwise=sandbox.groupwise)
        trials: list[Trial] = []
        for question in questions:
            request = request_of(
                question, setup.train.data, setup.train.evaluation, rewards=rewards
            )
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


def as_registered(config: WorkerConfig, model: ModelFacts) -> WorkerInfo:
    """The registration of such a worker, as far as `run.recruitment.check_worker` reads it."""
    if config.mode in ENGINES:
        longest = config.max_model_len or model.max_positions
    else:
        longest = min(config.max_tokens_per_gpu, model.max_positions)
    return WorkerInfo(
        worker_id=f"of [[worker]] {config.role}",
        role=config.role,
        node_id="",
        pid=0,
        model_path=config.model_path,
        vocab_size=model.vocab_size,
        capacity=float(config.max_num_seqs),
        overhead=0.0,
        max_model_len=longest,
        tokenizer_hash=model.tokenizer_hash,
        temperature=config.temperature or None,
        devices=("its own",),
    )


def check_engine(
    config: WorkerConfig, model: Known[ModelFacts] | None, option_names: Collection[str]
) -> None:
    """Raise `ConfigError` for what vLLM would refuse once it has been started."""
    if config.mode not in ENGINES:
        return
    if option_names:
        check_known(config.engine_options, option_names)
    heads, devices = model.num_heads if isinstance(model, ModelFacts) else 0, config.num_devices
    if devices and heads % devices:  # a judge at an address takes none
        raise ConfigError(
            f"--tensor-parallel-size must divide the {heads} attention heads of "
            f"{config.model_path}, got {devices}: choose a divisor"
        )
    most = engine_positions(Path(model.path)) if isinstance(model, ModelFacts) else None
    if most and config.max_model_len > most and not config.judge_url:
        raise ConfigError(
            f"--max-model-len must not exceed the {most} positions of {config.model_path}, got "
            f"{config.max_model_len}: lower it, or leave it out"
        )


def check_same_rewards(workers: Sequence[WorkerConfig]) -> None:
    """Raise `ConfigError` for dispatchers that bring different rewards to one run."""
    rewards = [
        verifier_config(each).rewards(num_cores=1)
        for each in workers
        if each.role in (GENERATION, VERIFIER) and each.reward_names
    ]
    for other in rewards[1:]:
        other.require_equal(rewards[0], users="another [[worker]] of this run")


def room_in(cluster: ClusterResources, setup: Setup, *, address: str) -> Finding:
    """Whether a cluster that is joined has what the run's file starts on it, and has it free.

    A worker takes one CPU, verifiers and judges behind a URL none; devices count where Ray counts
    some. That a dispatcher's workers share its own machine is not looked at.
    """
    workers = [each for each in setup.workers if each.mode != VERIFIER and not each.judge_url]
    cpus = float(sum(each.num_workers for each in workers))
    memory = setup.train.memory
    devices = setup.num_ranks * memory.gpus_per_rank * (not memory.colocated) + sum(
        each.num_workers * each.num_devices * each.gpus_per_worker for each in workers
    )
    machines = "1 machine" if cluster.num_machines == 1 else f"{cluster.num_machines} machines"
    has = (
        f"the Ray cluster at {address} has {machines}, {cluster.free_cpus:g} of "
        f"{cluster.cpus:g} CPUs and {cluster.free_devices:g} of {cluster.devices:g} devices free"
    )
    counted = {"CPUs": (cpus, cluster.free_cpus, cluster.cpus)}
    if cluster.devices:
        counted["devices"] = (devices, cluster.free_devices, cluster.devices)
    takes = "the run takes " + ", ".join(f"{counted[kind][0]:g} {kind}" for kind in counted)
    short = [kind for kind, (need, free, _) in counted.items() if need > free]
    if not short:
        return Finding("ok", "cluster", f"{has}; {takes}")
    fits = all(need <= total for need, _, total in counted.values())
    remedy = "end other runs" if fits else "add machines, or start fewer workers"
    return Finding(
        "warning", "cluster", f"{has}; {takes}; of {' and '.join(short)} it has too few: {remedy}"
    )
