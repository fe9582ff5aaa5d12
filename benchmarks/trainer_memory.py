"""What trainer ranks hold while they load a model and while they train, beside what is promised.

Each rank is a process of its own, which this one looks at from outside: the peak that Linux tells
of it, above what it held after its imports.

    load    its shard + 1.5 of the largest unit of sharding + 0.5 GB, and what loading the whole
            model in each rank would take
    train   within 15 % of the bill of memory (`async_grpo/devices/bill.py`)
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from async_grpo.devices.bill import ModelShape, trainer_bill
from benchmarks import procfs, results
from benchmarks.results import Figure

if TYPE_CHECKING:
    from async_grpo.config.train_config import TrainConfig

NAME = "trainer_memory"
MIB = 2**20
ALLOWED_BYTES = 500_000_000
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "135M": (  # SmolLM2-135M
        "llama",
        {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        },
    ),
    "0.5B": (  # Qwen2.5-0.5B
        "qwen2",
        {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        },
    ),
    "31M": (
        "llama",
        {
            "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536,
            "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        },
    ),
    "7M": (
        "qwen3",
        {
            "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768,
            "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One set of ranks."""

    model: str
    num_ranks: int
    whole: bool = False  # each rank loads the whole model before it is sharded, as it once was
    num_tokens: int = 0  # of a minibatch; 0: nothing is trained
    options: tuple[tuple[str, Any], ...] = ()  # of the run
    saves: bool = False  # a checkpoint after the first step and the last, and trains on

    @property
    def name(self) -> str:
        words = [self.model, f"{self.num_ranks} ranks", *(str(value) for _, value in self.options)]
        words += [f"{self.num_tokens} tokens"] * bool(self.num_tokens) + ["saves"] * self.saves
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Measured:
    """The most that a rank of a case has held above its imports, and what it should."""

    loading: int
    training: int
    model: ModelShape
    billed: int

    def bound(self, num_ranks: int) -> int:
        """Of loading, in bytes: float32 masters."""
        unit = max(self.model.layer_parameters, self.model.root_parameters)
        return int(4 * self.model.num_parameters / num_ranks + 1.5 * 4 * unit + ALLOWED_BYTES)


LOADS = tuple(
    Case(model, num_ranks, whole)
    for model in ("135M", "0.5B")
    for num_ranks in (1, 2, 4)
    for whole in (True, False)
)
ON, OFF = ("activation_checkpointing", "on"), ("activation_checkpointing", "off")
TRAINED = (
    Case("31M", 1, num_tokens=1024, options=(OFF,)),
    Case("31M", 1, num_tokens=2048, options=(ON,)),
    Case("31M", 2, num_tokens=1024, options=(OFF, ("fsdp_sharding_strategy", "SHARD_GRAD_OP"))),
    Case("31M", 2, num_tokens=1024, options=(ON, ("defer_gradient_sync", True))),
    Case("31M", 1, num_tokens=1024, options=(OFF,), saves=True),
    Case("31M", 2, num_tokens=1024, options=(OFF, ("offload", "optimizer")), saves=True),
)
QUICK = (Case("7M", 1, num_tokens=512, options=(OFF,)), Case("7M", 2))


@click.command()
@click.option("--quick", is_flag=True, help="a small size, which proves that everything runs")
@click.option("--only", type=click.Choice(["load", "train"]), help="one half of it")
@click.option("--results-dir", default=str(results.FOLDER), help="where trainer_memory.json goes")
def main(quick: bool, only: str | None, results_dir: str) -> None:
    """Measure the memory of trainer ranks."""
    click.echo(f"{results.machine()}, {results.load()}")
    cases = QUICK if quick else (*(LOADS * (only != "train")), *(TRAINED * (only != "load")))
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            figures += figures_of(case, measure(case, Path(folder)))
            click.echo(results.show(figures[-1:]).splitlines()[-1])
    click.echo("\n" + results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def figures_of(case: Case, measured: Measured) -> list[Figure]:
    """What a case shows; a peak beside the bill is a ratio."""
    if case.num_tokens:
        ratio = measured.training / measured.billed
        return [
            Figure(f"{case.name}: trained, peak", measured.training / MIB, "MiB"),
            Figure(f"{case.name}: trained, peak of the bill", ratio, "x", goal=1.15),
        ]
    way = "whole in each rank" if case.whole else "in slices"
    goal = None if case.whole else round(measured.bound(case.num_ranks) / MIB, 1)
    return [Figure(f"{case.name}: loaded {way}, peak", measured.loading / MIB, "MiB", goal=goal)]


def measure(case: Case, folder: Path) -> Measured:
    """The rank of the case that held the most."""
    model = folder / case.model
    context = multiprocessing.get_context("spawn")
    if not model.exists():
        maker = context.Process(target=write_model, args=(case.model, str(model)))
        maker.start()
        maker.join()
    # Tensors are pages of their own: holes in glibc's heap, which no device has, would count too.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    store = tempfile.mktemp(dir=folder)
    ends = [context.Pipe() for _ in range(case.num_ranks)]
    ranks = [
        context.Process(target=run_rank, args=(rank, case, str(model), store, ends[rank][1]))
        for rank in range(case.num_ranks)
    ]
    for rank, (_, theirs) in zip(ranks, ends, strict=True):
        rank.start()
        theirs.close()  # so that its end is seen here
    pids = [rank.pid for rank in ranks if rank.pid]
    pipes = [ours for ours, _ in ends]
    held, _ = _next(pipes, pids)  # after the imports
    loading, _ = _next(pipes, pids)
    training, said = _next(pipes, pids)
    for rank in ranks:
        rank.join()
    peaks = [max(b - a for a, b in zip(held, each, strict=True)) for each in (loading, training)]
    shape, billed = said[0]
    return Measured(*peaks, shape, billed)


def _next(pipes: Sequence[Connection], pids: Sequence[int]) -> tuple[list[int], list[Any]]:
    """Peaks up to the moment at which every rank has come to its next place, which lets them go."""
    said = [pipe.recv() for pipe in pipes]
    peaks = [procfs.peak_rss(pid) for pid in pids]
    for pid, pipe in zip(pids, pipes, strict=True):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak is what it holds now
        pipe.send(None)
    return peaks, said


# In the processes of their own


def write_model(name: str, folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind, sizes = MODELS[name]
    config = AutoConfig.for_model(
        kind, **sizes, tie_word_embeddings=True, max_position_embeddings=8192,
        pad_token_id=None, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def run_rank(rank: int, case: Case, model: str, store: str, pipe: Connection) -> None:
    """Import, load, train; at the end of each tell so and wait."""
    os.environ.update(HF_HUB_OFFLINE="1", LOCAL_WORLD_SIZE=str(case.num_ranks))
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from async_grpo.checkpoint.tensors import Staging
    from async_grpo.model.policy import PolicyModel, model_shape
    from async_grpo.training.fsdp import shard
    from async_grpo.training.learner import Learner
    from async_grpo.training.ranks import Ranks, make_mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, case.num_ranks), rank=rank, world_size=case.num_ranks
    )
    config = config_of(case, model)
    mesh = make_mesh("cpu", num_ranks=case.num_ranks, shard_ranks=config.memory.shard_ranks or 0)
    ranks = Ranks(rank, case.num_ranks, torch.device("cpu"), mesh)
    with torch.device("meta"):  # imports the architecture
        shape = model_shape(
            PolicyModel(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))
        )

    def arrive(word: object) -> None:
        dist.barrier()
        pipe.send(word)
        pipe.recv()

    arrive("imported")
    if case.whole:
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        held: object = shard(PolicyModel(whole), mesh)
        del whole
        step: Callable[[], None] = lambda: None  # noqa: E731
    else:
        held = learner = Learner.build(config, ranks)
        step = lambda: train(learner, case.num_tokens)  # noqa: E731
    arrive("loaded")
    staging = Staging()
    for _ in range((2 + case.saves) * bool(case.num_tokens)):  # in the second there are moments
        step()
        if case.saves:
            staging.copy(learner)
    arrive((shape, billed(case, config, shape, shard_ranks=mesh.size(-1))))
    dist.barrier()
    dist.destroy_process_group()
    del held


def config_of(case: Case, model: str) -> TrainConfig:
    """Unchecked: ranks that train nothing are not to be refused for a whole minibatch."""
    from async_grpo.config.train_config import TrainConfig

    return TrainConfig(
        model_name_or_path=model,
        data_path="none",
        output_dir=tempfile.mkdtemp(dir=Path(model).parent),
        max_tokens_per_gpu=case.num_tokens or 16384,
        max_generation_tokens=case.num_tokens // 2 or 512,
        unchecked_memory=True,
        **dict(case.options),
    )


def billed(case: Case, config: TrainConfig, shape: ModelShape, *, shard_ranks: int) -> int:
    """Bytes of a rank; on a CPU those of its host lie in the same memory."""
    import torch

    from async_grpo.algorithms.find import find_algorithm
    from async_grpo.training.billing import as_billed

    training = as_billed(
        config.memory, find_algorithm(config), number_bytes=torch.float32.itemsize,
        num_ranks=case.num_ranks, shard_ranks=shard_ranks, tokens=case.num_tokens or 1,
    )  # fmt: skip
    bill = trainer_bill(shape, replace(training, saves=case.saves))
    return bill.total + bill.on_host


def train(learner: Any, num_tokens: int) -> None:
    """One step on two minibatches that fill the budget: at the second there are gradients."""
    from benchmarks.gpu import rows

    vocabulary = learner.policy.model.config.vocab_size
    lengths = rows.heavy_tailed(num_tokens, seed=0)
    minibatch = rows.minibatch(lengths, vocabulary=vocabulary, seed=0)
    for _ in range(2):
        learner.accumulate(minibatch)
    learner.step.finish(2 * len(minibatch.samples))


if __name__ == "__main__":
    main()
