"""The tables and figures of simulated clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import results
from benchmarks.results import Figure
from benchmarks.scaling.cases import Case
from benchmarks.scaling.outcome import Outcome

HEADER = (
    "staleness", "samples/s", "tokens/s/device", "slots filled", "engines stalled",
    "trainers busy", "idle", "gather", "sync wait", "network", "batcher", "registry", "pool",
)  # fmt: skip
SHARE = "share of the time"  # which a smaller or larger one is not worse for: not guarded
SINGLE = ("batcher", "registry", "pool")  # one process each, whatever the number of devices


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated run."""

    case: Case
    engines: int
    max_staleness: int
    outcome: Outcome

    @property
    def tokens_per_device(self) -> float:
        return self.outcome.tokens_per_second / self.case.devices

    @property
    def network(self) -> float:
        """Share of the time in which weights are on their way to the nodes."""
        scenario = self.case.scenario(self.engines, max_staleness=self.max_staleness)
        return scenario.sync.transfer_s / self.outcome.seconds_per_batch

    def parts(self) -> dict[str, float]:
        """Utilisation of what all devices share."""
        outcome = self.outcome
        return {
            "batcher": outcome.batcher,
            "registry": outcome.registry,
            "pool": outcome.pool,
            "verifiers": outcome.verifiers,
            "rank 0 packing weights": outcome.gathering,
            "weights on the network": self.network,
        }


def show_case(rows: Sequence[Row]) -> str:
    """One cluster, a line a staleness."""
    case, engines = rows[0].case, rows[0].engines
    devices = engines * case.model.devices_per_engine
    title = (
        f"{case.name} devices: {engines} engines on {devices}, {case.devices - devices} ranks; "
        f"{rows[0].case.scenario(engines, max_staleness=0).samples_per_batch:,} samples a batch"
    )
    return f"\n{title}\n{results.table(HEADER, [_cells(row) for row in rows])}"


def _cells(row: Row) -> tuple[str, ...]:
    o = row.outcome
    shares = (
        o.slots_filled, o.engines_stalled, o.trainers_busy, o.trainers_idle, o.gathering,
        o.waiting_for_sync, row.network, o.batcher, o.registry, o.pool,
    )  # fmt: skip
    return (
        str(row.max_staleness),
        f"{o.samples_per_second:.1f}",
        f"{row.tokens_per_device:,.0f}",
        *(f"{share:.1%}" for share in shares),
    )


def case_figures(rows: Sequence[Row]) -> list[Figure]:
    """What the file holds of one cluster."""
    figures = []
    best = max(row.outcome.samples_per_second for row in rows)
    for row in rows:
        o, at = row.outcome, f"{row.case.name} devices, staleness {row.max_staleness}"
        figures += [
            Figure(f"{at}, samples", o.samples_per_second, "samples/s", "higher"),
            Figure(f"{at}, tokens a device", row.tokens_per_device, "tokens/s", "higher"),
            Figure(f"{at}, samples / best staleness's", o.samples_per_second / best, "x", "higher"),
            Figure(f"{at}, engines' slots filled", o.slots_filled, SHARE, "higher"),
            Figure(f"{at}, engines stalled by new weights", o.engines_stalled, SHARE),
            Figure(f"{at}, trainers in rounds", o.trainers_busy, SHARE, "higher"),
            Figure(f"{at}, trainers idle", o.trainers_idle, SHARE),
            Figure(f"{at}, trainers gather and wait for sync", o.gathering + o.waiting_for_sync,
                   SHARE),
            *(Figure(f"{at}, {part}", share, SHARE) for part, share in row.parts().items()),
        ]  # fmt: skip
    return figures


def split_figure(case: Case, tried: Mapping[int, float]) -> Figure:
    """Share of the devices that generate, of the best of the splits that were tried."""
    engines = max(tried, key=lambda number: tried[number])
    share = engines * case.model.devices_per_engine / case.devices
    return Figure(f"{case.name} devices, best share of them to generate", share, "of devices")


def limits(row: Row) -> list[Figure]:
    """Devices at which a single process would be full, were its load from a device the same."""
    parts = row.parts()
    return [
        Figure(f"the load of {row.case.name} devices, as many fill one {part}",
               row.case.devices / parts[part], "devices", "higher")
        for part in SINGLE
    ]  # fmt: skip


def bottleneck_line(row: Row) -> str:
    """In words, with what comes next."""
    parts = sorted(row.parts().items(), key=lambda item: -item[1])[:3]
    said = ", ".join(f"{name} {share:.0%}" for name, share in parts)
    return f"{row.case.name} devices, staleness {row.max_staleness}: {said}"
