"""Lives of training runs, each in processes of its own that may be killed at a chosen call.

    resumed_loop.py lives.pt outcomes.json

Imports everything once and forks the ranks of each life, so that a life costs a second; nothing of
Ray or torch.distributed is running here when it forks. When a rank ends badly the others are
killed, as torchrun does.
"""

import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
import torch.distributed.checkpoint
from scripted_loop import train_asynchronously
from scripted_services import TIMEOUT_S, Story

from async_grpo.cli.control import main as control
from async_grpo.cli.use_run import replay
from async_grpo.run.loop import train_sft
from async_grpo.training.ranks import Ranks
from async_grpo.util.errors import AsyncGrpoError
from async_grpo.util.ports import free_port

GRACE_S = 5.0


@dataclass(frozen=True)
class Death:
    """SIGKILL of one rank when it begins its `count`-th call, from 1, of `module:Class.method`.

    `needs`: once this file of the run's folder is there, which a thread may be about to write.
    """

    where: str
    count: int
    rank: int = 0
    needs: str = ""


@dataclass(frozen=True)
class Failure:
    """A full disk in place of one rank's `count`-th call of `where`."""

    where: str
    count: int
    rank: int = 0


@dataclass(frozen=True)
class Ask:
    """`async-grpo control RUN` by rank 0, before its `count`-th call of `where`."""

    where: str
    count: int
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Life:
    story: Story
    num_ranks: int = 1
    death: Death | None = None
    failure: Failure | None = None
    asks: tuple[Ask, ...] = ()
    replays: int | None = None  # a batch, in the place of going on
    damages_newest: bool = False  # a flipped bit in the newest checkpoint, before it begins
    environment: dict = field(default_factory=dict)


def patched(where, replacement):
    """Put `replacement(original)` in the place of a function."""
    module, _, path = where.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, replacement(getattr(owner, name)))


def awaited(is_there, what):
    due_at = time.monotonic() + TIMEOUT_S
    while not is_there():
        assert time.monotonic() < due_at, f"waited for {what}"
        time.sleep(0.02)


def dying(death, folder):
    calls = iter(range(1, 1_000_000))

    def replacement(original):
        def call(*arguments, **options):
            if next(calls) == death.count:
                awaited(Path(folder, death.needs).exists, death.needs)
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            return original(*arguments, **options)

        return call

    return replacement


def asking(ask, folder):
    calls = iter(range(1, 1_000_000))

    def replacement(original):
        def call(*arguments, **options):
            if next(calls) == ask.count:
                journal = Path(folder, "control.jsonl")
                before = journal.stat().st_size if journal.exists() else 0
                control([folder, *ask.arguments], standalone_mode=False)
                heard = lambda: journal.exists() and journal.stat().st_size > before  # noqa: E731
                awaited(heard, "that a thread of rank 0 has heard of it")
            return original(*arguments, **options)

        return call

    return replacement


def failing(failure):
    calls = iter(range(1, 1_000_000))

    def replacement(original):
        def call(*arguments, **options):
            if next(calls) == failure.count:
                raise OSError(28, "No space left on device")
            return original(*arguments, **options)

        return call

    return replacement


def live(life, rank, port):
    """One rank, in a process of its own; its exit code."""
    os.environ.update(
        life.environment,
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(life.num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    if life.death and life.death.rank == rank:
        patched(life.death.where, dying(life.death, life.story.config.recording.output_dir))
    for ask in life.asks if not rank else ():
        patched(ask.where, asking(ask, life.story.config.recording.output_dir))
    if life.failure and life.failure.rank == rank:
        patched(life.failure.where, failing(life.failure))
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    if life.replays is not None:
        arguments = [life.story.config.recording.output_dir, "--batch", str(life.replays)]
        replay(arguments, standalone_mode=False)
        return
    ranks = Ranks.start(timeout_s=TIMEOUT_S)
    if life.story.config.objective.algorithm == "sft":
        train_sft(life.story.config, ranks)
    else:
        train_asynchronously(life.story, ranks)
    ranks.stop()


def forked(life, rank, port, log):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        live(life, rank, port)
        code = 0
    except AsyncGrpoError as error:
        print(f"error: {error}", flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def waited(pids):
    """Exit codes, or -signal, by rank; one that ends badly takes the others along."""
    codes = {}
    bad_since = None
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            bad_since = bad_since or time.monotonic()
            if time.monotonic() - bad_since > GRACE_S:
                for rank, pid in enumerate(pids):
                    if rank not in codes:
                        os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[rank] for rank in range(len(pids))]


def damage(checkpoints):
    newest = max(checkpoints.glob("batch_*"), key=lambda path: path.stat().st_mtime)
    shard = min(newest.glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)


def main(lives_path, outcomes_path):
    torch.set_num_threads(1)
    outcomes = []
    for number, life in enumerate(torch.load(lives_path, weights_only=False)):
        port = free_port()
        log = Path(lives_path).with_name(f"life_{number}.log")
        if life.damages_newest:
            damage(Path(life.story.config.recording.output_dir) / "checkpoints")
        started = time.monotonic()
        codes = waited([forked(life, rank, port, log) for rank in range(life.num_ranks)])
        outcomes.append({"codes": codes, "log": log.read_text(), "s": time.monotonic() - started})
        Path(outcomes_path).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    assert not ray.is_initialized()
    main(*sys.argv[1:])
