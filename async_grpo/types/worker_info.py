"""What a worker states when it registers, in its pulse, and about its grading.

Verifier pools on several nodes grade the samples of one run, so all of them must grade alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from async_grpo.types.message import Parcel
from async_grpo.types.samples import Turn
from async_grpo.util.deadlines import LEASE_S
from async_grpo.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker states when it registers."""

    worker_id: str
    role: str  # name of a role, see `config.roles`
    node_id: str
    pid: int
    model_path: str = ""  # of a service: its class
    vocab_size: int = 0
    capacity: float = 1.0  # in the unit of its role
    overhead: float = 0.0  # accepted beyond the capacity, same unit
    max_model_len: int = 0
    tokenizer_hash: str = ""  # `model_folder.encoding_hash`; empty: unknown
    temperature: float | None = None  # None: that of each request
    model_hash: str = ""  # of a teacher's model or a service's file, which never change
    hidden_size: int = 0  # of a teacher's model
    num_ranks: int = 1  # that share its model, and are members of express groups
    item_size: int = 0  # bytes of one of a teacher's weights
    dtype: str = ""  # of weights that follow the policy; empty: it has none
    devices: tuple[str, ...] = ()  # identities of its NVIDIA devices; empty on a CPU
    max_lora_rank: int = 0  # of adapters that it serves; 0: it takes weights of the model
    max_loras: int = 0  # adapters that it serves at a time
    sleeps: bool = False  # it can give its devices to the trainer now and then
    lease_s: float = LEASE_S  # it counts as lost when silent for so long
    startup: tuple[tuple[str, float], ...] = ()  # (phase, seconds) before it was ready
    rewards: Rewards | None = None  # of a verifier pool
    # Of a service: sha256 of its file, and of the modules that it imports from its folder.
    code: Mapping[str, str] = field(default_factory=dict, hash=False)
    # See `confinement_in_words`.
    confinement: Mapping[str, str] = field(default_factory=dict, hash=False)
    owner: str = ""  # its dispatcher, which a message may ask the user to stop


def confinement_in_words(confinement: Mapping[str, str]) -> str:
    """A sentence on confinement; `confinement`: {kind of code: why it is not confined, or ""}.

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


@dataclass(frozen=True, slots=True, eq=False)
class Cut(Parcel):
    """What each output of a request has sampled since the last cut, up to one step of the engine.

    Nothing of it depends on which outputs end first. So after the loss of the worker others can go
    on from a cut, where to keep only finished outputs would prefer short ones.
    """

    number: int  # of the request's cuts: 0, 1, ...
    parts: tuple[Turn, ...]


class RequestPulse(NamedTuple):
    """The progress of a worker with the request of one lease."""

    num_tokens: int  # of its unfinished sequences
    is_waiting: bool  # none of its sequences runs, and some wait in the worker's queue
    cut: Cut | None = None


class Pulse(NamedTuple):
    """A worker's answer to a ping."""

    serves: str  # the version of its weights, or "none"
    num_tokens: int = 0  # made since it began
    requests: Mapping[int, RequestPulse] | None = None  # by lease; None: unknown now


class Standing(NamedTuple):
    """The standing of a worker in its registry."""

    is_member: bool
    num_leases: int
    excluded: str  # why it was fenced; empty: it was not, or the reason is unknown
    run: int = 0  # incarnation of the run that the registry serves; 0: none


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a verifier pool states about its grading when it registers."""

    names: tuple[str, ...]
    registry: str
    # sha256 of each file or module that options name, and of what it imports from its folder
    hashes: Mapping[str, str]
    num_verifiers: int  # processes wanted in all pools together
    num_cores: int  # of the pool's node
    groupwise: tuple[str, ...] = ()  # of `names`: grade a group in one call, alone

    def __str__(self) -> str:
        return f"--reward-fns {','.join(self.names)} of {self.registry}"

    def grade_singly(self, names: Sequence[str]) -> bool:
        """Whether `names` (empty: all) grade an output of a group without the others.

        >>> rewards = Rewards(("math", "majority"), "", {}, 1, 1, groupwise=("majority",))
        >>> [rewards.grade_singly(names) for names in (["math"], ["majority"], [])]
        [True, False, True]
        """
        # Without names a pool leaves out groupwise ones where it has others.
        chosen = names or {*self.names}.difference(self.groupwise) or self.names
        return {*chosen}.isdisjoint(self.groupwise)

    def require_equal(self, admitted: Rewards, *, users: str) -> None:
        """Raise `ConfigError` unless these grade as the `admitted` rewards, which `users` use."""
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
    """{pool: its processes}, from {pool: (node, rewards)}; a node gets no more than its cores.

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
