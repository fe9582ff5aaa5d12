"""What the ranks spend on new weights: standing still, moving bytes, holding memory.

Two ways in turns, on gloo ranks with a Ray of their own and one receiver that fetches, checks and
stages what was stored:

    whole tensors   rank 0 gathers whole parameters and packs, hashes and stores all of them
    shares          each rank stores its own rows (`weight_sync/publisher.py`)

Memory is what a rank has for itself beyond what it held before; the object store's pages, which
hold the result, are not counted.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from async_grpo.cluster.cluster import Cluster
from async_grpo.launch.interrupts import interrupt_once
from async_grpo.model.policy import PolicyModel
from async_grpo.model.served import FlatShards, served
from async_grpo.training.fsdp import iter_full_tensors
from async_grpo.types import WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync.gather import Shards
from async_grpo.weight_sync.publisher import Collector, Publisher
from benchmarks import results
from benchmarks.alternation import alternate, ratios
from benchmarks.results import Figure, median
from benchmarks.stack import start
from benchmarks.weight_sync.memory import private_bytes
from benchmarks.weight_sync.receiver import Receiver

NAME = "weight_gather"
WHOLE, SHARES = "whole tensors", "shares"
TIMEOUT_S = 240.0
MIB = 2**20
LOOK_S = 0.002
MODELS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "SmolLM2-135M": lambda: LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": lambda: Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4_864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
}  # fmt: skip


class Turn(NamedTuple):
    """One publication, as one rank saw it; seconds."""

    still: float  # this rank could not train
    whole: float  # until the receiver has all of it; rank 0's
    memory: float  # the most bytes beyond those before it; 0 where it was not watched


class Rank:
    """One trainer rank with random weights, and both ways to give them away."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            policy = PolicyModel(AutoModelForCausalLM.from_config(MODELS[model]()))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in policy.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        self.policy = policy.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in self.policy.parameters():
                assert isinstance(parameter, DTensor)
                parameter.to_local().normal_()
        self._version = itertools.count()
        self._publisher = Publisher(Cluster(), dtype=dtype)
        self._kept: WeightsSnapshot | None = None
        shards = Shards.of(self.policy, served(self.policy))
        self.collector = Collector(shards, Cluster(), device=torch.device("cpu"), dtype=dtype)
        self.is_main = dist.get_rank() == 0
        self._receiver: Any = ray.remote(Receiver).remote() if self.is_main else None

    def whole_tensors(self) -> Turn:
        started = time.perf_counter()
        tensors = iter_full_tensors(self.policy)
        version = WeightsVersion(0, next(self._version))
        if self.is_main:
            self._kept = self._publisher.pack(tensors, version=version)
        for _ in tensors:
            pass
        still = time.perf_counter() - started
        return self._received(still, started)

    def shares(self) -> Turn:
        started = time.perf_counter()
        version = WeightsVersion(0, next(self._version))
        collected = self.collector.collect(FlatShards(served(self.policy)), version=version)
        still = time.perf_counter() - started
        snapshot = collected.wait()
        if self.is_main:
            self._kept = snapshot
        return self._received(still, started)

    def _received(self, still: float, started: float) -> Turn:
        if self.is_main:
            ray.get(self._receiver.stage.remote(self._kept), timeout=TIMEOUT_S)
        whole = time.perf_counter() - started
        dist.barrier()
        return Turn(still, whole, 0.0)

    def watched(self, way: Callable[[], Turn]) -> Turn:
        """With the most memory that this process has had meanwhile."""
        stop, before, most = threading.Event(), private_bytes(os.getpid()), [0]

        def look() -> None:
            while not stop.wait(LOOK_S):
                most[0] = max(most[0], private_bytes(os.getpid()) - before)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            turn = way()
        finally:
            stop.set()
            watcher.join()
        return turn._replace(memory=float(most[0]))


def rank_main(rank: int, options: dict[str, Any]) -> None:
    """One rank: leaves its measurements in a file."""
    torch.set_num_threads(1)
    os.environ.update(options["environment"])
    ray.init(address=options["address"], log_to_driver=False, logging_level="ERROR")
    store = dist.FileStore(options["folder"] + "/store", options["num_ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options["num_ranks"])
    me = Rank(options["model"], getattr(torch, options["dtype"]))
    memory = me.watched(me.shares).memory  # the first: its buffers are still to be made
    whole_memory = me.watched(me.whole_tensors).memory
    ways = {WHOLE: me.whole_tensors, SHARES: me.shares}
    turns = alternate(ways, repeats=options["repeats"])
    found = {"turns": turns, "memory": {WHOLE: whole_memory, SHARES: memory}}
    torch.save(found, f"{options['folder']}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()
    ray.shutdown()


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank has found."""
    with tempfile.TemporaryDirectory(prefix="gather-") as folder:
        mp.spawn(rank_main, (options | {"folder": folder},), nprocs=options["num_ranks"])
        files = [f"{folder}/rank{rank}" for rank in range(options["num_ranks"])]
        return [torch.load(file, weights_only=False) for file in files]


def figures_of(title: str, ranks: list[dict[str, Any]]) -> list[Figure]:
    """The slowest rank counts for standing still, rank 0 for the way to the receiver."""

    def still(way: str) -> list[float]:
        each = ([turn.still for turn in rank["turns"][way]] for rank in ranks)
        return [max(turn) for turn in zip(*each, strict=True)]

    def whole(way: str) -> list[float]:
        return [turn.whole for turn in ranks[0]["turns"][way]]

    def compared(what: str, seconds: Callable[[str], list[float]], goal: float) -> list[Figure]:
        by_way = [median(f"{title}, {way}, {what}", seconds(way), "s") for way in (WHOLE, SHARES)]
        ratio = ratios(seconds(SHARES), by=seconds(WHOLE))
        return [*by_way, median(f"{title}, {what}, shares / whole", ratio, "x", goal=goal)]

    memory = {way: max(rank["memory"][way] for rank in ranks) / MIB for way in (WHOLE, SHARES)}
    return [
        *compared("ranks stand still", still, 1 / 3),
        *compared("to the receiver", whole, 0.5),
        Figure(f"{title}, memory of a rank", memory[SHARES], "MiB", goal=1024.0),
        Figure(f"{title}, memory of a rank, whole tensors", memory[WHOLE], "MiB"),
    ]


@click.command()
@click.option("--models", default=",".join(MODELS))
@click.option("--ranks", default="1,2,4")
@click.option("--dtypes", default="float32,bfloat16")
@click.option("--repeats", default=5, help="turns of each way, after one of each")
@click.option("--quick", is_flag=True, help="the smaller model on two ranks, one turn")
@click.option("--results-dir", default=str(results.FOLDER), help="where weight_gather.json goes")
def main(models: str, ranks: str, dtypes: str, repeats: int, quick: bool, results_dir: str) -> None:
    """Measure publications by ranks of random models."""
    if quick:
        models, ranks, dtypes, repeats = next(iter(MODELS)), "2", "bfloat16", 1
    interrupt_once()
    click.echo(f"{results.machine()}, {results.load()}")
    figures: list[Figure] = []
    for model, dtype, num_ranks in itertools.product(
        models.split(","), dtypes.split(","), map(int, ranks.split(","))
    ):
        with tempfile.TemporaryDirectory(prefix="weights-") as folder, start(Path(folder)) as stack:
            options = {
                "model": model, "dtype": dtype, "num_ranks": num_ranks, "repeats": repeats,
                "address": stack.environment["RAY_ADDRESS"],
                "environment": {"RAY_AUTH_MODE": "disabled"},
            }  # fmt: skip
            own = figures_of(f"{model}, {dtype}, {num_ranks} ranks", measure(options))
        click.echo(f"\n{results.show(own)}")
        figures += own
        file = results.write(NAME, figures, folder=Path(results_dir))
        click.echo(f"wrote {file}, {results.load()}")


if __name__ == "__main__":
    main()
