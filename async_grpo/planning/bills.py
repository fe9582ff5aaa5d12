"""The bill of memory of every role of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_grpo.devices.bill import (
    CPU_BATCHED_TOKENS,
    CPU_KV_CACHE_BYTES,
    GIB,
    MIB,
    OUTPUT_BYTES,
    WHOLE_SHARE,
    Bill,
    Engine,
    Line,
    Scoring,
    Training,
    cached_token_bytes,
    engine_bill,
    longest_sequence_bytes,
    scorer_bill,
    trainer_bill,
    with_checkpointing_if_needed,
)
from async_grpo.planning.asked import Asked, Split
from async_grpo.training.billing import USED, as_billed
from async_grpo.types.roles import JUDGE, LOGPROB
from async_grpo.weight_sync.routes import NUM_SNAPSHOTS

CONTEXT_BYTES = GIB  # CUDA and NCCL of a rank or a scoring worker, an assumption
BUCKET_BYTES, BUCKETS = 256 * MIB, 4  # of a rank's share of the weights: weight_sync/gather.py
# What a process holds before it holds anything of the run: the interpreter and its libraries.
PROCESS_BYTES = {
    "rank": 560 * MIB, "engine": 1530 * MIB, "scorer": 510 * MIB, "controller": 140 * MIB,
    "verifiers": 130 * MIB, "Ray": 860 * MIB,
}  # fmt: skip
VERIFIER_BYTES = 20 * MIB  # of a process that was forked, and has graded
SOURCE_OF_PROCESS = "measured on CPUs"
CORES = 50  # of a machine with devices, for verifiers


@dataclass(frozen=True, slots=True)
class RoleBill:
    """What each of some equal processes holds."""

    role: str
    count: int
    bill: Bill
    room: int = 0  # bytes for its total; 0: nobody knows


def bills_of(asked: Asked, split: Split) -> tuple[RoleBill, ...]:
    """Of all roles; `fits.check_fits` says whether they fit."""
    device = asked.fleet.kind.memory_bytes
    engine, number = engine_of(asked, asked.generation), asked.generation

    def room(number: int) -> int:
        return int(device * (asked.workers[number].memory_share or 1))

    found = [
        RoleBill("trainer rank", split.ranks, rank_bill_of(asked, split.ranks),
                 int(device * asked.train.gpus_per_rank)),
        RoleBill("generation worker", split.engines, _engine_bill(asked, number, engine),
                 room(number)),
    ]  # fmt: skip
    for count, scorer in zip(split.scorers, asked.scorers, strict=True):
        role = f"{asked.workers[scorer].role} worker"
        found.append(RoleBill(role, count, scorer_bill_of(asked, scorer), room(scorer)))
    for judge, config in enumerate(asked.workers):
        if config.mode == JUDGE and judge in asked.worker_models:
            bill = _engine_bill(asked, judge, engine_of(asked, judge))
            found.append(RoleBill(f"{config.role} worker", config.num_workers, bill, room(judge)))
    found += _hosts(asked, split)
    return tuple(found)


def training_of(asked: Asked, num_ranks: int) -> Training:
    """How a rank trains, with activation checkpointing where it needs it."""
    training = as_billed(
        asked.train, shard_ranks=asked.shard_ranks(num_ranks), compute_bytes=asked.train_bytes
    )
    if asked.train.activation_checkpointing != "auto":
        return training
    free = _rank_room(asked) or asked.host_bytes // num_ranks or 1 << 62
    return with_checkpointing_if_needed(asked.model, training, free_bytes=int(USED * free))


def _rank_room(asked: Asked) -> int:
    """Bytes of a device for a rank's tensors; 0 on CPUs."""
    if asked.on_cpu:
        return 0
    return int(asked.fleet.kind.memory_bytes * asked.train.gpus_per_rank) - CONTEXT_BYTES


def engine_of(asked: Asked, number: int) -> Engine:
    """The engine of a worker's table, as it is started: rollout/engine_args.py."""
    config, kind = asked.workers[number], asked.fleet.kind
    size, longest = asked.worker_bytes(number), asked.longest[number]
    options = config.engine_options
    given = int(config.kv_cache_gib * GIB)
    if asked.on_cpu:
        token = cached_token_bytes(asked.worker_models[number], size)
        least = longest_sequence_bytes(longest=longest, token_bytes=token)
        return Engine(
            bytes_of_number=size,
            batched_tokens=int(options.get("max_num_batched_tokens", 0))
            or max(longest, CPU_BATCHED_TOKENS),
            num_seqs=config.capacity,
            longest=longest,
            cache_bytes=given or max(CPU_KV_CACHE_BYTES, least),
            keeps_staged=asked.train.weight_delta,
        )
    tokens, seqs = (8192, 1024) if kind.has_large_batches else (2048, 256)
    return Engine(
        devices=config.tensor_parallel_size,
        bytes_of_number=size,
        batched_tokens=int(options.get("max_num_batched_tokens", tokens)),
        num_seqs=config.max_num_seqs or seqs,
        longest=longest,
        cache_bytes=given,
        may_take=int((config.memory_share or WHOLE_SHARE) * kind.memory_bytes),
        keeps_staged=asked.train.weight_delta,
    )


def rank_bill_of(asked: Asked, num_ranks: int) -> Bill:
    bill = trainer_bill(asked.model, training_of(asked, num_ranks))
    published = asked.model.num_parameters * asked.worker_bytes(asked.generation)
    buffers = min(BUCKET_BYTES, -(-published // num_ranks)) * BUCKETS
    context = CONTEXT_BYTES * (not asked.on_cpu)
    return _with(
        bill,
        Line("CUDA's and NCCL's own", context, "assumed"),
        Line("buckets of weights", buffers, f"{BUCKETS} of e P / ranks, at most 256 MiB",
             not asked.on_cpu),
        _process("rank", asked),
    )  # fmt: skip


def _engine_bill(asked: Asked, number: int, engine: Engine) -> Bill:
    bill = engine_bill(asked.worker_models[number], engine)
    return _on_host_too(asked, _with(bill, _process("engine", asked)))


def scorer_bill_of(asked: Asked, number: int) -> Bill:
    config = asked.workers[number]
    scoring = Scoring(
        bytes_of_number=asked.worker_bytes(number),
        num_tokens=config.max_tokens_per_gpu,
        is_updated=config.mode == LOGPROB
        and asked.train.num_batches_per_ref_model_update < asked.train.num_training_batches,
    )
    bill = scorer_bill(asked.worker_models[number], scoring)
    context = Line("CUDA's own", CONTEXT_BYTES * (not asked.on_cpu), "assumed")
    return _on_host_too(asked, _with(bill, context, _process("scorer", asked)))


def _on_host_too(asked: Asked, bill: Bill) -> Bill:
    """On CPUs there is one memory."""
    if not asked.on_cpu:
        return bill
    return replace(bill, lines=tuple(replace(line, on_host=False) for line in bill.lines))


def _hosts(asked: Asked, split: Split) -> Iterator[RoleBill]:
    """What every run has besides: the control process, verifiers, Ray's store of a machine."""
    train, size = asked.train, asked.worker_bytes(asked.generation)
    samples = train.batch_size * train.samples_per_question * (train.max_staleness + 1)
    held = samples * train.max_generation_tokens * OUTPUT_BYTES
    snapshot = asked.model.num_parameters * size
    control = (
        _process("controller", asked, on_host=False),
        Line("samples in flight", held, f"{OUTPUT_BYTES} a token of B n (S + 1) longest outputs"),
    )
    yield RoleBill("controller", 1, Bill("the controller", control))
    pool = next((each for each in asked.workers if each.reward_names), None)
    if pool is not None:
        count = min(pool.global_num_verifiers, asked.fleet.num_cores or CORES)
        forked = Line("verifier processes", count * VERIFIER_BYTES,
                      f"{count} of 20 MiB (--verifier-memory-mib at most)")  # fmt: skip
        own = _process("verifiers", asked, on_host=False)
        yield RoleBill("verifier pool", 1, Bill("the verifier pool", (own, forked)))
    ray = _process("Ray", asked, on_host=False)
    yield RoleBill("Ray and a dispatcher", 1, Bill("Ray on a machine", (ray,)))
    line = Line("versions of the weights", NUM_SNAPSHOTS * snapshot, f"{NUM_SNAPSHOTS} e P")
    yield RoleBill("object store of a machine", 1, Bill("the object store", (line,)))


def _process(role: str, asked: Asked, *, on_host: bool | None = None) -> Line:
    there = not asked.on_cpu if on_host is None else on_host
    return Line("interpreter and libraries", PROCESS_BYTES[role], SOURCE_OF_PROCESS, there)


def _with(bill: Bill, *lines: Line) -> Bill:
    return replace(bill, lines=(*bill.lines, *(line for line in lines if line.num_bytes)))
