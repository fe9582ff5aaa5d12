"""Errors that cross a boundary: each is one sentence with the rule, the value and the remedy.

The commands print these without a traceback and exit with code 1; anything else is a bug and
keeps its traceback.
"""

from __future__ import annotations


class AsyncGrpoError(Exception):
    """Base of every error that a user can cause or must be told about."""


class ConfigError(AsyncGrpoError, ValueError):
    """An option, or a combination of options, that cannot work."""


class DataError(AsyncGrpoError, ValueError):
    """A data file that cannot be read, or a line of it that is malformed."""


class ModelError(AsyncGrpoError, ValueError):
    """A model folder that cannot be used."""


class ClusterError(AsyncGrpoError, ConnectionError):
    """Ray, or something that should run on it, cannot be reached."""


class DeadlineError(AsyncGrpoError, TimeoutError):
    """Another process did not answer in time; the message names it."""


class WorkerError(AsyncGrpoError, RuntimeError):
    """A worker could not do what it was asked; the cause is in the message."""


class ProcessLostError(WorkerError):
    """An actor's process has died, or its node cannot be reached; nobody knows what it did last."""


class RankLostError(AsyncGrpoError, RuntimeError):
    """Another trainer rank has died in the middle of what all ranks do together."""


class BatcherLostError(ProcessLostError):
    """The experience batcher's process has died: every rank raises it before the same item."""


class CheckpointError(AsyncGrpoError, RuntimeError):
    """A checkpoint that is incomplete or damaged, or that belongs to another run."""


class WeightSyncError(AsyncGrpoError, RuntimeError):
    """A weight transfer that was refused or incomplete; the old weights still serve."""


class SnapshotLostError(WeightSyncError):
    """The trainer that held the bytes of these weights has ended; nobody can load them any more."""


class StaleAnswerError(AsyncGrpoError, RuntimeError):
    """An answer whose lease was revoked, or whose weights are not the ones asked for."""
