"""Finds the workers that a run needs, and checks that each can serve this run.

consumes:     the controller's members
produces:     a run that can begin, or continue
waits for:    one worker of each role, up to --worker-timeout-s, logging which are missing
unblocked by: a registration
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config import roles
from async_grpo.config.teaching import check_vocabulary
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.environments.find import SHIPPED, asked_services, grades_itself
from async_grpo.model.model_folder import ModelFacts
from async_grpo.run.output_folder import LAUNCH_LOGS
from async_grpo.types import SamplingContract, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, DeadlineError, WorkerError
from async_grpo.util.waiting import poll
from async_grpo.weight_sync.routes import check_route

if TYPE_CHECKING:
    from async_grpo.cluster.handles import ControllerClient

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5
REMIND_INTERVAL_S = 10.0
ANSWER = "--max-generation-tokens"


@dataclass(frozen=True, slots=True)
class SetDemand:
    """What generation workers must be able to sample for a set of held-out questions."""

    name: str
    sampling: SamplingContract
    longest_prompt: int  # in tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What every worker of the run must be able to serve."""

    config: TrainConfig
    model: ModelFacts
    longest_prompt: int  # in tokens
    longest_pair: int = 0  # in tokens; of given pairs, prompt and completion, which teachers score
    devices: tuple[str, ...] = ()  # identities of the ranks' NVIDIA devices; "" on a CPU
    sets: tuple[SetDemand, ...] = ()  # of --eval

    @property
    def device(self) -> str:
        """The device of rank 0, which sends weights."""
        return self.devices[0] if self.devices else ""


def recruit(client: ControllerClient, demand: Demand) -> list[WorkerInfo]:
    """Wait until every role that the run needs has a worker; check and return all of them.

    Raises `DeadlineError` after `--worker-timeout-s`, and `ConfigError` for workers that cannot
    serve this run.
    """
    needed = needed_roles(demand.config)
    return [it for role, why in needed.items() for it in _find(client, role, demand, why)]


def teachers_of(client: ControllerClient, config: TrainConfig) -> dict[str, WorkerInfo]:
    """{teacher: one of its workers}; all workers of a name serve the same model.

    Raises `ConfigError` where a teacher's vocabulary has too few tokens.
    """
    found: dict[str, WorkerInfo] = {}
    for name in config.teacher_names:
        members = client.answer(deadlines.ANSWER_S, client.controller.members, roles.teacher(name))
        if not members:
            raise WorkerError(
                f"the last worker of teacher {name} has ended while the run began: look at its "
                "dispatcher's terminal, and start both again"
            )
        check_vocabulary(config.teaching, members[0].vocab_size)
        found[name] = members[0]
    return found


def needed_roles(config: TrainConfig) -> dict[str, str]:
    """{role: why the run needs a worker of it}, in the order in which they are waited for."""
    found = {roles.GENERATION: ""} if config.asks_questions else {}
    for need in find_algorithm(config).needs:
        why = f"--algorithm {config.objective.algorithm} asks it"
        if need.role == roles.REFERENCE and config.objective.kl_coefficient:
            why = "the KL coefficient is not 0"
        if need.role == roles.TEACHER:
            why = (
                f"--teacher-for {config.options()['teacher_for']}"
                if config.teaching.teacher_for
                else "--data names it"
            )
        found |= dict.fromkeys(roles.named([need.role], config.teacher_names), f" ({why})")
    if not config.asks_questions:
        return found
    if names := config.environments - SHIPPED.keys():
        found[roles.ENVIRONMENT] = f" (--environment {sorted(names)[0]} is played there)"
    judges = map(roles.judge, config.data.judge_names)
    found |= dict.fromkeys(judges, f" (--judges {config.data.judges})")
    for name in sorted(names):
        asked = asked_services(name)
        found |= {roles.service(each): f" ({name} asks services[{each!r}])" for each in asked}
    if not all(map(grades_itself, config.environments)):
        found[roles.VERIFIER] = ""
    return found


def brought_by(workers: Iterable[WorkerConfig]) -> set[str]:
    """The roles of these dispatchers' workers; one of generation with rewards has verifiers too."""
    workers = tuple(workers)
    graded = any(each.role == roles.GENERATION and each.reward_names for each in workers)
    return {each.role for each in workers} | ({roles.VERIFIER} if graded else set())


def check_roles(config: TrainConfig, present: Collection[str], *, where: str) -> None:
    """Raise `ConfigError` for a needed role that is not among those `present` in the run's file."""
    for role, why in needed_roles(config).items():
        if role not in present:
            grades = role == roles.VERIFIER and roles.GENERATION in present
            remedy = "give one --reward-fns" if grades else "add one"
            others = sorted(filter(roles.is_service, present))
            if roles.is_service(role) and others:
                remedy = f"correct the name, for it has {', '.join(others)}, or {remedy}"
            raise ConfigError(f"{where} needs a [[worker]] for the role {role}{why}: {remedy}")


def command_for(role: str, *, model: str) -> str:
    """The command that starts a worker of the role for a trainer of `model`."""
    options = {
        roles.GENERATION: f"--model-path {model} --mode generation",
        roles.REFERENCE: f"--model-path {model} --mode logprob",
        roles.VERIFIER: "--mode verifier --reward-fns NAMES",
        roles.ENVIRONMENT: "--mode environment",
    }
    mode, _, name = role.partition(":")
    own = f"--model-path ITS_MODEL --mode {mode} --name {name}"
    if role == roles.service(roles.REWARD):
        own = "--model-path ITS_MODEL --mode reward"
    elif mode == roles.SERVICE:
        own = f"--mode path/to/file.py:Name --name {name}"
    return f"`python worker_dispatcher.py {options.get(role, own)}`"


def _find(client: ControllerClient, role: str, demand: Demand, why: str) -> tuple[WorkerInfo, ...]:
    remedy = f"start one with {command_for(role, model=demand.config.places.model_name_or_path)}"
    hint = f"where none was started, {remedy}"
    if logs := os.environ.get(LAUNCH_LOGS):
        remedy = hint = f"launch keeps the logs of its workers in {logs}"
    timeout_s, reminded = demand.config.places.worker_timeout_s, float("-inf")
    for _ in poll(every_s=POLL_INTERVAL_S, within_s=timeout_s):
        workers = client.answer(deadlines.ANSWER_S, client.controller.members, role)
        for worker in workers:
            check_worker(worker, demand)
        theirs = {device for worker in workers for device in worker.devices}
        waits = role == roles.GENERATION and demand.config.memory.colocated
        if workers and not (waits and {*filter(None, demand.devices)} - theirs):
            return workers
        now = time.monotonic()
        if now - reminded > REMIND_INTERVAL_S:
            logger.info("waiting for a %s worker to load; %s", role, hint)
            reminded = now
    raise DeadlineError(
        f"no worker registered within --worker-timeout-s {timeout_s:g}: the run needs "
        f"a {role} worker{why}, {remedy}"
    )


def check_worker(worker: WorkerInfo, demand: Demand) -> None:
    """Raise `ConfigError` for a worker that cannot serve this run."""
    config, model, who = demand.config, demand.model, f"worker {worker.worker_id}"
    places = config.places
    _check_device(worker, demand)
    role = roles.role_of(worker.role)
    follows = role.follows
    if role.unit not in ("sequences", "tokens"):  # such workers read texts of any length
        return
    if worker.role == roles.GENERATION:
        if config.memory.colocated and not worker.sleeps:
            raise ConfigError(
                f"--colocated needs generation workers that can sleep, {who} cannot: start it with "
                "--colocated too"
            )
        check_route(config.memory.weight_transport, worker, sender=demand.device)
        for found in demand.sets:
            _check_set(found, worker)
    if worker.temperature is not None and worker.temperature != config.sampling.temperature:
        raise ConfigError(
            f"--temperature {config.sampling.temperature} must be that of {who}, which serves "
            f"{worker.temperature}: give both the same, or leave the worker's out"
        )
    # A teacher's head may be padded to another width: only its tokens must be the same.
    if follows != "own" and worker.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{who} must serve the model that is trained, but its vocabulary has "
            f"{worker.vocab_size} tokens instead of {model.vocab_size}: start it with "
            f"--model-path {places.model_name_or_path} instead of {worker.model_path}"
        )
    if worker.tokenizer_hash and worker.tokenizer_hash != model.tokenizer_hash:
        raise ConfigError(
            f"{who} must have the tokenizer of the model that is trained, but that of "
            f"{worker.model_path} has another hash ({worker.tokenizer_hash[:12]}) than that of "
            f"{places.model_name_or_path} ({model.tokenizer_hash[:12]}): give both the same folder"
        )
    needed = demand.longest_prompt + config.sampling.max_generation_tokens
    row = f"the longest prompt with {ANSWER} {config.sampling.max_generation_tokens}"
    remedy = f"lower {ANSWER}"
    if config.data.data_order == "window":  # nobody has read all prompts
        row, remedy = f"{row}, which may come of --data-order window,", "lower --max-prompt-tokens"
    if config.environments - SHIPPED.keys():  # turns may fill all positions
        needed = min(config.batching.max_tokens_per_gpu, model.max_positions)
        row, remedy = "an episode", "lower the trainer's --max-tokens-per-gpu"
    if follows == "own" and demand.longest_pair > needed:
        needed, row, remedy = demand.longest_pair, "the longest pair of --pairs-path", "drop it"
    if needed > worker.max_model_len:
        flag = "--max-model-len" if worker.role == roles.GENERATION else "--max-tokens-per-gpu"
        raise ConfigError(
            f"{who} serves at most {worker.max_model_len} tokens, {row} needs {needed}: start it "
            f"with a larger {flag}, or {remedy}"
        )


def _check_set(found: SetDemand, worker: WorkerInfo) -> None:
    """Raise `ConfigError` for a worker that cannot sample held-out questions."""
    own = worker.temperature
    if own is not None and own != found.sampling.temperature:
        raise ConfigError(
            f"--eval of {found.name} is sampled at temperature {found.sampling.temperature}, and "
            f"worker {worker.worker_id} serves {own} alone: leave out the worker's --temperature"
        )
    needed = found.longest_prompt + found.sampling.max_tokens
    if needed > worker.max_model_len:
        raise ConfigError(
            f"worker {worker.worker_id} serves at most {worker.max_model_len} tokens, --eval of "
            f"{found.name} needs {needed}: start it with a larger --max-model-len, or lower the "
            "set's max_tokens"
        )


def _check_device(worker: WorkerInfo, demand: Demand) -> None:
    """Raise `ConfigError` for a device that a rank uses too, unless it is shared on purpose.

    Ray keeps them apart only if it knows that the trainer uses the device.
    """
    if demand.config.memory.gpus_per_rank < 1 or (demand.config.memory.colocated and worker.sleeps):
        return
    for rank, device in enumerate(demand.devices):
        if device and device in worker.devices:
            raise ConfigError(
                f"trainer rank {rank} and worker {worker.worker_id} have the same device {device}: "
                "give Ray and trainer others with CUDA_VISIBLE_DEVICES, or share it with "
                "--gpus-per-worker and --gpus-per-rank"
            )
