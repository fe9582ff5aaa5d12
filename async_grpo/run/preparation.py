"""What can be wrong with model, data and workers, found on rank 0 before any of it is made."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from transformers import AutoTokenizer

from async_grpo import cluster
from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.algorithms.remote import start_rules
from async_grpo.batching.packing import attention_ratio
from async_grpo.batching.records import BatcherPlan
from async_grpo.batching.services import Services, renewed
from async_grpo.checkpoint.background import in_background
from async_grpo.checkpoint.fingerprints import hash_data, hash_model
from async_grpo.checkpoint.resume import Start, check_contents
from async_grpo.config.source import DataSource
from async_grpo.config.train import TrainConfig
from async_grpo.data.columns import parse_column_mapping
from async_grpo.data.questions import load_questions
from async_grpo.data.stream import QuestionStream, sampling_seed
from async_grpo.data.table import QuestionTable
from async_grpo.errors import ConfigError
from async_grpo.model.folder import ModelFacts, check_model_folder
from async_grpo.model.size import read_size
from async_grpo.run.recorder import start_recorder
from async_grpo.run.recruitment import Demand, find_services
from async_grpo.run.reward_trial import try_rewards
from async_grpo.run.takeover import take_name
from async_grpo.types import Question, ResumePoint, SamplingContract, TrainingPair
from async_grpo.weight_sync.transport import device_id

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class Run:
    """What rank 0 alone holds of a run; handles change when their actors are made anew."""

    plan: BatcherPlan
    services: Services
    recorder: Any  # see run/recorder.py
    batcher: Any
    hashes: Future[Mapping[str, str]]  # of what must be the same when the run goes on

    def restart_batcher(self, resume: ResumePoint | None) -> None:
        """Another batcher goes on at `resume` (None: where the run began); weights stay."""
        self.services = renewed(self.services)
        plan = replace(self.plan, resume=resume or self.plan.resume)
        with contextlib.suppress(RayError):
            ray.kill(self.batcher)  # a dead actor keeps its name as long as somebody has its handle
        self.batcher = _take_name(plan, self.services, self.recorder)
        for registry in registries_of(self.services).values():
            call = registry.replace_batcher.remote(self.batcher)
            cluster.wait(call, timeout_s=CALL_TIMEOUT_S, who="the registry")

    def close(self) -> None:
        """Let go of the workers, then end the batcher: until then nobody else may have them."""
        ends = [registry.end_run.remote() for registry in registries_of(self.services).values()]
        with contextlib.suppress(RayError):
            ray.wait(ends, num_returns=len(ends), timeout=CLOSE_TIMEOUT_S)
            ray.kill(self.batcher)


def open_run(config: TrainConfig, *, start: Start, num_ranks: int) -> Run:
    """Check everything that can be wrong, find the workers, start the batcher; in this order."""
    facts = check_model_folder(config.model_name_or_path)
    questions, held_out = load_data(config, facts)
    logger.info("%d questions to train on, %d ranks", len(questions), num_ranks)
    warn_of_few(config, len(questions))
    hashes = hash_contents(config, facts, questions, start=start)
    plan = plan_run(config, facts, questions, held_out, num_ranks=num_ranks, resume=start.point)
    cluster.connect(config.ray_address, namespace=config.namespace)
    plan = replace(plan, rules=start_rules(config))
    services = find_services(
        Demand(
            config,
            vocab_size=facts.vocab_size,
            tokenizer_hash=facts.tokenizer_hash,
            longest_prompt=max(questions.longest_prompt, held_out.longest_prompt),
            device=device_id(),
        )
    )
    try_rewards(services.verifiers, questions[0], config)
    recorder = start_recorder(plan.config)
    return Run(plan, services, recorder, start_batcher(plan, services, recorder), hashes)


def warn_of_few(config: TrainConfig, num_records: int) -> None:
    """Say when every batch repeats the data: most often a file was cut short, or another meant."""
    if num_records < config.batch_size:
        logger.warning(
            "--data-path %s holds %d lines, fewer than --batch-size %d: each is trained about %.3g "
            "times in every batch; give more data or a smaller batch",
            config.data_path, num_records, config.batch_size, config.batch_size / num_records,
        )  # fmt: skip


def hash_contents(
    config: TrainConfig,
    facts: ModelFacts,
    records: Sequence[Question] | Sequence[TrainingPair],
    *,
    start: Start,
) -> Future[Mapping[str, str]]:
    """Hashes for the manifest of a checkpoint, taken meanwhile; at once where they must fit one."""

    def work() -> Mapping[str, str]:
        model = hash_model(config.model_name_or_path)
        # "tokenizer" was its files' hash once: such checkpoints are held to model and data.
        return {"model": model, "encoding": facts.tokenizer_hash, "data": hash_data(records)}

    hashes = in_background(work, name="hash-contents")
    if start.folder:
        model = config.model_name_or_path
        paths = {"model": model, "encoding": model, "data": config.data_path}
        check_contents(start, hashes.result(), paths)
    return hashes


def load_data(config: TrainConfig, facts: ModelFacts) -> tuple[QuestionTable, QuestionTable]:
    """What is trained on and what is held out, all of it checked."""
    held_out = _load(config, facts, config.held_out) if config.held_out else QuestionTable.of(())
    return _load(config, facts, config.data), held_out


def plan_run(
    config: TrainConfig,
    facts: ModelFacts,
    questions: QuestionTable,
    held_out: QuestionTable,
    *,
    num_ranks: int,
    resume: ResumePoint | None = None,
) -> BatcherPlan:
    """The run as the batcher sees it."""
    seed = config.infinite_sampler_seed
    order = QuestionStream(len(questions), seed=seed)
    return BatcherPlan(
        # The batcher's process has a working directory of its own.
        config=replace(config, output_dir=os.path.abspath(config.output_dir)),
        questions=questions,
        held_out=held_out,
        order=order.index,
        replacement=order.replacement,
        seed_of=partial(sampling_seed, seed) if config.deterministic else None,
        sampling=SamplingContract(
            config.temperature, facts.stop_token_ids, config.max_generation_tokens
        ),
        num_ranks=num_ranks,
        # Later than that of any earlier run on these workers, so that they never take its
        # weights for ours.
        incarnation=time.time_ns() // 1_000_000,
        rules=LocalRules(find_algorithm(config)),
        attention_ratio=read_attention_ratio(config),
        resume=resume,
    )


def read_attention_ratio(config: TrainConfig) -> float:
    """What the model's attention costs, for packing: see `batching.packing`."""
    size = read_size(config.model_name_or_path)
    return attention_ratio(
        num_parameters=size.num_parameters,
        num_layers=size.num_layers,
        attention_width=size.attention_width,
    )


def _load(config: TrainConfig, facts: ModelFacts, source: DataSource) -> QuestionTable:
    room = min(config.max_tokens_per_gpu, facts.max_positions) - config.max_generation_tokens
    if room < 1:
        raise ConfigError(
            f"--max-generation-tokens ({config.max_generation_tokens}) must leave room for a "
            f"prompt in the model's {facts.max_positions} positions: lower it"
        )
    return load_questions(
        source.path,
        split=source.split,
        config=source.config,
        column_mapping=parse_column_mapping(config.column_mapping),
        tokenizer=AutoTokenizer.from_pretrained(config.model_name_or_path),
        vocab_size=facts.vocab_size,
        max_prompt_tokens=room,
    )


def start_batcher(plan: BatcherPlan, services: Services, recorder: Any) -> Any:
    """The run's batcher, beside rank 0, and ended with it.

    Its name is what keeps two runs from using the same workers. Raises `ConfigError` when it is
    taken.
    """
    batcher = _take_name(plan, services, recorder)
    for registry in registries_of(services).values():
        call = registry.begin_run.remote(batcher)
        cluster.wait(call, timeout_s=CALL_TIMEOUT_S, who="the registry")
    return batcher


def _take_name(plan: BatcherPlan, services: Services, recorder: Any) -> Any:
    from async_grpo.batching.batcher import ExperienceBatcher

    options = ray.remote(ExperienceBatcher).options(
        name=cluster.BATCHER,
        num_cpus=0,
        max_concurrency=10_000,
        enable_task_events=False,  # Ray's log of every call grows for as long as a run lasts
        scheduling_strategy=cluster.on_this_node(),
    )
    return take_name(lambda: options.remote(plan, services, recorder))


def registries_of(services: Services) -> dict[str, Any]:
    """The run's registries by role."""
    reference = {"logprob": services.reference} if services.reference else {}
    return {"generation": services.generation} | reference
