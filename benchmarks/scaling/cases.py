"""The clusters that are simulated, and how their devices are best split."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.rounds import heavy_tail
from benchmarks.scaling import hardware
from benchmarks.scaling.hardware import CONTROL, DEVICES_A_NODE, MODELS, PACK_BYTES_PER_S, Model
from benchmarks.scaling.outcome import Outcome
from benchmarks.scaling.scenario import ControlCosts, Lengths, Scenario
from benchmarks.scaling.service import simulate

# Questions a batch and samples a question: more with more devices, but fewer for each of them.
BATCHES = {8: (64, 8), 64: (512, 8), 512: (1024, 16), 10_000: (4096, 16)}
# Few batches where each has many samples; and how often a batcher looks for a round (in truth every
# 20 ms), so that the number of events stays small.
MEASURED = {8: 24, 64: 10, 512: 4, 10_000: 2}
WARM_UP = {8: 3, 64: 2, 512: 2, 10_000: 1}
POLL_S = {8: 0.05, 64: 0.1, 512: 0.1, 10_000: 0.25}
VERIFIERS = 64  # one node's cores: the pool's processes live where its actor does
SPLITS = (0.8, 1.0, 1.2, 1.4)  # of the engines that an even flow asks for
# Share of an engine's places that hold a sequence while groups wait for a lease: a group's places
# are kept until its longest answer is there. Only where the search for a split begins.
PLACES_HELD = 0.45
SEARCHED = 512  # devices up to which splits are tried; above, the even flow decides


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a number of devices."""

    model: Model
    devices: int
    control: ControlCosts = CONTROL
    lengths: Lengths = heavy_tail
    num_registries: int = 1
    num_batchers: int = 1
    pack_bytes_per_s: float = PACK_BYTES_PER_S
    by_tree: bool = False  # weights between nodes
    overhead_seqs: int = 8
    reference_share: float = 0.0  # of the devices, for a reference model

    @property
    def name(self) -> str:
        kl = " with KL" if self.reference_share else ""
        return f"{self.model.name}{kl} on {self.devices:,}"

    @property
    def num_reference(self) -> int:
        """Devices of the reference model."""
        return round(self.devices * self.reference_share)

    def scenario(self, engines: int, *, max_staleness: int, seed: int = 0) -> Scenario:
        """With this many engines, everything else training."""
        batch_size, samples = BATCHES[self.devices]
        ranks = self.devices - self.num_reference - engines * self.model.devices_per_engine
        nodes = -(-engines * self.model.devices_per_engine // DEVICES_A_NODE)
        return Scenario(
            num_engines=engines,
            engine=hardware.engine_rates(self.model),
            overhead_seqs=self.overhead_seqs,
            num_ranks=ranks - ranks % self.num_batchers,
            trainer=hardware.trainer_rates(self.model),
            sync=hardware.sync_rates(
                self.model,
                engine_nodes=nodes,
                pack_bytes_per_s=self.pack_bytes_per_s,
                by_tree=self.by_tree,
            ),
            control=dataclasses.replace(self.control, poll_s=POLL_S[self.devices]),
            lengths=self.lengths,
            batch_size=batch_size,
            samples_per_question=samples,
            prompt_tokens=hardware.PROMPT_TOKENS,
            max_staleness=max_staleness,
            num_warm_up=WARM_UP[self.devices],
            num_measured=MEASURED[self.devices],
            num_verifiers=VERIFIERS,
            reference=hardware.reference_rates(self.model, workers=self.num_reference),
            num_registries=self.num_registries,
            num_batchers=self.num_batchers,
            seed=seed,
        )


CASES = (
    Case(MODELS["1.5B"], 8),
    Case(MODELS["7B"], 8),
    Case(MODELS["7B"], 64),
    Case(MODELS["7B"], 64, reference_share=0.1),
    Case(MODELS["32B"], 64),
    Case(MODELS["7B"], 512),
    Case(MODELS["70B"], 512),
    Case(MODELS["7B"], 10_000),
    Case(MODELS["70B"], 10_000),
)


@cache
def mean_length(lengths: Lengths) -> tuple[float, float]:
    """Mean output tokens, and mean of their squares."""
    drawn = lengths(np.random.default_rng(0), 20_000)
    return float(drawn.mean()), float((drawn.astype(float) ** 2).mean())


def even_flow(case: Case, *, max_staleness: int = 1) -> int:
    """Engines with which generation and training would be equally fast, were nothing to vary."""
    return min(
        range(1, _most_engines(case) + 1),
        key=lambda engines: max(_batch_seconds(case, engines, max_staleness)),
    )


def _most_engines(case: Case) -> int:
    return (case.devices - case.num_reference - 1) // case.model.devices_per_engine


def _batch_seconds(case: Case, engines: int, max_staleness: int) -> tuple[float, float]:
    """Of generating and of training one batch."""
    scenario = case.scenario(engines, max_staleness=max_staleness)
    mean, square = mean_length(case.lengths)
    open_samples = scenario.samples_per_batch * (max_staleness + 0.5)
    running = min(PLACES_HELD * scenario.engine.capacity, open_samples / engines)
    context = scenario.prompt_tokens + square / mean / 2
    step_s = scenario.engine.seconds_a_step(int(running) or 1, running * context)
    generating = scenario.samples_per_batch * mean / (engines * max(running, 1) / step_s)
    tokens = mean + scenario.prompt_tokens
    cost = tokens + square / scenario.trainer.attention_ratio
    training = scenario.samples_per_batch * cost / scenario.trainer.cost_per_second
    return generating, training / max(scenario.num_ranks, 1) + scenario.sync.gather_s


def splits(case: Case, *, max_staleness: int = 1) -> list[int]:
    """Numbers of engines that are worth a try; above SEARCHED devices the even flow's alone."""
    flow = even_flow(case, max_staleness=max_staleness)
    if case.devices > SEARCHED:
        return [flow]
    return sorted({min(max(round(flow * part), 1), _most_engines(case)) for part in SPLITS})


def run(case: Case, engines: int, max_staleness: int) -> Outcome:
    return simulate(case.scenario(engines, max_staleness=max_staleness))


def sharded(case: Case, *, registries: int, batchers: int) -> Case:
    """The same cluster with more processes in its control plane."""
    return dataclasses.replace(case, num_registries=registries, num_batchers=batchers)
