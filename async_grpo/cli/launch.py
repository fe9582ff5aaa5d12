"""Makes the Ray actors that a dispatcher is responsible for, and takes them down again."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import ray
from ray.exceptions import RayError

from async_grpo import cluster
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import AsyncGrpoError, WorkerError

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0
POOL_START_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 1.0


def make_registry(role: str) -> Any:
    """The registry of a role, made by whoever asks first."""
    from async_grpo.routing.registry import WorkerRegistry

    return _shared_actor(WorkerRegistry, cluster.registry_name(role)).remote(role)


def make_verifier_pool(config: WorkerConfig) -> Any:
    """The cluster's verifier pool; raises `ConfigError` when a running one grades otherwise."""
    from async_grpo.verification.config import VerifierConfig
    from async_grpo.verification.pool import VerifierPool

    wanted = VerifierConfig(
        reward_names=config.reward_names,
        registry=config.reward_registry,
        num_verifiers=config.global_num_verifiers,
        timeout_s=config.verifier_timeout_s,
        memory_mib=config.verifier_memory_mib,
        search_paths=(os.getcwd(),),
    )
    pool = _shared_actor(VerifierPool, cluster.VERIFIER_POOL).remote(wanted)
    running = cluster.wait(pool.config.remote(), timeout_s=CALL_TIMEOUT_S, who="the verifier pool")
    wanted.require_same_rewards(running)
    try:
        cluster.wait(pool.ready.remote(), timeout_s=POOL_START_TIMEOUT_S, who="the verifier pool")
    except AsyncGrpoError:
        ray.kill(pool)  # or the next dispatcher would find a pool that can never grade
        raise
    return pool


def start_worker(config: WorkerConfig, name: str) -> Any:
    """A worker actor on this node; it is still loading when this returns."""
    if config.mode == "generation":
        return _start_generation_worker(config, name)
    return _start_logprob_worker(config, name)


def register(
    registry: Any, name: str, handle: Any, *, timeout_s: float, stop: threading.Event
) -> None:
    """Wait until a worker has loaded and its registry has admitted it, or `stop` is set."""
    info = handle.info.remote()
    waited = 0.0
    while not ray.wait([info], timeout=POLL_INTERVAL_S)[0]:
        waited += POLL_INTERVAL_S
        if stop.is_set():
            return
        if waited > timeout_s:
            raise WorkerError(
                f"worker {name} was not ready within {timeout_s:g} s: raise --start-timeout-s or "
                "see its log in Ray's session folder"
            )
    details = cluster.wait(info, timeout_s=CALL_TIMEOUT_S, who=f"worker {name}")
    cluster.wait(registry.register.remote(details, handle), timeout_s=timeout_s, who="the registry")


def release(registry: Any, workers: dict[str, Any]) -> None:
    """Take workers out of their registry and end them; a cluster that is gone is no error."""
    for name, handle in workers.items():
        with contextlib.suppress(AsyncGrpoError, RayError):
            cluster.wait(
                registry.deregister.remote(name), timeout_s=POLL_INTERVAL_S * 5, who="the registry"
            )
        with contextlib.suppress(RayError):
            ray.kill(handle)


def _shared_actor(actor_class: type[Any], name: str) -> Any:
    return ray.remote(actor_class).options(
        name=name, get_if_exists=True, lifetime="detached", num_cpus=0, max_concurrency=10_000
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
    on_gpu = _has_gpu()
    options = ray.remote(GenerationWorker).options(
        num_cpus=1,
        num_gpus=config.tensor_parallel_size if on_gpu else 0,
        max_concurrency=1000,
        scheduling_strategy=cluster.on_this_node(),
        runtime_env={"env_vars": worker_environment(on_cpu=not on_gpu)},
    )
    return options.remote(
        engine,
        worker_id=name,
        overhead_seqs=config.overhead_seqs,
        temperature=config.temperature or None,
    )


def _start_logprob_worker(config: WorkerConfig, name: str) -> Any:
    from async_grpo.reference.worker import LogprobWorker

    options = ray.remote(LogprobWorker).options(
        num_cpus=1,
        num_gpus=1 if _has_gpu() else 0,
        max_concurrency=1000,
        scheduling_strategy=cluster.on_this_node(),
    )
    return options.remote(
        os.path.abspath(config.model_path),
        worker_id=name,
        max_tokens=config.max_tokens_per_gpu,
        dtype=config.dtype,
        temperature=config.temperature or None,
    )


def _has_gpu() -> bool:
    return ray.cluster_resources().get("GPU", 0) > 0
