"""The roles of workers: the only place that knows their names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from async_grpo.util.errors import ConfigError

GENERATION = "generation"
REFERENCE = "reference"
VERIFIER = "verifier"
ENVIRONMENT = "environment"
TEACHER = "teacher"
JUDGE = "judge"
LOGPROB = "logprob"  # what a dispatcher's --mode calls the reference, as the predecessor did
MODES = (GENERATION, LOGPROB, TEACHER, VERIFIER, ENVIRONMENT, JUDGE)  # of a dispatcher

# `policy`: the newest weights, each batch. `reference`: those of the run's first batch, or of a
# later one. `own`: what the worker was started with, never changed. `none`: it has no weights.
Follows = Literal["policy", "reference", "own", "none"]


@dataclass(frozen=True, slots=True)
class Role:
    """What the workers of one registry do."""

    name: str
    unit: str  # what the cost of its work counts
    follows: Follows  # whose weights it serves

    @property
    def loads_weights(self) -> bool:
        """Whether the trainer publishes weights to these workers."""
        return self.follows in ("policy", "reference")


_ROLES = (
    Role(GENERATION, "sequences", "policy"),
    Role(REFERENCE, "tokens", "reference"),
    Role(VERIFIER, "texts", "none"),
    Role(ENVIRONMENT, "episodes", "none"),
)


def teacher(name: str) -> str:
    """The role's name of the workers that serve one teacher."""
    return f"{TEACHER}:{name}"


def judge(name: str) -> str:
    """The role's name of the workers that serve one judge, whom environments ask."""
    return f"{JUDGE}:{name}"


def named(roles: Iterable[str], teacher_names: Sequence[str]) -> tuple[str, ...]:
    """The roles that have workers, each once: `TEACHER` alone stands for all teachers of a run.

    >>> named(["reference", "teacher"], ["math", "code"])
    ('reference', 'teacher:math', 'teacher:code')
    """
    found = (map(teacher, teacher_names) if role == TEACHER else [role] for role in roles)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def role_of(name: str) -> Role:
    """The role of that name.

    >>> role_of("reference").unit, role_of(teacher("math")).follows
    ('tokens', 'own')
    """
    if name.startswith(f"{TEACHER}:") and name != teacher(""):
        return Role(name, "tokens", "own")
    if name.startswith(f"{JUDGE}:") and name != judge(""):
        return Role(name, "answers", "own")
    for role in _ROLES:
        if role.name == name:
            return role
    known = ", ".join([*(role.name for role in _ROLES), judge("NAME")])
    raise ConfigError(f"a role must be one of {known} or {teacher('NAME')}, got {name!r}")
