"""The rates of each role, the lengths of samples, and the source of both. Pure.

Rates follow from the peaks of one kind of device: an engine's step is a roofline (weights and
caches read from memory, products, all-reduces over its devices), whose constants were chosen to
match two published latencies: docs/scaling.md. Lengths are assumed, given, or those of an earlier
run.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import exp, log, log2
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.packing import DEFAULT_ATTENTION_RATIO, attention_ratio
from async_grpo.devices.bill import FLOAT32, ModelShape, cached_token_bytes
from async_grpo.planning.asked import DeviceKind, flops_a_parameter, multiplied
from async_grpo.planning.bills import BUCKET_BYTES, BUCKETS
from async_grpo.util.errors import ConfigError

# Chosen to match vLLM's published latencies on H200 (8B on one device, 70B on four).
MEMORY_SHARE = 0.8
STEP_OVERHEAD_S = 2.3e-3
ALL_REDUCE_S = 30e-6
# Of the peak, for products of decoding and prefill: an assumption without a source.
COMPUTE_SHARE = 0.5
# IBM's fms-fsdp: 7B and 34B on 96 H100 train at 31 and 32 % of the peak.
TRAINING_SHARE = 0.31
NETWORK_SHARE, PCIE_SHARE = 0.8, 0.5  # assumptions
# Ray's release test, commit 08ff3113: 1 GiB to 50 nodes of 10 Gb/s takes 16.9 s; four times as fast
# between nodes of 400 Gb/s is an assumption.
BROADCAST_S_PER_BYTE, BROADCAST_NODES, BROADCAST_SPEED_UP = 16.938 / 2**30, 50, 4.0
PACK_BYTES_PER_S = 0.9e9  # one core, measured: checksums, and the first copy into the store
BYTES_OF_ADAMW = 28  # a parameter and step: master, gradient and moments read, three written
# On a CPU core: vLLM's scheduler and Python between two steps, PyTorch's between two minibatches.
CPU_STEP_S, CPU_ROUND_S = 4e-3, 30e-3
SPREAD = 1.0  # sigma of the logarithm of lengths, as in reasoning runs: an assumption
ASSUMED_SHARE = 0.25  # of the longest output: the median by default
NUM_DRAWN = 20_000
OutputLengths = Callable[[np.random.Generator, int], NDArray[np.int64]]  # draws n lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """How fast one engine, with all its devices, decodes and prefills."""

    step_s: float  # constant part of a step: weights read once, launches, all-reduces
    per_sequence_s: float = 0.0  # matrix products of one token
    per_kv_token_s: float = 0.0  # keys and values of a token, read once a step
    per_prefill_token_s: float = 0.0  # of a prompt, or of a cache that is rebuilt
    capacity: int = 256  # sequences at a time
    keeps_caches: bool = False  # when new weights are loaded: --keep-kv-cache

    def seconds_a_step(self, running: int, kv_tokens: float) -> float:
        """
        >>> EngineRates(step_s=0.01, per_sequence_s=0.001).seconds_a_step(10, 0)
        0.02
        """
        return self.step_s + self.per_sequence_s * running + self.per_kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRates:
    """How fast the ranks train, which go through rounds in lock step with the slowest."""

    cost_per_second: float  # of one rank, in units of one token's matrix products
    max_tokens: int = 32_768  # of a rank's minibatch
    attention_ratio: float = DEFAULT_ATTENTION_RATIO
    round_overhead_s: float = 0.05
    round_floor_s: float = 0.0  # gathering and reducing shards, hidden by longer computing
    step_s: float = 0.1  # clipping and the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerRates:
    """How fast one worker scores given outputs, as the reference model or a teacher does."""

    cost_per_second: float  # in units of one token's matrix products
    group_s: float = 0.02  # for the outputs of one question, whatever their length


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRates:
    """The seconds that one version of the weights costs."""

    gather_s: float = 0.0  # ranks copy their shares, wait for buckets, and do not train
    transfer_s: float = 0.0  # to all nodes, while training and generation go on
    load_s: float = 0.0  # an engine loads, and does not decode; without rebuilding caches


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCosts:
    """CPU seconds of the controller, which is one process; latency of verifiers."""

    group_s: float = 0.0  # the calls for one group: lease, generate, verify
    sample_s: float = 0.0  # to receive, grade, record, pack and send a sample
    item_s: float = 0.0  # a rank's request for its minibatch
    ping_s: float = 0.0  # of a worker, every PING_INTERVAL_S
    verification_s: float = 0.0  # of a group


# One core of two AMD EPYC (benchmarks.control_plane): 0.72 ms a sample of the controller.
CONTROL = ControlCosts(group_s=2e-3, sample_s=0.5e-3, item_s=0.5e-3, ping_s=0.6e-3,
                       verification_s=1.6e-3)  # fmt: skip


AnyRates = TypeVar("AnyRates", EngineRates, TrainerRates, ScorerRates, SyncRates, ControlCosts)
APART = ("round_floor_s", "verification_s")  # seconds of links and of other processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of all roles; each table of `--rates FILE` is one of these fields."""

    engine: EngineRates
    trainer: TrainerRates
    scorer: ScorerRates
    sync: SyncRates
    control: ControlCosts = CONTROL
    sources: Mapping[str, str] = field(default_factory=dict)  # {table or table.key: its source}

    def source(self, table: str) -> str:
        """The sources of a whole table."""
        own = {text for name, text in self.sources.items() if name.startswith(f"{table}.")}
        return " and ".join([self.sources.get(table, "assumed"), *sorted(own)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a run lies on its machines, as rates by peaks depend on it."""

    engine_devices: int = 1  # of one engine: its tensor parallel size
    num_ranks: int = 1
    shard_ranks: int = 1
    engine_nodes: int = 1  # to which weights are sent; 0: engines are on the ranks' machine
    train_nodes: int = 1
    train_bytes: int = 2  # of one value in the compute dtype
    engine_bytes: int = 2  # of one value of an engine's weights
    published: int = 0  # numbers that a version of the weights sends; 0: all parameters
    by_store: bool = True  # weights are sent through Ray's object store, not by NCCL


def from_peaks(model: ModelShape, kind: DeviceKind, layout: Layout) -> Rates:
    """The rates by data sheets and published shares of their peaks."""
    source = kind.source or f"of {kind.name}'s peaks"
    names = ("engine", "trainer", "scorer", "sync")
    return Rates(
        engine=engine_rates(model, kind, devices=layout.engine_devices, size=layout.engine_bytes),
        trainer=trainer_rates(model, kind, layout),
        scorer=ScorerRates(cost_per_second=_products_per_s(model, kind, COMPUTE_SHARE) / 2),
        sync=sync_rates(model, kind, layout),
        sources=dict.fromkeys(names, source) | {"control": "measured on one core (AMD EPYC)"},
    )


def engine_rates(
    model: ModelShape, kind: DeviceKind, *, devices: int = 1, size: int = 2, capacity: int = 256
) -> EngineRates:
    """The rates of an engine on `devices`, with weights and caches of `size` bytes a value."""
    memory = devices * kind.bytes_per_s * MEMORY_SHARE
    product_s = 2 * model.num_parameters / (devices * kind.flops * _share(kind, COMPUTE_SHARE))
    all_reduces = 2 * model.num_layers if devices > 1 else 0
    constant = CPU_STEP_S if kind.is_cpu else STEP_OVERHEAD_S
    return EngineRates(
        step_s=constant + all_reduces * ALL_REDUCE_S + model.num_parameters * size / memory,
        per_sequence_s=product_s,
        per_kv_token_s=cached_token_bytes(model, size) / memory,
        per_prefill_token_s=product_s,
        capacity=capacity,
    )


def trainer_rates(model: ModelShape, kind: DeviceKind, layout: Layout) -> TrainerRates:
    """The rates of one rank, which gathers or reduces all shards three times a round.

    Where several ranks hold the same shards, they also add up the gradients of these, in float32.
    """
    apart = kind.network_bytes_per_s if layout.train_nodes > 1 else kind.link_bytes_per_s
    trained, frozen = model.num_trained, model.num_parameters * (model.trained is not None)
    moved: float = (3 * trained + 2 * frozen) * layout.train_bytes * (layout.shard_ranks > 1)
    replicas = max(1, layout.num_ranks // layout.shard_ranks)
    moved += 2 * FLOAT32 * trained / layout.shard_ranks * (1 - 1 / replicas)
    flops = flops_a_parameter(model)
    ratio = attention_ratio(
        num_parameters=round(multiplied(model) * flops / 6),
        num_layers=model.num_layers,
        attention_width=model.query_width,
    )
    stepped = BYTES_OF_ADAMW * trained / layout.shard_ranks
    overhead = CPU_ROUND_S if kind.is_cpu else 0.05
    return TrainerRates(
        cost_per_second=_products_per_s(model, kind, TRAINING_SHARE) / flops,
        attention_ratio=ratio,
        round_overhead_s=overhead,
        round_floor_s=moved / (apart * NETWORK_SHARE),
        step_s=0.02 + stepped / (kind.bytes_per_s * MEMORY_SHARE),
    )


def sync_rates(model: ModelShape, kind: DeviceKind, layout: Layout) -> SyncRates:
    """Seconds in which ranks move and pack their shares, nodes pass these on, engines load them.

    Ranks train while what lies in their buckets is packed, and wait where their share is larger.
    """
    size = (layout.published or model.num_parameters) * layout.engine_bytes
    own = size / layout.num_ranks
    waiting_s = max(0.0, own - BUCKET_BYTES * BUCKETS) / PACK_BYTES_PER_S  # for free buckets
    gather_s = max(own / (kind.host_bytes_per_s * PCIE_SHARE), waiting_s)
    hops = log2(1 + layout.engine_nodes) / log2(1 + BROADCAST_NODES)
    transfer_s = size * BROADCAST_S_PER_BYTE / BROADCAST_SPEED_UP * hops
    if not layout.by_store:
        way = kind.network_bytes_per_s if layout.engine_nodes else kind.link_bytes_per_s
        transfer_s = size / (way * NETWORK_SHARE)
    return SyncRates(
        gather_s=gather_s,
        transfer_s=transfer_s + own / PACK_BYTES_PER_S - waiting_s,
        load_s=size / layout.engine_devices / (kind.host_bytes_per_s * PCIE_SHARE),
    )


def slower(rates: AnyRates, times: float) -> AnyRates:
    """The rates of processes that take `times` as long; links and verifiers do not.

    >>> slower(ScorerRates(cost_per_second=8.0, group_s=0.5), 2.0)
    ScorerRates(cost_per_second=4.0, group_s=1.0)
    """
    own = {each.name: getattr(rates, each.name) for each in fields(rates)}
    seconds = (name for name in own if name.endswith("_s") and name not in APART)
    changed = {name: own[name] * times for name in seconds}
    if "cost_per_second" in own:
        changed["cost_per_second"] = own["cost_per_second"] / times
    return replace(rates, **changed)


def given(rates: Rates, tables: Mapping[str, object], *, who: str) -> Rates:
    """`rates` with the values in a file's tables, such as [trainer] cost_per_second.

    `who` names the file. Raises `ConfigError` for a table, a key or a value that is no rate.
    """
    known = [each.name for each in fields(Rates) if each.name != "sources"]
    for table, values in tables.items():
        if table not in known or not isinstance(values, Mapping):
            raise ConfigError(_unknown(f"[{table}]", table, known, who))
        own = getattr(rates, table)
        keys = [each.name for each in fields(own)]
        for key, value in values.items():
            if key not in keys:
                raise ConfigError(_unknown(f"[{table}] {key}", key, keys, who))
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise ConfigError(
                    f"--rates {who}: [{table}] {key} must be a number that is not negative, got "
                    f"{value!r}: correct it"
                )
        sources = {**rates.sources, **{f"{table}.{key}": f"given in {who}" for key in values}}
        rates = replace(rates, **{table: replace(own, **values)}, sources=sources)
    return rates


def _unknown(what: str, name: str, known: list[str], who: str) -> str:
    [near] = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"--rates {who}: {what} is no rate, the nearest is {near}: correct it"


def _share(kind: DeviceKind, share: float) -> float:
    return 1.0 if kind.is_cpu else share  # a core's measured speed is not a peak


def _products_per_s(model: ModelShape, kind: DeviceKind, share: float) -> float:
    """FLOP/s over the parameters in a token's products: 6 of these train a token, 2 score it."""
    return kind.flops * _share(kind, share) / multiplied(model)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal output tokens of independent samples, cut at the longest."""

    median: float
    longest: int
    spread: float = SPREAD

    def __call__(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = rng.lognormal(log(self.median), self.spread, count)
        return np.clip(drawn, 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class MeasuredLengths:
    """Output tokens of an earlier run, drawn by whole groups: samples of a question are alike."""

    groups: tuple[tuple[int, ...], ...]

    def __call__(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        group = self.groups[int(rng.integers(len(self.groups)))]
        chosen = [*group] if len(group) == count else rng.choice(group, count)
        return np.asarray(chosen, np.int64)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of a run's samples, in tokens."""

    prompt: int
    outputs: LogNormal | MeasuredLengths
    source: str

    def moments(self) -> tuple[float, float]:
        """The mean of the output tokens, and the mean of their squares."""
        return _moments(self.outputs)

    def context(self) -> float:
        """Mean tokens of a running sequence at a random time."""
        mean, square = self.moments()
        return self.prompt + square / mean / 2


@functools.lru_cache(256)
def _moments(outputs: LogNormal | MeasuredLengths) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    drawn = np.concatenate([outputs(rng, 8) for _ in range(NUM_DRAWN // 8)]).astype(float)
    return float(drawn.mean()), float((drawn**2).mean())


def assumed_lengths(*, longest: int, prompt: int, mean: float = 0.0) -> Lengths:
    """Lognormal outputs of a given mean; 0: their median is a quarter of the longest.

    >>> found = assumed_lengths(longest=10_000, prompt=100, mean=800)
    >>> abs(found.moments()[0] - 800) < 20
    True
    """
    if not mean:
        median = max(1.0, ASSUMED_SHARE * longest)
        source = f"assumed: lognormal outputs, median a quarter of {longest}, sigma {SPREAD:g}"
        return Lengths(prompt, LogNormal(median, longest), source)
    low, high = 1e-3, max(1e3 * longest, 1.0)  # bounds of the median: the cut lowers the mean
    for _ in range(60):
        middle = exp((log(low) + log(high)) / 2)
        found = Lengths(prompt, LogNormal(middle, longest), "")
        low, high = (middle, high) if found.moments()[0] < mean else (low, middle)
    source = f"given: lognormal outputs of mean {mean:g}, cut at {longest}"
    return Lengths(prompt, LogNormal(low, longest), source)


def measured_lengths(groups: Sequence[Sequence[int]], *, prompt: float, source: str) -> Lengths:
    """The lengths of an earlier run's groups."""
    whole = tuple(tuple(map(int, group)) for group in groups)
    return Lengths(max(1, round(prompt)), MeasuredLengths(whole), source)
