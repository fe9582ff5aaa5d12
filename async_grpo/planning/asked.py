"""A run as the plan sees it: options, sizes of models, devices that it may have. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.bill import FLOAT32, ModelShape
from async_grpo.planning.kinds import Fleet
from async_grpo.types.roles import GENERATION, JUDGE, LOGPROB, REFERENCE, TEACHER
from async_grpo.util.errors import ConfigError

BF16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run's file and the machines for it."""

    train: TrainConfig
    workers: tuple[WorkerConfig, ...]
    num_ranks: int
    model: ModelShape
    worker_models: Mapping[int, ModelShape]  # by the number of the worker's table
    longest: Mapping[int, int]  # prompt and output in tokens that each of these takes
    fleet: Fleet
    host_bytes: int = 0  # memory of a machine; 0: nobody knows

    @property
    def on_cpu(self) -> bool:
        return not self.fleet.num_devices

    @property
    def generation(self) -> int:
        """The number of the table of generation workers: the first, should there be several.

        Raises `ConfigError` where there is none.
        """
        found = [n for n, each in enumerate(self.workers) if each.mode == GENERATION]
        if not found:
            raise ConfigError(
                "[[worker]] mode must be generation in one table, there is none: add the workers "
                "that the run will have"
            )
        return found[0]

    @property
    def scorers(self) -> tuple[int, ...]:
        """The numbers of the tables whose workers the algorithm needs to score."""
        needs = {need.role for need in find_algorithm(self.train).needs}
        wanted = {each for each in needs if each == REFERENCE}
        modes = {TEACHER} | ({LOGPROB} if wanted else set())
        return tuple(n for n, each in enumerate(self.workers) if each.mode in modes)

    @property
    def own_split(self) -> Split:
        """Of the file."""
        engines = sum(each.num_workers for each in self.workers if each.mode == GENERATION)
        scorers = tuple(self.workers[number].num_workers for number in self.scorers)
        return Split(engines=engines, ranks=self.num_ranks, scorers=scorers)

    @property
    def engine_devices(self) -> int:
        """Of one engine."""
        return self.workers[self.generation].tensor_parallel_size

    @property
    def train_bytes(self) -> int:
        """Of a number of the trainer's compute type."""
        precision = self.train.mixed_precision
        is_bf16 = precision == "bf16" or (precision == "auto" and not self.on_cpu)
        return BF16 if is_bf16 else FLOAT32

    def worker_bytes(self, number: int) -> int:
        """Of a number of a worker's weights."""
        dtype = self.workers[number].dtype
        is_bf16 = dtype == "bfloat16" or (dtype == "auto" and not self.on_cpu)
        return BF16 if is_bf16 else FLOAT32

    def shard_ranks(self, num_ranks: int) -> int:
        """Ranks that share a copy of the model."""
        asked = self.train.shard_ranks
        if asked is None:
            machines = 1 if self.on_cpu else -(-num_ranks // self.fleet.of_a_node)
            return num_ranks // machines
        return asked or num_ranks

    @property
    def is_shared(self) -> bool:
        """Whether several of its processes have one device."""
        shares = [each.gpus_per_worker for each in self.workers if each.num_devices]
        return not self.on_cpu and min(self.train.gpus_per_rank, *shares) < 1

    @property
    def judge_devices(self) -> int:
        """That the file's judges take, whatever the split."""
        judges = [each for each in self.workers if each.mode == JUDGE]
        return sum(each.num_workers * each.num_devices for each in judges)

    def devices_of(self, split: Split) -> int:
        """That all of them take."""
        others = sum(split.scorers) + self.judge_devices
        return split.ranks + split.engines * self.engine_devices + others


@dataclass(frozen=True, slots=True)
class Split:
    """How many of each there are."""

    engines: int
    ranks: int
    scorers: tuple[int, ...] = ()  # in the order of `Asked.scorers`
