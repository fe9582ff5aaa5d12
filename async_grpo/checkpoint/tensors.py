"""The tensors of a checkpoint: what trains, AdamW's moments, the ranks' random states, references.

Shards are safetensors files that torch.distributed.checkpoint writes and reads: nothing is pickled,
and another number of ranks can read them. Names are those of Hugging Face, or of peft's layers:

    policy.<name>  exp_avg.<name>  exp_avg_sq.<name>  [rank_3.random_cpu, rank_3.random_cuda]

Moments in 8 bits depend on how a rank's shards are cut: they are each rank's own, as rank_3.state1.

AdamW's count of updates is not saved, for it equals the run's clock of steps: every update moves
every parameter. The weights of a reference that has moved are in separate files, as served.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from async_grpo.checkpoint import disk
from async_grpo.checkpoint.resume import Start
from async_grpo.model.policy import trained_parameters
from async_grpo.model.weight_files import local_part
from async_grpo.training.fsdp import LibraryAdamW, as_shard, host_memory, moments_of, reshard
from async_grpo.training.learner import Learner
from async_grpo.util.errors import CheckpointError

FILE_BYTES = 1 << 30  # of a rank's file, and of one of a reference: one at a time is in memory
MOMENTS = ("exp_avg", "exp_avg_sq")
OF_A_RANK = re.compile(r"rank_\d+\.")

Tensors = dict[str, Tensor]


class Staging:
    """Copies a rank's tensors into host memory, into the same buffers at each save.

    A copy is valid until the next one is made.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, learner: Learner) -> Tensors:
        """The rank's current tensors by name; only the first call is collective."""
        reshard(learner.policy)
        state = _named_state(learner)
        own = [local_part(tensor) for tensor in state.values()]
        if [each.nbytes for each in self._buffers] != [each.nbytes for each in own]:
            self._buffers = []  # of a save before AdamW had moments
            self._buffers = host_memory(own)
        copies = zip(state.items(), own, self._buffers, strict=True)
        staged = {
            name: as_shard(buffer.copy_(each, non_blocking=True), tensor)
            for (name, tensor), each, buffer in copies
        }
        if learner.device.type == "cuda":
            torch.cuda.synchronize(learner.device)  # copies into pinned memory are asynchronous
        return staged | _random_states()


def save_tensors(tensors: Tensors, folder: Path, *, group: dist.ProcessGroup) -> dict[str, str]:
    """Write this rank's shards of staged tensors; collective over `group`, on a CPU backend.

    Returns {name: sha256} of this rank's files, each read back from the device and compared. Raises
    `CheckpointError` on every rank when any rank could not write its files.
    """
    writer = _VerifyingWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(tensors), save_distributed=True
    )
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"shards could not be written: {_cause(error)}") from None
    return writer.hashes


class _VerifyingWriter(dcp.HuggingFaceStorageWriter):
    """Hashes the files it writes, and verifies that the disk returns the same bytes.

    torch.distributed.checkpoint passes what it raises to all ranks.
    """

    def __init__(self, path: str, **options: object) -> None:
        super().__init__(path, **options)
        self.fs = _HashingFiles()

    @property
    def hashes(self) -> dict[str, str]:
        """{name: sha256} of this rank's files."""
        return {path.name: digest.hexdigest() for path, digest in self.fs.digests.items()}

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for path in self.fs.digests:
            disk.sync(path)
        found = disk.sha256(list(self.fs.digests))
        for path, digest in zip(self.fs.digests, found, strict=True):
            if digest != self.hashes[path.name]:
                raise CheckpointError(
                    f"{path.name} must have the sha256 {self.hashes[path.name]}, which was "
                    f"written, the disk gives back {digest}: check that disk"
                )
        return written


class _HashingFiles(FileSystem):
    """Hashes files while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[Path, hashlib._Hash] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[object]:
        with super().create_stream(path, mode) as stream:
            digest = self.digests[Path(path)] = hashlib.sha256()
            yield _Hashed(stream, digest)


class _Hashed:
    def __init__(self, stream: BinaryIO, digest: hashlib._Hash) -> None:
        self._stream = stream
        self._digest = digest

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return self._stream.write(content)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def restore_learner(learner: Learner, start: Start) -> None:
    """Restore a learner from a checkpoint, of any number of ranks; collective.

    Random states are restored if the number of ranks is the same. Raises `CheckpointError` on every
    rank when any rank could not read its part.
    """
    assert start.folder and start.manifest
    reshard(learner.policy)
    learner.step.clocks = start.clocks
    learner.step.expert_shares = start.state.get("expert_shares")
    if start.clocks.steps:
        _begin_moments(learner)
    saved_by_as_many = start.manifest.world_size == dist.get_world_size()
    if isinstance(learner.step.optimizer, LibraryAdamW) and not saved_by_as_many:
        raise CheckpointError(
            f"{start.folder} holds moments of bitsandbytes' optimizer, which are each rank's own: "
            f"resume it with {start.manifest.world_size} ranks"
        )
    random_states = _random_states() if saved_by_as_many else {}
    reader = dcp.HuggingFaceStorageReader(str(start.folder))
    try:
        dcp.load(_named_state(learner) | random_states, storage_reader=reader)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{start.folder} could not be read: {_cause(error)}") from None
    _set_random_states(random_states)


def _named_state(learner: Learner) -> Tensors:
    """The trained tensors themselves, not copies, by their names in a checkpoint."""
    trained = dict(trained_parameters(learner.policy))
    tensors = {f"policy.{name}": parameter.detach() for name, parameter in trained.items()}
    optimizer, clocks = learner.step.optimizer, learner.step.clocks
    if not clocks.steps:
        return tensors  # AdamW makes its moments with its first step
    if isinstance(optimizer, LibraryAdamW):
        own = optimizer.moments({parameter: name for name, parameter in trained.items()})
        return tensors | {f"rank_{dist.get_rank()}.{name}": each for name, each in own.items()}
    counts = torch.stack([moments_of(optimizer, p)["step"].cpu() for p in trained.values()])
    assert bool((counts == clocks.steps).all()), f"AdamW counts {counts}, the clock {clocks}"
    for moment in MOMENTS:
        for name, parameter in trained.items():
            tensors[f"{moment}.{name}"] = moments_of(optimizer, parameter)[moment]
    return tensors


def _begin_moments(learner: Learner) -> None:
    """Make AdamW's state, as its first step would, with the clock's number of steps."""
    if isinstance(learner.step.optimizer, LibraryAdamW):
        learner.step.optimizer.begin(learner.step.clocks.steps)
        return
    num_steps = float(learner.step.clocks.steps)
    for group in learner.step.optimizer.param_groups:
        for parameter in group["params"]:
            learner.step.optimizer.state[parameter] = {
                "step": torch.tensor(num_steps, dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """{name: number of its file, from 1}: no file of a rank exceeds `FILE_BYTES` by much.

    All ranks use rank 0's result, so it names their random states too.
    """
    world_size = dist.get_world_size()
    numbers = {name: 1 for rank in range(world_size) for name in _random_names(rank)}
    sharded = ((name, tensor) for name, tensor in tensors.items() if name not in numbers)
    for number, part in enumerate(cut_by_size(sharded, FILE_BYTES * world_size), 1):
        numbers |= dict.fromkeys(part, number)
        for name in part:
            if of_a_rank := OF_A_RANK.match(name):
                rest = name[of_a_rank.end() :]
                numbers |= {f"rank_{rank}.{rest}": number for rank in range(world_size)}
    return numbers


def _random_names(rank: int) -> tuple[str, str]:
    return f"rank_{rank}.random_cpu", f"rank_{rank}.random_cuda"


def _random_states() -> Tensors:
    """The states of this rank's random generators, by names that no other rank has."""
    on_cpu, on_cuda = _random_names(dist.get_rank())
    states = {on_cpu: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[on_cuda] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        if name.endswith("random_cpu"):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state)


def _cause(error: dcp.CheckpointException) -> str:
    """The first line of the lowest rank's error."""
    rank = min(error.failures)
    cause, _ = error.failures[rank]
    return f"rank {rank}: {' '.join([type(cause).__name__, *str(cause).splitlines()[:1]])}"


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, stem: str, max_bytes: int
) -> Iterator[tuple[Path, list[str]]]:
    """Write `STEM_00001.safetensors` and so on; yield each file with the names of its parameters.

    The parameters of one file are in memory at a time: at most `max_bytes`, or a single one.
    Raises `CheckpointError` when the disk fails.
    """
    for number, shard in enumerate(cut_by_size(tensors, max_bytes), 1):
        file = folder / f"{stem}_{number:05}.safetensors"
        try:
            save_file(shard, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file.name} could not be written: {error}") from error
        yield file, list(shard)


def cut_by_size(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Group whole parameters, in order, into dicts of at most `max_bytes` or one parameter."""
    shard: dict[str, Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        if shard and size_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard, size_bytes = {}, 0
        shard[name] = tensor
        size_bytes += tensor.nbytes
    if shard:
        yield shard


def save_reference(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, batches: int) -> None:
    """Write a moved reference's weights after `batches` batches, as they were served.

    `reference_12_00001.safetensors` holds some of the parameters after batch 12, in the dtype in
    which the workers got them. Raises `CheckpointError` when the disk fails.
    """
    prefix = _reference_prefix(batches)
    named = ((prefix + name, tensor) for name, tensor in tensors)
    for _ in write_shards(named, folder, stem=prefix.rstrip("."), max_bytes=FILE_BYTES):
        pass


def read_reference(folder: Path, batches: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the parameters that `save_reference` wrote, one at a time."""
    prefix = _reference_prefix(batches)
    for file in sorted(folder.glob(f"{prefix.rstrip('.')}_*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                yield name.removeprefix(prefix), tensors.get_tensor(name)


def _reference_prefix(batches: int) -> str:
    return f"reference_{batches}."
