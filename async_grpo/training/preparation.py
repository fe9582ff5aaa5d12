"""Everything that can be wrong with a run, found on rank 0 before anything of it is made."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from transformers import AutoTokenizer

from async_grpo import cluster
from async_grpo.batching.pipeline import Services
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.train import TrainConfig
from async_grpo.data.columns import parse_column_mapping
from async_grpo.data.questions import load_questions
from async_grpo.data.stream import QuestionStream, sampling_seed
from async_grpo.errors import ConfigError, DeadlineError
from async_grpo.model.folder import ModelFacts, check_model_folder
from async_grpo.telemetry.trackers import check_trackers
from async_grpo.training.report import METRICS_FILE
from async_grpo.types import Question, SamplingContract, WorkerInfo

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.5
REMIND_INTERVAL_S = 10.0


def check_run(config: TrainConfig) -> ModelFacts:
    """Model, trackers and output folder, before anything of the run is made."""
    facts = check_model_folder(config.model_name_or_path)
    check_trackers(config.tracker_names)
    metrics = Path(config.output_dir) / METRICS_FILE
    if metrics.exists() and not config.overwrite:
        raise ConfigError(
            f"--output-dir {config.output_dir} holds a run already: name another folder, "
            "or replace it with --overwrite"
        )
    return facts


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What rank 0 alone holds of a run."""

    plan: BatcherPlan
    services: Services
    batcher: Any

    def close(self) -> None:
        """Let go of the workers, then end the batcher: until then nobody else may have them."""
        ends = [registry.end_run.remote() for registry in self.services.registries]
        with contextlib.suppress(RayError):
            ray.wait(ends, num_returns=len(ends), timeout=CLOSE_TIMEOUT_S)
            ray.kill(self.batcher)


def open_run(config: TrainConfig, *, num_ranks: int) -> Run:
    """Check everything that can be wrong, find the workers, start the batcher; in this order."""
    facts = check_run(config)
    plan = plan_run(config, facts, num_ranks=num_ranks)
    cluster.connect(config.ray_address, namespace=config.namespace)
    services = find_services(config, plan)
    return Run(plan, services, start_batcher(plan, services))


def plan_run(config: TrainConfig, facts: ModelFacts, *, num_ranks: int) -> BatcherPlan:
    """Load and check all questions."""
    questions = _load(config, facts, config.data_path)
    held_out = _load(config, facts, config.eval_data_path) if config.eval_data_path else ()
    seed = config.infinite_sampler_seed
    order = QuestionStream(len(questions), seed=seed)
    return BatcherPlan(
        config=config,
        questions=questions,
        held_out=held_out,
        order=order.index,
        seed_of=partial(_seed_of, seed) if config.deterministic else None,
        sampling=SamplingContract(
            config.temperature, facts.stop_token_ids, config.max_generation_tokens
        ),
        num_ranks=num_ranks,
        # Later than that of any earlier run on these workers, so that they never take its
        # weights for ours.
        incarnation=time.time_ns() // 1_000_000,
    )


def _load(config: TrainConfig, facts: ModelFacts, path: str) -> tuple[Question, ...]:
    room = min(config.max_tokens_per_gpu, facts.max_positions) - config.max_generation_tokens
    if room < 1:
        raise ConfigError(
            f"--max-generation-tokens ({config.max_generation_tokens}) must leave room for a "
            f"prompt in the model's {facts.max_positions} positions: lower it"
        )
    return load_questions(
        path,
        split=config.data_split,
        column_mapping=parse_column_mapping(config.column_mapping),
        tokenizer=AutoTokenizer.from_pretrained(config.model_name_or_path),
        vocab_size=facts.vocab_size,
        max_prompt_tokens=room,
    )


def _seed_of(run_seed: int, ordinal: int) -> int:
    return sampling_seed(run_seed, ordinal=ordinal, attempt=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Need:
    """A service that a run cannot start without."""

    actor: str
    label: str
    command: str


def find_services(config: TrainConfig, plan: BatcherPlan) -> Services:
    """Wait for the workers that the run needs, telling which are missing, and check them.

    Raises `DeadlineError` after `--worker-timeout-s`, `ConfigError` for workers that cannot serve
    this run.
    """
    dispatcher = f"`python worker_dispatcher.py --model-path {config.model_name_or_path}"
    needs = [
        _Need(
            cluster.registry_name("generation"),
            "a generation worker",
            f"{dispatcher} --mode generation`",
        )
    ]
    if config.needs_reference:
        needs.append(
            _Need(
                cluster.registry_name("logprob"),
                "a logprob worker (the KL coefficient is not 0)",
                f"{dispatcher} --mode logprob`",
            )
        )
    registries = [_wait_for_workers(need, config, plan) for need in needs]
    verifiers = cluster.find_actor(cluster.VERIFIER_POOL)
    if verifiers is None:
        raise ClusterError(
            "the verifier pool of the generation workers has gone: start their dispatchers again"
        )
    return Services(
        generation=registries[0],
        verifiers=verifiers,
        reference=registries[1] if config.needs_reference else None,
    )


def _wait_for_workers(need: _Need, config: TrainConfig, plan: BatcherPlan) -> Any:
    """The registry of a role, once it has a worker; all that it has are checked."""
    timeout_s = config.worker_timeout_s
    started, reminded = time.monotonic(), float("-inf")
    while True:
        registry = cluster.find_actor(need.actor)
        workers = _members(registry) if registry is not None else ()
        for worker in workers:
            _check_worker(worker, config, plan)
        if workers:
            return registry
        now = time.monotonic()
        if now - started > timeout_s:
            raise DeadlineError(
                f"no worker registered within --worker-timeout-s {timeout_s:g}: the run needs "
                f"{need.label}, start one with {need.command}"
            )
        if now - reminded > REMIND_INTERVAL_S:
            logger.info("waiting for %s: start one with %s", need.label, need.command)
            reminded = now
        time.sleep(POLL_INTERVAL_S)


def _members(registry: Any) -> tuple[WorkerInfo, ...]:
    """Who is registered; nobody, in a registry that ends at this moment for want of members."""
    try:
        workers: tuple[WorkerInfo, ...] = cluster.wait(
            registry.members.remote(), timeout_s=CALL_TIMEOUT_S, who="the registry"
        )
    except WorkerError:
        return ()
    return workers


def _check_worker(worker: WorkerInfo, config: TrainConfig, plan: BatcherPlan) -> None:
    if worker.temperature is not None and worker.temperature != config.temperature:
        raise ConfigError(
            f"--temperature {config.temperature} must be that of worker {worker.worker_id}, which "
            f"serves {worker.temperature}: give both the same, or leave the worker's out"
        )
    if worker.vocab_size != plan.vocab_size:
        raise ConfigError(
            f"worker {worker.worker_id} must serve the model that is trained, but its vocabulary "
            f"has {worker.vocab_size} tokens instead of {plan.vocab_size}: start it with "
            f"--model-path {config.model_name_or_path}, not {worker.model_path}"
        )
    flag = "--max-model-len" if worker.role == "generation" else "--max-tokens-per-gpu"
    if plan.longest_sample > worker.max_model_len:
        raise ConfigError(
            f"worker {worker.worker_id} serves at most {worker.max_model_len} tokens, the longest "
            f"prompt with --max-generation-tokens {config.max_generation_tokens} needs "
            f"{plan.longest_sample}: start it with a larger {flag}, or lower "
            "--max-generation-tokens"
        )


def start_batcher(plan: BatcherPlan, services: Services) -> Any:
    """The run's batcher, beside rank 0, and ended with it."""
    from async_grpo.batching.batcher import ExperienceBatcher

    for registry in (services.generation, services.reference):
        if registry is not None:
            cluster.wait(registry.begin_run.remote(), timeout_s=CALL_TIMEOUT_S, who="the registry")
    options = ray.remote(ExperienceBatcher).options(
        name=cluster.BATCHER,
        num_cpus=0,
        max_concurrency=10_000,
        scheduling_strategy=cluster.on_this_node(),
    )
    try:
        return options.remote(plan, services)
    except ValueError as error:
        raise ConfigError(
            "another trainer uses these workers: wait for it, or start workers and trainer with "
            "another --namespace"
        ) from error
