"""Finds the workers that a run needs, and asks of each whether it can serve this run.

consumes:     the registries' members
produces:     the services of the run
waits for:    one worker a role, up to --worker-timeout-s, telling which are missing
unblocked by: a registration
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from async_grpo import cluster
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.services import Services
from async_grpo.config.train import TrainConfig
from async_grpo.errors import ClusterError, ConfigError, DeadlineError, WorkerError
from async_grpo.types import WorkerInfo
from async_grpo.weight_sync.routes import check_route

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5
REMIND_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What every worker of the run must be able to serve."""

    config: TrainConfig
    vocab_size: int
    longest_prompt: int  # in tokens
    tokenizer_hash: str = ""
    device: str = ""  # the identity of the trainer's NVIDIA device, empty when it has none

    @property
    def longest_sample(self) -> int:
        return self.longest_prompt + self.config.max_generation_tokens


@dataclass(frozen=True, slots=True)
class _Need:
    """A role that the run cannot do without."""

    role: str
    why: str
    command: str


def find_services(demand: Demand) -> Services:
    """Wait for the workers that the run needs, and check them.

    Raises `DeadlineError` after `--worker-timeout-s`, `ConfigError` for workers that cannot serve
    this run, `ClusterError` when nobody can grade.
    """
    dispatcher = f"`python worker_dispatcher.py --model-path {demand.config.model_name_or_path}"
    generation = _find(_Need("generation", "", f"{dispatcher} --mode generation`"), demand)
    reference = None
    if find_algorithm(demand.config).needs_reference:
        why = " (the KL coefficient is not 0)"
        reference = _find(_Need("logprob", why, f"{dispatcher} --mode logprob`"), demand)
    verifiers = cluster.find_actor(cluster.VERIFIER_POOL)
    if verifiers is None:
        raise ClusterError(
            "the verifier pool of the generation workers has gone: start their dispatchers again"
        )
    return Services(generation=generation, verifiers=verifiers, reference=reference)


def _find(need: _Need, demand: Demand) -> Any:
    """The registry of a role, once it has a worker; all that it has are checked."""
    timeout_s = demand.config.worker_timeout_s
    started, reminded = time.monotonic(), float("-inf")
    while True:
        registry = cluster.find_actor(cluster.registry_name(need.role))
        workers = _members(registry) if registry is not None else ()
        for worker in workers:
            check_worker(worker, demand)
        if workers:
            return registry
        now = time.monotonic()
        if now - started > timeout_s:
            raise DeadlineError(
                f"no worker registered within --worker-timeout-s {timeout_s:g}: the run needs "
                f"a {need.role} worker{need.why}, start one with {need.command}"
            )
        if now - reminded > REMIND_INTERVAL_S:
            logger.info(
                "waiting for a %s worker; if none is loading, start one with %s",
                need.role,
                need.command,
            )
            reminded = now
        time.sleep(POLL_INTERVAL_S)


def _members(registry: Any) -> tuple[WorkerInfo, ...]:
    """Who is registered; nobody in a registry that ends at this moment for want of members."""
    try:
        workers: tuple[WorkerInfo, ...] = cluster.wait(
            registry.members.remote(), timeout_s=CALL_TIMEOUT_S, who="the registry"
        )
    except WorkerError:
        return ()
    return workers


def check_worker(worker: WorkerInfo, demand: Demand) -> None:
    """Raise `ConfigError` for a worker whose answers this run could not use."""
    config, who = demand.config, f"worker {worker.worker_id}"
    if worker.role == "generation":
        check_route(config.weight_transport, worker, sender=demand.device)
    if worker.temperature is not None and worker.temperature != config.temperature:
        raise ConfigError(
            f"--temperature {config.temperature} must be that of {who}, which serves "
            f"{worker.temperature}: give both the same, or leave the worker's out"
        )
    if worker.vocab_size != demand.vocab_size:
        raise ConfigError(
            f"{who} must serve the model that is trained, but its vocabulary has "
            f"{worker.vocab_size} tokens instead of {demand.vocab_size}: start it with "
            f"--model-path {config.model_name_or_path} instead of {worker.model_path}"
        )
    if worker.tokenizer_hash and worker.tokenizer_hash != demand.tokenizer_hash:
        raise ConfigError(
            f"{who} must have the tokenizer of the model that is trained, but that of "
            f"{worker.model_path} has another hash ({worker.tokenizer_hash[:12]}) than that of "
            f"{config.model_name_or_path} ({demand.tokenizer_hash[:12]}): give both the same folder"
        )
    if demand.longest_sample > worker.max_model_len:
        flag = "--max-model-len" if worker.role == "generation" else "--max-tokens-per-gpu"
        raise ConfigError(
            f"{who} serves at most {worker.max_model_len} tokens, the longest prompt with "
            f"--max-generation-tokens {config.max_generation_tokens} needs "
            f"{demand.longest_sample}: start it with a larger {flag}, or lower "
            "--max-generation-tokens"
        )
