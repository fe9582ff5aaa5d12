"""A scorer whose model is sharded by FSDP2 over processes of one node, behind one worker.

`ScorerRanks`, in the worker's process, which is rank 0:
consumes:     a task, and its arguments for each rank
produces:     the result of each rank
waits for:    all ranks: each gathers a layer's weights from the others while it computes
unblocked by: the end of all tasks; a rank's death, which ends the worker: it is restarted as any
              other, and what it had been asked is asked again

Each rank scores outputs of its own, so that nothing is computed twice.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_grpo.model.scorer import FILLER, Scorer, TokenIds
from async_grpo.rollout.teacher_payloads import teach, to_array
from async_grpo.types import Arrays, Payload, TensorMeta
from async_grpo.util import deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import AsyncGrpoError, ConfigError
from async_grpo.weight_sync.buckets import view_tensor

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
ENDED = "a rank of this scorer has ended"
T = TypeVar("T")
Task = Callable[..., T]  # of a scorer and arguments; a function of a module travels by name


class RankOptions(NamedTuple):
    """What all ranks of a worker are made with."""

    worker_id: str
    model_path: str
    dtype: str
    num_ranks: int
    on_device: bool
    memory_share: float  # of a device's memory; 0: all

    def device(self, rank: int) -> torch.device:
        """The rank's device of those that Ray gave the worker; `ConfigError` if it lacks one."""
        if not self.on_device:
            return torch.device("cpu")
        if rank >= (seen := torch.cuda.device_count()):
            raise ConfigError(
                f"worker {self.worker_id} was given {self.num_ranks} device(s) by Ray, and torch "
                f'sees {seen}: see what `python -c "import torch; torch.cuda.init()"` says on its '
                "node"
            )
        if self.memory_share:
            torch.cuda.set_per_process_memory_fraction(self.memory_share, rank)
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)

    def scorer(self, rank: int, port: int) -> Scorer:
        """The model, or the rank's part of it; returns on each rank once all have come."""
        device = self.device(rank)
        mesh = self._mesh(rank, port, device) if self.num_ranks > 1 else None
        return Scorer(self.model_path, device=device, dtype=self.dtype, mesh=mesh)

    def _mesh(self, rank: int, port: int, device: torch.device) -> DeviceMesh:
        limit = timedelta(seconds=deadlines.SCORER_RANKS_S)
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=limit)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store, rank=rank, world_size=self.num_ranks, timeout=limit,
        )  # fmt: skip
        return init_device_mesh(device.type, (self.num_ranks,))


class ScorerRanks:
    """The ranks of one worker; with one rank there is no other process, and no group."""

    def __init__(self, options: RankOptions) -> None:
        """Return when every rank has its part of the model. Raises `AsyncGrpoError`."""
        self.num_ranks = options.num_ranks
        self._pipes: list[Connection] = []
        # Two tasks at a time would gather from each other; one rank alone gathers nothing.
        self._one_at_a_time: AbstractContextManager[object] = (
            threading.Lock() if self.num_ranks > 1 else nullcontext()
        )
        port = 0
        if self.num_ranks > 1:
            self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
            _watch(self._start(options, port), ENDED)
        self.scorer = options.scorer(0, port)
        self._results(None)

    def _start(self, options: RankOptions, port: int) -> list[int]:
        spawn = mp.get_context("spawn")  # no fork of a process that has threads, or a device
        sentinels = []
        for rank in range(1, options.num_ranks):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_follow, args=(options, rank, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            sentinels.append(process.sentinel)
        return sentinels

    def run(self, task: Task[T], arguments: Sequence[Sequence[object]]) -> list[T]:
        """The result of `task(scorer, *arguments[r])` of each rank r.

        Raises what a task raises of this package's errors: all ranks must raise it alike, before
        they compute. After any other the ranks may wait for each other, so the process ends, unless
        there is one rank alone.
        """
        with self._one_at_a_time:
            try:
                for pipe, own in zip(self._pipes, arguments[1:], strict=True):
                    pipe.send((task, own))
                return self._results(_attempt(self.scorer, task, arguments[0]))
            except Exception as error:
                if self._pipes and not isinstance(error, AsyncGrpoError):
                    is_end = isinstance(error, (EOFError, BrokenPipeError))
                    _end(ENDED if is_end else f"rank 0 failed: {type(error).__name__}: {error}")
                raise

    def _results(self, own: T | AsyncGrpoError) -> list[T]:
        results = list[T]()
        for each in [own, *(pipe.recv() for pipe in self._pipes)]:
            if isinstance(each, AsyncGrpoError):
                raise each
            results.append(each)
        return results


def load(scorer: Scorer, path: str, tensors: Sequence[TensorMeta], rest_of_folder: bool) -> None:
    """A task: take this rank's part of the tensors that lie in a file; see `Scorer.load`."""
    data = np.memmap(path, dtype=np.uint8, mode="c") if tensors else np.empty(0, np.uint8)
    views = ((meta.name, view_tensor(data, meta)) for meta in tensors)
    scorer.load(views, rest_of_folder=rest_of_folder)


def score(
    scorer: Scorer,
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    temperature: float,
    width: int,
    payload: Payload | None,
) -> list[tuple[NDArray[np.float32], Arrays]]:
    """A task: the answers of its pairs (prompt ids, output ids) by one forward."""
    asked = pairs or [FILLER]  # others gather this rank's shards
    if payload is not None:
        answers = teach(scorer, asked, temperature=temperature, payload=payload, width=width)
    else:
        scored = scorer.score(asked, temperature=temperature, width=width)
        answers = [(scores, {}) for scores in scored]
    return answers[: len(pairs)]


def head(scorer: Scorer) -> Arrays:
    """A task: the whole head, which a forward over a sharded model gathers."""
    if scorer.is_sharded:
        scorer.score([FILLER], temperature=1.0)
    whole = scorer.head
    tensors = {"weight": whole.weight, "bias": whole.bias}
    # Copies: FSDP2 frees what it has gathered.
    arrays = {n: to_array(t.to("cpu", copy=True)) for n, t in tensors.items() if t is not None}
    factor, softcap = whole.rescaling
    return {**arrays, "rescaling": np.array([factor, softcap or 0.0])}


@cache
def _express(scorer: Scorer, max_tokens: int) -> Any:
    return add_on("express.teacher")(scorer, device=scorer.device, max_tokens=max_tokens)


def join_express(scorer: Scorer, max_tokens: int, meeting: object, number: int) -> None:
    """A task: be this member of a group."""
    _express(scorer, max_tokens).join(meeting, rank=number)


def serve_express(scorer: Scorer, max_tokens: int, work: object, num_forwards: int) -> None:
    """A task: read its sequences, and send their logits; all ranks do as many forwards."""
    _express(scorer, max_tokens).serve(work, num_forwards=num_forwards)


def _attempt(scorer: Scorer, task: Task[T], arguments: Sequence[object]) -> T | AsyncGrpoError:
    try:
        return task(scorer, *arguments)
    except AsyncGrpoError as error:
        return error
    finally:
        scorer.release()


def _follow(options: RankOptions, rank: int, port: int, pipe: Connection) -> None:
    """The process of a rank above 0: do every task that rank 0 sends, until that ends."""
    parent = mp.parent_process()
    assert parent is not None
    _watch([parent.sentinel], "")
    try:
        scorer = options.scorer(rank, port)
    except AsyncGrpoError as error:  # rank 0 raises it, and ends this process
        pipe.send(error)
        threading.Event().wait()
    pipe.send(None)
    with suppress(EOFError):  # rank 0 has ended
        while True:
            task, arguments = pipe.recv()
            pipe.send(_attempt(scorer, task, arguments))


def _watch(sentinels: Sequence[int], sentence: str) -> None:
    """End this process with the first of others to end: a collective would wait for it."""

    def until_death() -> None:
        wait(sentinels)
        _end(sentence)

    threading.Thread(target=until_death, name="watch-ranks", daemon=True).start()


def _end(sentence: str) -> None:
    if sentence:
        logger.error("%s: the worker ends, to be started again", sentence)
        logging.shutdown()
    os._exit(1)


def deal(sizes: Sequence[int], num_ranks: int, *, max_tokens: int) -> list[list[int]]:
    """The indices of outputs for each rank, by their numbers of tokens; a last list: without room.

    Neighbours stay together, as those of one prompt, which a rank then computes once.

    >>> deal([50, 50, 50, 50], 2, max_tokens=100)
    [[0, 1], [2, 3], []]
    >>> deal([60, 60, 60], 2, max_tokens=100)
    [[0], [1], [2]]
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    held, left, before = [0] * num_ranks, [], 0
    wanted = sum(sizes) / num_ranks
    for index, size in enumerate(sizes):
        rank = min(int((before + size / 2) / wanted), num_ranks - 1)
        before += size
        if held[rank] + size > max_tokens:
            rank = held.index(min(held))
        if held[rank] + size > max_tokens:
            left.append(index)
            continue
        shares[rank].append(index)
        held[rank] += size
    return [*shares, left]
