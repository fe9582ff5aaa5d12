"""What a verifier pool runs, and how many processes it may take."""

from __future__ import annotations

from dataclasses import dataclass

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
    search_paths: tuple[str, ...] = ()  # folders where modules and relative paths are looked for
    failed_samples: str = ""  # file to which samples are appended that could not be graded
    start_timeout_s: float = 60.0  # a process may take to import the adapters

    def require_same_rewards(self, running: VerifierConfig) -> None:
        """Raise `ConfigError` when the pool that is `running` grades in another way."""
        wanted, theirs = (
            (self.reward_names, self.registry),
            (running.reward_names, running.registry),
        )
        if wanted != theirs:
            raise ConfigError(
                "--reward-fns and --reward-registry must agree within a run, got "
                f"{','.join(wanted[0])} of {wanted[1]} while its verifiers run "
                f"{','.join(theirs[0])} of {theirs[1]}: use the same, or another --namespace"
            )


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
