"""Fetches models by their name on a hub, such as Qwen/Qwen2-1.5B-Instruct, as local folders.

huggingface_hub provides the cache, its locks between processes, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE. It is imported for such names only.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from async_grpo.model.model_folder import first_line
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError, UnfitModel

logger = logging.getLogger(__name__)
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
NOT_NEEDED = ("*/*", "consolidated*")  # other formats of the same weights


def local_folder(model: str, *, revision: str = "", fetch: bool = True) -> str:
    """`model` if it is a path; the folder of the snapshot if it is a name on a hub.

    `revision` is a branch, tag or commit of the hub's model. Without `fetch` nothing is downloaded,
    and the result is empty for a model that is only on the hub. Raises `UnfitModel` or
    `ConfigError` within seconds when the model is not available. A string that is no possible name
    is returned as it is; the reader of the folder refuses it.
    """
    if os.path.exists(model) or not _is_hub_name(model):
        if revision:
            raise ConfigError(
                f"--model-revision goes with the name of a model on a hub, got {revision!r} for "
                f"the path {model}: leave it out"
            )
        return model
    folder = _snapshot(model, revision or "main", fetch=fetch)
    if folder and not any(Path(folder).glob("*.safetensors")):
        raise UnfitModel(
            f"a model of a hub must hold *.safetensors, {model} does not: choose another, or "
            "convert its weights with save_pretrained and give that folder"
        )
    logger.info("model %s: %s", model, folder)
    return folder


def _is_hub_name(model: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def _snapshot(model: str, revision: str, *, fetch: bool) -> str:
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    hub = constants.ENDPOINT
    download = functools.partial(
        snapshot_download, model, revision=revision,
        allow_patterns=[*NEEDED], ignore_patterns=[*NOT_NEEDED],
    )  # fmt: skip
    try:
        # snapshot_download would request the same, and wait for minutes without an answer.
        HfApi().model_info(model, revision=revision, timeout=deadlines.HUB_ANSWER_S)
        if not fetch:
            return _in_cache(download)
        logger.info("asking %s for the model %s", hub, model)
        return download()
    except errors.GatedRepoError as error:
        raise UnfitModel(
            f"{hub} gives {model} only to those who accepted its terms: accept them there, and set "
            "HF_TOKEN to a token of your account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnfitModel(
            f"the model must be a folder, or the name of a model on {hub}, {model!r} is neither: "
            "correct it, or set HF_TOKEN when the model is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"--model-revision must be a branch, tag or commit of {model}, got {revision!r}: "
            "correct it, or leave it out"
        ) from error
    except (errors.HTTPError, OSError) as error:
        offline = isinstance(error, errors.OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE is set" if offline else first_line(error)
        return _cached(download, model, f"{hub} cannot be asked for it ({reason})")


def _in_cache(download: Callable[..., str]) -> str:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return download(local_files_only=True)
    except LocalEntryNotFoundError:
        return ""


def _cached(download: Callable[..., str], model: str, why: str) -> str:
    folder = _in_cache(download)
    if not folder:
        raise UnfitModel(
            f"{model!r} is no folder here, nor a model in Hugging Face's cache, and {why}: correct "
            "the path, or download the model where there is a network"
        )
    logger.info("model %s is taken from the cache: %s", model, why)
    return folder
