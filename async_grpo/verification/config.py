"""What a verifier pool runs, and the limits of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo.types import Rewards


SHIPPED_REWARDS, OWN_REWARDS = "shipped rewards", "own rewards"
GENERATED_CODE = "programs of the model"
NOBODY = 65534
MAX_PROCESSES = 64  # of one request, itself included
MAX_OPEN_FILES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """The verification part of a dispatcher's options."""

    reward_names: tuple[str, ...]
    registry: str = "reward_registry"  # module name, or path of a .py file
    num_verifiers: int = 50  # wanted of all pools together
    timeout_s: float = 10.0  # one adapter on one sample
    memory_mib: int = 4096  # of all processes of a request, and address space of each
    file_mib: int = 256  # largest file that one process may write
    network: bool = True  # for users' functions; shipped graders never have it
    environment: tuple[str, ...] = ()  # variables that users' functions get beside ordinary ones
    search_paths: tuple[str, ...] = ()  # folders where modules and relative paths are looked for
    sources: Mapping[str, str] = field(default_factory=dict)  # see `sources.read_sources`
    imported: Mapping[str, str] = field(default_factory=dict)  # see `user_code.hash_imported`
    start_timeout_s: float = 60.0  # a process may take to import the adapters
    unconfined_rewards: bool = False  # may run where they cannot be confined
    unconfined_code: bool = False  # so may programs of the model's

    def rewards(self, *, num_cores: int) -> Rewards:
        """What a pool on a node of so many cores registers with."""
        from async_grpo.types import Rewards  # which holds arrays: fork servers stay small

        hashes = {name: sha256(text.encode()).hexdigest() for name, text in self.sources.items()}
        hashes |= self.imported
        return Rewards(self.reward_names, self.registry, hashes, self.num_verifiers, num_cores)

    @property
    def wall_s(self) -> float:
        """On the wall's clock a sample may take much longer than of processor time.

        So a machine short of processors is no verdict.
        """
        return 3.0 * self.timeout_s

    @property
    def child_s(self) -> float:
        """Of all samples that a process grades: it starts none once it has taken `timeout_s`."""
        return self.timeout_s + self.wall_s

    @property
    def time_limit(self) -> str:
        """With its option, for whoever has to raise it."""
        return f"--verifier-timeout-s {self.timeout_s:g}"

    @property
    def memory_limit(self) -> str:
        return f"--verifier-memory-mib {self.memory_mib}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What surrounds the requests of one fork server."""

    confined: bool
    network: bool
    uid: int | None = None  # that requests change to; None: they stay what they are
    seen_as: int = NOBODY  # the user's number inside a request
    scratch_mib: int = 0  # of an own, empty /dev/shm for each request; 0: no file can be written
    kind: str = OWN_REWARDS
    why: str = ""  # they are not confined
