"""Fetches models by their name on a hub, such as Qwen/Qwen2-1.5B-Instruct, as local folders, and
sends exports there.

huggingface_hub provides the cache, its locks between processes, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE. It is imported for such names only.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock

from async_grpo.model.model_folder import first_line
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ConfigError, UnfitModel
from async_grpo.util.waiting import in_background

logger = logging.getLogger(__name__)
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
WEIGHTS = ".safetensors"  # in the names of weights and their index
SENDING = """
import sys
from pathlib import Path
from async_grpo.model.hub import push_folder
print(push_folder(Path(sys.argv[1]), sys.argv[2], public=bool(sys.argv[3])))"""
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


def check_push(name: str) -> None:
    """Raise `ConfigError` where no model can be sent to a hub; asks nobody."""
    from huggingface_hub import constants, get_token

    if not _is_hub_name(name):
        raise ConfigError(
            "the model on a hub (--push-to-hub) must be NAME or ORGANISATION/NAME, of letters, "
            f"digits, - _ and ., got {name!r}: correct it"
        )
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{name} is sent to {constants.ENDPOINT}, but HF_HUB_OFFLINE is set: unset it, or "
            "send the export later, by `async-grpo push`"
        )
    if not get_token():
        raise ConfigError(
            f"{name} is sent to {constants.ENDPOINT}, which needs a token that may write: set "
            "HF_TOKEN, or run `hf auth login`"
        )


def push_folder(folder: Path, name: str, *, public: bool) -> str:
    """Send the files of an export in one commit, which is seen whole or not; returns its address.

    Weights that an earlier commit left and this one has not are removed. Raises `ConfigError` for
    what the hub refuses, and for a model that is public there unless `public`.
    """
    check_push(name)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, errors

    api, hub = HfApi(), constants.ENDPOINT
    try:
        name = api.create_repo(name, private=not public, exist_ok=True).repo_id
        there = api.model_info(name, timeout=deadlines.HUB_ANSWER_S)
        if not (public or there.private):
            raise ConfigError(
                f"{name} is there on {hub}, and public: add --hub-public, or give another name"
            )
        files = sorted(file for file in folder.iterdir() if file.is_file())
        weights = {each.rfilename for each in there.siblings or () if WEIGHTS in each.rfilename}
        old = sorted(weights - {file.name for file in files})
        work: list[CommitOperationAdd | CommitOperationDelete] = [
            *[CommitOperationAdd(file.name, file) for file in files],
            *[CommitOperationDelete(each) for each in old],
        ]
        return api.create_commit(name, work, commit_message=f"Upload {folder.name}").commit_url
    except AsyncGrpoError:
        raise
    except (errors.HTTPError, OSError, RuntimeError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        remedy = "set HF_TOKEN to one that may write there" if status in (401, 403) else "try again"
        raise ConfigError(
            f"{folder} could not be sent to {name} on {hub}, {first_line(error)}: {remedy}"
        ) from error


class Pushes:
    """Sends exports to a hub, one at a time and each by a process of its own; on rank 0.

    Of those that wait only the newest is sent. A hub that fails or hangs costs the push: that is
    logged with the command that tries again, and no step waits.
    """

    def __init__(self, name: str, *, public: bool) -> None:
        self._name, self._public = name, public
        self._sending = Lock()
        self._newest: Path | None = None
        self._sent: Future[None] | None = None  # the newest

    def push(self, folder: Path) -> None:
        """Send an export, unless it is the one that came last."""
        if folder != self._newest:
            self._newest = folder
            self._sent = in_background(lambda: self._send(folder), name="push")

    def wait(self) -> None:
        """Return once the newest was sent, or has failed, or its deadline has passed."""
        if self._sent and not self._sent.done():
            logger.info("waiting until the model is sent, %g s at most", deadlines.HUB_PUSHED_S)
            try:
                self._sent.result(deadlines.HUB_PUSHED_S)
            except TimeoutError:
                self._failed(self._newest, "it is still on its way")

    def _send(self, folder: Path) -> None:
        with self._sending:
            reason = self._refused(folder) if folder == self._newest else ""
        if reason:
            self._failed(folder, reason)

    def _refused(self, folder: Path) -> str:
        """Send an export, within a deadline; why that failed, empty if it did not."""
        # The kernel kills it where this process is killed; this thread outlives it.
        leash = [found, "--pdeathsig", "KILL"] if (found := shutil.which("setpriv")) else []
        public = "public" if self._public else ""
        try:
            done = subprocess.run(
                [*leash, sys.executable, "-c", SENDING, str(folder), self._name, public],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", timeout=deadlines.HUB_PUSH_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it was not there in {deadlines.HUB_PUSH_S:g} s"
        except OSError as error:
            return str(error)
        said = (done.stdout.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        if done.returncode:
            return said.rpartition("ConfigError: ")[2]
        logger.info("sent %s: %s", folder, said)
        return ""

    def _failed(self, folder: Path | None, reason: str) -> None:
        again = ["async-grpo", "push", str(folder), self._name, *["--hub-public"] * self._public]
        logger.warning(
            "%s was NOT sent to the hub, which costs the run nothing: %s; `%s` tries again",
            folder, reason, shlex.join(again),
        )  # fmt: skip


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
