"""Packs samples end to end without padding, as tensors for the model and the loss.

Legend: P prompt tokens, L output tokens, T packed tokens, S sequences, N trained tokens, U tokens
of the sequences, each with its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from async_grpo.types import Experts, PackedMinibatch, Sample, token_weight
from async_grpo.types.prefixes import as_keys, places_of, with_whole_prompts

# The largest copy out of pinned memory, which torch keeps: not teachers' states and logits.
PINNED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One sequence before packing."""

    prompt: NDArray[np.int32]  # [P]
    output: NDArray[np.int32]  # [L]
    trained: NDArray[np.intp]  # indices into the output of its trained tokens
    behaviour: NDArray[np.float32]  # [L]; zeros for a given pair, which no loss reads
    weight: float = 1.0  # w_i
    advantage: float | NDArray[np.float32] = 0.0  # or [L]
    scores: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)  # [L] or [L, K]
    is_first: bool = True  # of its sample
    is_given: bool = False  # of a given pair: it was not sampled
    experts: Experts | None = None  # see `Row`


def collate(
    samples: Sequence[Sample],
    *,
    aggregation: str,
    constant_length: int = 0,
    scores: Mapping[str, int] | None = None,
    scores_of_given: Set[str] = frozenset(),
    share_prompts: bool = False,
    dense: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> PackedMinibatch:
    """Pack one rank's samples; without samples, an inert filler whose loss is exactly zero.

    The model reads a masked token, but it is not trained; a fully masked sample adds nothing to N.
    Tokens behind a sample's last trained one influence nothing and are left out of T. With
    `share_prompts` what sequences begin with, prompt or output, is in the row once for all of them:
    the same sums by fewer products.
    `scores`: {name: columns} that every sample must have (0: one value a token), and a filler gets.
    A given pair needs `scores_of_given` alone, and gets zeros for the others. `dense`: scores that
    are packed already, as `Minibatch.dense`. `dtype`: of weights and advantages. Raises ValueError
    for an empty prompt or a missing score.
    """
    dense = dense or {}
    scores = {name: number for name, number in (scores or {}).items() if name not in dense}
    columns = _columns(samples, scores, scores_of_given)
    rows = [
        row for sample in samples for row in _rows(sample, columns, aggregation, constant_length)
    ]
    packed = _pack(rows, dtype, share_prompts=share_prompts) if rows else _filler(dtype, scores)
    return replace(packed, scores={**packed.scores, **dense}) if dense else packed


def collate_pairs(
    pairs: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    *,
    share_prompts: bool = False,
    dtype: torch.dtype = torch.float32,
    experts: Sequence[Experts | None] | None = None,
) -> PackedMinibatch:
    """Pack (prompt ids, output ids) so that every output token is scored, each with weight 1.

    `experts`: of each pair, as `Row.experts`.
    """
    rows = [
        _Row(prompt, output, np.arange(len(output)), behaviour=_zeros(len(output)), experts=own)
        for (prompt, output), own in zip(pairs, experts or repeat(None), strict=False)
    ]
    return _pack(rows, dtype, share_prompts=share_prompts) if rows else _filler(dtype, {})


def split_by_row(values: Tensor, packed: PackedMinibatch) -> list[Tensor]:
    """Split per-token `values` [N] into one tensor a row, in the order of packing."""
    counts = torch.bincount(packed.sample_index, minlength=packed.num_rows)
    return list(values.split(counts.tolist())[: packed.num_rows])


def to_device(packed: PackedMinibatch, device: torch.device) -> PackedMinibatch:
    """The same minibatch with its tensors on `device`; copies of at most `PINNED_BYTES` do not
    wait for it."""

    def moved(value: Tensor) -> Tensor:
        if device.type == "cuda" and value.device.type == "cpu" and value.nbytes <= PINNED_BYTES:
            value = value.pin_memory()
        return value.to(device, non_blocking=True)

    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    tensors = {name: moved(value) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(packed, **tensors, scores={k: moved(v) for k, v in packed.scores.items()})


def _rows(
    sample: Sample, columns: Mapping[str, int], aggregation: str, constant_length: int
) -> Iterator[_Row]:
    weight = token_weight(sample.num_trained_tokens, aggregation, constant_length)
    for part in sample.parts():
        (row,) = part.episode.rows
        yield _Row(
            prompt=row.prompt_token_ids,
            output=row.token_ids,
            trained=np.flatnonzero(row.loss_mask),
            behaviour=_zeros(len(row.token_ids)) if row.logprobs is None else row.logprobs,
            weight=weight,
            advantage=part.advantage,
            scores={
                name: part.scores.get(name, _zeros(len(row.token_ids), num_columns))
                for name, num_columns in columns.items()
            },
            is_first=part.row == 0,
            is_given=row.logprobs is None,
            experts=row.experts,
        )


def _zeros(num_tokens: int, num_columns: int = 0) -> NDArray[np.float32]:
    return np.zeros((num_tokens, num_columns) if num_columns else num_tokens, np.float32)


def _filler(dtype: torch.dtype, scores: Mapping[str, int]) -> PackedMinibatch:
    """A row of one token, N = 0: a full forward and backward whose gradients are exactly zero."""
    prompt, output = np.zeros(1, np.int32), np.zeros(0, np.int32)  # id 0 is in every vocabulary
    nothing = {name: _zeros(0, num_columns) for name, num_columns in scores.items()}
    row = _Row(prompt, output, np.zeros(0, np.intp), behaviour=_zeros(0), scores=nothing)
    return replace(_pack([row], dtype), num_rows=0, num_samples=0)


def _pack(
    rows: Sequence[_Row], dtype: torch.dtype, *, share_prompts: bool = False
) -> PackedMinibatch:
    if any(len(row.prompt) == 0 for row in rows):
        raise ValueError("every prompt needs at least one token, got an empty one: check the data")
    sequences = [_needed_tokens(row) for row in rows]
    lengths = np.array([len(sequence) for sequence in sequences])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    keys = as_keys(zip(sequences, (row.experts for row in rows), strict=True))
    whole = np.split(np.arange(offsets[-1]), offsets[1:-1])
    places = places_of(keys) if share_prompts else whole
    repeat_index = np.concatenate(places)
    # numpy returns the first index of each value; the row is in the order of values.
    _, first_index = np.unique(repeat_index, return_index=True)
    is_shared = len(first_index) < len(repeat_index)
    by_prompts = with_whole_prompts(keys, (len(row.prompt) for row in rows))
    counts = np.array([len(row.trained) for row in rows])
    positions = [
        place[len(row.prompt) - 1 + row.trained] for row, place in zip(rows, places, strict=True)
    ]
    return PackedMinibatch(
        input_ids=_ids([np.concatenate(sequences)[first_index]]),
        position_ids=_ids([np.concatenate([np.arange(n) for n in lengths])[first_index]]),
        cu_seqlens=torch.from_numpy(offsets.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        logit_positions=_ids(positions),
        target_ids=_ids([row.output[row.trained] for row in rows]),
        sample_index=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
        weights=torch.from_numpy(np.repeat([row.weight for row in rows], counts)).to(dtype),
        advantages=torch.from_numpy(np.concatenate([_advantages(row) for row in rows])).to(dtype),
        behaviour_logprobs=_floats([row.behaviour[row.trained] for row in rows]),
        scores={
            name: _numbers([r.scores[name][r.trained] for r in rows]) for name in rows[0].scores
        },
        num_rows=len(rows),
        num_samples=sum(row.is_first for row in rows),
        is_given=(
            torch.from_numpy(np.repeat([row.is_given for row in rows], counts))
            if any(row.is_given for row in rows)
            else None
        ),
        repeat_index=_ids([repeat_index]) if is_shared else None,
        first_index=_ids([first_index]) if is_shared else None,
        is_trie=is_shared and len(first_index) < by_prompts,
        experts=_experts(rows, lengths, first_index),
        num_rerouted=_num_rerouted(rows) if share_prompts else 0,
    )


def _experts(
    rows: Sequence[_Row], lengths: NDArray[np.intp], first_index: NDArray[np.intp]
) -> Tensor | None:
    """The choices [T, K] of all tokens of the row, -1 where none are known; None if all are."""
    known = next((row.experts for row in rows if row.experts is not None), None)
    if known is None:
        return None
    whole = np.full((lengths.sum(), known.shape[1]), -1, np.int16)
    for row, end, length in zip(rows, np.cumsum(lengths), lengths, strict=True):
        if row.experts is not None:
            own = row.experts[:length]
            whole[end - length :][: len(own)] = own
    return torch.from_numpy(whole[first_index])


def _num_rerouted(rows: Sequence[_Row]) -> int:
    """Prompts that are here again, because other experts computed them."""
    prompts = as_keys((row.prompt, row.experts) for row in rows)
    return len({key.tobytes() for key in prompts}) - len({row.prompt.tobytes() for row in rows})


def _needed_tokens(row: _Row) -> NDArray[np.int32]:
    """Prompt and output up to the position that predicts the last trained token; at least one."""
    num_read = len(row.prompt) + int(row.trained[-1]) if len(row.trained) else 1
    return np.concatenate([row.prompt, row.output])[:num_read]


def _advantages(row: _Row) -> NDArray[np.float64]:
    """The advantage of each trained token."""
    advantage = np.asarray(row.advantage, dtype=np.float64)
    return advantage[row.trained] if advantage.ndim else np.full(len(row.trained), advantage)


def _columns(
    samples: Sequence[Sample], scores: Mapping[str, int], of_given: Set[str]
) -> dict[str, int]:
    """{name: columns} of all scores. ValueError if a sample lacks one that it needs."""
    found = {
        name: values.shape[1] if values.ndim > 1 else 0
        for sample in samples
        for name, values in sample.scores.items()
    }
    columns = {**found, **scores}
    for sample in samples:
        needed = columns.keys() & of_given if sample.episode.is_given else columns.keys()
        if missing := needed - sample.scores.keys():
            raise ValueError(
                f"all samples of a minibatch need the same scores, sample "
                f"{(sample.ordinal, sample.index)} lacks {', '.join(sorted(missing))}: start a "
                "worker that gives them"
            )
    return columns


def _ids(parts: Sequence[NDArray[np.integer]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _floats(parts: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def _numbers(parts: Sequence[NDArray[Any]]) -> Tensor:
    """int64 if all parts are integers, else float32, as a filler's zeros are."""
    is_ids = all(np.issubdtype(part.dtype, np.integer) for part in parts)
    return _ids(parts) if is_ids else _floats(parts)
