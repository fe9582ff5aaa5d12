"""The models of `benchmarks.scaling` and their rates on H100, where they are not the planner's.

Each has its source in docs/scaling.md; `async_grpo.planning.rates` has those of an engine's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from async_grpo.batching.packing import attention_ratio
from async_grpo.devices.bill import ModelShape
from async_grpo.planning import rates
from async_grpo.planning.asked import H100
from async_grpo.planning.rates import (
    BROADCAST_NODES,
    BROADCAST_S_PER_BYTE,
    BROADCAST_SPEED_UP,
    NETWORK_SHARE,
    PACK_BYTES_PER_S,
    PCIE_SHARE,
    ControlCosts,
    EngineRates,
    SyncRates,
    TrainerRates,
)

BYTES = 2  # bfloat16, of weights and caches
DEVICES_A_NODE = 8
MEAN_CONTEXT = 2_600  # tokens of a running sequence, seen at random, for the room it needs
MEMORY_FOR_ENGINE = 0.9  # of a device's memory, an assumption
MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense transformer, and how the service runs it."""

    name: str
    parameters: float
    layers: int
    attention_width: int  # query heads by their size
    kv_width: int  # key heads by their size
    devices_per_engine: int
    train_tokens_per_s: float  # of a device, with short sequences

    @property
    def size_bytes(self) -> float:
        return self.parameters * BYTES

    @property
    def shape(self) -> ModelShape:
        """As far as an engine's speed depends on it."""
        return ModelShape(
            num_parameters=int(self.parameters), layer_parameters=0, root_parameters=0,
            num_layers=self.layers, hidden=0, intermediate=0, query_width=self.attention_width,
            key_width=self.kv_width, num_heads=0, vocab_size=0,
        )  # fmt: skip

    @property
    def kv_bytes(self) -> float:
        """Of one token."""
        return 2 * self.layers * self.kv_width * BYTES


# Training: IBM's fms-fsdp on 96 H100 publishes 7,500 tokens/s a device for 7B and 1,550 for 34B
# (4,096 tokens a sequence; 31 and 32 % of the peak). Others: the same share of it.
MODELS = {
    model.name: model
    for model in (
        Model(name="1.5B", parameters=1.54e9, layers=28, attention_width=1536, kv_width=256,
              devices_per_engine=1, train_tokens_per_s=7_500 * 6.74 / 1.54),
        Model(name="7B", parameters=7.62e9, layers=28, attention_width=3584, kv_width=512,
              devices_per_engine=1, train_tokens_per_s=7_500 * 6.74 / 7.62),
        Model(name="32B", parameters=32.8e9, layers=64, attention_width=5120, kv_width=1024,
              devices_per_engine=4, train_tokens_per_s=1_550 * 34 / 32.8),
        Model(name="70B", parameters=70.6e9, layers=80, attention_width=8192, kv_width=1024,
              devices_per_engine=8, train_tokens_per_s=1_550 * 34 / 70.6),
    )
}  # fmt: skip


def engine_rates(model: Model) -> EngineRates:
    """Of one engine on as many devices as the service gives it."""
    devices = model.devices_per_engine
    room = devices * H100.memory_bytes * MEMORY_FOR_ENGINE - model.size_bytes
    capacity = min(MAX_NUM_SEQS, int(room / model.kv_bytes / MEAN_CONTEXT))
    return rates.engine_rates(model.shape, H100, devices=devices, capacity=capacity)


def trainer_rates(model: Model) -> TrainerRates:
    """Of a rank on one device; three passes over the shards a round, hidden if computing is longer.

    The published rates are those of 4,096 tokens a sequence: that much attention is in them.
    """
    ratio = attention_ratio(
        num_parameters=int(model.parameters),
        num_layers=model.layers,
        attention_width=model.attention_width,
    )
    return TrainerRates(
        cost_per_second=model.train_tokens_per_s * (1 + 4096 / ratio),
        attention_ratio=ratio,
        round_floor_s=3 * model.size_bytes / (H100.network_bytes_per_s * NETWORK_SHARE),
    )


def sync_rates(model: Model, *, engine_nodes: int) -> SyncRates:
    """Rank 0 gathers float32 shards, packs bfloat16 into the store; nodes pass the bytes on."""
    gather_s = 4 * model.parameters / (H100.network_bytes_per_s * NETWORK_SHARE)
    hops = log2(1 + engine_nodes) / log2(1 + BROADCAST_NODES)
    per_byte_s = BROADCAST_S_PER_BYTE / BROADCAST_SPEED_UP
    share = model.size_bytes / model.devices_per_engine
    return SyncRates(
        gather_s=gather_s + model.size_bytes / PACK_BYTES_PER_S,
        transfer_s=model.size_bytes * per_byte_s * hops,
        load_s=share / (H100.host_bytes_per_s * PCIE_SHARE),
    )


# One core of two AMD EPYC. `Publisher.collect` packs and checksums 3.2 GB/s, the store's first copy
# takes 1.2 GB/s. `CONTROL` is of 2026-11-21, when leases came from another process: a ping 0.6 ms,
# a sample through the batcher 0.6 ms in groups of 8; how that splits, and what a rank's request
# costs, are assumptions. Today's controller takes 0.72 ms a sample, leases included, and 1.3 ms a
# turn that an environment asks for (results/control_plane.json): more than is simulated here.
CONTROL = ControlCosts(
    group_s=2.6e-3, sample_s=0.25e-3, item_s=0.5e-3, ping_s=0.6e-3, verification_s=1.6e-3
)
