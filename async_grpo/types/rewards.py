"""What verifier pools grade with, and how they share a number of processes. Pure.

Pools on several nodes grade the samples of one run, so all of them must grade alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_grpo.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a verifier pool states about its grading when it registers."""

    names: tuple[str, ...]
    registry: str
    # sha256 of each loaded text, by file or module as options name it, and of what it imports out
    # of its own folder
    hashes: Mapping[str, str]
    num_verifiers: int  # processes wanted of all pools together
    num_cores: int  # of the pool's node
    groupwise: tuple[str, ...] = ()  # of the names: these grade a question alone

    def __str__(self) -> str:
        return f"--reward-fns {','.join(self.names)} of {self.registry}"

    def require_equal(self, admitted: Rewards, *, users: str) -> None:
        """Raise `ConfigError` unless these grade as the `admitted` ones of `users` do."""
        remedy = "stop these first, or use another --namespace"
        if (self.names, self.registry) != (admitted.names, admitted.registry):
            raise ConfigError(
                "--reward-fns and --reward-registry must be those of the verifiers that run, got "
                f"{self} while {admitted} is used by {users}: {remedy}"
            )
        edited = [
            f"{name} ({admitted.hashes.get(name, 'absent')[:12]}, now {own[:12]})"
            for name, own in self.hashes.items()
            if own != admitted.hashes.get(name)
        ]
        if edited:
            raise ConfigError(
                f"a reward must stay as it is while it is used, but {', '.join(edited)} was edited "
                f"since {users} began to use {admitted}: {remedy}"
            )


def share_out(pools: Mapping[str, tuple[str, Rewards]]) -> dict[str, int]:
    """Processes of each pool, given its node and rewards: never more on a node than it has cores.

    >>> def pool(node, num_verifiers=50):
    ...     return node, Rewards(("math",), "registry", {}, num_verifiers, num_cores=16)
    >>> share_out({"a": pool("n1"), "b": pool("n1"), "c": pool("n2")})
    {'a': 8, 'b': 8, 'c': 16}
    >>> share_out({"a": pool("n1", 9), "b": pool("n2", 9)}), share_out({"b": pool("n2", 9)})
    ({'a': 4, 'b': 5}, {'b': 9})
    """
    nodes = [node for node, _ in pools.values()]
    cores = {name: rewards.num_cores / nodes.count(node) for name, (node, rewards) in pools.items()}
    wanted = max((rewards.num_verifiers for _, rewards in pools.values()), default=0)
    part = min(1.0, wanted / max(1.0, sum(cores.values())))
    shares, before = {}, 0.0
    for name, its_cores in cores.items():  # rounding the running sum, so that the total is right
        after = before + its_cores * part
        shares[name] = max(1, round(after) - round(before))
        before = after
    return shares
