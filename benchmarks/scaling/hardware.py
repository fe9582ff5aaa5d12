"""Rates of devices, networks and processes, each with where it comes from: docs/scaling.md.

An engine's step is a roofline: weights and caches are read from memory, products computed, and
every layer's halves are summed over the engine's devices. Its three constants were chosen to meet
two published latencies (vLLM's own, H200, 8B on one device and 70B on four); `latency_figures`
compares it with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from async_grpo.batching.packing import attention_ratio
from benchmarks.results import Figure
from benchmarks.scaling.engine import EngineRates
from benchmarks.scaling.references import ReferenceRates
from benchmarks.scaling.scenario import ControlCosts, SyncRates, TrainerRates

BYTES = 2  # bfloat16, of weights and caches
DEVICES_A_NODE = 8
BUCKET_BYTES = 256 << 20  # of weights
PROMPT_TOKENS = 200
MEAN_CONTEXT_SHARE = 2_600  # tokens of a running sequence, seen at random, for the room it needs

# NVIDIA's data sheets.
FLOPS = 989e12  # H100 SXM and H200, bfloat16, dense
H100_BYTES_PER_S, H200_BYTES_PER_S = 3.35e12, 4.8e12
DEVICE_BYTES = 80e9
NETWORK_BYTES_PER_S = 50e9  # a device's 400 Gb/s
PCIE_BYTES_PER_S = 64e9  # Gen5 x16, one direction

# Chosen to meet vLLM's published latencies; the share of the products is an assumption.
MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.5
STEP_OVERHEAD_S = 2.3e-3
ALL_REDUCE_S = 30e-6

# Assumptions without a source.
NETWORK_SHARE = 0.8
PCIE_SHARE = 0.5
MEMORY_FOR_ENGINE = 0.9  # vLLM's default share of a device's memory
MAX_NUM_SEQS = 256  # vLLM's default
BROADCAST_SPEED_UP = 4.0  # 400 Gb/s nodes beside the 10 Gb/s ones of Ray's test, through its CPUs

# Ray's release test, commit 08ff3113: 1 GiB to 50 nodes takes 16.9 s.
RAY_BROADCAST_S, RAY_BROADCAST_BYTES, RAY_BROADCAST_NODES = 16.938, 2**30, 50


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


def engine_rates(
    model: Model, *, devices: int | None = None, bytes_per_s: float = H100_BYTES_PER_S
) -> EngineRates:
    """Of one engine on `devices`, by default as many as the service gives it."""
    devices = devices or model.devices_per_engine
    memory = devices * bytes_per_s * MEMORY_SHARE
    product_s = 2 * model.parameters / (devices * FLOPS * COMPUTE_SHARE)
    all_reduces = 2 * model.layers if devices > 1 else 0
    room = devices * DEVICE_BYTES * MEMORY_FOR_ENGINE - model.size_bytes
    return EngineRates(
        step_s=STEP_OVERHEAD_S + all_reduces * ALL_REDUCE_S + model.size_bytes / memory,
        per_sequence_s=product_s,
        per_kv_token_s=model.kv_bytes / memory,
        per_prefill_token_s=product_s,
        capacity=min(MAX_NUM_SEQS, int(room / model.kv_bytes / MEAN_CONTEXT_SHARE)),
    )


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
        round_floor_s=3 * model.size_bytes / (NETWORK_BYTES_PER_S * NETWORK_SHARE),
    )


def reference_rates(model: Model, *, workers: int) -> ReferenceRates | None:
    """One worker a device, where there is a reference: a forward is a third of a training step."""
    if not workers:
        return None
    return ReferenceRates(workers=workers, tokens_per_second=3 * model.train_tokens_per_s)


def sync_rates(
    model: Model, *, engine_nodes: int, pack_bytes_per_s: float, by_tree: bool = False
) -> SyncRates:
    """Rank 0 gathers float32 shards, packs bfloat16 into the store; nodes pass the bytes on.

    `by_tree`: every node sends each bucket to two others at the speed of its network.
    """
    gather_s = 4 * model.parameters / (NETWORK_BYTES_PER_S * NETWORK_SHARE)
    if by_tree:
        copies = 2 * (model.size_bytes + log2(1 + engine_nodes) * BUCKET_BYTES)
        transfer_s = copies / (NETWORK_BYTES_PER_S * NETWORK_SHARE)
    else:
        hops = log2(1 + engine_nodes) / log2(1 + RAY_BROADCAST_NODES)
        per_byte_s = RAY_BROADCAST_S / RAY_BROADCAST_BYTES / BROADCAST_SPEED_UP
        transfer_s = model.size_bytes * per_byte_s * hops
    share = model.size_bytes / model.devices_per_engine
    return SyncRates(
        gather_s=gather_s + model.size_bytes / pack_bytes_per_s,
        transfer_s=transfer_s,
        load_s=share / (PCIE_BYTES_PER_S * PCIE_SHARE),
    )


# One core of this machine (2 x AMD EPYC): see docs/scaling.md, and benchmarks/results/.
# Weights: `Publisher.collect` packs and checksums 3.2 GB/s, the store's first copy takes 1.2 GB/s.
PACK_BYTES_PER_S = 0.9e9
# Control plane: benchmarks.control_plane, CPU seconds on this machine while it was loaded. A lease
# in bundled calls 0.10 ms, a ping 0.6 ms, a sample through the batcher 0.55 to 0.6 ms in groups of
# 8, a verdict through the pool's own process 0.2 ms. How the batcher's splits is an assumption.
CONTROL = ControlCosts(
    registry_call_s=0.1e-3 / 3,
    ping_s=0.6e-3,
    batcher_group_s=2.5e-3,
    batcher_sample_s=0.25e-3,
    batcher_item_s=0.5e-3,
    batcher_token_s=2 * 9 / 1.0e9,
    pool_sample_s=0.2e-3,
    verification_s=1.6e-3,
)


@dataclass(frozen=True, slots=True)
class Latency:
    """A published time of one decode step."""

    source: str
    model: str
    devices: int
    bytes_per_s: float
    sequences: int
    context: int  # tokens of each, on the average
    seconds: float


LATENCIES = (
    # The two that the constants were chosen for: batch 8, 32 tokens in, 128 out.
    Latency("vLLM", "8B", 1, H200_BYTES_PER_S, 8, 96, 0.8334 / 128),
    Latency("vLLM", "70B", 4, H200_BYTES_PER_S, 8, 96, 2.0775 / 128),
    # Others; NIM's page gives 70B results whose first line is one sequence, whose devices it names
    # elsewhere: bfloat16 on four H100 is the setting that its one-sequence latency fits.
    Latency("NIM", "70B", 4, H100_BYTES_PER_S, 1, 700, 0.01321),
    Latency("NIM", "70B", 4, H100_BYTES_PER_S, 50, 700, 0.01742),
    Latency("NIM", "70B", 4, H100_BYTES_PER_S, 200, 700, 0.03107),
)
LLAMA_8B = Model(
    name="8B", parameters=8.03e9, layers=32, attention_width=4096, kv_width=1024,
    devices_per_engine=1, train_tokens_per_s=0.0,
)  # fmt: skip


def latency_figures() -> list[Figure]:
    """Our step by the published one."""
    figures = []
    for known in LATENCIES:
        model = LLAMA_8B if known.model == "8B" else MODELS[known.model]
        rates = engine_rates(model, devices=known.devices, bytes_per_s=known.bytes_per_s)
        step_s = rates.seconds_a_step(known.sequences, known.sequences * known.context)
        name = f"decode step, {known.model} on {known.devices}, {known.sequences} sequences"
        figures.append(
            Figure(f"{name}, {known.source}", step_s / known.seconds, "model / published")
        )
    return figures
