"""The devices that a run may have, the sizes of its models, and whether they hold these."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.check.finding import tried
from async_grpo.cli.local_run import LocalRun
from async_grpo.devices.core_shares import num_cores
from async_grpo.devices.inventory import Inventory
from async_grpo.model.foreign_folders import stated_adapter
from async_grpo.util.errors import AsyncGrpoError, ConfigError, UnfitModel
from async_grpo.weight_sync.routes import serving_adapters

if TYPE_CHECKING:
    from async_grpo.devices.bill import ModelShape
    from async_grpo.planning.asked import Asked, Fleet

CONFIG = "config.json"
ASSUMED_LONGEST = 32_768
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of this machine
LARGE_BATCHES = 70 << 30  # bytes of a device from which on vLLM's defaults are large
NOTHING: Mapping[int | None, float] = {}


def devices_in(text: str) -> Fleet:
    """The devices of machines, of an H100 each where no kind is named; raises `ConfigError`.

    >>> devices_in("8,8").nodes, devices_in("1xL4").kind.name
    ((8, 8), 'L4')
    """
    from async_grpo.planning.asked import H100, KINDS, Fleet

    counts, _, name = text.partition("x")
    try:
        nodes, kind = tuple(int(each) for each in counts.split(",")), KINDS[name or H100.name]
    except (ValueError, KeyError):
        raise ConfigError(
            f"--plan-for must be the devices of each machine, such as 8 or 8,8, and their kind as "
            f"in 8xA100 where it is none of H100, got {text!r}"
        ) from None
    return Fleet(tuple(each for each in nodes if each), kind)


def fleet_here(inventory: Inventory, *, threads: str | None = None) -> Fleet:
    """The devices of this machine, or its cores.

    `threads`: OMP_NUM_THREADS of each process, for which the cores' speed is measured; what is no
    number counts as 1.
    """
    from async_grpo.planning.asked import CPU, H100, KINDS, Fleet
    from async_grpo.planning.cores import read_speed

    if devices := inventory.devices:
        names = [each.name for each in devices]
        kind = next((KINDS[kind] for kind in KINDS if any(kind in name for name in names)), H100)
        held = min(each.memory_mib for each in devices) << 20
        kind = replace(
            kind, name=names[0], memory_bytes=held or kind.memory_bytes,
            has_large_batches=kind.has_large_batches and held >= LARGE_BATCHES,
        )  # fmt: skip
        return Fleet((len(devices),), kind)
    core, num_threads = CPU, max(1, int(threads)) if threads and threads.isdigit() else 1
    if threads is not None:
        speed = read_speed(threads=num_threads)
        core = replace(
            CPU, flops=speed.flops, bytes_per_s=speed.bytes_per_s, source="measured on these cores"
        )
    return Fleet((), core, num_cores=num_cores(), threads=num_threads)


def check_memory(run: LocalRun, fleet: Fleet, *, host_bytes: int = 0) -> None:
    """Raise `ConfigError` for a placed run that its devices or their machine cannot hold.

    Not asked are runs with --unchecked-memory, and those with a model of unknown sizes.
    """
    from async_grpo.planning.bills import TooLargeError, check_fits

    asked = _sized(run, fleet, host_bytes=host_bytes)
    if asked is None or run.train.memory.unchecked_memory:
        return
    try:
        check_fits(asked, as_placed=True)
    except TooLargeError as error:
        raise ConfigError(f"{error}; --unchecked-memory starts it all the same") from None
    except ConfigError:  # options that other checks refuse, in their words
        return


def _sized(run: LocalRun, fleet: Fleet, *, host_bytes: int = 0) -> Asked | None:
    """The run with the sizes of its models; None where one is not known, or is quantised."""
    from async_grpo.model.foreign_folders import quantization_of

    folders = [_folder(each.model_path) for each in run.workers if each.serves_model]
    packed = [each for each in folders if each and quantization_of(each)]
    if packed or any("quantization" in each.engine_options for each in run.workers):
        return None
    asked = tried(lambda: asked_of(run, fleet, host_bytes=host_bytes))
    return None if isinstance(asked, AsyncGrpoError) else asked  # others say what is wrong with it


def needs_of(run: LocalRun, fleet: Fleet) -> Mapping[int | None, float]:
    """The least share of a device of the ranks and of each worker; empty: unknown, or none."""
    from async_grpo.planning.bills import least_bytes

    asked = _sized(run, fleet) if fleet.num_devices else None
    if asked is None:
        return NOTHING
    try:
        least = {number: least_bytes(asked, number) for number in (None, *asked.worker_models)}
    except ConfigError:  # see `check_memory`
        return NOTHING
    return {number: each / fleet.kind.memory_bytes for number, each in least.items()}


def asked_of(run: LocalRun, fleet: Fleet, *, shape_of: str = "", host_bytes: int = 0) -> Asked:
    """A run with the sizes of its models, for its bills; `host_bytes` of a machine, 0: unknown.

    Raises `UnfitModel` for a model whose sizes are not known.
    """
    from async_grpo.devices.bill import FLOAT32
    from async_grpo.model.foreign_folders import stated_config
    from async_grpo.planning.asked import BF16, Asked

    with_model = {number: each for number, each in enumerate(run.workers) if each.serves_model}
    adapter = stated_adapter(run.train.adapter)
    workers = serving_adapters(run.train, adapter, run.workers, on_cpu=not fleet.num_devices)
    folder = _folder(run.train.places.model_name_or_path)
    stated = stated_config(folder) if folder else {}
    is_half = not folder or "bfloat16" in (stated.get("dtype"), stated.get("torch_dtype"))
    asked = Asked(
        train=run.train,
        workers=workers,
        num_ranks=run.num_ranks,
        model=read_shape(run.train.places.model_name_or_path, instead=shape_of),
        worker_models={
            number: read_shape(each.model_path, instead=shape_of)
            for number, each in with_model.items()
        },
        longest={
            number: each.max_model_len or read_positions(each.model_path) or ASSUMED_LONGEST
            for number, each in with_model.items()
        },
        fleet=fleet,
        host_bytes=host_bytes,
        stored_bytes=BF16 if is_half else FLOAT32,
    )
    return asked.adapted(adapter, run.train)


def read_shape(model: str, *, instead: str = "") -> ModelShape:
    """The sizes of a model: a folder, one in the hub's cache, or a published name; or `instead`.

    Weights are not read, and no network is asked. Raises `UnfitModel` for what is not known.
    """
    from async_grpo.model.model_folder import weights_size
    from async_grpo.planning.asked import published_config, shape_of_config, unknown_model

    folder = _folder(model)
    if folder is not None:
        size = weights_size(str(folder))
        try:
            config = json.loads((folder / CONFIG).read_text())
        except ValueError as error:
            raise UnfitModel(f"{folder / CONFIG} is no JSON: {error}") from None
        count = size.num_parameters if size else 0
        return shape_of_config(config, who=model, num_parameters=count)
    if config := published_config(model):
        return shape_of_config(config, who=model)
    if instead and instead != model:
        return read_shape(instead)
    raise unknown_model(model)


def read_positions(model: str) -> int:
    """The longest sequence that a model's config states; 0 where it does not, or is not here."""
    from async_grpo.model.model_folder import stated_positions

    folder = _folder(model)
    return (folder and stated_positions(folder)) or 0


def _folder(model: str) -> Path | None:
    """The folder that holds the model's config; None: there is none."""
    if (Path(model) / CONFIG).is_file():
        return Path(model)
    if Path(model).exists() or model.count("/") != 1 or model.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, CONFIG)
    return Path(found).parent if isinstance(found, str) else None
