"""How fast each role is, how long samples are, and who says so. Pure.

From peaks of one kind of device: an engine's step is a roofline (weights and caches read from
memory, products, sums over its devices). Its constants were chosen to meet two published latencies:
docs/scaling.md. Lengths are assumed, given, or as an earlier run had them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, log2
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.packing import DEFAULT_ATTENTION_RATIO, attention_ratio
from async_grpo.devices.bill import ModelShape
from async_grpo.planning.asked import Kind, multiplied
from async_grpo.util.errors import ConfigError

# Chosen to meet vLLM's published latencies on H200 (8B on one device, 70B on four).
MEMORY_SHARE = 0.8
STEP_OVERHEAD_S = 2.3e-3
ALL_REDUCE_S = 30e-6
# An assumption without a source: of the peak, for products while decoding and reading.
COMPUTE_SHARE = 0.5
# IBM's fms-fsdp: 7B and 34B on 96 H100 train at 31 and 32 % of the peak.
TRAINING_SHARE = 0.31
NETWORK_SHARE, PCIE_SHARE = 0.8, 0.5  # assumptions
# Ray's release test, commit 08ff3113: 1 GiB to 50 nodes of 10 Gb/s takes 16.9 s; four times as fast
# between nodes of 400 Gb/s is an assumption.
BROADCAST_S_PER_BYTE, BROADCAST_NODES, BROADCAST_SPEED_UP = 16.938 / 2**30, 50, 4.0
PACK_BYTES_PER_S = 0.9e9  # one core, measured: checksums, and the first copy into the store
BYTES_OF_ADAMW = 28  # a parameter and step: master, gradient and moments read, three written
# Of a CPU core: vLLM's scheduler and Python between two steps, PyTorch's between two minibatches.
CPU_STEP_S, CPU_ROUND_S = 4e-3, 30e-3
SPREAD = 1.0  # sigma of the logarithm, as of reasoning runs: an assumption
ASSUMED_SHARE = 0.25  # of the longest output, the median where nobody says anything
NUM_DRAWN = 20_000
OutputLengths = Callable[[np.random.Generator, int], NDArray[np.int64]]  # of some samples


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """How fast one engine, on however many devices, decodes and reads."""

    step_s: float  # of a step whatever it does: weights read once, launches, all-reduces
    per_sequence_s: float = 0.0  # matrix products of one token
    per_kv_token_s: float = 0.0  # its keys and values, read once a step
    per_prefill_token_s: float = 0.0  # of a prompt, or of a cache that is made anew
    capacity: int = 256  # sequences at a time
    keeps_caches: bool = False  # over new weights: --keep-kv-cache

    def seconds_a_step(self, running: int, kv_tokens: float) -> float:
        """
        >>> EngineRates(step_s=0.01, per_sequence_s=0.001).seconds_a_step(10, 0)
        0.02
        """
        return self.step_s + self.per_sequence_s * running + self.per_kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRates:
    """How fast the ranks train; they go through rounds in lock step with the slowest."""

    cost_per_second: float  # of one rank, in units of one token's matrix products
    max_tokens: int = 32_768  # of a rank's minibatch
    attention_ratio: float = DEFAULT_ATTENTION_RATIO
    round_overhead_s: float = 0.05
    round_floor_s: float = 0.0  # gathering and reducing shards, which computing hides if longer
    step_s: float = 0.1  # clipping and the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerRates:
    """How fast one worker scores given outputs, as the reference model or a teacher does."""

    cost_per_second: float  # in units of one token's matrix products
    group_s: float = 0.02  # of a question's outputs, whatever they hold


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRates:
    """What one version of the weights costs."""

    gather_s: float = 0.0  # trainers stand still: full tensors, packed by rank 0
    transfer_s: float = 0.0  # to all nodes, while everything goes on
    load_s: float = 0.0  # an engine stands still, beside what it then reads again


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCosts:
    """CPU seconds of the process of registry and batcher; latency of verifiers."""

    group_s: float = 0.0  # the calls for one group: lease, generate, verify
    sample_s: float = 0.0  # received, graded, booked, packed, sent
    item_s: float = 0.0  # a rank's request for its minibatch
    ping_s: float = 0.0  # a worker and PING_INTERVAL_S
    verification_s: float = 0.0  # of a group


# One core of two AMD EPYC (benchmarks.control_plane): 0.72 ms a sample of the controller.
CONTROL = ControlCosts(group_s=2e-3, sample_s=0.5e-3, item_s=0.5e-3, ping_s=0.6e-3,
                       verification_s=1.6e-3)  # fmt: skip


AnyRates = TypeVar("AnyRates", EngineRates, TrainerRates, ScorerRates, SyncRates, ControlCosts)
APART = ("round_floor_s", "verification_s")  # seconds of something else than the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds that a run's parts take; each table of `--rates FILE` is one of these fields."""

    engine: EngineRates
    trainer: TrainerRates
    scorer: ScorerRates
    sync: SyncRates
    control: ControlCosts = CONTROL
    sources: Mapping[str, str] = field(default_factory=dict)  # {table, or table.key: who says so}

    def source(self, table: str) -> str:
        """Who says so, of a whole table."""
        own = {text for name, text in self.sources.items() if name.startswith(f"{table}.")}
        return " and ".join([self.sources.get(table, "assumed"), *sorted(own)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What rates of peaks depend on besides model and device."""

    engine_devices: int = 1  # of one engine: its tensor parallel size
    num_ranks: int = 1
    shard_ranks: int = 1
    engine_nodes: int = 1  # to which weights travel; 0: engines stand where the ranks are
    train_nodes: int = 1
    train_bytes: int = 2  # of a number of the compute type
    engine_bytes: int = 2
    by_store: bool = True  # weights travel through Ray's object store, or by NCCL


def from_peaks(model: ModelShape, kind: Kind, layout: Layout) -> Rates:
    """Of data sheets and published shares of them."""
    said = kind.source or f"of {kind.name}'s peaks"
    names = ("engine", "trainer", "scorer", "sync")
    return Rates(
        engine=engine_rates(model, kind, devices=layout.engine_devices, size=layout.engine_bytes),
        trainer=trainer_rates(model, kind, layout),
        scorer=ScorerRates(cost_per_second=_products_per_s(model, kind, _share(kind, COMPUTE_SHARE))
                           / 2),
        sync=sync_rates(model, kind, layout),
        sources=dict.fromkeys(names, said) | {"control": "measured on one core (AMD EPYC)"},
    )  # fmt: skip


def engine_rates(
    model: ModelShape, kind: Kind, *, devices: int = 1, size: int = 2, capacity: int = 256
) -> EngineRates:
    """Of an engine on so many devices, with weights and caches of `size` bytes a number."""
    memory = devices * kind.bytes_per_s * MEMORY_SHARE
    product_s = 2 * model.num_parameters / (devices * kind.flops * _share(kind, COMPUTE_SHARE))
    all_reduces = 2 * model.num_layers if devices > 1 else 0
    constant = CPU_STEP_S if kind.is_cpu else STEP_OVERHEAD_S
    return EngineRates(
        step_s=constant + all_reduces * ALL_REDUCE_S + model.num_parameters * size / memory,
        per_sequence_s=product_s,
        per_kv_token_s=token_bytes(model, size) / memory,
        per_prefill_token_s=product_s,
        capacity=capacity,
    )


def trainer_rates(model: ModelShape, kind: Kind, layout: Layout) -> TrainerRates:
    """Of one rank; three passes over the shards a round, hidden where computing takes longer."""
    apart = kind.network_bytes_per_s if layout.train_nodes > 1 else kind.link_bytes_per_s
    moved = 3 * model.num_parameters * layout.train_bytes * (layout.shard_ranks > 1)
    ratio = attention_ratio(
        num_parameters=multiplied(model),
        num_layers=model.num_layers,
        attention_width=model.query_width,
    )
    stepped = BYTES_OF_ADAMW * model.num_parameters / layout.shard_ranks
    overhead = CPU_ROUND_S if kind.is_cpu else 0.05
    return TrainerRates(
        cost_per_second=_products_per_s(model, kind, _share(kind, TRAINING_SHARE)) / 6,
        attention_ratio=ratio,
        round_overhead_s=overhead,
        round_floor_s=moved / (apart * NETWORK_SHARE),
        step_s=0.02 + stepped / (kind.bytes_per_s * MEMORY_SHARE),
    )


def sync_rates(model: ModelShape, kind: Kind, layout: Layout) -> SyncRates:
    """Every rank moves and packs its share; nodes pass the bytes on; engines load them."""
    size = model.num_parameters * layout.engine_bytes
    link = kind.network_bytes_per_s if layout.train_nodes > 1 else kind.link_bytes_per_s
    own = size / layout.num_ranks
    gather_s = own / (link * NETWORK_SHARE) + own / (kind.host_bytes_per_s * PCIE_SHARE)
    hops = log2(1 + layout.engine_nodes) / log2(1 + BROADCAST_NODES)
    transfer_s = size * BROADCAST_S_PER_BYTE / BROADCAST_SPEED_UP * hops
    if not layout.by_store:
        way = kind.network_bytes_per_s if layout.engine_nodes else kind.link_bytes_per_s
        transfer_s = size / (way * NETWORK_SHARE)
    return SyncRates(
        gather_s=gather_s,
        transfer_s=transfer_s + own / PACK_BYTES_PER_S,
        load_s=size / layout.engine_devices / (kind.host_bytes_per_s * PCIE_SHARE),
    )


def slower(rates: AnyRates, times: float) -> AnyRates:
    """Of processes that take so many times as long; links and verifiers do not.

    >>> slower(ScorerRates(cost_per_second=8.0, group_s=0.5), 2.0)
    ScorerRates(cost_per_second=4.0, group_s=1.0)
    """
    own = {each.name: getattr(rates, each.name) for each in dataclasses.fields(rates)}
    seconds = (name for name in own if name.endswith("_s") and name not in APART)
    changed = {name: own[name] * times for name in seconds}
    if "cost_per_second" in own:
        changed["cost_per_second"] = own["cost_per_second"] / times
    return replace(rates, **changed)


def token_bytes(model: ModelShape, size: int) -> int:
    """Keys and values of one token."""
    return 2 * model.num_layers * model.key_width * size


def given(rates: Rates, tables: Mapping[str, object], *, who: str) -> Rates:
    """With what a file says in its tables, such as [trainer] cost_per_second.

    Raises `ConfigError` for a table, a key or a value that is no rate.
    """
    known = [each.name for each in dataclasses.fields(Rates) if each.name != "sources"]
    for table, values in tables.items():
        if table not in known or not isinstance(values, Mapping):
            raise ConfigError(_unknown(f"[{table}]", table, known, who))
        own = getattr(rates, table)
        keys = [each.name for each in dataclasses.fields(own)]
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


def _share(kind: Kind, share: float) -> float:
    return 1.0 if kind.is_cpu else share  # which a core's measured speed has in it


def _products_per_s(model: ModelShape, kind: Kind, share: float) -> float:
    """FLOP/s by the parameters that a token meets: 6 of them train one, 2 score one."""
    return kind.flops * share / multiplied(model)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Output tokens of independent samples, cut at the longest."""

    median: float
    longest: int
    spread: float = SPREAD

    def __call__(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = rng.lognormal(log(self.median), self.spread, count)
        return np.clip(drawn, 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Seen:
    """Those of the groups of an earlier run, each drawn whole: samples of a question are alike."""

    groups: tuple[tuple[int, ...], ...]

    def __call__(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        group = self.groups[int(rng.integers(len(self.groups)))]
        chosen = [*group] if len(group) == count else rng.choice(group, count)
        return np.asarray(chosen, np.int64)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a run's samples, in tokens."""

    prompt: int
    outputs: LogNormal | Seen
    source: str

    def moments(self) -> tuple[float, float]:
        """Mean output, and mean of the squares."""
        return _moments(self.outputs)

    def context(self) -> float:
        """Tokens of a running sequence, seen at random."""
        mean, square = self.moments()
        return self.prompt + square / mean / 2


@functools.lru_cache(256)
def _moments(outputs: LogNormal | Seen) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    drawn = np.concatenate([outputs(rng, 8) for _ in range(NUM_DRAWN // 8)]).astype(float)
    return float(drawn.mean()), float((drawn**2).mean())


def assumed_lengths(*, longest: int, prompt: int, mean: float = 0.0) -> Lengths:
    """Lognormal outputs of a given mean; without one, of a median of a quarter of the longest.

    >>> found = assumed_lengths(longest=10_000, prompt=100, mean=800)
    >>> abs(found.moments()[0] - 800) < 20
    True
    """
    if not mean:
        median = max(1.0, ASSUMED_SHARE * longest)
        said = f"assumed: lognormal outputs, median a quarter of {longest}, sigma {SPREAD:g}"
        return Lengths(prompt, LogNormal(median, longest), said)
    low, high = 1e-3, max(1e3 * longest, 1.0)  # of the median: the cut takes from the mean
    for _ in range(60):
        middle = exp((log(low) + log(high)) / 2)
        found = Lengths(prompt, LogNormal(middle, longest), "")
        low, high = (middle, high) if found.moments()[0] < mean else (low, middle)
    said = f"given: lognormal outputs of mean {mean:g}, cut at {longest}"
    return Lengths(prompt, LogNormal(low, longest), said)


def seen_lengths(groups: Sequence[Sequence[int]], *, prompt: float, source: str) -> Lengths:
    """Of an earlier run."""
    whole = tuple(tuple(map(int, group)) for group in groups)
    return Lengths(max(1, round(prompt)), Seen(whole), source)
