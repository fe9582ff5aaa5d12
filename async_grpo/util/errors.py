"""Errors that cross a boundary: each is one sentence with the rule, the value and the remedy.

The commands print these without a traceback and exit with code 1; anything else is a bug and
keeps its traceback.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


def escaped(text: str) -> str:
    r"""Text of a user's code, or of a model, escaped to one printable line for terminals and logs.

    >>> print(escaped("no\x1b[2J\nüben"))
    no\x1b[2J\nüben
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class AsyncGrpoError(Exception):
    """Base of every error that a user can cause or must be told about."""


class ConfigError(AsyncGrpoError, ValueError):
    """An option, or a combination of options, that cannot work."""


class DataError(AsyncGrpoError, ValueError):
    """A data file that cannot be read, or a line of it that is malformed."""


class UnfitModel(AsyncGrpoError, ValueError):
    """A model folder that cannot be used."""


class ClusterError(AsyncGrpoError, ConnectionError):
    """Ray, or something that should run on it, cannot be reached."""


class DeadlineError(AsyncGrpoError, TimeoutError):
    """Another process did not answer in time; the message names it."""


class NoWorkerError(DeadlineError):
    """No worker became free while nothing else moved; the message says what is missing."""


class WorkerError(AsyncGrpoError, RuntimeError):
    """A worker could not do what it was asked; the cause is in the message."""


class ProcessLostError(WorkerError):
    """An actor's process has died, or its node cannot be reached; what it did last is unknown."""


class RunLost(ProcessLostError):
    """This run has ended at the controller, or goes on there under another epoch."""


class RunFailed(AsyncGrpoError, RuntimeError):
    """A run that a script has started has ended with an error."""

    def __init__(self, message: str, *, folder: Path) -> None:
        """`folder`: what the run has left, its logs too."""
        super().__init__(message)
        self.folder = folder


class LossCause(StrEnum):
    """Why a lease has ended before its work was done."""

    DIED = "died"  # the worker's process
    SILENT = "silent"  # the worker has not answered its pings
    STALLED = "stalled"  # no token came for the lease, while its worker made some for others
    UPDATE = "update"  # the worker could not load new weights
    SLEEP = "sleep"  # the worker has not given its devices to the trainer
    LEFT = "left"  # the worker was taken out of its registry
    RUN_ENDED = "run ended"  # or was begun again
    OWNER = "owner lost"  # the lease under which the work was asked for


class LeaseLost(AsyncGrpoError, RuntimeError):
    """A lease has ended before its work was done; an answer under it must not be used."""

    def __init__(self, cause: LossCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> tuple[type[LeaseLost], tuple[LossCause, str]]:
        return type(self), (self.cause, str(self))


class RankLostError(AsyncGrpoError, RuntimeError):
    """Another trainer rank has died in the middle of what all ranks do together."""


class CollectiveTimeout(AsyncGrpoError, RuntimeError):
    """Another trainer rank has not come to what all ranks do together."""


class ExpressLost(AsyncGrpoError, RuntimeError):
    """A group of teacher and trainer ranks has lost a member; the remaining ranks form another."""


class AuditError(AsyncGrpoError, RuntimeError):
    """A rank trained other samples than it was sent: the gradient would be wrong."""


class ReplayError(AsyncGrpoError, RuntimeError):
    """A batch that is trained again does not come to what it came to before."""


class CheckpointError(AsyncGrpoError, RuntimeError):
    """A checkpoint that is incomplete or damaged, or that belongs to another run."""


class WeightSyncError(AsyncGrpoError, RuntimeError):
    """A weight transfer that was refused or incomplete; the old weights still serve."""


class SnapshotLostError(WeightSyncError):
    """The trainer that held the bytes of these weights has ended; they can no longer be loaded."""


class StaleAnswerError(AsyncGrpoError, RuntimeError):
    """An answer whose lease was revoked, or whose weights are not the ones asked for."""


class ServerAway(AsyncGrpoError, ConnectionError):
    """A server elsewhere could not be reached: it has not done what was asked."""
