"""See `async_grpo.roles`, which imports no numpy."""

from async_grpo.roles import (
    ENVIRONMENT,
    GENERATION,
    LOGPROB,
    MODES,
    REFERENCE,
    TEACHER,
    VERIFIER,
    Role,
    role_of,
    teacher,
)

__all__ = [
    "ENVIRONMENT",
    "GENERATION",
    "LOGPROB",
    "MODES",
    "REFERENCE",
    "TEACHER",
    "VERIFIER",
    "Role",
    "role_of",
    "teacher",
]
