"""The dtype of published weights, whether an adapter goes alone, and by which transport. Pure.

A device is named by the identity that its driver gives it, which is the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from async_grpo.config.roles import GENERATION, role_of
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import LARGEST_RANK, WorkerConfig
from async_grpo.types import WorkerInfo
from async_grpo.util.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

OBJECT_STORE = "object_store"
OWN_DEVICE = "a device of its own for every process, but"


def published_dtype(workers: Iterable[WorkerInfo]) -> str:
    """The narrowest dtype that loses no precision for the workers that load the policy's weights.

    >>> from async_grpo.types import WorkerInfo
    >>> each = {
    ...     dtype: WorkerInfo("w", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, dtype=dtype)
    ...     for dtype in ("bfloat16", "float16", "float32")
    ... }
    >>> published_dtype([each["bfloat16"]]), published_dtype([each["float16"]])
    ('bfloat16', 'float32')
    >>> published_dtype([each["bfloat16"], each["float32"]])
    'float32'
    """
    loading = (worker for worker in workers if role_of(worker.role).loads_weights)
    return "bfloat16" if {worker.dtype for worker in loading} == {"bfloat16"} else "float32"


def served_dtype(workers: Iterable[WorkerInfo]) -> str:
    """The least precise dtype that generation workers compute in.

    >>> served_dtype([WorkerInfo("w", "generation", "n", 1, dtype="bfloat16")])
    'bfloat16'
    """
    served = {each.dtype for each in workers if each.role == GENERATION}
    return next((each for each in ("bfloat16", "float16") if each in served), "float32")


def publishes_adapter(
    config: TrainConfig, adapter: Mapping[str, Any], workers: Iterable[WorkerInfo]
) -> tuple[bool, str]:
    """Whether workers are sent the run's adapter alone, not merged weights, and why, in words.

    `adapter`: peft's configuration of it, by peft's names. Raises `ConfigError` where
    --adapter-publication adapter is given and cannot be, and for workers that take the other kind.
    """
    asked, workers = config.adapter.adapter_publication, tuple(workers)
    why, remedy = next(_why_merged(config, adapter, workers), ("", ""))
    if asked == "merged":
        why = "--adapter-publication is merged"
    if why and asked == "adapter":
        raise config.adapter.refusal("adapter_publication", f"must be merged: {why}", remedy)
    of_adapters = [each.worker_id for each in workers if each.max_lora_rank]
    if why and of_adapters:  # vLLM cannot load weights into the layers of such an engine
        raise ConfigError(
            "--max-lora-rank is for workers that are sent adapters alone, this run's is merged "
            f"({why}), got worker {of_adapters[0]}: start it without"
        )
    return not why, why or "they are started for it, and a merge would round its change away"


def serving_adapters(
    config: TrainConfig,
    adapter: Mapping[str, Any],
    workers: Iterable[WorkerConfig],
    *,
    on_cpu: bool,
) -> tuple[WorkerConfig, ...]:
    """Tables of workers, with room for adapters where these do not say and the run sends adapters.

    `adapter`: as in `publishes_adapter`; empty: none trains.
    """
    workers, rank = tuple(workers), adapter_rank(adapter) if adapter else 0
    asked = config.adapter.adapter_publication
    infos = [as_stated(each, on_cpu=on_cpu) for each in workers]
    loses = any(each.dtype == "bfloat16" for each in infos if each.role == GENERATION)
    is_wanted = asked == "adapter" or (asked == "auto" and loses)
    says = any(each.max_lora_rank for each in workers)
    if not is_wanted or says or not 0 < rank <= LARGEST_RANK:
        return workers
    able = tuple(
        replace(w, max_lora_rank=rank, max_loras=max(w.max_loras, num_adapters(config)))
        if w.mode == GENERATION
        else w
        for w in workers
    )
    stated = [as_stated(each, on_cpu=on_cpu) for each in able]
    return able if not next(_why_merged(config, adapter, stated), None) else workers


def as_stated(config: WorkerConfig, *, on_cpu: bool) -> WorkerInfo:
    """What workers of a table would state, as far as `publishes_adapter` reads it."""
    dtype = config.dtype if config.dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    return WorkerInfo(
        f"of [[worker]] {config.role}",
        config.role,
        "",
        0,
        dtype=dtype,
        max_lora_rank=config.max_lora_rank,
        max_loras=config.max_loras,
    )


def _why_merged(
    config: TrainConfig, adapter: Mapping[str, Any], workers: Iterable[WorkerInfo]
) -> Iterator[tuple[str, str]]:
    """(why workers cannot be sent the adapter alone, what would change that)."""
    if adapter.get("use_dora"):
        yield "vLLM serves no adapter with --use-dora", "leave out one of the two"
    if saved := adapter.get("modules_to_save"):
        yield (
            f"vLLM serves no other modules beside an adapter ({', '.join(saved)})",
            ("leave out one of --modules-to-save and this"),
        )
    if adapter.get("target_parameters"):
        yield "vLLM on a CPU serves no adapters of experts", "name dense layers as --lora-targets"
    rank = adapter_rank(adapter)
    if rank > LARGEST_RANK:
        yield f"vLLM serves ranks up to {LARGEST_RANK}, this one is {rank}", "lower --lora-rank"
    scores_reference = config.objective.kl_coefficient and not config.trainer_scores_reference
    others = any(role_of(w.role).loads_weights and w.role != GENERATION for w in workers)
    if scores_reference or others:
        yield (
            "a reference worker takes weights of the whole model",
            ("--adapter-reference trainer and --kl-estimator k3 need none"),
        )
    dtypes = sorted({each.dtype for each in workers if each.role == GENERATION})
    if len(dtypes) > 1:
        yield (
            f"it would be rounded otherwise in workers of {' and '.join(dtypes)}",
            "give one --dtype",
        )
    num_loras = num_adapters(config)
    for each in workers:
        if each.role != GENERATION:
            continue
        if each.max_lora_rank < rank:
            yield (
                f"worker {each.worker_id} serves adapters up to rank {each.max_lora_rank}",
                (f"start it with --max-lora-rank {rank}"),
            )
        if each.max_loras < num_loras:
            yield (
                (
                    f"worker {each.worker_id} serves {each.max_loras} adapters at a time, and "
                    f"{num_loras} versions may be in use"
                ),
                f"start it with --max-loras {num_loras}",
            )


def num_adapters(config: TrainConfig) -> int:
    """Versions of an adapter that an engine serves at a time: of requests, and the next.

    >>> num_adapters(TrainConfig(model_name_or_path="m", data_path="d", max_staleness=1))
    3
    """
    return config.sampling.max_staleness + 2 + bool(config.evaluation_sets)


def adapter_rank(adapter: Mapping[str, Any]) -> int:
    """The largest rank of an adapter's layers.

    >>> adapter_rank({"r": 8, "rank_pattern": {"q_proj": 16}})
    16
    """
    return max(adapter["r"], *(adapter.get("rank_pattern") or {"": 0}).values())


def check_route(
    transport: str, worker: WorkerInfo, *, sender: str, others: Iterable[WorkerInfo] = ()
) -> None:
    """Raise `ConfigError` unless weights can travel from device `sender` to a worker's devices.

    `sender`: the device of trainer rank 0; empty: it has none. `others`: the workers that get them
    with it. The object store needs no device.

    >>> from async_grpo.types import WorkerInfo
    >>> worker = WorkerInfo("w", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, devices=("GPU-1",))
    >>> check_route("nccl", worker, sender="GPU-0")
    >>> check_route("nccl", worker, sender="GPU-1")
    Traceback (most recent call last):
    async_grpo.util.errors.ConfigError: --weight-transport nccl needs a device of its own for \
every process, but trainer rank 0 and worker w share GPU-1: use object_store
    """
    if transport == OBJECT_STORE:
        return
    who = f"worker {worker.worker_id}"
    if not sender:
        need = "an NVIDIA device in trainer rank 0, which has none"
    elif not worker.devices:
        need = f"an NVIDIA device in every generation worker, {who} has none"
    elif sender in worker.devices:
        need = f"{OWN_DEVICE} trainer rank 0 and {who} share {sender}"
    elif shared := next((each for each in others if {*each.devices} & {*worker.devices}), None):
        device = min({*shared.devices} & {*worker.devices})
        need = f"{OWN_DEVICE} worker {shared.worker_id} and {who} share {device}"
    else:
        return
    raise ConfigError(f"--weight-transport {transport} needs {need}: use {OBJECT_STORE}")


def check_group(group: PyNcclCommunicator | None) -> None:
    """Raise `WeightSyncError` for a communicator of vLLM whose broadcasts would do nothing.

    vLLM makes one even where it cannot load the NCCL library; the receiver would then serve
    uninitialised memory.
    """
    if group is None or group.disabled:
        raise WeightSyncError(
            "--weight-transport nccl needs the NCCL library in trainer and worker, and vLLM could "
            "not load it, or VLLM_DISABLE_PYNCCL is set: install requirements/gpu.txt in both, or "
            f"use {OBJECT_STORE}"
        )
