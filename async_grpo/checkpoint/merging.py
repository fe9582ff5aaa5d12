"""Whoever takes a model takes an adapter in peft's format, too: it is merged into its base, once.

What is made stays in the adapter's folder, named by a digest of both, for the next one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from pathlib import Path

from async_grpo.model.foreign_folders import ADAPTER_CONFIG, is_adapter
from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import check_files
from async_grpo.util.errors import CheckpointError, ConfigError, UnfitModel

logger = logging.getLogger(__name__)
TEXTS = (".json", ".jinja", ".txt")
CONFIGS = (ADAPTER_CONFIG, "config.json")  # of the adapter, and of its base


def whole_folder(model: str, *, revision: str = "") -> str:
    """As `local_folder`, but of an adapter the folder of its base with the adapter merged into it.

    Raises `UnfitModel` for one without its base, or of another model, before weights are read.
    """
    place = local_folder(model, revision=revision)
    folder = Path(place)
    if not is_adapter(folder):
        return place
    base = Path(base_of(folder))
    goal = folder / "merged" / _digest(folder, base)
    if not goal.exists():
        logger.info("merging the adapter %s into %s, once", folder, base)
        _merge(folder, base, goal)
    logger.info("the adapter %s is merged with its base in %s", folder, goal)
    return str(goal)


def base_of(adapter: Path, *, fetch: bool = True) -> str:
    """The folder of the model that an adapter belongs to; see `local_folder` for `fetch`.

    Raises `UnfitModel` where there is none.
    """
    try:
        stated = json.loads((adapter / ADAPTER_CONFIG).read_text())
        name, revision = stated.get("base_model_name_or_path"), stated.get("revision")
        if not isinstance(name, str) or not name:
            raise UnfitModel("it names none")
        is_path = Path(name).exists()
        folder = local_folder(name, revision="" if is_path else revision or "", fetch=fetch)
        if folder:
            check_files(Path(folder))
    except (OSError, ValueError, AttributeError, UnfitModel) as error:
        raise UnfitModel(
            f"an adapter needs the model that it belongs to, base_model_name_or_path in "
            f"{adapter / ADAPTER_CONFIG} must name it: {error}"
        ) from error
    return folder


def _digest(adapter: Path, base: Path) -> str:
    """Of the adapter's contents, and of the base's names, sizes and times."""
    digest = hashlib.sha256(str(base.resolve()).encode())
    for file in sorted(adapter.iterdir()):
        if file.is_file() and file.name != "README.md":
            digest.update(f"\0{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    for file in sorted(base.iterdir()):
        if file.is_file():
            found = file.stat()
            digest.update(f"\0{file.name} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def _merge(adapter: Path, base: Path, goal: Path) -> None:
    """Write `goal` as the trainer exports a merged model; the adapter's own texts come first."""
    import torch  # with what follows, seconds

    from async_grpo.checkpoint.export import descriptions, stored_tensors, write_folder
    from async_grpo.model.adapters import Adapter, base_dtype, read_adapter_config
    from async_grpo.model.loading import CPU, EAGER, load_sharded
    from async_grpo.training.fsdp import iter_full_tensors

    policy = load_sharded(
        str(base), attention=EAGER, dtype=base_dtype(str(base), torch.bfloat16), device=CPU,
        shard=None, adapter=Adapter(read_adapter_config(adapter), 0, adapter),
    )  # fmt: skip
    own = [file for file in descriptions(adapter) if file.suffix in TEXTS]
    texts = {file.name: file.read_text() for file in own if file.name not in CONFIGS}
    made = goal.with_name(uuid.uuid4().hex[:12])  # others may be at it, too
    try:
        tensors = stored_tensors(policy.model, iter_full_tensors(policy), base)
        write_folder(tensors, base, made, texts=texts)
        try:
            made.rename(goal)
        except OSError:
            if not goal.is_dir():
                raise
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"the model with its adapter is written into {goal}, which failed ({error}): copy the "
            "adapter's folder to where there is room, and give that"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
