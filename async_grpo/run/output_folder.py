"""Whose an output folder is, and how others join the run in it.

Rank 0 locks a file in it, from before the run until its end: one trainer a folder. `async-grpo
launch` locks it too, in another place, before it starts what rank 0 needs. Rank 0 leaves there
where its cluster is, for its user.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from async_grpo.telemetry.jsonl import to_json, write_json_atomic
from async_grpo.util.errors import ClusterError, ConfigError
from async_grpo.util.files import explained

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.training.ranks import Ranks

logger = logging.getLogger(__name__)
LOCK_FILE = "trainer.lock"
TRAINER, LAUNCH = range(2)  # the byte of it that each of them locks
CONNECTION_FILE = "connection.json"
LAUNCH_LOGS = "ASYNC_GRPO_LAUNCH_LOGS"  # where `launch` has what the run's workers say
# Of the environment, what a client of the cluster must have as the run has it; none is a secret.
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")


@contextmanager
def folder_held(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Within, no other trainer may use `folder`, which is made where it is missing; collective.

    A run that is refused leaves no folder behind. Raises `ConfigError` on every rank when another
    trainer has the folder, or it cannot be written.
    """
    is_new = not folder.exists()
    file = ranks.on_main(lambda: lock(folder))
    try:
        yield
    finally:
        if file is not None:
            if is_new:
                _remove_if_unused(folder)
            file.close()


def _remove_if_unused(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
            folder.rmdir()


def lock(folder: Path, *, byte: int = TRAINER) -> BinaryIO:
    """The locked file, which tells others whose it is; closing it gives the folder back.

    `byte`: whose lock it is. A launch takes none while a trainer holds the folder.
    """
    file = _locked(folder, byte)
    while not os.fstat(file.fileno()).st_nlink:  # a refused run has just removed it
        file.close()
        file = _locked(folder, byte)
    with contextlib.suppress(OSError):  # a full disk: it is locked all the same
        _sign(file)
    return file


def is_given_back(folder: Path) -> bool:
    """Whether a trainer of this machine has had the folder, and has ended however."""
    try:
        with open(folder / LOCK_FILE, "rb") as file:
            is_here = json.loads(file.read())["host"] == socket.gethostname()
            return is_here and not _is_taken(file, TRAINER)
    except (OSError, ValueError, LookupError):  # nobody knows
        return False


def check_free(folder: Path) -> None:
    """Raise `ConfigError` when a trainer or a launch has the folder; nothing is changed."""
    with contextlib.suppress(OSError):  # none is there, or none can be locked
        file = open(folder / LOCK_FILE, "rb")  # noqa: SIM115 - `_in_use` closes it
        if _is_taken(file, TRAINER) or _is_taken(file, LAUNCH):
            raise _in_use(folder, file)
        file.close()


def _is_taken(file: BinaryIO, byte: int) -> bool:
    """Whether another process has locked that byte; who only asks disturbs nobody."""
    asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    found: int = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


def _locked(folder: Path, byte: int) -> BinaryIO:
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(folder / LOCK_FILE, "a+b", buffering=0)  # noqa: SIM115 - it stays open
    try:
        # Ends with this process, however that ends; unlike flock's, no forked child shares it.
        if byte == LAUNCH and _is_taken(file, TRAINER):
            raise BlockingIOError
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError) as error:
        raise _in_use(folder, file) from error
    except OSError as error:
        logger.warning(
            "the file system of --output-dir %s cannot lock files (%s): see to it that no other "
            "trainer is given this folder",
            folder,
            error.strerror,
        )
    return file


def _sign(file: BinaryIO) -> None:
    own = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    file.truncate(0)
    file.write(to_json(own) + b"\n")


def _in_use(folder: Path, file: BinaryIO) -> ConfigError:
    return ConfigError(
        f"--output-dir {folder} is in use by another trainer{_holder(file)}: wait for its end, or "
        "give another --output-dir"
    )


def _holder(file: BinaryIO) -> str:
    with file:
        file.seek(0)
        try:
            told = json.loads(file.read())
        except (OSError, ValueError):  # it has only just been locked, or on a full disk
            return ""
    return f" (process {told['pid']} on {told['host']}, since {told['since']})"


def leave_connection(folder: Path, cluster: Cluster) -> None:
    """Write the file, of the cluster that this process has joined."""
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if token := variables.get("RAY_AUTH_TOKEN_PATH"):
        variables["RAY_AUTH_TOKEN_PATH"] = os.path.abspath(token)
    connection = {
        "ray_address": cluster.head_address(),
        "metrics_url": cluster.metrics_url(),
        "variables": variables,
    }
    write_json_atomic(folder / CONNECTION_FILE, connection, mode=0o600)


def way_to(folder: Path, *, by_options: str) -> str:
    """The address of the run's cluster, whose variables this process has from now on.

    To be asked before Ray is imported. `by_options`: the address of a run that has left no
    connection. Raises `ClusterError` where the run has ended, or the token is gone.
    """
    if is_given_back(folder):
        raise ClusterError(
            f"the run in {folder} must be training, it has ended, or has not begun yet: start it "
            f"again with `async-grpo launch {folder}/run.toml`, or with its own command"
        )
    try:
        left: dict[str, Any] = json.loads((folder / CONNECTION_FILE).read_text())
    except (OSError, ValueError):
        return by_options
    token = left["variables"].get("RAY_AUTH_TOKEN_PATH", "")
    if token and not os.access(token, os.R_OK):
        raise ClusterError(
            f"the token of the run's cluster must be in {token}, it cannot be read there: its "
            "cluster has ended, or is another machine's or another user's"
        )
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would go before the run's own
    os.environ.update(left["variables"])
    return str(left["ray_address"])
