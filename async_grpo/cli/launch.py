"""Makes the Ray actors that a dispatcher is responsible for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from async_grpo import cluster
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import AsyncGrpoError

if TYPE_CHECKING:
    from async_grpo.verification.config import VerifierConfig

FAILED_SAMPLES = "failed_samples.jsonl"
CALL_TIMEOUT_S = 60.0
POOL_START_TIMEOUT_S = 120.0


def make_registry(role: str) -> Any:
    """The registry of a role, made by whoever asks first."""
    from async_grpo.routing.registry import WorkerRegistry

    return _shared_actor(WorkerRegistry, cluster.registry_name(role)).remote(role)


def make_verifier_pool(config: WorkerConfig) -> Any:
    """The cluster's verifier pool; raises `ConfigError` when a running one grades otherwise."""
    wanted, pool = _verifier_config(config), find_verifier_pool(config)
    running = cluster.wait(pool.config.remote(), timeout_s=CALL_TIMEOUT_S, who="the verifier pool")
    wanted.require_same_rewards(running)
    try:
        cluster.wait(pool.ready.remote(), timeout_s=POOL_START_TIMEOUT_S, who="the verifier pool")
    except AsyncGrpoError:
        ray.kill(pool)  # or the next dispatcher would find a pool that can never grade
        raise
    return pool


def find_verifier_pool(config: WorkerConfig) -> Any:
    """The same, made by whoever asks first, without asking anything of it."""
    from async_grpo.verification.pool import VerifierPool

    here = cluster.on_this_node()  # where the files are that the options name
    actor = _shared_actor(VerifierPool, cluster.VERIFIER_POOL, scheduling_strategy=here)
    return actor.remote(_verifier_config(config))


def _verifier_config(config: WorkerConfig) -> VerifierConfig:
    from async_grpo.verification.config import VerifierConfig

    keeps_failed = config.write_failed_generation_samples
    return VerifierConfig(
        reward_names=config.reward_names,
        registry=config.reward_registry,
        num_verifiers=config.global_num_verifiers,
        timeout_s=config.verifier_timeout_s,
        memory_mib=config.verifier_memory_mib,
        search_paths=(os.getcwd(),),
        failed_samples=os.path.abspath(FAILED_SAMPLES) if keeps_failed else "",
    )


def start_worker(config: WorkerConfig, name: str) -> Any:
    """A worker actor on this node; it is still loading when this returns."""
    if config.mode == "generation":
        return _start_generation_worker(config, name)
    return _start_logprob_worker(config, name)


def resources(config: WorkerConfig) -> dict[str, float]:
    """What one worker takes of this node: a CPU, and devices where Ray has been told of some."""
    on_gpu = cluster.resources_here().get("GPU", 0.0) > 0
    num_gpus = config.tensor_parallel_size if config.mode == "generation" else 1
    return {"CPU": 1.0, "GPU": float(num_gpus) if on_gpu else 0.0}


def _shared_actor(actor_class: type[Any], name: str, **options: Any) -> Any:
    return ray.remote(actor_class).options(
        name=name,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,  # a process that is killed comes back under the same handle
        max_concurrency=100_000,  # each lease has a call that waits for its end
        enable_task_events=False,  # the head would keep a record of every call
        **options,
    )


def _start_generation_worker(config: WorkerConfig, name: str) -> Any:
    from async_grpo.rollout.settings import EngineConfig, worker_environment
    from async_grpo.rollout.worker import GenerationWorker

    engine = EngineConfig(
        model_path=os.path.abspath(config.model_path),
        dtype=config.dtype,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        tensor_parallel_size=config.tensor_parallel_size,
        kv_cache_gib=config.kv_cache_gib,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    on_cpu = not resources(config)["GPU"]
    environment = {"env_vars": worker_environment(on_cpu=on_cpu)}
    return _worker_actor(GenerationWorker, config, runtime_env=environment).remote(
        engine,
        worker_id=name,
        overhead_seqs=config.overhead_seqs,
        temperature=config.temperature or None,
        lease_s=config.worker_lease_s,
    )


def _start_logprob_worker(config: WorkerConfig, name: str) -> Any:
    from async_grpo.reference.worker import LogprobWorker

    return _worker_actor(LogprobWorker, config).remote(
        os.path.abspath(config.model_path),
        worker_id=name,
        max_tokens=config.max_tokens_per_gpu,
        dtype=config.dtype,
        temperature=config.temperature or None,
        lease_s=config.worker_lease_s,
    )


def _worker_actor(actor_class: type[Any], config: WorkerConfig, **options: Any) -> Any:
    taken = resources(config)
    return ray.remote(actor_class).options(
        num_cpus=taken["CPU"],
        num_gpus=taken["GPU"],
        max_concurrency=1000,
        enable_task_events=False,
        scheduling_strategy=cluster.on_this_node(),
        **options,
    )
