"""The roles of workers: the only place that knows their names."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode

GENERATION = "generation"
REFERENCE = "reference"
VERIFIER = "verifier"
ENVIRONMENT = "environment"
TEACHER = "teacher"
JUDGE = "judge"
SERVICE = "service"  # of the user's own, whose class stands in the place of a mode
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


def service(name: str) -> str:
    """The role's name of the workers of one service, which is asked as `services["NAME"]`."""
    return f"{SERVICE}:{name}"


def is_service(role: str) -> bool:
    """Whether that is the name of a service's role."""
    return role.startswith(service(""))


def check_service(role: str, known: Collection[str]) -> None:
    """Raise `ConfigError` for a service that is none of the `known` roles: those with workers."""
    if is_service(role) and role not in known:
        names = sorted(each.removeprefix(service("")) for each in known if is_service(each))
        raise ConfigError(
            f"a service must be one of {', '.join(names) or 'those that have had a worker'}, got "
            f"services[{role.removeprefix(service(''))!r}]: correct the name, or start it with "
            "--mode path/to/file.py:Name (--name names it, else its class)"
        )


def name_of_class(mode: str) -> str:
    """Of a service that has no other.

    >>> name_of_class("my/files.py:BM25Index"), name_of_class("mine.search:HTTPSearch")
    ('bm25_index', 'http_search')
    """
    between = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(between, "_", mode.rpartition(":")[2]).lower()


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """What the class of a service says of each of its workers."""

    code: UserCode
    capacity: int  # requests that it answers at a time
    devices: int

    @classmethod
    def read(cls, mode: str) -> ServiceTerms:
        """Those of the class that `mode` names, whose file is read and not run.

        Raises `ConfigError` where there is no such class, or it lacks something.
        """
        return _terms(UserCode.read(mode, option="--mode", shipped=MODES))


@functools.cache
def _terms(code: UserCode) -> ServiceTerms:
    code.check_defined()
    capacity = _number(code, "capacity", least=1, what="requests a worker answers at a time")
    devices = _number(code, "devices", least=0, what="devices a worker takes", default=0)
    if not code.awaits("answer"):
        raise ConfigError(
            f"--mode {code.name} must have a method `async def answer(self, request)`, and has "
            "none: add it to its class"
        )
    return ServiceTerms(code, capacity, devices)


def _number(code: UserCode, name: str, *, what: str, least: int, default: int | None = None) -> int:
    found = code.states(name, default)
    if type(found) is not int or found < least:
        raise ConfigError(
            f"--mode {code.name} must say in its class how many {what}, as `{name} = 1`, got "
            f"{found!r}: give a whole number of at least {least}, in that file"
        )
    return found


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
    if is_service(name) and name != service(""):
        return Role(name, "requests", "own")
    for role in _ROLES:
        if role.name == name:
            return role
    known = ", ".join([*(role.name for role in _ROLES), judge("NAME"), service("NAME")])
    raise ConfigError(f"a role must be one of {known} or {teacher('NAME')}, got {name!r}")
