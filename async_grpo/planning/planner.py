"""What is known of a run's speeds and lengths, and with it the work of any split. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

from async_grpo.planning.asked import Asked, Split
from async_grpo.planning.lengths import Lengths, LogNormal, Seen, assumed_lengths
from async_grpo.planning.measured import Run, rates_of, seen_of
from async_grpo.planning.prediction import Work
from async_grpo.planning.rates import Layout, Rates, from_peaks, given
from async_grpo.util.errors import ConfigError

ASSUMED_PROMPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Where speeds come from, beside the peaks of devices."""

    runs: tuple[Run, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)  # tables of a file
    file: str = ""


def layout_of(asked: Asked, split: Split) -> Layout:
    """How a split lies on the machines: ranks fill them from the first, engines the others."""
    a_node = asked.fleet.of_a_node
    is_one = asked.on_cpu or len(asked.fleet.nodes) == 1
    return Layout(
        engine_devices=asked.engine_devices,
        num_ranks=split.ranks,
        shard_ranks=asked.shard_ranks(split.ranks),
        engine_nodes=0 if is_one else -(-split.engines * asked.engine_devices // a_node),
        train_nodes=-(-split.ranks // a_node) if not asked.on_cpu else 1,
        train_bytes=asked.train_bytes,
        engine_bytes=asked.worker_bytes(asked.generation),
        by_store=asked.train.weight_transport == "object_store",
    )


def rates_at(asked: Asked, known: Known, split: Split) -> Rates:
    """Of peaks; with what runs measured, and what a file gives, in their place."""
    rates = from_peaks(asked.model, asked.fleet.kind, layout_of(asked, split))
    if known.runs:
        rates = rates_of(known.runs, rates)
    return given(rates, known.given, who=known.file)


def work_of(asked: Asked, known: Known, lengths: Lengths) -> Callable[[Split], Work]:
    """The work of a split: its rates, and what every split has in common."""
    contributing = fmean([seen_of(run).contributing for run in known.runs] or [1.0])
    fixed = rates_at(asked, known, asked.own_split) if known.runs else None

    @cache
    def work(split: Split) -> Work:
        rates = fixed or rates_at(asked, known, split)
        return Work(asked=asked, rates=rates, lengths=lengths, contributing=contributing)

    return work


def lengths_of(
    asked: Asked, known: Known, *, output_tokens: float = 0.0, prompt_tokens: int = 0
) -> Lengths:
    """Given, as the newest of the runs had them, or assumed.

    Raises `ConfigError` for outputs that are longer than the longest.
    """
    train = asked.train
    if output_tokens > train.max_generation_tokens:
        raise ConfigError(
            f"--output-tokens must be at most --max-generation-tokens "
            f"({train.max_generation_tokens}), got {output_tokens:g}: lower it"
        )
    if known.runs and not output_tokens:
        found = known.runs[-1].lengths
        found = replace(found, prompt=prompt_tokens or found.prompt)
        return _cut(found, longest=train.max_tokens_per_gpu - found.prompt)
    prompt = prompt_tokens or (known.runs[-1].lengths.prompt if known.runs else ASSUMED_PROMPT)
    prompt = min(prompt, max(1, train.max_tokens_per_gpu - train.max_generation_tokens))
    return assumed_lengths(longest=train.max_generation_tokens, prompt=prompt, mean=output_tokens)


def _cut(lengths: Lengths, *, longest: int) -> Lengths:
    """What no minibatch holds is cut, as the run would."""
    outputs = lengths.outputs
    if isinstance(outputs, LogNormal):
        return replace(lengths, outputs=replace(outputs, longest=min(outputs.longest, longest)))
    groups = tuple(tuple(min(each, longest) for each in group) for group in outputs.groups)
    return replace(lengths, outputs=Seen(groups))
