"""What a verifier pool runs, and how many processes it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from async_grpo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """The verification part of a dispatcher's options; one pool serves all of a run."""

    reward_names: tuple[str, ...]
    registry: str = "reward_registry"  # module name, or path of a .py file
    num_verifiers: int = 50  # wanted; see `count_processes`
    timeout_s: float = 10.0  # one adapter on one sample
    memory_mib: int = 4096  # address space of one process
    file_mib: int = 256  # largest file that one process may write
    network: bool = True  # for users' functions; shipped graders never have it
    environment: tuple[str, ...] = ()  # variables that users' functions get beside ordinary ones
    search_paths: tuple[str, ...] = ()  # folders where modules and relative paths are looked for
    sources: Mapping[str, str] = field(default_factory=dict)  # see `sources.read_sources`
    start_timeout_s: float = 60.0  # a process may take to import the adapters

    def require_same_rewards(self, running: VerifierConfig, *, users: str) -> None:
        """Raise `ConfigError` when the verifiers `running` for `users` grade in another way."""
        remedy = "stop these first, or use another --namespace"
        if self._rewards != running._rewards:
            raise ConfigError(
                "--reward-fns and --reward-registry must be those of the verifiers that run, got "
                f"{self._rewards} while {running._rewards} is used by {users}: {remedy}"
            )
        edited = [name for name, text in self.sources.items() if text != running.sources.get(name)]
        if edited:
            raise ConfigError(
                f"a reward must stay as it is while it is used, but {', '.join(edited)} was edited "
                f"since {users} began to use {running._rewards}: {remedy}"
            )

    @property
    def time_limit(self) -> str:
        """With its option, for whoever has to raise it."""
        return f"--verifier-timeout-s {self.timeout_s:g}"

    @property
    def memory_limit(self) -> str:
        return f"--verifier-memory-mib {self.memory_mib}"

    @property
    def _rewards(self) -> str:
        return f"--reward-fns {','.join(self.reward_names)} of {self.registry}"


def count_processes(requested: int, *, cluster_cpus: int, num_nodes: int, local_cpus: int) -> int:
    """How many verifier processes to start: never more than the cluster has cores.

    Ray may be told of more cores than a machine has; with one node the machine itself bounds too.

    >>> count_processes(50, cluster_cpus=8, num_nodes=1, local_cpus=2)
    2
    >>> count_processes(50, cluster_cpus=40, num_nodes=4, local_cpus=16)
    40
    """
    bounds = [requested, cluster_cpus] + ([local_cpus] if num_nodes == 1 else [])
    return max(1, min(bounds))
