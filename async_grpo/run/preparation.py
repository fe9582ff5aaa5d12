"""Prepares a run on rank 0: checks model, data and workers, then begins it at the controller."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm, users_algorithm
from async_grpo.batching.packing import attention_ratio
from async_grpo.batching.records import BatcherPlan
from async_grpo.checkpoint.resume import Record, Start, check_contents, hash_data
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import ControllerClient
from async_grpo.config.roles import is_service
from async_grpo.config.teaching import check_vocabulary
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.data.order import MixedOrder, QuestionStream, sampling_seed
from async_grpo.data.shards import StreamedRecords
from async_grpo.data.table import QuestionTable
from async_grpo.environments.chat.find import AUTO, find_renderer
from async_grpo.environments.find import hash_files, users_environment
from async_grpo.model.adapters import Adapter
from async_grpo.model.attention import FLASH_2
from async_grpo.model.foreign_folders import ADAPTER_CONFIG
from async_grpo.model.model_folder import ModelFacts, check_model_folder, hash_model
from async_grpo.model.policy import ModelSize, read_size
from async_grpo.run import data
from async_grpo.run.companions import start_rules
from async_grpo.run.journals import CONTROL_FILE, pending_after
from async_grpo.run.main_rank import MainRank, RunAtController
from async_grpo.run.publication import Publication
from async_grpo.run.recruitment import Demand, SetDemand, needed_roles, recruit, teachers_of
from async_grpo.run.reward_trial import try_all_rewards
from async_grpo.run.watch import RunRecord
from async_grpo.types import GivenPair, Question, ResumePoint, SamplingContract, WorkerInfo
from async_grpo.types.snapshots import store_complaint, stored_here
from async_grpo.util.user_code import UserCode
from async_grpo.util.waiting import in_background
from async_grpo.weight_sync.buckets import laid_out_bytes, lay_out, torch_dtype
from async_grpo.weight_sync.publisher import Publisher
from async_grpo.weight_sync.routes import published_dtype, publishes_adapter, served_dtype
from async_grpo.weight_sync.transport import open_sender
from async_grpo.weight_sync.update_checks import ExpectedWeights

logger = logging.getLogger(__name__)


def open_run(
    config: TrainConfig, record: RunRecord, *, start: Start, devices: Sequence[str]
) -> MainRank:
    """Check the run's options and data, find its workers, and begin it, in this order.

    `devices`: identity of each rank's device, "" on a CPU.
    """
    num_ranks, places = len(devices), config.places
    facts, address = check_model_folder(places.model_name_or_path), None
    if places.gateway:  # only here, because OpenAI's types take most of a second to import
        from async_grpo.gateway.run_gateway import free_address, start_gateway

        address = free_address(places)
    plan, longest_pair = _load(config, facts, start, num_ranks=num_ranks)
    questions = plan.questions
    hashes = hash_contents(config, facts, questions, pairs=plan.pairs, start=start)
    record.cluster = cluster = Cluster.join(places.ray_address, namespace=places.namespace)
    journal = start.source and pending_after(start.source / CONTROL_FILE, start.batches)
    plan = replace(
        plan,
        rules=start_rules(partial(find_algorithm, config), users_algorithm(config), cluster),
        object_store_bytes=cluster.object_store_bytes(),
        settings=start.settings(config),
        pending=journal or (),
    )
    demand = replace(
        demand_of(config, facts, plan), longest_pair=longest_pair, devices=tuple(devices)
    )
    controller = ControllerClient(cluster, find_or_make_controller(cluster))
    workers = recruit(controller, demand)
    dtype = published_dtype(workers)
    warn_of_small_store(config, cluster, dtype=dtype, num_ranks=num_ranks)
    teachers = teachers_of(controller, config)
    hashes = with_workers(hashes, teachers, workers, start=start)
    try_all_rewards(controller, plan, data.first_of_each_file(config, questions))
    gateway = start_gateway(plan, controller, address) if address else None
    sender = open_sender(config.memory.weight_transport, cluster, device_id=devices[0])
    main = MainRank(
        RunAtController(plan, cluster, recruit=partial(recruit, demand=demand)),
        Publication(
            plan,
            Publisher(cluster, dtype=torch_dtype(dtype)),
            sender=sender,
            alone=_publishes_adapter(config, workers),
            served=torch_dtype(served_dtype(workers)),
        ),
        record,
        workers=workers,
        hashes=hashes,
        teachers=teachers,
        code=hash_code(config, workers),
        gateway=gateway,
    )
    record.forget()
    logger.info("outputs end with token ids %s", plan.sampling.stop_token_ids)
    for sentence in find_algorithm(config).in_words():
        logger.info("%s", sentence)
    return main


def _publishes_adapter(config: TrainConfig, workers: Sequence[WorkerInfo]) -> bool:
    """Whether workers are sent the adapter alone; logs why, or why it is merged."""
    if not config.adapter.trains_adapter:
        return False
    model, seed = config.places.model_name_or_path, config.data.infinite_sampler_seed
    policy = Adapter.of(config.adapter, model=model, seed=seed).outlined(model)
    assert policy.adapter is not None
    alone, why = publishes_adapter(config, policy.adapter.to_dict(), workers)
    form = "the adapter alone" if alone else "weights with the adapter merged into them"
    logger.info("workers are sent %s: %s", form, why)
    return alone


def _load(
    config: TrainConfig, facts: ModelFacts, start: Start, *, num_ranks: int
) -> tuple[BatcherPlan, int]:
    """Load the data, and return the plan of the run and the tokens of its longest given pair."""
    if config.data.renderer != AUTO:  # for environments that chat; their workers start later
        find_renderer(config.places.model_name_or_path, config.data.renderer)
    questions, held_out = data.load_data(config, facts)
    sets, pairs = data.load_sets(config, facts), data.load_given(config, facts)
    logger.info("%d questions to train on, %d ranks", len(questions), num_ranks)
    if pairs:
        logger.info(
            "%d given pairs, for %.3g of the samples", len(pairs), 1 - config.teaching.gkd_lambda
        )
    data.warn_of_few(config, len(questions))
    check_vocabulary(config.teaching, facts.vocab_size)
    data.check_types(config, questions, pairs)
    plan = plan_run(
        config, facts, questions, held_out, sets=sets, pairs=pairs, num_ranks=num_ranks,
        resume=start.point,
    )  # fmt: skip
    return plan, pairs.longest


def demand_of(config: TrainConfig, facts: ModelFacts, plan: BatcherPlan) -> Demand:
    """What the workers of a run must be able to serve, without its given pairs."""
    longest = max(_longest_prompt(plan.questions), _longest_prompt(plan.held_out))
    sets = (
        SetDemand(each.config.name, each.sampling, _longest_prompt(each.questions))
        for each in plan.sets
        if each.config.name
    )
    return Demand(config, facts, longest, sets=tuple(sets))


def _longest_prompt(questions: Sequence[Question]) -> int:
    """In tokens."""
    assert isinstance(questions, QuestionTable | StreamedRecords), "as `plan_run` takes them"
    return questions.longest_prompt


def warn_of_small_store(
    config: TrainConfig, cluster: Cluster, *, dtype: str, num_ranks: int
) -> None:
    """Warn when this node's object store cannot hold new weights beside those being served."""
    shapes = ExpectedWeights.read(config.places.model_name_or_path, dtype=dtype).shapes
    model_bytes = laid_out_bytes(tuple(lay_out((n, dtype, s) for n, s in shapes.items())))
    # torchrun sets LOCAL_WORLD_SIZE, the number of ranks of this node.
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    store_bytes = int(cluster.resources_here().get("object_store_memory", 0))
    share = stored_here(
        num_ranks=num_ranks, num_here=num_here, shard_ranks=config.memory.shard_ranks
    )
    if complaint := store_complaint(model_bytes, store_bytes=store_bytes, share=share):
        logger.warning("%s", complaint)


def hash_contents(
    config: TrainConfig,
    facts: ModelFacts,
    records: Sequence[Record],
    *,
    pairs: Sequence[GivenPair] = (),
    start: Start,
) -> Future[Mapping[str, str]]:
    """Hashes for a checkpoint's manifest, from a thread; on resume compared before returning."""
    users = users_code(config)
    of_code = {what: code.sha256 for what, code in users.items()}

    def work() -> Mapping[str, str]:
        model = hash_model(config.places.model_name_or_path)
        # Older checkpoints have a hash of files as "tokenizer": it is not compared.
        of_files = records.sha256 if isinstance(records, StreamedRecords) else ""
        of_data = of_files or hash_data(records)
        given = {"pairs": hash_data(pairs)} if pairs else {}
        if path := config.adapter.adapter_path:
            given["adapter"] = hash_model(path, config=ADAPTER_CONFIG)
        encoding = facts.tokenizer_hash
        return {"model": model, "encoding": encoding, "data": of_data, **given, **of_code}

    hashes = in_background(work, name="hash-contents")
    if start.folder:
        model = config.places.model_name_or_path
        paths = {"model": model, "encoding": model}
        paths |= {"data": config.data.data_paths, "pairs": config.teaching.pairs_path}
        paths |= {"adapter": config.adapter.adapter_path}
        paths |= {what: code.name for what, code in users.items()}
        check_contents(start, hashes.result(), paths)
    return hashes


def users_code(config: TrainConfig) -> dict[str, UserCode]:
    """{part: the user's code for it}, without sets of --eval; raises `ConfigError`."""
    users = {
        "algorithm": users_algorithm(config),
        "environment": users_environment(config.data.environment),
        **{f"environment of {kind}": code for kind, code in own_environments(config).items()},
    }
    return {what: code for what, code in users.items() if code}


def hash_code(config: TrainConfig, workers: Iterable[WorkerInfo] = ()) -> dict[str, str]:
    """{purpose: sha256} of the user's files that affect training, and of modules they import.

    For rewards and services, these are the files that the `workers` have read.
    """
    of_sets = environments_of_sets(config).items()
    users = users_code(config) | {f"environment of --eval {n}": code for n, code in of_sets if code}
    found: dict[str, str] = {}
    for what, code in users.items():
        found |= hash_files(code, what=what)
    for worker in workers:
        rewards = worker.rewards.hashes if worker.rewards else {}
        found |= {f"reward {name}": own for name, own in rewards.items()}
        found |= worker.code
    return found


def with_workers(
    hashes: Future[Mapping[str, str]],
    teachers: Mapping[str, WorkerInfo],
    workers: Iterable[WorkerInfo],
    *,
    start: Start,
) -> Future[Mapping[str, str]]:
    """Add the hashes of teachers and services, after comparing them with a checkpoint's."""
    own = {f"teacher {name}": info for name, info in teachers.items()}
    own |= {each.role.replace(":", " "): each for each in workers if each.code}
    found = {name: info.model_hash for name, info in own.items()}
    check_contents(start, found, {name: info.model_path for name, info in own.items()})
    if not found:
        return hashes
    return in_background(lambda: {**hashes.result(), **found}, name="hash-workers")


def plan_run(
    config: TrainConfig,
    facts: ModelFacts,
    questions: data.Questions,
    held_out: QuestionTable,
    *,
    sets: Mapping[str, QuestionTable] | None = None,
    pairs: Sequence[GivenPair] = (),
    num_ranks: int,
    resume: ResumePoint | None = None,
) -> BatcherPlan:
    """The plan of the run for the batcher; `sets`: {name: questions} of --eval."""
    seed, size = config.data.infinite_sampler_seed, read_size(config.places.model_name_or_path)
    order = MixedOrder(
        sampled_share=config.teaching.gkd_lambda,
        questions=data.order_of(config, questions),
        pairs=QuestionStream(len(pairs), seed=seed, purpose="pairs"),
        samples_per_slot=config.sampling.samples_per_question,
    )
    return BatcherPlan(
        # The batcher's process has another working directory.
        config=config.but(
            output_dir=os.path.abspath(config.recording.output_dir),
            model_name_or_path=os.path.abspath(config.places.model_name_or_path),
        ),
        questions=questions,
        held_out=held_out,
        named_sets=sets or {},
        set_environments=environments_of_sets(config),
        order=order.question,
        take_refused=questions.take_refused if isinstance(questions, StreamedRecords) else int,
        replacement=order.replacement,
        pairs=pairs,
        pairs_of=order.pairs_of,
        seed_of=partial(sampling_seed, seed) if config.batching.deterministic else None,
        sampling=SamplingContract(
            config.sampling.temperature,
            facts.stop_token_ids,
            config.sampling.max_generation_tokens,
            with_experts=config.sampling.routing_replay != "off",
        ),
        num_ranks=num_ranks,
        # Later than that of any earlier run on these workers: they never confuse its weights with
        # this run's.
        incarnation=time.time_ns() // 1_000_000,
        rules=LocalRules(find_algorithm(config)),
        attention_ratio=attention_ratio_of(size),
        # As `PolicyModel.shares_prompts` will say, but that states would be computed again.
        shares_prefixes=config.memory.attention != FLASH_2 and not size.has_states,
        resume=resume,
        environment=users_environment(config.data.environment),
        environments=own_environments(config),
        services=tuple(filter(is_service, needed_roles(config))),
        max_positions=facts.max_positions,
        vocab_size=facts.vocab_size,
    )


def own_environments(config: TrainConfig) -> dict[str, UserCode | None]:
    """{type: code of its own environment}, None for a shipped one; raises `ConfigError`."""
    return {
        each.type: users_environment(each.environment, option=f"environment of --data {each.type}")
        for each in config.data.data_files
        if each.environment
    }


def environments_of_sets(config: TrainConfig) -> dict[str, UserCode | None]:
    """{set of --eval: code of its own environment}, None for a shipped one."""
    return {
        each.name: users_environment(each.environment, option=f"environment of --eval {each.name}")
        for each in config.evaluation.eval
        if each.environment
    }


def attention_ratio_of(size: ModelSize) -> float:
    """The cost of the model's attention for packing: see `batching.packing.attention_ratio`."""
    return attention_ratio(
        num_parameters=size.num_parameters,
        num_layers=size.num_layers,
        attention_width=size.attention_width,
    )
