"""The bill of memory of every role of a run, whether it fits, what to change if not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.roles import GENERATION, JUDGE, LOGPROB, TEACHER
from async_grpo.devices.bill import (
    GIB,
    MIB,
    OUTPUT_BYTES,
    WHOLE_SHARE,
    Bill,
    Engine,
    Line,
    Scoring,
    Training,
    batched_on_cpu,
    cache_of_cpu,
    cached_token_bytes,
    engine_bill,
    missing_bytes,
    scorer_bill,
    trainer_bill,
    with_checkpointing_if_needed,
)
from async_grpo.planning.asked import Asked, Split
from async_grpo.training.billing import USED, as_billed
from async_grpo.types.snapshots import NUM_SNAPSHOTS
from async_grpo.util.errors import ConfigError

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
    """Of all roles; `check_fits` says whether they fit."""
    device = asked.fleet.kind.memory_bytes
    engine, number = engine_of(asked, asked.generation), asked.generation

    def room(number: int) -> int:
        return int(device * (asked.workers[number].memory_share or 1))

    found = [
        RoleBill("trainer rank", split.ranks, rank_bill_of(asked, split.ranks),
                 int(device * asked.train.memory.gpus_per_rank)),
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
        asked.train.memory, find_algorithm(asked.train), number_bytes=asked.train_bytes,
        shard_ranks=asked.shard_ranks(num_ranks), tokens=asked.train.batching.max_tokens_per_gpu,
    )  # fmt: skip
    if asked.train.memory.activation_checkpointing != "auto":
        return training
    free = _tensor_room(asked) or asked.host_bytes // num_ranks or 1 << 62
    return with_checkpointing_if_needed(asked.model, training, free_bytes=int(USED * free))


def _tensor_room(asked: Asked) -> int:
    """Bytes of a device for a rank's tensors; 0 on CPUs."""
    if asked.on_cpu:
        return 0
    return int(asked.fleet.kind.memory_bytes * asked.train.memory.gpus_per_rank) - CONTEXT_BYTES


def engine_of(asked: Asked, number: int) -> Engine:
    """The engine of a worker's table, as it is started: rollout/engine_args.py."""
    config, kind = asked.workers[number], asked.fleet.kind
    size, longest = asked.worker_bytes(number), asked.longest[number]
    options = config.engine_options
    given = int(config.kv_cache_gib * GIB)
    if asked.on_cpu:
        token = cached_token_bytes(asked.worker_models[number], size)
        return Engine(
            bytes_of_number=size,
            batched_tokens=int(options.get("max_num_batched_tokens", batched_on_cpu(longest))),
            num_seqs=config.capacity,
            longest=longest,
            cache_bytes=given or cache_of_cpu(longest=longest, token_bytes=token),
            keeps_staged=asked.train.memory.weight_delta,
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
        keeps_staged=asked.train.memory.weight_delta,
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
        and asked.train.sampling.num_batches_per_ref_model_update
        < asked.train.batching.num_training_batches,
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
    samples = (
        train.batching.batch_size
        * train.sampling.samples_per_question
        * (train.sampling.max_staleness + 1)
    )
    held = samples * train.sampling.max_generation_tokens * OUTPUT_BYTES
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


def check_fits(asked: Asked) -> None:
    """Raise `ConfigError` for what does not fit: by how much, and which option to change."""
    if asked.on_cpu:
        _check_machine(asked, bills_of(asked, asked.own_split))
        return
    ranks = min(asked.num_ranks, asked.fleet.num_devices)
    most = 1 if asked.is_shared else asked.fleet.num_devices
    if not rank_fits(asked, ranks) and not fewest_ranks(asked, most=most):
        raise _rank_refusal(asked, ranks)
    for number, config in enumerate(asked.workers):
        if config.mode in (GENERATION, JUDGE) and number in asked.worker_models:
            _check_engine(asked, number)
        elif config.mode in (LOGPROB, TEACHER) and number in asked.scorers:
            _check_scorer(asked, number)


def _check_machine(asked: Asked, bills: Sequence[RoleBill]) -> None:
    needed = sum(each.count * (each.bill.total + each.bill.on_host) for each in bills)
    if asked.host_bytes and needed > asked.host_bytes:
        largest = max(bills, key=lambda each: each.count * each.bill.total)
        raise ConfigError(
            f"this machine has {asked.host_bytes / GIB:.1f} GiB and the run needs about "
            f"{needed / GIB:.1f} GiB, {(needed - asked.host_bytes) / GIB:.1f} GiB more, most of it "
            f"for {largest.count} x {largest.role}: lower --max-tokens-per-gpu or --num-workers, "
            "or train a smaller model"
        )


def _rank_refusal(asked: Asked, num_ranks: int) -> ConfigError:
    total, room = rank_bill_of(asked, num_ranks).total, _rank_room(asked)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    found = remedies(asked, lambda changed: rank_fits(changed, num_ranks))
    more = fewest_ranks(asked, first=num_ranks + 1)
    found += [f"train on {more} ranks or more (--nproc-per-node)"] if more else []
    return ConfigError(
        f"--max-tokens-per-gpu {asked.train.batching.max_tokens_per_gpu} does not fit on {ranks}: "
        f"a rank needs {total / GIB:.1f} GiB and {_has(asked, asked.train.memory.gpus_per_rank)}, "
        f"{(total - room) / GIB:.1f} GiB too much: "
        f"{', or '.join(found) or 'take a device with more memory, or a smaller model'}"
    )


def _has(asked: Asked, share: float) -> str:
    kind, of_it = asked.fleet.kind, "" if share == 1 else f"{share:.0%} of "
    return f"{of_it}{kind.name} has {share * kind.memory_bytes / GIB:.1f} GiB"


def remedies(asked: Asked, is_enough: Callable[[Asked], bool]) -> list[str]:
    """What to change of the options, each by itself enough, in words."""

    def helps(**options: object) -> bool:
        try:
            return is_enough(replace(asked, train=asked.train.but(**options)))
        except ConfigError:  # such options are refused for another reason
            return False

    def divides(parts: int) -> bool:
        own = replace(asked.workers[asked.generation], tensor_parallel_size=parts)
        others = asked.workers[asked.generation + 1 :]
        changed = replace(asked, workers=(*asked.workers[: asked.generation], own, *others))
        engine = engine_of(changed, asked.generation)
        return is_enough(changed) and not missing_bytes(asked.model, engine)

    tokens, parts = asked.train.batching.max_tokens_per_gpu, asked.engine_devices
    fewer = [n for n in _halves(tokens) if n > asked.train.sampling.max_generation_tokens]
    lower = next((n for n in fewer if helps(max_tokens_per_gpu=n)), 0)
    offload = next((each for each in ("optimizer", "parameters") if helps(offload=each)), "")
    smaller = next((n for n in (16, 8, 4, 2, 1) if n < parts and divides(n)), 0)
    found = [f"lower --max-tokens-per-gpu to {lower}"] if lower else []
    found += [f"give --offload {offload}"] if offload else []
    return found + ([f"lower --tensor-parallel-size to {smaller}"] if smaller else [])


def _halves(tokens: int) -> list[int]:
    """
    >>> _halves(2048)[:3]
    [1024, 512, 256]
    """
    return [tokens // 2**n for n in range(1, tokens.bit_length())]


def fewest_ranks(asked: Asked, *, first: int = 1, most: int = 4096) -> int:
    """Of which each fits its device, from `first` on; 0: no number up to `most` does."""
    if asked.on_cpu:
        return first
    if asked.train.memory.shard_ranks is None:  # more than a machine's are further copies
        most = min(most, asked.fleet.of_a_node)
    powers = (2**power for power in range(13))
    tried = [first, *(n for n in powers if first < n < most), *[most] * (most > first)]
    fitting = next((n for n in tried if rank_fits(asked, n)), 0)
    below = max((n for n in tried if n < fitting), default=first - 1)
    return next((n for n in range(below + 1, fitting) if rank_fits(asked, n)), fitting)


def rank_fits(asked: Asked, num_ranks: int) -> bool:
    """Whether each of so many ranks fits its device, or its share of one."""
    return rank_bill_of(asked, num_ranks).total <= _rank_room(asked)


def _rank_room(asked: Asked) -> float:
    return asked.fleet.kind.memory_bytes * asked.train.memory.gpus_per_rank


def _check_engine(asked: Asked, number: int) -> None:
    config, model = asked.workers[number], asked.worker_models[number]
    engine = engine_of(asked, number)
    lacking = missing_bytes(model, engine)
    if not lacking:
        return
    enough = [
        parts
        for parts in (2, 4, 8, 16, 32)
        if parts > engine.devices and not missing_bytes(model, replace(engine, devices=parts))
    ]
    remedies = [f"raise it to {enough[0]}"] if enough else []
    if not missing_bytes(model, replace(engine, longest=engine.longest // 4)):
        remedies.append(f"lower --max-model-len {engine.longest}")
    remedies.append("lower max_num_batched_tokens of --engine-option")
    raise ConfigError(
        f"--tensor-parallel-size {engine.devices} of the {config.role} worker is too few: each "
        f"device lacks {lacking / GIB:.1f} GiB for the weights and one sequence of "
        f"{engine.longest} tokens, vLLM may take {engine.may_take / GIB:.1f} GiB: "
        f"{', or '.join(remedies)}"
    )


def _check_scorer(asked: Asked, number: int) -> None:
    config = asked.workers[number]
    share = config.memory_share or 1.0
    room = asked.fleet.kind.memory_bytes * share
    total = scorer_bill_of(asked, number).total
    if total <= room:
        return

    def fits(tokens: int) -> bool:
        own = replace(config, max_tokens_per_gpu=tokens)
        changed = (*asked.workers[:number], own, *asked.workers[number + 1 :])
        return scorer_bill_of(replace(asked, workers=changed), number).total <= room

    lower = next((n for n in _halves(config.max_tokens_per_gpu) if n >= 256 and fits(n)), 0)
    remedy = (
        f"lower it to {lower}" if lower else "take a device with more memory, or a smaller model"
    )
    raise ConfigError(
        f"--max-tokens-per-gpu {config.max_tokens_per_gpu} of the {config.role} worker does not "
        f"fit: it needs {total / GIB:.1f} GiB and {_has(asked, share)}, "
        f"{(total - room) / GIB:.1f} GiB too much: {remedy}"
    )
