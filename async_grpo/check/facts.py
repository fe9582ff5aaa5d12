"""What a check looks at, gathered once: files, models, this machine, its packages, the cluster.

A fact that cannot be read is kept as the error that a run would end with, so that the checks stay
pure. Private interfaces of other packages are looked up in their sources, which are not imported:
a package that has moved one is found here at once, and not by a worker.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from async_grpo.check.data_read import DataRead, ids_of, read_data
from async_grpo.check.finding import EVERYTHING, Cost, Known, Setup, tried
from async_grpo.check.worker_tables import Tried, try_here
from async_grpo.checkpoint.merging import base_of
from async_grpo.checkpoint.resume import find_start
from async_grpo.cluster import head
from async_grpo.cluster.head import ClusterResources
from async_grpo.config.roles import GENERATION, JUDGE, REWARD
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.data.questions import check_sources
from async_grpo.model.foreign_folders import check_sampled, is_adapter, stated_adapter
from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import (
    ModelFacts,
    WeightsSize,
    check_model_folder,
    check_reward_model,
    stated_facts,
    weights_size,
)
from async_grpo.types import Question
from async_grpo.util.errors import AsyncGrpoError

WEIGHTS_S = 2.0  # longest look at the values of weights
SHARED_MEMORY = Path("/dev/shm")
MOST_VERIFIED_BYTES = 1 << 30  # of checkpoints, whose bytes a start reads
Look = Callable[..., ModelFacts | None]  # reads a model's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the checks read, besides the run's own options."""

    model: Known[ModelFacts] | None = None  # None: it is not here yet
    size: WeightsSize | None = None
    weights: Known[str] = ""  # what is odd about their names
    worker_models: tuple[Known[ModelFacts] | None, ...] = ()
    adapter: Known[Mapping[str, Any]] = field(default_factory=dict)  # peft's configuration of it
    adapter_fits: Known[str] = ""  # what its layers are
    data: Known[tuple[DataRead, ...]] = ()
    prompt: str = ""  # the first question as the model reads it
    begins_twice: bool = False  # that prompt, with the tokenizer's first token
    rewards: Known[Tried] = field(default_factory=Tried)
    head: Known[str] = ""  # the address of the cluster; empty: none is needed, or one is made
    cluster: Known[ClusterResources] | None = None  # what that cluster has
    gateway: Known[str] = ""  # its address, where it is asked for
    placement: Known[str] = ""  # who gets which device
    num_devices: int = 0  # NVIDIA's, of this machine
    start: Known[str] = ""  # where the run begins
    disk_free_bytes: int = 1 << 60  # where the run's folder is
    shared_bytes: int = 1 << 60  # free in /dev/shm
    memory_bytes: int = 1 << 60
    unfit: tuple[str, ...] = ()  # packages and their interfaces
    engine_options: frozenset[str] = frozenset()  # vLLM's; empty: unknown, or nobody gives one


def gather(setup: Setup, *, tries_rewards: bool = True, cost: Cost = EVERYTHING) -> Facts:
    """Read what checks of these costs need; this starts verifier processes, and nothing else."""
    found: dict[str, Any] = _machine(Path(setup.train.recording.output_dir))
    look = check_model_folder if cost & Cost.SECONDS else stated_facts
    found["model"] = model = read_model(setup, look)
    found["worker_models"] = tuple(_worker_model(setup, w, model, look) for w in setup.workers)
    found["adapter"] = tried(lambda: stated_adapter(setup.train.adapter))
    if isinstance(model, ModelFacts):
        size = tried(lambda: weights_size(model.path))
        found["size"] = None if isinstance(size, AsyncGrpoError) else size
    if cost & Cost.SECONDS:
        found |= _in_seconds(setup, model, tries_rewards)
    else:
        found["data"] = _sources(setup) or ()
    if cost & Cost.AT_ONCE:
        found |= _places(setup)
    asks_engine = any(each.engine_options for each in setup.workers)
    return Facts(**found, engine_options=engine_option_names() if asks_engine else frozenset())


def _places(setup: Setup) -> dict[str, object]:
    """The run's folder, the cluster, the gateway's port, the packages."""
    config, found = setup.train, dict[str, object]()
    if not setup.starts_head and not setup.learns_from_pairs:
        found["head"] = at = tried(
            lambda: head.locate(setup.ray_address or config.places.ray_address)
        )
        if isinstance(at, str):
            found["cluster"] = tried(lambda: head.resources_of(at))
    if config.places.gateway:
        from async_grpo.gateway.run_gateway import free_address  # most of a second

        found["gateway"] = tried(lambda: ":".join(map(str, free_address(config.places) or ())))
    unfit = (*unfit_packages(), *broken_interfaces())
    return {**found, "start": tried(lambda: _start(setup)), "unfit": unfit}


def _sources(setup: Setup) -> AsyncGrpoError | None:
    """The error of the run's data: its places, and the first line of each file."""
    config, waits = setup.train, setup.is_prepared
    parts = config.data, config.evaluation, config.teaching
    return tried(lambda: check_sources(*parts, waits=waits))


def _in_seconds(
    setup: Setup, model: Known[ModelFacts] | None, tries_rewards: bool
) -> dict[str, object]:
    """What the lines of data, the weights and the rewards say."""
    found: dict[str, object] = {}
    reads: Known[tuple[DataRead, ...]] = ()
    if isinstance(model, ModelFacts):
        from async_grpo.model.weight_files import check_weights  # imports torch

        wrong = _sources(setup)
        reads = tried(lambda: tuple(read_data(setup, model))) if wrong is None else wrong
        if setup.train.adapter.trains_adapter:
            found["adapter_fits"] = tried(lambda: _adapter_fits(setup, model))
        if not setup.train.places.draws_weights:
            found["weights"] = tried(lambda: check_weights(model.path, seconds=WEIGHTS_S))
        prompt = tried(lambda: _prompt(model, reads))
        found |= {"data": prompt} if isinstance(prompt, AsyncGrpoError) else prompt
    if tries_rewards and isinstance(reads, tuple):
        questions = _questions(setup, reads)
        found["rewards"] = tried(lambda: try_here(setup, questions))
    return found


def _adapter_fits(setup: Setup, model: ModelFacts) -> str:
    """What the run's adapter is of, in words; raises `UnfitModel` where it does not fit."""
    from async_grpo.model.adapters import Adapter  # imports torch
    from async_grpo.model.served import check_adapter

    adapter = Adapter.of(setup.train.adapter, model=model.path, seed=0)
    check_adapter(model.path, adapter)
    return f"rank {adapter.config.r} of {adapter.config.target_modules}, computed as if merged"


def read_model(setup: Setup, look: Look = check_model_folder) -> Known[ModelFacts] | None:
    """The trained model; None where it is not here yet."""
    places = setup.train.places
    look = functools.partial(look, needs_weights=not places.draws_weights)
    return _model_at(setup, places.model_name_or_path, places.model_revision, look)


def _worker_model(
    setup: Setup,
    worker: WorkerConfig,
    trained: Known[ModelFacts] | None,
    look: Look,
) -> Known[ModelFacts] | None:
    """The model of a worker that serves one from this machine's disk, if it is there yet.

    Of an adapter, which its dispatcher merges, it is the base.
    """
    if not worker.serves_model:
        return None
    if worker.mode == REWARD:
        return _model_at(setup, worker.model_path, worker.model_revision, check_reward_model)
    if worker.mode == JUDGE:
        look = functools.partial(stated_facts, trains=False)
        return _model_at(setup, worker.model_path, worker.model_revision, look)
    if worker.mode == GENERATION:
        place = worker.model_path, worker.model_revision
        refused = _model_at(setup, *place, lambda folder: check_sampled(Path(folder)))
        if refused is not None:
            return refused
    if worker.model_path == setup.train.places.model_name_or_path:
        return trained
    return _model_at(setup, worker.model_path, worker.model_revision, look)


def _model_at(setup: Setup, path: str, revision: str, look: Look) -> Known[ModelFacts] | None:
    """The model of a folder, or of the hub's cache; None where it is in neither yet."""

    def read() -> ModelFacts | None:
        is_made = setup.is_prepared(path)
        folder = "" if is_made else local_folder(path, revision=revision, fetch=False)
        is_other = folder and path != setup.train.places.model_name_or_path
        if is_other and is_adapter(Path(folder)):
            folder = base_of(Path(folder), fetch=False)
        return look(folder) if folder else None

    return tried(read)


def _questions(setup: Setup, reads: Collection[DataRead]) -> list[Question]:
    """The questions for the rewards: the first of each dataset_type, or the first of all."""
    found = [q for each in reads if each.purpose == "train" for q in each.firsts.values()]
    questions = [question for question in found if isinstance(question, Question)]
    return questions if setup.train.data.data else questions[:1]


def _prompt(model: ModelFacts, data: Known[tuple[DataRead, ...]]) -> dict[str, object]:
    """The first prompt as text, whether bos stands twice, and each file's unknown tokens."""
    from transformers import AutoTokenizer

    reads = data if isinstance(data, tuple) else ()
    records = [record for each in reads for record in each.firsts.values()]
    if not records:
        return {"data": data}
    ids = ids_of(records[0])
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    begin = tokenizer.bos_token_id
    twice = begin is not None and ids[:2] == [begin, begin]
    unknown = tokenizer.unk_token_id
    told = tuple(
        replace(each, unknown=each.notes.ids.count(unknown) / max(1, len(each.notes.ids)))
        for each in reads
    )
    return {"prompt": str(tokenizer.decode(ids)), "begins_twice": twice, "data": told}


def _start(setup: Setup) -> str:
    """Where the run begins, in words; raises what its folder has against it."""
    saved = Path(setup.train.recording.output_dir) / "checkpoints"
    if sum(each.stat().st_size for each in saved.rglob("*")) > MOST_VERIFIED_BYTES:
        return f"{saved} is too large to be verified here: the run does when it goes on"
    start = find_start(setup.train)
    if start.folder is None:
        return f"a new run in {setup.train.recording.output_dir}"
    left = "nothing is left to train" if start.is_finished else "the run goes on"
    return f"{left} after batch {start.batches}, from {start.folder}"


def _machine(output: Path) -> dict[str, int]:
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    shared = SHARED_MEMORY if SHARED_MEMORY.exists() else folder
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "shared_bytes": shutil.disk_usage(shared).free,
        "memory_bytes": pages,
    }


OURS = "async-grpo"
# (package, file, name): arguments of a function, methods and fields of a class that we use.
RELIED_ON: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("ray", "ray/_private/state.py", "available_resources_per_node"): (),
    ("ray", "ray/_private/state.py", "actors"): ("actor_id",),
    ("ray", "ray/_private/services.py", "find_gcs_addresses"): (),
    ("ray", "ray/_private/gcs_utils.py", "create_gcs_channel"): ("address",),
    (
        "ray",
        "ray/_private/authentication/authentication_token_setup.py",
        "_enable_token_auth",
    ): (),
    ("vllm", "vllm/v1/core/sched/scheduler.py", "Scheduler"): (
        "update_from_output",
        "finish_requests",
        "has_requests",
    ),
    ("vllm", "vllm/v1/core/sched/async_scheduler.py", "AsyncScheduler"): (),
    ("vllm", "vllm/v1/core/sched/interface.py", "PauseState"): ("PAUSED_ALL",),
    ("vllm", "vllm/v1/engine/async_llm.py", "AsyncLLM"): (
        "pause_generation",
        "resume_generation",
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
        "get_weight_version",
        "collective_rpc",
        "add_request",
        "abort",
    ),
    ("vllm", "vllm/engine/arg_utils.py", "EngineArgs"): (
        "scheduler_cls",
        "scheduling_policy",
        "worker_extension_cls",
        "weight_transfer_config",
        "logprobs_mode",
    ),
    ("vllm", "vllm/distributed/weight_transfer/factory.py", "WeightTransferEngineFactory"): (
        "register_engine",
    ),
    ("torch", "torch/distributed/fsdp/_fully_shard/_fully_shard.py", "FSDPModule"): (
        "set_gradient_divide_factor",
        "set_force_sum_reduction_for_comms",
        "set_requires_gradient_sync",
    ),
}


@functools.cache
def broken_interfaces() -> tuple[str, ...]:
    """A sentence for each interface that the installed packages lack."""
    return tuple(_broken(RELIED_ON))


@functools.cache
def engine_option_names() -> frozenset[str]:
    """Fields of the arguments of vLLM's engine; empty where vLLM is not installed."""
    return frozenset(
        field.target.id
        for file in _files_of("vllm", "vllm/engine/arg_utils.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


@functools.cache
def unfit_packages() -> tuple[str, ...]:
    """A sentence for each required package that is missing or has another version."""
    return tuple(_unfit(metadata.requires(OURS) or ()))


def _broken(relied_on: Mapping[tuple[str, str, str], Sequence[str]]) -> Iterator[str]:
    for (package, file, name), used in relied_on.items():
        for source in _files_of(package, file):
            if missing := _missing_name(source, name, used):
                yield f"{package} must have {missing} in {file}, the installed one has none"


def _files_of(package: str, file: str) -> Iterator[Path]:
    """Where an installed package has that file; none where it is not installed."""
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        yield Path(folder).parent / file


def _unfit(requirements: Iterable[str]) -> Iterator[str]:
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield f"{wanted.name} must be installed, it is not"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name} must be {wanted.specifier}, got {found}"


def _missing_name(file: Path, name: str, used: Collection[str]) -> str:
    """The first name that a source file does not define; empty when it defines all."""
    if not file.is_file():
        return name
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            known = set(_names_in(node))
            return next((f"{name}.{each}" for each in used if each not in known), "")
    return name


def _names_in(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        yield from (each.arg for each in (*arguments.args, *arguments.kwonlyargs))
        return
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))
