"""What a check looks at, gathered once: files, the model's folder, this machine, the cluster.

What cannot be had is kept as the error that a run would end with, so that the checks stay pure.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from async_grpo import head
from async_grpo.algorithms.find import find_algorithm
from async_grpo.check.interfaces import (
    broken_interfaces,
    engine_option_names,
    unfit_packages,
)
from async_grpo.check.trial import Tried, try_here
from async_grpo.checkpoint.resume import find_start
from async_grpo.config.source import DataSource
from async_grpo.config.train import TrainConfig
from async_grpo.config.worker import WorkerConfig
from async_grpo.data.lines import may_be_hub_name
from async_grpo.errors import AsyncGrpoError
from async_grpo.head import ClusterResources
from async_grpo.model.folder import ModelFacts, WeightsSize, check_model_folder, weights_size
from async_grpo.model.hub import local_folder
from async_grpo.roles import GENERATION, JUDGE, LOGPROB, TEACHER
from async_grpo.run.data import Part, Purpose, parts_of
from async_grpo.run.gateway import free_address
from async_grpo.types import GivenPair, Question, TrainingPair

T = TypeVar("T")
Known: TypeAlias = T | AsyncGrpoError
DATA_S = 3.0  # of reading data, beyond which the rest is left to the run
SHARED_MEMORY = Path("/dev/shm")
WITH_MODEL = (GENERATION, LOGPROB, TEACHER, JUDGE)
MOST_VERIFIED_BYTES = 1 << 30  # of checkpoints, whose bytes a start reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run as its file and options describe it."""

    train: TrainConfig
    workers: tuple[WorkerConfig, ...] = ()
    num_ranks: int = 1
    prepare: tuple[tuple[str, ...], ...] = ()
    starts_head: bool = False  # or runs on a cluster that is there, if on any
    ray_address: str = ""  # empty: the trainer's
    file: str = ""
    plot_variables: tuple[str, ...] = ()  # that are drawn at the end
    types_overwrite: bool = False

    @property
    def learns_from_pairs(self) -> bool:
        """Whether it needs neither cluster nor workers; False for an algorithm that is refused."""
        algorithm = tried(lambda: find_algorithm(self.train))
        return not isinstance(algorithm, AsyncGrpoError) and algorithm.learns_from_pairs

    def is_prepared(self, path: str) -> bool:
        """Whether `prepare` makes what does not exist at a path, to all appearances."""
        words = [word for command in self.prepare for word in command]
        named = re.compile(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])")  # in a script, or after =
        made = any(named.search(word) or path.startswith(f"{word}/") for word in words)
        return made and not os.path.exists(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRead:
    """What was read of one source of data."""

    purpose: Purpose
    source: DataSource
    num_lines: int = 0
    is_whole: bool = True  # or time was up
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [R] tokens
    firsts: Mapping[str, Any] = field(default_factory=dict)  # by dataset_type, the first record
    problem: AsyncGrpoError | None = None
    waits: str = ""  # why it cannot be read yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the checks read, besides the run's own options."""

    folder: Known[str] = ""  # of the model; empty: it is not here yet
    model: Known[ModelFacts] | None = None
    size: WeightsSize | None = None
    worker_models: tuple[Known[ModelFacts] | None, ...] = ()
    data: Known[tuple[DataRead, ...]] = ()
    prompt: str = ""  # the first question as the model reads it
    begins_twice: bool = False  # that prompt, with the tokenizer's first token
    rewards: Known[Tried] = field(default_factory=Tried)
    head: Known[str] = ""  # the address of the cluster; empty: none is needed, or one is made
    cluster: Known[ClusterResources] | None = None  # what that cluster has
    gateway: Known[str] = ""  # its address, where it is asked for
    placement: Known[str] = ""  # who gets which device
    num_devices: int = 0  # NVIDIA's, of this machine
    start: Known[str] = ""  # where the run begins
    disk_free_bytes: int = 1 << 60  # where the run's folder is
    shared_bytes: int = 1 << 60  # free in /dev/shm
    memory_bytes: int = 1 << 60
    unfit: tuple[str, ...] = ()  # packages and their interfaces
    engine_options: frozenset[str] = frozenset()  # vLLM's; empty: unknown, or nobody gives one


def gather(setup: Setup, *, tries_rewards: bool = True) -> Facts:
    """Look at everything, in seconds; starts verifier processes, and nothing else."""
    config = setup.train
    folder, model = read_model(setup)
    found: dict[str, Any] = {"folder": folder, "model": model, **_machine(Path(config.output_dir))}
    reads: Known[tuple[DataRead, ...]] = ()
    if isinstance(model, ModelFacts):
        reads = tried(lambda: tuple(read_data(setup, model)))
        found |= {"size": weights_size(model.path), "data": reads, **_prompt(model, reads)}
    if tries_rewards and isinstance(reads, tuple):
        questions = _questions(config, reads)
        found["rewards"] = tried(lambda: try_here(setup.workers, questions, config))
    if not setup.starts_head and not setup.learns_from_pairs:
        found["head"] = at = tried(lambda: head.locate(setup.ray_address or config.ray_address))
        if isinstance(at, str):
            found["cluster"] = tried(lambda: head.resources_of(at))
    if config.gateway:
        found["gateway"] = tried(lambda: ":".join(map(str, free_address(config) or ())))
    asks_engine = any(each.engine_options for each in setup.workers)
    return Facts(
        **found,
        start=tried(lambda: _start(config)),
        worker_models=tuple(_worker_model(setup, each, model) for each in setup.workers),
        unfit=(*unfit_packages(), *broken_interfaces()),
        engine_options=engine_option_names() if asks_engine else frozenset(),
    )


def read_model(setup: Setup) -> tuple[Known[str], Known[ModelFacts] | None]:
    """The trained model's folder, empty where it is not here yet, and what that says of it."""
    folder = tried(lambda: _folder(setup))
    if isinstance(folder, AsyncGrpoError) or not folder:
        return folder, None
    return folder, tried(lambda: check_model_folder(folder))


def tried(look: Callable[[], T]) -> Known[T]:
    """What was found, or the error that a run would end with."""
    try:
        return look()
    except AsyncGrpoError as error:
        return error


def _folder(setup: Setup) -> str:
    """Of the model; empty where it is not here yet."""
    config = setup.train
    if setup.is_prepared(config.model_name_or_path):
        return ""
    return local_folder(config.model_name_or_path, revision=config.model_revision, fetch=False)


def _worker_model(
    setup: Setup, worker: WorkerConfig, trained: Known[ModelFacts] | None
) -> Known[ModelFacts] | None:
    """The model of a worker that serves one from this machine's disk, if it is there yet."""
    path = worker.model_path
    if worker.mode not in WITH_MODEL or worker.judge_url or setup.is_prepared(path):
        return None
    if path == setup.train.model_name_or_path:
        return trained
    folder = tried(lambda: local_folder(path, revision=worker.model_revision, fetch=False))
    if isinstance(folder, str):
        return tried(lambda: check_model_folder(folder)) if folder else None
    return folder


def read_data(setup: Setup, model: ModelFacts) -> Iterator[DataRead]:
    """Every source of the run's data, as much of it as can be read in `DATA_S`."""
    deadline = time.monotonic() + DATA_S
    config = replace(setup.train, model_name_or_path=model.path)
    for part in parts_of(config, model):
        path = part.source.path
        if setup.is_prepared(path):
            waits = f"{path} is made by [launch] prepare"
        elif not os.path.exists(path) and may_be_hub_name(path):
            waits = f"{path} is read from the hub when the run loads"
        else:
            yield _read(part, deadline)
            continue
        yield DataRead(purpose=part.purpose, source=part.source, waits=waits)


def _read(part: Part, deadline: float) -> DataRead:
    lengths: list[int] = []
    firsts: dict[str, Any] = {}
    is_whole, problem = True, None

    def goes_on() -> bool:
        nonlocal is_whole
        is_whole = not lengths or time.monotonic() < deadline
        return is_whole

    try:
        for record in part.records(goes_on=goes_on):
            lengths.append(num_tokens(record))
            firsts.setdefault(type_of(record), record)
    except AsyncGrpoError as error:
        problem = error
    return DataRead(
        purpose=part.purpose,
        source=part.source,
        num_lines=len(lengths),
        is_whole=is_whole,
        lengths=np.asarray(lengths, np.int64),
        firsts=firsts,
        problem=problem,
    )


def num_tokens(record: Question | TrainingPair | GivenPair) -> int:
    """Of the prompt, or of the whole pair."""
    if isinstance(record, Question):
        return len(record.input_token_ids)
    if isinstance(record, GivenPair):
        return record.num_tokens
    return len(record.prompt_token_ids) + len(record.completion_token_ids)


def ids_of(record: Question | TrainingPair | GivenPair) -> list[int]:
    """The prompt's."""
    if isinstance(record, TrainingPair):
        return [int(each) for each in record.prompt_token_ids]
    question = record.question if isinstance(record, GivenPair) else record
    return [int(each) for each in question.input_token_ids]


def type_of(record: Question | TrainingPair | GivenPair) -> str:
    """The dataset_type of a record; a supervised pair has none."""
    if isinstance(record, GivenPair):
        record = record.question
    return record.dataset_type if isinstance(record, Question) else ""


def _questions(config: TrainConfig, reads: Collection[DataRead]) -> list[Question]:
    """What the rewards are tried on: the first question of each file."""
    found = [q for each in reads if each.purpose == "train" for q in each.firsts.values()]
    questions = [question for question in found if isinstance(question, Question)]
    return questions if config.data else questions[:1]


def _prompt(model: ModelFacts, data: Known[tuple[DataRead, ...]]) -> dict[str, Any]:
    """The first prompt as text, and whether it begins with two first tokens."""
    from transformers import AutoTokenizer

    reads = data if isinstance(data, tuple) else ()
    records = [record for each in reads for record in each.firsts.values()]
    if not records:
        return {}
    ids = ids_of(records[0])
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    begin = tokenizer.bos_token_id
    twice = begin is not None and ids[:2] == [begin, begin]
    return {"prompt": str(tokenizer.decode(ids)), "begins_twice": twice}


def _start(config: TrainConfig) -> str:
    """Where the run begins, in words; raises what its folder has against it."""
    saved = Path(config.output_dir) / "checkpoints"
    if sum(each.stat().st_size for each in saved.rglob("*")) > MOST_VERIFIED_BYTES:
        return f"{saved} is too large to be verified here: the run does when it goes on"
    start = find_start(config)
    if start.folder is None:
        return f"a new run in {config.output_dir}"
    left = "nothing is left to train" if start.is_finished else "the run goes on"
    return f"{left} after batch {start.batches}, from {start.folder}"


def _machine(output: Path) -> dict[str, int]:
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    shared = SHARED_MEMORY if SHARED_MEMORY.exists() else folder
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "shared_bytes": shutil.disk_usage(shared).free,
        "memory_bytes": pages,
    }
