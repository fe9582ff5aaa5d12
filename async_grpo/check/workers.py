"""A worker as it would register, and the room for all of them in a cluster. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from async_grpo.check.facts import Known, Setup
from async_grpo.check.finding import Finding
from async_grpo.cluster.head import ClusterResources
from async_grpo.config.worker_config import WorkerConfig, check_known
from async_grpo.model.model_folder import ModelFacts, engine_positions
from async_grpo.types import WorkerInfo
from async_grpo.types.roles import GENERATION, JUDGE, VERIFIER
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import verifier_config


def as_registered(config: WorkerConfig, model: ModelFacts) -> WorkerInfo:
    """What the trainer would hear of it: enough for `run.recruitment.check_worker`."""
    if config.mode in (GENERATION, JUDGE):
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
    if config.mode not in (GENERATION, JUDGE):
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
    devices = setup.num_ranks * setup.train.gpus_per_rank + sum(
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
