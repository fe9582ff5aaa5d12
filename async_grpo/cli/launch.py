"""Makes the Ray actors that a dispatcher is responsible for."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import ray

from async_grpo import cluster
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import AsyncGrpoError, ProcessLostError

FAILED_SAMPLES = "failed_samples.jsonl"
CALL_TIMEOUT_S = 60.0
POOL_START_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.2
VERIFIERS = "the verifier pool"


def make_registry(role: str) -> Any:
    """The registry of a role, made by whoever asks first."""
    from async_grpo.controller.registry import WorkerRegistry

    return _shared_actor(WorkerRegistry, cluster.registry_name(role)).remote(role)


class VerifierPools:
    """A dispatcher's way to the cluster's verifier pool, whichever has that name at the moment.

    The reward files are read here, once: a pool that is made again grades as the one before.
    """

    def __init__(self, config: WorkerConfig) -> None:
        from async_grpo.verification.config import VerifierConfig
        from async_grpo.verification.dispatchers import Dispatcher
        from async_grpo.verification.sources import read_sources

        names, registry, here = config.reward_names, config.reward_registry, (os.getcwd(),)
        self._wanted = VerifierConfig(
            reward_names=names,
            registry=registry,
            num_verifiers=config.global_num_verifiers,
            timeout_s=config.verifier_timeout_s,
            memory_mib=config.verifier_memory_mib,
            network=config.verifier_network,
            environment=config.verifier_variables,
            search_paths=here,
            sources=read_sources(names, registry=registry, search_paths=here),
        )
        keeps_failed = config.write_failed_generation_samples
        failed_samples = os.path.abspath(FAILED_SAMPLES) if keeps_failed else ""
        self._me = Dispatcher(socket.gethostname(), os.getpid(), failed_samples)

    def make(self) -> Any:
        """The pool, ready; raises `ConfigError` when others still grade with other rewards."""
        deadline = time.monotonic() + POOL_START_TIMEOUT_S
        while True:
            pool = self.find()
            try:
                cluster.wait(self.join(pool), timeout_s=CALL_TIMEOUT_S, who=VERIFIERS)
                self._await_ready(pool)
            except ProcessLostError:  # that of earlier dispatchers has just ended
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_INTERVAL_S)
            else:
                return pool

    def _await_ready(self, pool: Any) -> None:
        try:
            cluster.wait(pool.ready.remote(), timeout_s=POOL_START_TIMEOUT_S, who=VERIFIERS)
        except ProcessLostError:
            raise
        except AsyncGrpoError:
            ray.kill(pool)  # or the next dispatcher would find a pool that can never grade
            raise

    def find(self) -> Any:
        """The same, made by whoever asks first, without asking anything of it."""
        from async_grpo.verification.pool import VerifierPool

        here = cluster.on_this_node()  # where the files are that the options name
        actor = _shared_actor(VerifierPool, cluster.VERIFIER_POOL, scheduling_strategy=here)
        return actor.remote(self._wanted)

    def join(self, pool: Any) -> Any:
        """The call that says: this dispatcher lives, and needs the pool."""
        return pool.join.remote(self._me, self._wanted)

    def leave(self, pool: Any) -> Any:
        """The call that says the opposite."""
        return pool.leave.remote(self._me)


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
    from async_grpo.scoring.worker import LogprobWorker

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
