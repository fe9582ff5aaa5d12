"""What teachers say of a minibatch's tokens, fetched by the rank that trains them.

consumes:     minibatches whose samples have tickets
produces:     the same with scores `teacher.ids` and so on, and no ticket
waits for:    the object stores of the teachers' nodes
unblocked by: the objects; a loss, after which the controller has them made again
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.cluster import cluster
from async_grpo.controller.client import WHO, RunClient
from async_grpo.types import Minibatch, RowKey, Sample
from async_grpo.types.roles import TEACHER
from async_grpo.util import deadlines
from async_grpo.util.errors import WorkerError

logger = logging.getLogger(__name__)
MAX_LOSSES = 5  # of payloads of one minibatch
Arrays = Mapping[str, NDArray[Any]]  # of one row


def fetch_payloads(
    item: Minibatch,
    client: RunClient,
    *,
    rank: int,
    index: int,
    timeout_s: float,
    teachers: Sequence[str],
) -> Minibatch:
    """Item `index` of the rank with what its tickets stand for.

    Tickets that it lacks are asked for first. `teachers` are roles, in the order of
    `teacher.index`; `timeout_s` is that of scoring again.
    Raises `WorkerError` when payloads are lost again and again.
    """
    if without := [sample.key for sample in item.samples if not sample.tickets]:
        item = _made_again(client, rank, index, without, timeout_s)
    for _ in range(MAX_LOSSES):
        tickets = [sample.tickets[0] for sample in item.samples]
        references = [ticket.reference[0] for ticket in tickets]
        found: list[Any] = cluster.fetch(
            references, timeout_s=deadlines.PAYLOADS_FETCHED_S, owner=WHO
        )
        lost = [s.key for s, arrays in zip(item.samples, found, strict=True) if arrays is None]
        if not lost:
            return with_payloads(item, found, teachers=teachers)
        item = _made_again(client, rank, index, lost, timeout_s)
    raise WorkerError(
        f"what teachers said of minibatch {index} was lost {MAX_LOSSES} times: look at the memory "
        "of the teachers' object stores"
    )


def with_payloads(
    item: Minibatch, found: Sequence[Arrays], *, teachers: Sequence[str]
) -> Minibatch:
    """The minibatch with the arrays of each of its samples among the scores.

    Hidden states and logits of several teachers are filled up with zeros to one width, which no
    divergence reads.
    """
    widest: dict[str, int] = {}
    for arrays in found:
        for name, array in arrays.items():
            if array.ndim > 1:
                widest[name] = max(widest.get(name, 0), array.shape[1])
    samples = [
        replace(
            sample, tickets=(), scores={**sample.scores, **_scores(sample, own, widest, teachers)}
        )
        for sample, own in zip(item.samples, found, strict=True)
    ]
    return replace(item, samples=tuple(samples))


def _scores(
    sample: Sample, arrays: Arrays, widest: Mapping[str, int], teachers: Sequence[str]
) -> dict[str, NDArray[Any]]:
    scores = {f"{TEACHER}.{name}": _filled(a, widest.get(name)) for name, a in arrays.items()}
    if len(teachers) > 1:
        (row,) = sample.episode.rows
        number = teachers.index(sample.tickets[0].teacher)
        scores[f"{TEACHER}.index"] = np.full(len(row.token_ids), number, np.int32)
    return scores


def _filled(array: NDArray[Any], width: int | None) -> NDArray[Any]:
    """[L] or [L, width]; bfloat16, which came as its bits, is float32."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if width is None or array.shape[1] == width:
        return array
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def _made_again(
    client: RunClient, rank: int, index: int, lost: Sequence[RowKey], timeout_s: float
) -> Minibatch:
    logger.warning("the payloads of %d samples are lost, and asked for again", len(lost))
    call = client.taught_again(rank, index, lost)
    item: Minibatch = cluster.wait(call, timeout_s=timeout_s, who=WHO)
    return item
