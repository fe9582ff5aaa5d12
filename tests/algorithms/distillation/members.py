"""Processes that are members of an express group, for tests; they can be killed and frozen."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist

from async_grpo.algorithms.express import Give, Meeting, open_meeting
from async_grpo.algorithms.express_plan import Block, Send

LOOPBACK = "127.0.0.1"
CPU = torch.device("cpu")
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "async_grpo.algorithms.express"])
RESULT_S = 120


class Members:
    """Each runs `scenario(rank, say, **arguments)`; `say` tells the test that something is done."""

    def __init__(self, scenario: Callable[..., Any], *, num_members: int, **arguments: Any) -> None:
        self._ends, self.processes = [], []
        for rank in range(num_members):
            here, there = CONTEXT.Pipe()
            self._ends.append(here)
            process = CONTEXT.Process(target=_member, args=(scenario, rank, there, arguments))
            process.start()
            there.close()
            self.processes.append(process)

    def heard(self, rank: int) -> Any:
        """The next thing that a member says, the last being its result; its error is raised."""
        assert self._ends[rank].poll(RESULT_S), f"member {rank} is silent"
        said = self._ends[rank].recv()
        if isinstance(said, Exception):
            raise said
        return said

    def results(self) -> list[Any]:
        return [self.heard(rank) for rank in range(len(self.processes))]

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _member(scenario: Callable[..., Any], rank: int, end: Any, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        end.send(scenario(rank, end.send, **arguments))
    except Exception as error:
        traceback.print_exc()
        end.send(RuntimeError(f"{type(error).__name__}: {error}"))


def opened(num_members: int, dtype: torch.dtype) -> tuple[Meeting, dist.Store]:
    return open_meeting(LOOPBACK, num_members=num_members, dtype=dtype)


# A model of integers, whose products are exact in every type, however they are cut.
HIDDEN = 8


def hidden_states(rows: list[int]) -> torch.Tensor:
    """[N, HIDDEN] of rows of that identity."""
    return _integers([[row + 1, 3] for row in rows])


def head(num_columns: int) -> torch.Tensor:
    """[V, HIDDEN]."""
    return _integers([[column + 1, 5] for column in range(num_columns)])


def _integers(seeds: list[list[int]]) -> torch.Tensor:
    factors = torch.tensor(seeds)[:, :1] * torch.tensor([7919, 104729, 31, 57, 101, 211, 307, 401])
    return ((factors + torch.tensor(seeds)[:, 1:]) % 17 - 8).float()


def logits(rows: list[int], num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, V], by one process."""
    return (hidden_states(rows) @ head(num_columns).T).to(dtype)


def giving(block: Block, num_columns: int, dtype: torch.dtype) -> Give:
    """A tensor-parallel teacher's: it holds its slice of the head alone."""
    states = hidden_states(list(block.rows))
    weight = head(num_columns)[slice(*block.columns)].clone()

    def give(send: Send) -> torch.Tensor:
        start, stop = (column - block.columns[0] for column in send.columns)
        return (states[list(send.source_rows)] @ weight[start:stop].T).to(dtype)

    return give
