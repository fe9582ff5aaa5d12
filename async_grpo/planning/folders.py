"""The sizes of the models that a run names, read from folders and from the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

from async_grpo.devices.bill import ModelShape
from async_grpo.model.model_folder import stated_positions, weights_size
from async_grpo.planning.shapes import published_config, shape_of_config, unknown_model
from async_grpo.util.errors import UnfitModel

CONFIG = "config.json"


def read_shape(model: str, *, instead: str = "") -> ModelShape:
    """Of a folder, a model in the hub's cache, or a published name; `instead` where it is none.

    Weights are not read, and no network is asked. Raises `UnfitModel` for what is not known.
    """
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
    folder = _folder(model)
    return (folder and stated_positions(folder)) or 0


def _folder(model: str) -> Path | None:
    """That holds the model's config; None: there is none."""
    if (Path(model) / CONFIG).is_file():
        return Path(model)
    if Path(model).exists() or model.count("/") != 1 or model.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, CONFIG)
    return Path(found).parent if isinstance(found, str) else None
