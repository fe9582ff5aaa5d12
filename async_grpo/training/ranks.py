"""The trainer's ranks, several or a single one: their start, and what they share and agree on.

They hold the model in one group of shards, or in several groups that replicate it:

shard       the ranks of a group hold one copy of masters, gradients and moments between them
replicate   ranks of the same place in their groups hold the same shards, and add up gradients
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_grpo.util import deadlines
from async_grpo.util.errors import (
    AsyncGrpoError,
    CollectiveTimeout,
    ConfigError,
    RankLostError,
    RendezvousError,
)
from async_grpo.util.ports import interfaces

T = TypeVar("T")
SHARD, REPLICATE = "shard", "replicate"  # see `make_mesh`
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
COLLECTIVES_FILE = "collectives_rank_"  # and the rank: what torch has recorded of its collectives

# Messages of gloo's and NCCL's collectives when a peer's process has ended.
LOSS = re.compile(
    r"gloo/transport.*(closed by peer|reset by peer|Broken pipe|Connection refused)"
    r"|Connection (closed|reset) by peer|ncclRemoteError|remote process exited",
    re.DOTALL,
)


LATE = re.compile(r"gloo.*[Tt]imed out waiting|collective operation timeout", re.DOTALL)


def as_ranks_failure(error: BaseException, folder: str | Path) -> AsyncGrpoError | None:
    """What a collective's own error says of another rank, else None.

    `RankLostError` where it has died; where it has not come, `CollectiveTimeout`, with what torch
    has recorded of this rank's collectives kept in the run's `folder`.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, AsyncGrpoError):
        return None
    failure: AsyncGrpoError
    if LOSS.search(str(error)):
        failure = RankLostError(
            "another trainer rank has died: its own error, or its end, is the cause"
        )
    elif LATE.search(str(error)):
        failure = _late(Path(folder))
    else:
        return None
    failure.__cause__ = error
    return failure


def _late(folder: Path) -> CollectiveTimeout:
    """Name the collective that this rank has waited in, and keep torch's record of all of them."""
    rank, now_ns = os.environ.get("RANK", "0"), time.time_ns()
    if dist.is_initialized():
        rank = str(dist.get_rank())
    dump = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]  # in no stub
    file = folder / f"{COLLECTIVES_FILE}{rank}.json"
    kept = f"{file} has those before it"
    try:
        file.write_bytes(dump)
    except OSError as refusal:
        kept = f"those before it cannot be kept ({refusal})"
    waited = waited_in(json.loads(dump).get("entries", []), now_ns=now_ns)
    return CollectiveTimeout(
        f"trainer rank {rank} waited in vain for another rank in {waited}; {kept}: find the rank "
        "that is frozen or does something else, of which no such file tells that it waited"
    )


def waited_in(entries: list[dict[str, Any]], *, now_ns: int) -> str:
    """In words, the newest collective of torch's flight recorder whose time is up.

    `entries` are in the order in which they were recorded; gloo never records their ends, and calls
    those that it makes of others by the others' names. Times in nanoseconds since 1970.

    >>> entry = {"collective_seq_id": 6, "process_group": ["0", "default_pg"], "state": "scheduled",
    ...          "profiling_name": "gloo:all_reduce", "input_sizes": [[8, 1024]],
    ...          "input_dtypes": ["Float"], "timeout_ms": 3000, "time_created_ns": 0}
    >>> waited_in([entry, entry | {"time_created_ns": 2_000_000_000}], now_ns=3_100_000_000)
    'gloo:all_reduce of Float [8, 1024] (number 6 of default_pg, for 3.1 of 3 s)'
    >>> waited_in([], now_ns=0)
    'a collective that torch has not recorded'
    """
    open_ones = [each for each in entries if each["state"] != "completed"]
    for each in reversed(open_ones):
        waited_ms = (now_ns - each["time_created_ns"]) / 1e6
        if waited_ms < 0.99 * each["timeout_ms"]:
            continue
        sizes = ", ".join(
            f"{dtype} {size}"
            for dtype, size in zip(each["input_dtypes"], each["input_sizes"], strict=False)
        )
        return (
            f"{each['profiling_name']} of {sizes} (number {each['collective_seq_id']} of "
            f"{each['process_group'][1]}, for {waited_ms / 1e3:.4g} of "
            f"{each['timeout_ms'] / 1e3:g} s)"
        )
    return "a collective that torch has not recorded"


class Absent:
    """Stands on other ranks for an object of rank 0; every method does nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """This process among the trainer's processes."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh  # ("shard",) or ("replicate", "shard"): see `make_mesh`

    @classmethod
    def start(
        cls,
        *,
        timeout_s: float,
        device_index: int | None = None,
        memory_share: float = 1.0,
        shard_ranks: int | None = 0,
    ) -> Ranks:
        """Join the process group that the environment describes; without one, be the only rank.

        A collective that a rank does not reach within `timeout_s` ends the others. `device_index`:
        torch's index, None on a CPU; this rank may allocate `memory_share` of that device's memory.
        `shard_ranks`: how many share one copy of the model; 0: all; None: those of a machine.
        Raises `RendezvousError` where ranks cannot connect to each other.
        """
        if "RANK" not in os.environ:
            os.environ.update(ALONE, MASTER_PORT="0")
        device = torch.device("cpu")
        if device_index is not None:
            device = torch.device("cuda", device_index)
            torch.cuda.init()  # or the mesh below would take the device of LOCAL_RANK
            torch.cuda.set_device(device)
            if memory_share < 1:
                torch.cuda.set_per_process_memory_fraction(memory_share)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        _meet(backend, timeout_s=timeout_s)
        num_ranks = dist.get_world_size()
        if shard_ranks is None:
            shard_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        mesh = make_mesh(device.type, num_ranks=num_ranks, shard_ranks=shard_ranks)
        return cls(dist.get_rank(), num_ranks, device, mesh)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def on_main(
        self, prepare: Callable[[], T], *, group: dist.ProcessGroup | None = None
    ) -> T | None:
        """Call `prepare` on rank 0 and return its result there, None on other ranks; collective.

        An `AsyncGrpoError` that it raises is raised on every rank. A thread passes its own `group`.
        """
        result: T | None = None
        error: AsyncGrpoError | None = None
        if self.is_main:
            try:
                result = prepare()
            except AsyncGrpoError as raised:
                error = raised
        message = [str(error) if error else None]
        dist.broadcast_object_list(message, src=0, group=group)
        if error is not None:
            raise error
        if message[0] is not None:
            raise AsyncGrpoError(message[0])
        return result

    def share(self, prepare: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
        """As `on_main`, but every rank gets the result."""
        result = [self.on_main(prepare, group=group)]
        dist.broadcast_object_list(result, src=0, group=group)
        return cast(T, result[0])

    def gather(self, value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
        """The values of all ranks, in their order; collective, over hosts and not devices."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value, group=group)
        return values

    def agree(self, urgency: int) -> int:
        """The largest value of any rank; collective, over hosts and not devices."""
        if self.world_size == 1:
            return urgency
        flag = torch.tensor(urgency)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag)

    def stop(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(backend: str, *, timeout_s: float) -> None:
    """Connect to all other ranks."""
    environ = os.environ
    try:
        dist.init_process_group(
            backend,
            store=_store_of_this_attempt(),
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        if environ["WORLD_SIZE"] == "1":
            raise
        name = environ.get("GLOO_SOCKET_IFNAME", "")
        here = (
            f"{name} ({interfaces().get(name, ['no address'])[0]})" if name else "its host name's"
        )
        raise RendezvousError(
            f"trainer ranks must reach each other; rank {environ['RANK']}, by the interface {here} "
            f"and addresses learnt at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}, got "
            f"{error}: set GLOO_SOCKET_IFNAME on every machine to the interface of the network "
            "between them, if no rank has ended with an error of its own"
        ) from error


def _store_of_this_attempt() -> dist.Store:
    """The store through which ranks find each other.

    A prefix for each attempt: torchrun's store still has the addresses from before a restart.
    """
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=serves,
        timeout=timedelta(seconds=deadlines.RANKS_START_S),
    )
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def make_mesh(device_type: str, *, num_ranks: int, shard_ranks: int = 0) -> DeviceMesh:
    """("shard",) over all ranks, or ("replicate", "shard") of groups of `shard_ranks`; collective.

    Raises ConfigError where the number of ranks is not a multiple of `shard_ranks`.

    Six ranks in groups of two: rank 3 is in (1, 1), shards with rank 2, replicates with 1 and 5.
    """
    if shard_ranks in (0, num_ranks):
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=(SHARD,))
    if num_ranks % shard_ranks:
        raise ConfigError(
            f"--fsdp-shard-ranks must divide the number of trainer ranks ({num_ranks}), got "
            f"{shard_ranks}: give a divisor; without it, the ranks of a machine share a copy"
        )
    shape = num_ranks // shard_ranks, shard_ranks
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD))
