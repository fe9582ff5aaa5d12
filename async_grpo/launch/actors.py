"""Makes the Ray actors of a dispatcher's workers: what each mode starts, and what it takes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from async_grpo.cluster.head import LATE_REGISTRATION
from async_grpo.config.roles import ENVIRONMENT, GENERATION, JUDGE, REWARD, SERVICE, VERIFIER
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.inventory import forwarded, own_ids, usable_devices
from async_grpo.types.worker_info import WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.util.imports import startup_variables

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.cluster.handles import WorkerHandle
    from async_grpo.environments.service import Service

FAILED_SAMPLES = "failed_samples.jsonl"


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Equal workers of one dispatcher."""

    role: str
    num_workers: int
    resources: Mapping[str, float]  # Ray resources of this node that each worker takes
    start: Callable[[str], WorkerHandle]  # makes the actor of a worker id, which loads later
    placed_s: float = deadlines.PLACED_S  # in which its process joins Ray


def worker_kinds(cluster: Cluster, config: WorkerConfig) -> tuple[WorkerKind, ...]:
    """The kinds of workers that a dispatcher starts; generation workers bring a verifier pool."""
    if config.role == VERIFIER:
        return (_verifier_pool(cluster, config),)
    taken = {"CPU": 1.0, "GPU": _devices_taken(cluster, config)} if not config.judge_url else {}
    if config.judge_url or config.kind in (SERVICE, REWARD):
        start = _service_starter(cluster, config, taken)
    else:
        starts = {
            GENERATION: _start_generation_worker,
            JUDGE: _start_generation_worker,
            ENVIRONMENT: _start_environment_worker,
        }.get(config.mode, _start_logprob_worker)
        start = partial(starts, cluster, config, taken)
    placed_s = deadlines.IMPORTED_S if _imports_first(config, taken) else deadlines.PLACED_S
    workers = WorkerKind(config.role, config.num_workers, taken, start, placed_s)
    brings_pool = config.role == GENERATION and config.reward_names
    return (workers, _verifier_pool(cluster, config)) if brings_pool else (workers,)


def _imports_first(config: WorkerConfig, taken: Mapping[str, float]) -> bool:
    """Whether a worker's process imports vLLM, and forks its engine's, before it joins Ray.

    On devices vLLM reads more of the environment of an engine's process when that begins. Clusters
    that have not been told otherwise take a process for lost that imports for a minute first.
    """
    waits = LATE_REGISTRATION.items() <= os.environ.items()
    return config.mode in (GENERATION, JUDGE) and waits and not taken.get("GPU")


def _devices_taken(cluster: Cluster, config: WorkerConfig) -> float:
    """The devices that one worker takes, as Ray counts them; 0.0 on a node without devices.

    Raises `ConfigError` where devices cannot be used, and where Ray counts none of them: a worker
    would take one that Ray does not know to be taken.
    """
    if not config.num_devices or not (here := usable_devices()).devices:
        return 0.0
    if not cluster.resources_here().get("GPU"):
        raise ConfigError(
            f"workers take devices that Ray counts, and of the {here} of this node it counts none: "
            "start Ray here with --num-gpus, or the workers on another node"
        )
    return config.num_devices * config.gpus_per_worker


def _verifier_pool(cluster: Cluster, config: WorkerConfig) -> WorkerKind:
    """Read the reward files here, once, so that a restarted pool grades as the first one did."""
    from async_grpo.verification.config import verifier_config

    wanted = verifier_config(config)
    keeps_failed = config.write_failed_generation_samples
    failed_samples = os.path.abspath(FAILED_SAMPLES) if keeps_failed else ""

    def start(worker_id: str) -> WorkerHandle:
        from async_grpo.verification.pool import VerifierPool

        return _actor(cluster, VerifierPool, {}, max_concurrency=10_000).remote(
            wanted,
            worker_id=worker_id,
            failed_samples=failed_samples,
            lease_s=config.worker_lease_s,
            ray_cpus=cluster.resources_here().get("CPU", 1.0),
        )

    return WorkerKind(VERIFIER, 1, {}, start)


def _start_generation_worker(
    cluster: Cluster, config: WorkerConfig, taken: Mapping[str, float], worker_id: str
) -> WorkerHandle:
    from async_grpo.rollout.early_process import program
    from async_grpo.rollout.generation_worker import GenerationWorker, worker_environment

    kind = GenerationWorker
    if config.mode == JUDGE:
        from async_grpo.rollout.judge import JudgeWorker

        kind = JudgeWorker
    variables = worker_environment(on_cpu=not taken["GPU"]) | forwarded(os.environ)
    runs_in = program() if _imports_first(config, taken) else ""
    return _actor(cluster, kind, taken, variables=variables, program=runs_in).remote(
        replace(config, model_path=os.path.abspath(config.model_path)), worker_id=worker_id
    )


def _service_starter(
    cluster: Cluster, config: WorkerConfig, taken: Mapping[str, float]
) -> Callable[[str], WorkerHandle]:
    """Starts workers of a service: the user's own class, a reward model, or a judge at an address.

    The class's file and the judge's key are read here, once. Only the worker gets the key.
    """
    from async_grpo.environments.service import ServiceWorker, make_service

    make: Callable[[], Service]
    variables: Mapping[str, str] = {}
    if config.judge_url:
        from async_grpo.rollout.judge import RemoteJudge

        make = partial(RemoteJudge, config, key=os.environ[config.judge_key])
        what, hashes = f"{config.model_path} at {config.judge_url}", {}
        own_hash = hashlib.sha256(what.encode()).hexdigest()
    elif config.mode == REWARD:
        from async_grpo.model.model_folder import hash_model
        from async_grpo.rollout.generation_worker import worker_environment
        from async_grpo.rollout.reward_model import RewardModel

        what = os.path.abspath(config.model_path)
        make = partial(RewardModel, replace(config, model_path=what))
        own_hash = hash_model(what)
        hashes = {config.role.replace(":", " "): own_hash}
        variables = worker_environment(on_cpu=not taken["GPU"])
    else:
        code = config.terms.code
        make = partial(make_service, code)
        what, hashes = code.name, code.hashes(config.role.replace(":", " "))
        own_hash = code.sha256

    stated = WorkerInfo(
        "", config.role, "", 0, what, model_hash=own_hash, code=hashes,
        capacity=float(config.capacity), lease_s=config.worker_lease_s,
    )  # fmt: skip
    on_device = bool(taken.get("GPU"))

    variables = {**variables, **(forwarded(os.environ) if on_device else {})}

    def start(worker_id: str) -> WorkerHandle:
        return _actor(cluster, ServiceWorker, taken, variables=variables).remote(
            make,
            stated=replace(stated, worker_id=worker_id),
            devices=own_ids if on_device else tuple,
        )

    return start


def _start_environment_worker(
    cluster: Cluster, config: WorkerConfig, taken: Mapping[str, float], worker_id: str
) -> WorkerHandle:
    """Start a worker that asks the run which environment to play."""
    from async_grpo.cluster.handles import ask_controller
    from async_grpo.environments.environment_worker import EnvironmentWorker
    from async_grpo.verification.jailer import allow_unconfined

    return _actor(cluster, EnvironmentWorker, taken).remote(
        partial(ask_controller, cluster),
        worker_id=worker_id,
        capacity=config.capacity,
        lease_s=config.worker_lease_s,
        confinement=allow_unconfined if config.unconfined_code else dict,
    )


def _start_logprob_worker(
    cluster: Cluster, config: WorkerConfig, taken: Mapping[str, float], worker_id: str
) -> WorkerHandle:
    from async_grpo.rollout.logprob_worker import LogprobWorker

    variables = forwarded(os.environ) if taken["GPU"] else {}
    return _actor(cluster, LogprobWorker, taken, variables=variables).remote(
        os.path.abspath(config.model_path),
        role=config.role,
        worker_id=worker_id,
        max_tokens=config.max_tokens_per_gpu,
        dtype=config.dtype,
        temperature=config.temperature or None,
        num_ranks=config.scorer_ranks,
        on_device=bool(taken["GPU"]),
        memory_share=config.memory_share,
        lease_s=config.worker_lease_s,
    )


def _actor(
    cluster: Cluster,
    actor_class: type,
    taken: Mapping[str, float],
    *,
    max_concurrency: int = 1000,
    variables: Mapping[str, str] = MappingProxyType({}),
    program: str = "",
) -> Any:
    """Make an actor class of this node whose processes get `variables` beside those of Ray.

    Its actors take batched calls. `program`: what Ray starts them with in place of Python.
    """
    from async_grpo.cluster.batched_calls import BatchedActor

    variables = {**startup_variables(os.environ), **variables}
    own = {"py_executable": program} if program else {}
    return cluster.actor(
        type(actor_class.__name__, (actor_class, BatchedActor), {}),
        num_cpus=taken.get("CPU", 0.0),
        num_gpus=taken.get("GPU", 0.0),
        max_concurrency=max_concurrency,
        runtime_env={"env_vars": variables, **own} if variables else None,
    )
