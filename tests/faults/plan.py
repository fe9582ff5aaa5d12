"""Which faults, in which order. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["SIGKILL", "SIGTERM", "SIGSTOP", "slow", "join", "leave"]
Phase = Literal[
    "any", "generating", "verifying", "in_reference", "training", "weight sync", "checkpoint"
]

WORKERS = ("generation worker", "engine core", "logprob worker")
GRADING = ("verifier pool", "verifier container", "verifier server")
CONTROL = ("controller",)
OPERATED = ("generation dispatcher", "logprob dispatcher")  # ended, and started by the harness
ENDING = ("trainer rank 0", "trainer rank 1", "torchrun", "machine")  # these end the run
ROLES = (*WORKERS, *GRADING, *CONTROL, *OPERATED, "node of workers", *ENDING)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something done to one process, or to several at once."""

    role: str
    action: Action
    phase: Phase = "any"

    @property
    def ends_run(self) -> bool:
        """Whether the trainer is meant to end, and the same command line to go on."""
        return self.role in ENDING and self.action in ("SIGKILL", "SIGTERM")

    def __str__(self) -> str:
        when = "" if self.phase == "any" else f", {self.phase}"
        return f"{self.role}: {self.action}{when}"


MATRIX = (
    Fault("verifier server", "SIGKILL", "verifying"),
    Fault("verifier server", "SIGSTOP", "verifying"),
    Fault("verifier container", "SIGKILL", "verifying"),
    Fault("verifier pool", "SIGKILL", "verifying"),
    Fault("verifier pool", "SIGSTOP"),
    Fault("controller", "SIGKILL", "generating"),
    Fault("controller", "SIGKILL", "training"),
    Fault("controller", "SIGKILL", "weight sync"),
    Fault("controller", "SIGSTOP"),
    Fault("logprob worker", "SIGKILL", "in_reference"),
    Fault("logprob worker", "SIGSTOP", "in_reference"),
    Fault("logprob worker", "slow"),
    Fault("generation worker", "SIGKILL", "generating"),
    Fault("engine core", "SIGKILL", "generating"),
    Fault("generation worker", "SIGKILL", "weight sync"),
    Fault("engine core", "SIGSTOP", "generating"),
    Fault("generation worker", "SIGSTOP", "weight sync"),
    Fault("generation worker", "slow"),
    Fault("generation dispatcher", "SIGTERM"),
    Fault("generation dispatcher", "SIGKILL"),
    Fault("logprob dispatcher", "SIGKILL"),
    Fault("generation dispatcher", "join"),
    Fault("generation dispatcher", "leave"),
    Fault("node of workers", "SIGKILL"),
    Fault("trainer rank 1", "SIGSTOP"),
    Fault("trainer rank 0", "SIGKILL", "training"),
    Fault("trainer rank 0", "SIGKILL", "checkpoint"),
    Fault("trainer rank 1", "SIGKILL", "weight sync"),
    Fault("torchrun", "SIGTERM"),
    Fault("torchrun", "SIGKILL"),
    Fault("machine", "SIGKILL"),
    Fault("machine", "SIGKILL", "checkpoint"),
)


def matrix(roles: Sequence[str], *, repeats: int, seed: int) -> tuple[Fault, ...]:
    """The faults of `roles` (all when empty), each `repeats` times.

    Repeats are shuffled by the seed: what follows what differs. Joining comes before leaving.

    >>> [str(fault) for fault in matrix(["controller"], repeats=1, seed=0)][:2]
    ['controller: SIGKILL, generating', 'controller: SIGKILL, training']
    """
    chosen = [fault for fault in MATRIX if not roles or fault.role in roles]
    rounds = [chosen]
    for number in range(1, repeats):
        others = [fault for fault in chosen if fault.action not in ("join", "leave")]
        random.Random(f"{seed}-{number}").shuffle(others)
        rounds.append(others)
    return tuple(itertools.chain.from_iterable(rounds))


def random_kills(seed: int, *, roles: Sequence[str] = ()) -> Iterator[Fault]:
    """Endless SIGKILLs of roles drawn at random; those that end the run are rarer."""
    generator = random.Random(seed)
    names = [role for role in ROLES if not roles or role in roles]
    weights = [1 if role in ENDING else 3 for role in names]
    while True:
        (role,) = generator.choices(names, weights=weights)
        yield Fault(role, "SIGKILL")
