"""Kinds of devices by name: what their makers' data sheets say of them. Pure.

Dense products of bfloat16 without sparsity, one direction of links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from async_grpo.util.errors import ConfigError

A_NODE = 8  # devices of a machine, where nobody says


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One device; a CPU is one core, whose memory is its machine's."""

    name: str
    flops: float  # products of the compute type
    bytes_per_s: float  # of its memory
    memory_bytes: float
    link_bytes_per_s: float  # to the devices of its machine
    network_bytes_per_s: float = 50e9  # a device's share: 400 Gb/s
    host_bytes_per_s: float = 64e9  # PCIe Gen5 x16
    is_cpu: bool = False
    has_large_batches: bool = True  # of vLLM's defaults by device
    source: str = ""  # who says so; empty: its maker


H100 = Kind(name="H100", flops=989e12, bytes_per_s=3.35e12, memory_bytes=80e9,
            link_bytes_per_s=450e9)  # fmt: skip
A100 = Kind(name="A100", flops=312e12, bytes_per_s=2.04e12, memory_bytes=80e9,
            link_bytes_per_s=300e9, network_bytes_per_s=25e9, host_bytes_per_s=32e9,
            has_large_batches=False)  # fmt: skip
L40S = Kind(name="L40S", flops=362e12, bytes_per_s=0.864e12, memory_bytes=48e9,
            link_bytes_per_s=32e9, network_bytes_per_s=25e9, host_bytes_per_s=32e9,
            has_large_batches=False)  # fmt: skip
CPU = Kind(name="CPU", flops=18e9, bytes_per_s=8e9, memory_bytes=0, link_bytes_per_s=2e9,
           network_bytes_per_s=1e9, host_bytes_per_s=8e9, is_cpu=True)  # fmt: skip
KINDS = {
    each.name: each
    for each in (
        H100,
        replace(H100, name="H200", bytes_per_s=4.8e12, memory_bytes=141e9),
        replace(H100, name="B200", flops=2250e12, bytes_per_s=7.7e12, memory_bytes=180e9,
                link_bytes_per_s=900e9),
        A100,
        replace(A100, name="A100-40", bytes_per_s=1.555e12, memory_bytes=40e9),
        L40S,
        replace(L40S, name="A10G", flops=70e12, bytes_per_s=0.6e12, memory_bytes=24e9),
        replace(L40S, name="L4", flops=121e12, bytes_per_s=0.3e12, memory_bytes=24e9),
        replace(L40S, name="RTX4090", flops=165e12, bytes_per_s=1.008e12, memory_bytes=24e9),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices that a run may have: machines of so many of one kind; none: CPUs alone."""

    nodes: tuple[int, ...]
    kind: Kind
    num_cores: int = 0  # that everything shares; 0: devices do the work
    threads: int = 1  # of each process that computes on them

    @property
    def num_devices(self) -> int:
        return sum(self.nodes)

    @property
    def of_a_node(self) -> int:
        return max(self.nodes, default=1)

    def __str__(self) -> str:
        if not self.num_devices:
            return f"{self.num_cores} CPU cores"
        nodes = f" on {len(self.nodes):,} machines" if len(self.nodes) > 1 else ""
        return f"{self.num_devices:,} x {self.kind.name}{nodes}"


def fleet_of(text: str, *, kind: str = "") -> Fleet:
    """Of 16, of 8,8 (machines), or of 16xH200; more than 8 devices stand 8 in a machine.

    Raises `ConfigError` for a text that says no devices, and for an unknown kind.

    >>> fleet_of("20xA100").nodes, str(fleet_of("8,8"))
    ((8, 8, 4), '16 x H100 on 2 machines')
    """
    count, _, named = text.partition("x")
    name = named or kind or H100.name
    if name not in KINDS:
        raise ConfigError(
            f"--devices must name a kind that is known ({', '.join(KINDS)}), got {name!r}: choose "
            "the nearest, and give what it really does with --rates"
        )
    if not re.fullmatch(r"\d+(,\d+)*", count) or not sum(map(int, count.split(","))):
        raise ConfigError(
            f"--devices must be a number of devices, those of each machine, or a number and a "
            f"kind, got {text!r}: 16, 8,8 and 16xH200 are such"
        )
    nodes = [int(part) for part in count.split(",")]
    if len(nodes) == 1:
        whole, rest = divmod(nodes[0], A_NODE)
        nodes = [A_NODE] * whole + [rest] * (rest > 0)
    return Fleet(tuple(each for each in nodes if each), KINDS[name])
