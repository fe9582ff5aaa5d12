"""The interfaces of other packages that nobody promised us, read in their sources: imports none.

Each is a class or function by the file that defines it, with the names that we call it or its
arguments by. A package that has moved one of them is found here, in a moment, and not by a worker.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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
    """A sentence for each that the installed packages do not have."""
    return tuple(_broken(RELIED_ON))


@functools.cache
def engine_option_names() -> frozenset[str]:
    """Fields of the arguments of vLLM's engine; empty where vLLM is not installed."""
    return frozenset(
        field.target.id
        for file in _sources("vllm", "vllm/engine/arg_utils.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


@functools.cache
def unfit_packages() -> tuple[str, ...]:
    """A sentence for each package that this one asks for, and that is missing or another."""
    return tuple(_unfit(metadata.requires(OURS) or ()))


def _broken(relied_on: Mapping[tuple[str, str, str], Sequence[str]]) -> Iterator[str]:
    for (package, file, name), used in relied_on.items():
        for source in _sources(package, file):
            if missing := _missing(source, name, used):
                yield f"{package} must have {missing} in {file}, the installed one has none"


def _sources(package: str, file: str) -> Iterator[Path]:
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


def _missing(file: Path, name: str, used: Collection[str]) -> str:
    """The first name that a source does not define; empty when it has all."""
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
