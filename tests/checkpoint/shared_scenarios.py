"""What ranks do in the tests of saves that all of them take part in."""

import errno
import os
from functools import partial
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace

import torch.distributed as dist
from checkpoint_scenarios import make, train
from replaced_disk import Disk, used

from async_grpo.checkpoint import saving as checkpoint_saving
from async_grpo.checkpoint.saving import Checkpoints, files_of_all
from async_grpo.config.train_config import TrainConfig
from async_grpo.training.ranks import Ranks
from async_grpo.types import EndOfStep
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError

OWN_MACHINE = "/proc/self/cwd/run"  # one path, and another folder for each process


class CountedReport(SimpleNamespace):
    """Rank 0's and the others'."""

    def __init__(self):
        super().__init__(failed=0, skipped=0)
        self.state = lambda: {"steps": 1}
        self.doing = self.sync_files = self.stood_still = lambda *_: None
        self.spared_checkpoints = frozenset

    def checkpoint_failed(self):
        self.failed += 1

    def checkpoint_skipped(self):
        self.skipped += 1


class Saves:
    """A rank's checkpoints of a learner that has trained three steps."""

    def __init__(self, output_dir, **options):
        self.learner = make(0, tied=True)
        train(self.learner, steps=3)
        self.learner.config = TrainConfig(
            model_name_or_path="m", data_path="d", output_dir=output_dir,
            **{"checkpoint_every_batches": 1} | options,
        )  # fmt: skip
        mesh = next(self.learner.policy.parameters()).device_mesh
        self.ranks = Ranks(dist.get_rank(), dist.get_world_size(), self.learner.device, mesh)
        self.report = CountedReport()
        exports = SimpleNamespace(state=lambda: {"samples": 2, "last_export": -1})
        exports.push = lambda num_samples: None
        self.checkpoints = Checkpoints(
            self.learner, self.ranks, exports=exports, report=self.report, hashes=None,
            references=lambda batches: {},
        )  # fmt: skip

    def save(self, batches):
        self.begin(batches)
        self.checkpoints.wait()

    def begin(self, batches):
        self.checkpoints.batch_ended(EndOfStep(batches - 1, 0, True, 2, 9))


class ReadingDisk(Disk):
    """Knows which files were read back."""

    def __init__(self):
        self.hashed = []

    def sha256(self, paths):
        self.hashed += [path.name for path in paths]
        return super().sha256(paths)


class OtherBytes(Disk):
    def sha256(self, paths):
        return ["0" * 64 for _ in paths]


class DiesOnDisk(Disk):
    """The process ends in an operation of the second save."""

    def __init__(self, operation):
        self.operation = operation

    def _die(self, name):
        if name == self.operation:
            os._exit(0)

    def read(self, path):
        self._die("token")
        return super().read(path)

    def sync(self, path):
        self._die("written")
        return super().sync(path)

    def sha256(self, paths):
        self._die("synced")
        return super().sha256(paths)


def said(work):
    try:
        work()
    except AsyncGrpoError as error:
        return str(error)
    return ""


def all_saves(rank, *, root):
    """Everything that the tests look at; one set of processes."""
    return {
        "whole": whole(f"{root}/whole"),
        "apart": apart(rank, f"{root}/machine_{rank}"),
        "damaged": damaged(rank, f"{root}/damaged"),
        "lost": lost(rank, Path(root)),
        "timed": timed(rank, f"{root}/timed"),
        "full": full(f"{root}/full"),
        "crowded": crowded(rank, f"{root}/crowded"),
    }


def whole(output_dir):
    """(files that this rank has read back, addresses of its buffers) at two saves."""
    saves, disk = Saves(output_dir), ReadingDisk()
    assert not said(saves.checkpoints.check_folder)
    buffers = []
    with used(disk):
        for batches in (1, 2):
            saves.save(batches)
            staged = saves.checkpoints._staging._buffers
            buffers.append([buffer.data_ptr() for buffer in staged])
    return disk.hashed, buffers


def apart(rank, machine):
    """What a folder of this rank alone is refused with, and what a save there leaves."""
    deadlines.FILE_SEEN_S = 0.3
    os.makedirs(machine)
    os.chdir(machine)
    saves = Saves(OWN_MACHINE)
    sentence = said(saves.checkpoints.check_folder)
    saves.save(1)
    return sentence, saves.report.failed, sorted(str(p) for p in Path(machine).rglob("*"))


def damaged(rank, output_dir):
    """A good save, then one whose bytes rank 1's disk gives back as others."""
    saves = Saves(output_dir)
    saves.save(1)
    with used(OtherBytes() if rank else Disk()):
        saves.save(2)
    return saves.report.failed


def killed(rank, *, output_dir, at):
    """Rank 1 dies in the second save; rank 0 says what it came to, and ends too."""
    saves = Saves(output_dir)
    saves.save(1)
    if rank == 0:
        saves.save(2)
        Path(output_dir, "failed").write_text(str(saves.report.failed))
        os._exit(0)
    if at == "told":
        checkpoint_saving.files_of_all = lambda *_, **__: os._exit(0)
    with used(DiesOnDisk(at)):
        saves.save(2)


def lost(rank, root):
    """What is said when rank 1's shards are not where rank 0 looks, and when it has none."""
    folder = root / "lost"
    folder.mkdir(exist_ok=True)
    ranks = Saves(f"{root}/unused").ranks
    if rank == 0:
        (folder / "shard_0").write_bytes(b"")
    dist.barrier()
    each = {f"shard_{rank}": "0" * 64}
    return [
        said(partial(files_of_all, own, folder, ranks, group=dist.group.WORLD))
        for own in (each, each if rank == 0 else {})
    ]


class SlowDisk(Disk):
    """Writes nothing before it is `free`."""

    def __init__(self):
        self.free = Event()

    def sync(self, path):
        self.free.wait(60)
        return super().sync(path)


def crowded(rank, output_dir):
    """(batches in the latest save, saves left out) after each of five batches, then at the end.

    Rank 1's disk is slow while the save after batch 2 is written: it blocks both ranks' threads.
    """
    deadlines.CHECKPOINT_ROOM_S = 0.05
    saves, disk, seen = Saves(output_dir, checkpoint_every_batches=2), SlowDisk(), []
    with used(disk if rank else Disk()):
        for batches in range(1, 7):
            if batches >= 5:
                disk.free.set()
                saves.checkpoints.wait()
            saves.begin(batches)
            seen.append((saves.checkpoints._saved, saves.report.skipped))
        saves.checkpoints.wait()
        disk.free.clear()
        Timer(0.3, disk.free.set).start()
        saves.begin(8)
        saves.begin(9)
        saves.checkpoints.save_last()  # it waits for the one before
        saves.checkpoints.wait()
    return seen, saves.checkpoints._saved, saves.report.failed


class FullDisk(Disk):
    def write(self, path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def full(output_dir):
    """What a disk that is full when the run begins is refused with, and a save when it is not."""
    saves = Saves(output_dir)
    with used(FullDisk()):
        sentence = said(saves.checkpoints.check_folder)
    saves.save(1)
    return sentence, saves.report.failed


def timed(rank, output_dir):
    """Batches that are saved when rank 1's clock, and then rank 0's, says that it is time."""
    saves = Saves(output_dir, checkpoint_every_batches=99, checkpoint_every_minutes=10.0)
    saved = []
    for batches, late in ((1, -1), (2, 1), (3, 0), (4, -1), (5, 0)):
        if rank == late:
            saves.checkpoints._saved_at -= 601
        saves.save(batches)
        saved.append(saves.checkpoints._saved)
    return saved
