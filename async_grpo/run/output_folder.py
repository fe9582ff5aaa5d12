"""A run's output folder: whether it can be written, who holds it, and how others join its run.

Rank 0 locks a file in the folder, from before the run until its end: one trainer a folder.
`async-grpo launch` locks another byte of it, before it starts what rank 0 needs. Rank 0 writes the
address of its cluster there, for commands of its user.
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

from async_grpo.config.option import flag, require
from async_grpo.config.run_options import RecordingOptions
from async_grpo.telemetry.jsonl import to_json, write_json_atomic
from async_grpo.util.errors import ClusterError, ConfigError
from async_grpo.util.files import explained
from async_grpo.util.run_folder import is_restart, newest_checkpoint

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.training.ranks import Ranks

logger = logging.getLogger(__name__)
LOCK_FILE = "trainer.lock"
TRAINER, LAUNCH = range(2)  # the byte of the file that each of them locks
CONNECTION_FILE = "connection.json"
LAUNCH_LOGS = "ASYNC_GRPO_LAUNCH_LOGS"  # the folder of `launch` with the workers' logs
# Variables that a client of the cluster needs with the run's values; none is a secret.
VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")


def check_output(recording: RecordingOptions) -> None:
    """Raise `ConfigError` where the output folder or the dump cannot be written."""
    output, dump = Path(recording.output_dir), recording.dump_samples_filename
    _check_writable(output, "output_dir")
    if dump:
        _check_writable((output / dump).parent, "dump_samples_filename")
        require(
            not (output / dump).is_dir(), "dump_samples_filename", "must not be a folder", dump,
            "name a file in it",
        )  # fmt: skip


def check_overwrite(recording: RecordingOptions, *, is_typed: bool) -> None:
    """Raise `ConfigError` where a line of a file alone would remove a run with a checkpoint."""
    newest = newest_checkpoint(Path(recording.output_dir))
    if newest and recording.overwrite and not is_typed and not is_restart():
        raise ConfigError(
            f"--overwrite must be typed to remove a run with a checkpoint, got {newest[1]}, and a "
            f"file that says it: type --no-overwrite to go on after batch {newest[0]}, or type "
            "--overwrite to remove the run (overwrite=False or True of async_grpo.train)"
        )


def _check_writable(folder: Path, option: str) -> None:
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"{flag(option)} must lie in a folder that can be written, {existing} cannot: "
            "name another"
        )


@contextmanager
def folder_held(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Hold `folder` within the block: no other trainer may use it; collective.

    The folder is made where it is missing; only then it is removed again, if it holds nothing but
    the lock.
    Raises `ConfigError` on every rank when another trainer holds it, or it cannot be written.
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
    """Lock the folder, and return the locked file, which names the holder; closing it unlocks.

    `byte`: `TRAINER` or `LAUNCH`. A launch cannot lock while a trainer holds the folder. Raises
    `ConfigError` for a folder in use.
    """
    file = _locked(folder, byte)
    while not os.fstat(file.fileno()).st_nlink:  # a refused run has just removed it
        file.close()
        file = _locked(folder, byte)
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the holder's name
        _sign(file)
    return file


def is_given_back(folder: Path) -> bool:
    """Whether a trainer of this machine held the folder, and has ended in whatever way."""
    try:
        with open(folder / LOCK_FILE, "rb") as file:
            is_here = json.loads(file.read())["host"] == socket.gethostname()
            return is_here and not _is_taken(file, TRAINER)
    except (OSError, ValueError, LookupError):  # unknown
        return False


def check_free(folder: Path) -> None:
    """Raise `ConfigError` when a trainer or a launch holds the folder; changes nothing."""
    with contextlib.suppress(OSError):  # there is no file, or the file system cannot lock
        file = open(folder / LOCK_FILE, "rb")  # noqa: SIM115 - `_in_use` closes it
        if _is_taken(file, TRAINER) or _is_taken(file, LAUNCH):
            raise _in_use(folder, file)
        file.close()


def _is_taken(file: BinaryIO, byte: int) -> bool:
    """Whether another process has locked that byte; takes no lock."""
    asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    found: int = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


def _locked(folder: Path, byte: int) -> BinaryIO:
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(folder / LOCK_FILE, "a+b", buffering=0)  # noqa: SIM115 - it stays open
    try:
        # The lock ends with this process; unlike flock's, no forked child shares it.
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
            holder = json.loads(file.read())
        except (OSError, ValueError):  # locked a moment ago, or on a full disk
            return ""
    return f" (process {holder['pid']} on {holder['host']}, since {holder['since']})"


def leave_connection(folder: Path, cluster: Cluster) -> None:
    """Write how to join the run's cluster, which this process has joined."""
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
    """Set the variables of the run's cluster in this process, and return its address.

    Call it before Ray is imported. `by_options`: the address where the run has written none. Raises
    `ClusterError` where the run has ended, or its token cannot be read.
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
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the run's
    os.environ.update(left["variables"])
    return str(left["ray_address"])
