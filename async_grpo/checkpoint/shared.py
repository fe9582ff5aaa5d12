"""That all ranks write to one folder: shown before they do, and after they have.

On machines that share no disk every rank would write happily, each to its own, and a resume would
find a part. All of this is collective.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from async_grpo.checkpoint import disk
from async_grpo.checkpoint.reader import file_names
from async_grpo.training.ranks import Ranks
from async_grpo.util import deadlines
from async_grpo.util.errors import CheckpointError

TOKEN_NAME = ".token"
POLL_INTERVAL_S = 0.1
REMEDY = "give an --output-dir on a disk that all machines of the trainer share"


class NotSharedError(CheckpointError):
    """Ranks would save to different folders."""


def check_shared(folder: Path, ranks: Ranks, *, group: dist.ProcessGroup) -> None:
    """Raise `NotSharedError` on all ranks unless each reads in `folder` what rank 0 writes there.

    `folder` is rank 0's, and there. What its disk refuses is another error.
    """
    token = ranks.share(lambda: _leave_token(folder), group=group)
    sees = ranks.is_main or _is_seen(folder / TOKEN_NAME, token)
    found = ranks.gather((socket.gethostname(), sees), group=group)
    ranks.on_main(lambda: _take_token(folder), group=group)
    if blind := [rank for rank, (_, sees) in enumerate(found) if not sees]:
        hosts = [host for host, _ in found]
        raise NotSharedError(
            f"checkpoints must lie in one folder for all ranks, {folder} of rank 0 on {hosts[0]} "
            f"is not that of {_in_words(blind, hosts)}: {REMEDY}"
        )


def files_of_all(
    own: Mapping[str, str], folder: Path, ranks: Ranks, *, group: dist.ProcessGroup
) -> Mapping[str, str]:
    """The hashes of all ranks' files by name; `own` are this rank's.

    Raises `CheckpointError` on all ranks when one has written nothing, or rank 0 lacks a file.
    """
    found = ranks.gather((socket.gethostname(), dict(own)), group=group)
    ranks.on_main(lambda: _check_here(folder, found), group=group)
    return {name: digest for _, files in found for name, digest in files.items()}


def _leave_token(folder: Path) -> str:
    token = secrets.token_hex()
    try:
        disk.write(folder / TOKEN_NAME, token.encode())
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written to: {error}") from error
    return token


def _take_token(folder: Path) -> None:
    try:
        disk.remove(folder / TOKEN_NAME)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written to: {error}") from error


def _is_seen(path: Path, token: str) -> bool:
    """Whether this rank reads the token, waiting for a disk that is slow to show it."""
    given_up_at = time.monotonic() + deadlines.FILE_SEEN_S
    while True:
        try:
            if disk.read(path) == token.encode():
                return True
        except OSError:  # it is not here, or not yet
            pass
        if time.monotonic() >= given_up_at:
            return False
        time.sleep(POLL_INTERVAL_S)


def _check_here(folder: Path, found: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    try:
        here = {*file_names(folder)}
    except OSError as error:
        raise CheckpointError(f"{folder} must be readable: {error}") from error
    hosts = [host for host, _ in found]
    absent = [rank for rank, (_, files) in enumerate(found) if not files or files.keys() - here]
    if absent:
        raise CheckpointError(
            f"a checkpoint must hold the shards of all {len(found)} ranks, {folder} lacks those of "
            f"{_in_words(absent, hosts)}: {REMEDY}"
        )


def _in_words(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """
    >>> _in_words([1, 2, 3], ["a", "a", "b", "b"])
    'rank 1 on a, ranks 2, 3 on b'
    """
    parts = []
    for host, members in groupby(ranks, key=lambda rank: hosts[rank]):
        numbers = [str(rank) for rank in members]
        parts.append(f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} on {host}")
    return ", ".join(parts)
