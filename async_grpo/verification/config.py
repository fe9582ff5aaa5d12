"""The rewards that a verifier pool runs, and the limits of its processes.

A dispatcher reads the text of the users' reward files once. All verifiers of its pool run this
text, also those that start later: they never mix versions of a file that is edited meanwhile. Pools
that run other texts are recognised by the hashes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.util.user_code import hash_imported, hash_text, split_arguments, text_of
from async_grpo.verification import graders

if TYPE_CHECKING:  # both bring arrays: fork servers stay small
    from async_grpo.config.worker_config import WorkerConfig
    from async_grpo.types import Rewards

NOBODY = 65534
MAX_PROCESSES = 64  # of one request, its first included
# The hash of reward_registry.py as it is shipped, which users may edit.
REGISTRY_SHA256 = "e4209200ef488a9b4a5a79ffcf8f91dcc067f2ffb3c78f49b2e1169737206459"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """The verification part of a dispatcher's options."""

    reward_names: tuple[str, ...]
    registry: str = "reward_registry"  # module name, or path of a .py file
    num_verifiers: int = 50  # of all pools together
    timeout_s: float = 10.0  # of one adapter on one sample
    memory_mib: int = 4096  # of all processes of a request, and address space of each
    file_mib: int = 256  # largest file that one process may write
    network: bool = True  # for users' functions; shipped graders never have it
    environment: tuple[str, ...] = ()  # further variables for users' functions
    search_paths: tuple[str, ...] = ()  # folders of modules and relative paths
    sources: Mapping[str, str] = field(default_factory=dict)  # see `read_sources`
    imported: Mapping[str, str] = field(default_factory=dict)  # see `user_code.hash_imported`
    start_timeout_s: float = 60.0  # for the import of the adapters
    unconfined_rewards: bool = False  # rewards may run where they cannot be confined
    unconfined_code: bool = False  # programs of the model may

    def rewards(self, *, num_cores: int) -> Rewards:
        """The rewards with which a pool on a node of `num_cores` registers."""
        from async_grpo.types import Rewards  # which holds arrays: fork servers stay small

        given: dict[str, str] = {}  # arguments of the functions of each source
        for name in sorted(self.reward_names):
            if split_arguments(name)[1]:
                source = source_of(name, self.registry)
                given[source] = given.get(source, "") + name
        hashes = {name: hash_text(text, given.get(name, "")) for name, text in self.sources.items()}
        hashes |= self.imported
        return Rewards(self.reward_names, self.registry, hashes, self.num_verifiers, num_cores)

    @property
    def wall_s(self) -> float:
        """Wall-clock limit of a sample: far above its processor time, for a busy machine."""
        return 3.0 * self.timeout_s

    @property
    def child_s(self) -> float:
        """Wall-clock limit of a process, which starts no sample once it has run for `timeout_s`."""
        return self.timeout_s + self.wall_s

    @property
    def time_limit(self) -> str:
        """The option and its value, for error messages."""
        return f"--verifier-timeout-s {self.timeout_s:g}"

    @property
    def memory_limit(self) -> str:
        """The option and its value, for error messages."""
        return f"--verifier-memory-mib {self.memory_mib}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """How the requests of one fork server are confined."""

    confined: bool
    network: bool
    uid: int | None = None  # the user that requests become; None: they keep theirs
    seen_as: int = NOBODY  # the user's number inside a request
    scratch_mib: int = 0  # size of each request's new /dev/shm; 0: requests can write no file
    kind: str = "own rewards"  # the kind of code that they run
    why: str = ""  # the reason if they are not confined


def verifier_config(worker: WorkerConfig) -> VerifierConfig:
    """Read the reward files of a dispatcher, and return its verifiers' configuration."""
    names, registry, here = worker.reward_names, worker.reward_registry, (os.getcwd(),)
    return VerifierConfig(
        reward_names=names,
        registry=registry,
        num_verifiers=worker.global_num_verifiers,
        timeout_s=worker.verifier_timeout_s,
        memory_mib=worker.verifier_memory_mib,
        network=worker.verifier_network,
        environment=worker.verifier_variables,
        search_paths=here,
        sources=(sources := read_sources(names, registry=registry, search_paths=here)),
        imported={
            name: own
            for source in sources
            for name, own in hash_imported(str(path_of(source, here)), what=source).items()
        },
        unconfined_rewards=worker.unconfined_rewards,
        unconfined_code=worker.unconfined_code,
    )


def source_of(name: str, registry: str) -> str:
    """The file or module that holds a reward.

    >>> source_of("own/mine.py:near(by=2)", "reward_registry"), source_of("mathd", "my_registry")
    ('own/mine.py', 'my_registry')
    """
    return split_arguments(name)[0].rpartition(":")[0] or registry


def grader_of(name: str, config: VerifierConfig) -> str:
    """The name of the shipped grader that a reward's text is; empty: it is a user's function."""
    source = source_of(name, config.registry)
    text = config.sources.get(source)
    if text is None:
        return ""
    shipped = Path(graders.__file__).with_name("shipped.py")
    known = _sha256(text_of(str(shipped))) if source == graders.SHIPPED else REGISTRY_SHA256
    return name.rpartition(":")[2] if _sha256(text) == known else ""


def _sha256(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def read_sources(
    reward_names: Sequence[str], *, registry: str, search_paths: Sequence[str]
) -> Mapping[str, str]:
    """The text of each file or module, by its name in the options.

    One that is not found or is no text is left out; loading it raises the error later.
    """
    texts = {}
    for source in dict.fromkeys(source_of(name, registry) for name in reward_names):
        if not (path := path_of(source, search_paths)):
            continue
        try:
            texts[source] = text_of(str(path))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
    return texts


def path_of(source: str, search_paths: Sequence[str]) -> Path | None:
    """The path of a file or of a module's file; None: there is none."""
    found = next((path for path in candidates(source, search_paths) if path.is_file()), None)
    if found or not source.isidentifier():
        return found
    spec = find_spec(source)  # finds editable installations, which are on no search path
    return Path(spec.origin) if spec and spec.origin else None


def candidates(source: str, search_paths: Sequence[str]) -> list[Path]:
    """The paths where a file, or a module's file, may be; the first that exists is used."""
    if source.endswith(".py"):
        return [Path(folder, source).resolve() for folder in (*search_paths, ".")]
    stem = Path(*source.split("."))
    files = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
    return [Path(folder, file) for folder in (*search_paths, *sys.path) for file in files]
