"""Who works, under which lease, and what every stage is doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from async_grpo.types.control import Control
from async_grpo.types.rewards import Rewards
from async_grpo.util.deadlines import LEASE_S


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it registers."""

    worker_id: str
    role: str  # its name, see `roles`
    node_id: str
    pid: int
    model_path: str
    vocab_size: int
    capacity: float  # in the unit of its role
    overhead: float  # accepted beyond the capacity, same unit
    max_model_len: int
    tokenizer_hash: str = ""  # `model_folder.encoding_hash`; empty: nobody knows
    temperature: float | None = None  # None: whatever the trainer asks for
    model_hash: str = ""  # of a teacher: `model_folder.hash_model`
    hidden_size: int = 0  # of a teacher, as the next one: what its payloads are made of
    item_size: int = 0  # bytes of one of its weights
    dtype: str = ""  # of weights that follow the policy; empty: it has none
    devices: tuple[str, ...] = ()  # identities of its NVIDIA devices; empty on a CPU
    lease_s: float = LEASE_S  # silent for so long, it counts as lost
    startup: tuple[tuple[str, float], ...] = ()  # what it did before it was ready, and seconds
    rewards: Rewards | None = None  # of a verifier pool
    # See `confinement_in_words`.
    confinement: Mapping[str, str] = field(default_factory=dict, hash=False)
    owner: str = ""  # its dispatcher, for whoever must be stopped


def confinement_in_words(confinement: Mapping[str, str]) -> str:
    """Of each kind of what runs; the texts say why it is not confined, empty: it is.

    >>> confinement_in_words({"shipped rewards": "", "programs of the model": ""})
    'shipped rewards run confined; programs of the model run confined'
    """
    return "; ".join(
        f"{what} run UNCONFINED, within limits but with all the rights of your user, for {why} "
        "(docs/verification.md)"
        if why
        else f"{what} run confined"
        for what, why in confinement.items()
    )


class RequestPulse(NamedTuple):
    """How far a worker is with the request of one lease."""

    num_tokens: int  # that its unfinished sequences have
    is_waiting: bool  # none of them runs, and some stand in the worker's line


class Pulse(NamedTuple):
    """What a worker answers a ping."""

    serves: str  # the version of its weights, or "none"
    num_tokens: int = 0  # that it has made since it began
    requests: Mapping[int, RequestPulse] | None = None  # by lease; None: it cannot tell now


class Standing(NamedTuple):
    """How a registry sees a worker."""

    is_member: bool
    num_leases: int
    excluded: str  # why it was fenced; empty when it was not, or when nobody knows
    run: int = 0  # incarnation of the run that the registry serves; 0: none


class Problem(NamedTuple):
    """Why work is being tried again."""

    stage: str
    reason: str
    worker_id: str = ""  # whose answer was no good; empty: nobody's

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """What every stage is doing right now, for people; counts are of samples."""

    batch: int  # the oldest batch that is not completed
    generating: int
    verifying: int
    in_reference: int
    ready: int  # finished, waiting for a round
    training: int  # sent to trainers in the current gradient step
    done: int  # reached a fate since the start of the run
    output_tokens: int  # received since the start of the run
    answers: int  # of workers and verifiers, since the start of the run
    reward_sum: float  # over reward_count graded samples since the start of the current batch
    reward_count: int
    workers: Mapping[str, int] = field(default_factory=dict)  # healthy workers by role
    worker_tokens: int = 0  # that workers have made, of answers that have come and that will
    problem: Problem | None = None  # what the pipeline is waiting for, when it cannot move
    warnings: tuple[str, ...] = ()  # of the rewards: the first trouble of each kind
    failures: Mapping[str, str] = field(default_factory=dict)  # why groups were dropped, by kind
    controls: tuple[Control, ...] = ()  # what was asked of the run, the latest last

    @property
    def moves(self) -> tuple[int, int]:
        """What changes as long as anything moves, however long an output is."""
        return self.answers, self.worker_tokens
