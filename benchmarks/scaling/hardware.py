"""The models of `benchmarks.scaling` and their rates on H100, where they are not the planner's.

Each has its source in docs/scaling.md; `async_grpo.planning.rates` has those of an engine's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from async_grpo.batching.packing import attention_ratio
from async_grpo.devices.bill import ModelShape
from async_grpo.planning import rates
from async_grpo.planning.asked import H100
from async_grpo.planning.rates import (
    NETWORK_SHARE,
    ControlCosts,
    EngineRates,
    Layout,
    SyncRates,
    TrainerRates,
)
from benchmarks import results

BYTES = 2  # bfloat16, of weights and caches
DEVICES_A_NODE = 8
MEAN_CONTEXT = 2_600  # tokens of a running sequence, seen at random, for the room it needs
MEMORY_FOR_ENGINE = 0.9  # of a device's memory, an assumption
MAX_NUM_SEQS = 256
VERIFICATION_S = 1.6e-3  # math-verify, measured on 2026-11-21
PARTS = ("a group", "each sample of a group", "a rank's request")  # of the controller's work


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


def sync_rates(model: Model, *, num_ranks: int, engine_nodes: int) -> SyncRates:
    """Each rank copies and stores its own rows; nodes pass the bytes on; engines load them."""
    layout = Layout(
        engine_devices=model.devices_per_engine, num_ranks=num_ranks, engine_nodes=engine_nodes,
        engine_bytes=BYTES,
    )  # fmt: skip
    return rates.sync_rates(model.shape, H100, layout)


def control_costs(folder: Path = results.FOLDER) -> ControlCosts:
    """Of the one controller, by the file of `benchmarks.control_plane`; a verification is math's.

    Raises `ClickException` without such a file.
    """
    seconds = {
        figure.name: 1e-6 * figure.value for figure in results.read("control_plane", folder=folder)
    }
    try:
        group, sample, item, ping = (
            seconds[f"{what}, CPU of the controller"] for what in (*PARTS, "a ping")
        )
    except KeyError as missing:
        raise click.ClickException(
            f"benchmarks/results/control_plane.json must hold {missing}, it does not: run "
            "`python -m benchmarks.control_plane` first"
        ) from None
    return ControlCosts(
        group_s=group, sample_s=sample, item_s=item, ping_s=ping, verification_s=VERIFICATION_S
    )
