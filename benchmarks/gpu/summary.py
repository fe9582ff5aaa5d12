"""What follows from figures of several variants: shares of the peak, and ratios of neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpu import attention, heads
from benchmarks.gpu.plan import GOAL_VARIANTS
from benchmarks.results import Figure

GOAL_MFU = 0.5
GOAL_HEAD_TIME = 1.4
ARITHMETIC = ", model arithmetic"


def derived(figures: Sequence[Figure]) -> list[Figure]:
    """All that can be said of what was measured."""
    by_name = {figure.name: figure for figure in figures}
    return [*_utilisation(by_name), *_heads(by_name), *_attention(by_name)]


def peak(by_name: Mapping[str, Figure]) -> float:
    """TFLOP/s of the fastest of the square products; 0 where none was measured."""
    rates = [figure.value for name, figure in by_name.items() if name.startswith("matmul")]
    return max(rates, default=0.0)


def _utilisation(by_name: Mapping[str, Figure]) -> list[Figure]:
    """Model arithmetic by the measured peak (MFU), of every variant and of the goal's best."""
    limit = peak(by_name)
    if not limit:
        return []
    found = {
        name.removesuffix(ARITHMETIC): figure.value / limit
        for name, figure in by_name.items()
        if name.endswith(ARITHMETIC)
    }
    figures = [Figure(f"{name}, MFU", share, "fraction", "higher") for name, share in found.items()]
    contenders = [found[variant.name] for variant in GOAL_VARIANTS if variant.name in found]
    if contenders:
        name = "1.5B, 16384 tokens, FSDP2, MFU of the fastest"
        figures.append(Figure(name, max(contenders), "fraction", "higher", GOAL_MFU))
    return figures


def _heads(by_name: Mapping[str, Figure]) -> list[Figure]:
    """Time and memory of each way by those of the full logits."""
    figures = []
    for way in heads.WAYS:
        for quantity in ("time", "extra memory"):
            plain = by_name.get(f"head, full logits, {quantity}")
            own = by_name.get(f"head, {way}, {quantity}")
            if own and plain and own is not plain:
                is_ours = way.startswith("chunks of 1024") and quantity == "time"
                goal = GOAL_HEAD_TIME if is_ours else None
                name = f"head, {way} / full logits, {quantity}"
                figures.append(Figure(name, own.value / plain.value, "x", goal=goal))
    return figures


def _attention(by_name: Mapping[str, Figure]) -> list[Figure]:
    """Time of the other ways by that of the trainer's own."""
    figures = []
    for name, own in by_name.items():
        _, _, rest = name.partition("attention, packed, ")
        if not rest.endswith(", time"):
            continue
        for way in attention.WAYS:
            other = by_name.get(f"attention, {way}, {rest}")
            if other and other is not own:
                ratio = other.value / own.value
                title = f"attention, {way} / packed, {rest}"
                figures.append(Figure(title, ratio, "x", "higher"))
    return figures
