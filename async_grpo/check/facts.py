"""What a check looks at, gathered once: files, the model's folder, this machine, the cluster.

What cannot be had is kept as the error that a run would end with, so that the checks stay pure.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from async_grpo.algorithms.find import find_algorithm
from async_grpo.check.finding import EVERYTHING, Cost
from async_grpo.check.interfaces import (
    broken_interfaces,
    engine_option_names,
    unfit_packages,
)
from async_grpo.check.notes import Notes
from async_grpo.check.trial import Tried, try_here
from async_grpo.checkpoint.resume import find_start
from async_grpo.cluster import head
from async_grpo.cluster.head import ClusterResources
from async_grpo.config.data_files import DataSource
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.data.lines import may_be_hub_name
from async_grpo.gateway.run_gateway import free_address
from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import (
    ModelFacts,
    WeightsSize,
    check_model_folder,
    first_line,
    stated_facts,
    weights_size,
)
from async_grpo.run.data import Part, Purpose, parts_of
from async_grpo.run.first_checks import check_sources
from async_grpo.types import GivenPair, Question, TrainingPair
from async_grpo.types.roles import GENERATION, JUDGE, LOGPROB, TEACHER
from async_grpo.util.errors import AsyncGrpoError

T = TypeVar("T")
Known: TypeAlias = T | AsyncGrpoError
DATA_S = 3.0  # of reading a file, beyond which the rest is left to the run
WEIGHTS_S = 2.0  # of looking at their values
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
    trusted: bool = False  # its code may do what it likes, here and over the network
    num_cpus: int = 0  # of Ray, as they were given; 0: this machine's
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
    unknown: float = 0.0  # share of its first prompts' tokens that stand for nothing known
    notes: Notes = field(default_factory=Notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the checks read, besides the run's own options."""

    folder: Known[str] = ""  # of the model; empty: it is not here yet
    model: Known[ModelFacts] | None = None
    size: WeightsSize | None = None
    weights: Known[str] = ""  # what is odd about their names
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


def gather(setup: Setup, *, tries_rewards: bool = True, cost: Cost = EVERYTHING) -> Facts:
    """Look at what checks of these costs read; starts verifier processes, and nothing else."""
    config = setup.train
    folder = tried(lambda: _folder(setup))
    found: dict[str, Any] = {"folder": folder, **_machine(Path(config.output_dir))}
    found |= _in_seconds(setup, tries_rewards) if cost & Cost.SECONDS else _at_once(setup)
    if cost & Cost.AT_ONCE:
        found |= _places(setup)
    asks_engine = any(each.engine_options for each in setup.workers)
    return Facts(**found, engine_options=engine_option_names() if asks_engine else frozenset())


def _places(setup: Setup) -> dict[str, Any]:
    """The run's folder, the cluster, the gateway's port, the packages."""
    config, found = setup.train, dict[str, Any]()
    if not setup.starts_head and not setup.learns_from_pairs:
        found["head"] = at = tried(lambda: head.locate(setup.ray_address or config.ray_address))
        if isinstance(at, str):
            found["cluster"] = tried(lambda: head.resources_of(at))
    if config.gateway:
        found["gateway"] = tried(lambda: ":".join(map(str, free_address(config) or ())))
    unfit = (*unfit_packages(), *broken_interfaces())
    return {**found, "start": tried(lambda: _start(config)), "unfit": unfit}


def _at_once(setup: Setup) -> dict[str, Any]:
    """What heads of files say of models, and the first line of each file of data."""
    model, others = _models(setup, stated_facts)
    size = tried(lambda: weights_size(model.path)) if isinstance(model, ModelFacts) else None
    known = None if isinstance(size, AsyncGrpoError) else size
    data = _sources(setup) or ()
    return {"model": model, "size": known, "worker_models": others, "data": data}


def _sources(setup: Setup) -> AsyncGrpoError | None:
    """What is wrong with the places and first lines of its data."""
    return tried(lambda: check_sources(setup.train, waits=setup.is_prepared))


def _in_seconds(setup: Setup, tries_rewards: bool) -> dict[str, Any]:
    """What tokenizers, the lines of data, the weights and the rewards say."""
    model, others = _models(setup, check_model_folder)
    found: dict[str, Any] = {"model": model, "worker_models": others}
    reads: Known[tuple[DataRead, ...]] = ()
    if isinstance(model, ModelFacts):
        from async_grpo.model.weight_files import check_weights  # imports torch

        wrong = _sources(setup)
        reads = tried(lambda: tuple(read_data(setup, model))) if wrong is None else wrong
        found["weights"] = tried(lambda: check_weights(model.path, seconds=WEIGHTS_S))
        size = tried(lambda: weights_size(model.path))
        found |= {"size": size if isinstance(size, WeightsSize) else None, "data": reads}
        prompt = tried(lambda: _prompt(model, reads))
        found |= {"data": prompt} if isinstance(prompt, AsyncGrpoError) else prompt
    if tries_rewards and isinstance(reads, tuple):
        questions = _questions(setup.train, reads)
        found["rewards"] = tried(
            lambda: try_here(setup.workers, questions, setup.train, trusted=setup.trusted)
        )
    return found


def _models(
    setup: Setup, look: Callable[[str], ModelFacts | None]
) -> tuple[Known[ModelFacts] | None, tuple[Known[ModelFacts] | None, ...]]:
    """The trained one, and that of each worker; None where it is not here yet."""
    _, model = read_model(setup, look)
    return model, tuple(_worker_model(setup, each, model, look) for each in setup.workers)


def read_model(
    setup: Setup, look: Callable[[str], ModelFacts | None] = check_model_folder
) -> tuple[Known[str], Known[ModelFacts] | None]:
    """The trained model's folder, empty where it is not here yet, and what that says of it."""
    folder = tried(lambda: _folder(setup))
    if isinstance(folder, AsyncGrpoError) or not folder:
        return folder, None
    return folder, tried(lambda: look(folder))


def tried(look: Callable[[], T]) -> Known[T]:
    """What was found, or the error that a run would end with; what nobody foresaw is one too."""
    try:
        return look()
    except AsyncGrpoError as error:
        return error
    except Exception as error:  # other people's files, read by other people's libraries
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return AsyncGrpoError(
            f"it cannot be looked at, {type(error).__name__}: {first_line(error)} "
            f"({os.path.basename(frame.filename)}:{frame.lineno}): correct the file that this is of"
        )


def _folder(setup: Setup) -> str:
    """Of the model; empty where it is not here yet."""
    config = setup.train
    if setup.is_prepared(config.model_name_or_path):
        return ""
    return local_folder(config.model_name_or_path, revision=config.model_revision, fetch=False)


def _worker_model(
    setup: Setup,
    worker: WorkerConfig,
    trained: Known[ModelFacts] | None,
    look: Callable[[str], ModelFacts | None],
) -> Known[ModelFacts] | None:
    """The model of a worker that serves one from this machine's disk, if it is there yet."""
    path = worker.model_path
    if worker.mode not in WITH_MODEL or worker.judge_url or setup.is_prepared(path):
        return None
    if path == setup.train.model_name_or_path:
        return trained
    folder = tried(lambda: local_folder(path, revision=worker.model_revision, fetch=False))
    if isinstance(folder, str):
        return tried(lambda: look(folder)) if folder else None
    return folder


def read_data(setup: Setup, model: ModelFacts) -> Iterator[DataRead]:
    """Every source of the run's data, as much of each as can be read in `DATA_S`."""
    config = replace(setup.train, model_name_or_path=model.path)
    for part in parts_of(config, model):
        path = part.source.path
        if setup.is_prepared(path):
            waits = f"{path} is made by [launch] prepare"
        elif not os.path.exists(path) and may_be_hub_name(path):
            waits = f"{path} is read from the hub when the run loads"
        else:
            yield _read(part)
            continue
        yield DataRead(purpose=part.purpose, source=part.source, waits=waits)


def _read(part: Part) -> DataRead:
    lengths: list[int] = []
    firsts: dict[str, Any] = {}
    notes, is_whole, deadline = Notes(), True, float("inf")

    def goes_on() -> bool:  # from the first line on: what reads the format is imported before it
        nonlocal is_whole, deadline
        deadline = deadline if lengths else time.monotonic() + DATA_S
        is_whole = time.monotonic() < deadline
        return is_whole

    def build(row: Mapping[str, Any]) -> Any:
        record = part.build(row)
        notes.take(row, ids_of(record), answer=answer_of(record), kind=type_of(record))
        return record

    def read() -> None:
        for record in replace(part, build=build).records(goes_on=goes_on):
            lengths.append(num_tokens(record))
            firsts.setdefault(type_of(record), record)

    problem = tried(read)
    return DataRead(
        purpose=part.purpose,
        source=part.source,
        num_lines=len(lengths),
        is_whole=is_whole,
        lengths=np.asarray(lengths, np.int64),
        firsts=firsts,
        problem=problem,
        notes=notes,
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


def answer_of(record: Question | TrainingPair | GivenPair) -> str | bytes | None:
    """What is to be learnt of it."""
    return record.answer if isinstance(record, Question) else record.completion_token_ids.tobytes()


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
    """The first prompt as text, whether it begins with two first tokens; what no token is of."""
    from transformers import AutoTokenizer

    reads = data if isinstance(data, tuple) else ()
    records = [record for each in reads for record in each.firsts.values()]
    if not records:
        return {}
    ids = ids_of(records[0])
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    begin = tokenizer.bos_token_id
    twice = begin is not None and ids[:2] == [begin, begin]
    unknown = tokenizer.unk_token_id
    told = tuple(
        replace(each, unknown=each.notes.ids.count(unknown) / max(1, len(each.notes.ids)))
        for each in reads
    )
    return {"prompt": str(tokenizer.decode(ids)), "begins_twice": twice, "data": told}


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
