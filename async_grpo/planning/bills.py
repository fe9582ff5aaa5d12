"""The bill of memory of every role of a run, whether it fits, what to change if not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.roles import ENGINES, GENERATION, JUDGE, LOGPROB, REWARD, TEACHER
from async_grpo.devices import bill as memory
from async_grpo.devices.bill import FLOAT32, GIB, MIB, OUTPUT_BYTES, Bill, Line
from async_grpo.planning.asked import Asked, Split
from async_grpo.training.billing import USED, as_billed
from async_grpo.types.snapshots import NUM_SNAPSHOTS
from async_grpo.util.errors import ConfigError

OFFERED_RANK = 16  # of an adapter in place of training all
CONTEXT_BYTES = GIB  # CUDA and NCCL of a rank or a scoring worker, an assumption
BUCKET_BYTES, BUCKETS = 64 * MIB, 12  # of a rank's share of the weights: weight_sync/gather.py
# Memory of the interpreter and its libraries in a process of each role.
PROCESS_BYTES = {
    "rank": 560 * MIB, "engine": 1530 * MIB, "scorer": 510 * MIB, "controller": 140 * MIB,
    "verifiers": 130 * MIB, "Ray": 860 * MIB,
}  # fmt: skip
# Lines of bills whose bytes --colocated moves to the host while others have the device.
HELD = ("the frozen model", "master weights", "AdamW's moments", "the old policy",
        "the first policy")  # fmt: skip
PARKED, ASLEEP = "what waits while engines sample", "weights of a sleeping engine"
HELD_BYTES = 13  # of an output token of a batch: id, mask, two log-probabilities
VERIFIER_BYTES = 20 * MIB  # of a forked process that has graded
LIBRARIES, SOURCE_OF_PROCESS = "interpreter and libraries", "measured on CPUs"


class TooLargeError(ConfigError):
    """A bill exceeds the memory of a device or of a machine."""


@dataclass(frozen=True, slots=True)
class RoleBill:
    """The bill of each of `count` equal processes."""

    role: str
    count: int
    bill: Bill
    room: int = 0  # bytes that its total may take; 0: unknown
    devices: int = 0  # of each process; 0: all of its bill lies in the host's memory

    @property
    def host_bytes(self) -> int:
        """Bytes of one process in the host's memory, beside libraries, of which many share most."""
        lines = (each for each in self.bill.lines if each.on_host or not self.devices)
        return sum(each.num_bytes for each in lines if each.name != LIBRARIES)


def bills_of(asked: Asked, split: Split) -> tuple[RoleBill, ...]:
    """The bills of all roles, whether they fit or not."""
    counts = {asked.generation: split.engines} if asked.generates else {}
    counts |= zip(asked.scorers, split.scorers, strict=True)
    for number, config in enumerate(asked.workers):
        if config.mode in (JUDGE, REWARD) and number in asked.worker_models:
            counts[number] = config.num_workers
    ranks = RoleBill(
        "trainer rank", split.ranks, rank_bill_of(asked, split.ranks), _rank_room(asked),
        devices=int(not asked.on_cpu),
    )  # fmt: skip
    workers = (_worker_bill(asked, number, count) for number, count in counts.items())
    return ranks, *workers, *_hosts(asked)


def _worker_bill(asked: Asked, number: int, count: int) -> RoleBill:
    config = asked.workers[number]
    make = scorer_bill_of if config.mode in (LOGPROB, TEACHER) else engine_bill_of
    room = asked.room(config.memory_share or 1)
    role = f"{config.role} worker"
    if config.scorer_ranks > 1:
        role, count = f"rank of a {role}", count * config.scorer_ranks
    devices = 0 if asked.on_cpu else config.num_devices // config.scorer_ranks
    return RoleBill(role, count, make(asked, number), room, devices)


def training_of(asked: Asked, num_ranks: int) -> memory.Training:
    """How a rank trains, with activation checkpointing where it needs it."""
    training = as_billed(
        asked.train.memory, find_algorithm(asked.train), number_bytes=asked.train_bytes,
        num_ranks=num_ranks, shard_ranks=asked.shard_ranks(num_ranks),
        tokens=asked.train.batching.max_tokens_per_gpu,
    )  # fmt: skip
    teachers = [n for n in asked.worker_models if asked.workers[n].mode == TEACHER]
    widest = max((asked.worker_models[number].hidden for number in teachers), default=0)
    training = replace(training, teacher_hidden=widest)
    if asked.train.memory.activation_checkpointing != "auto":
        return training
    of_host = asked.host_bytes // num_ranks or 1 << 62  # without limit where it is unknown
    free = of_host if asked.on_cpu else _rank_room(asked) - CONTEXT_BYTES
    return memory.with_checkpointing_if_needed(asked.model, training, free_bytes=int(USED * free))


def engine_of(asked: Asked, number: int) -> memory.Engine:
    """The engine of a worker's table, with the options that rollout/engine_args.py gives it."""
    config, longest, size = asked.workers[number], asked.longest[number], asked.worker_bytes(number)
    cache, devices, may_take = int(config.kv_cache_gib * GIB), config.tensor_parallel_size, 0
    if asked.on_cpu:
        token = memory.cached_token_bytes(asked.worker_models[number], size)
        cache = cache or memory.cache_of_cpu(longest=longest, token_bytes=token)
        devices, tokens, seqs = 1, memory.batched_on_cpu(longest), config.capacity
    else:
        tokens, seqs = (8192, 1024) if asked.fleet.kind.has_large_batches else (2048, 256)
        seqs = config.max_num_seqs or seqs
        may_take = asked.room(config.memory_share or memory.WHOLE_SHARE)
    return memory.Engine(
        devices=devices,
        bytes_of_number=size,
        batched_tokens=int(config.engine_options.get("max_num_batched_tokens", tokens)),
        num_seqs=seqs,
        longest=longest,
        cache_bytes=cache,
        may_take=may_take,
        received=asked.published if config.mode == GENERATION else 0,
        adapters=asked.model.num_trained * config.max_loras * bool(config.max_lora_rank),
    )


def rank_bill_of(asked: Asked, num_ranks: int) -> Bill:
    """The bill of each of `num_ranks` trainer ranks."""
    training = training_of(asked, num_ranks)
    bill, shards = memory.trainer_bill(asked.model, training), training.shard_ranks
    buffers = min(BUCKET_BYTES * BUCKETS, -(-asked.published_bytes // num_ranks))
    context = CONTEXT_BYTES * (not asked.on_cpu)
    in_turns = asked.train.memory.colocated and not asked.on_cpu
    parked = sum(line.num_bytes for line in bill.lines if line.name in HELD and not line.on_host)
    own = memory.FLOAT32 * asked.model.num_parameters // shards
    is_pinned = training.offload == "parameters" and not asked.on_cpu  # by FSDP; not by us
    rounding = 2 * is_pinned * max(0, memory.pinned_bytes(asked.model, shards) - own)
    bill = bill.plus(
        Line("CUDA's and NCCL's own", context, "assumed"),
        Line("a sleeping engine's own", memory.GRAPHS_BYTES * in_turns, "assumed"),
        Line(PARKED, parked * in_turns, "weights, moments", True),
        Line("rounding of pinned memory", rounding, "each block to the next power of two", True),
        Line("buckets of weights", buffers, "e P / ranks, at most 12 of 64 MiB",
             not asked.on_cpu),
        _first_pass(asked, num_ranks),
        _process("rank", on_host=not asked.on_cpu),
    )  # fmt: skip
    return _in_one_memory(asked, bill)


def _first_pass(asked: Asked, num_ranks: int) -> Line:
    """A rank's share of a batch that is held for its later passes, if all outputs are longest."""
    train, needs = asked.train, find_algorithm(asked.train).needs
    payload = next((need.payload for need in needs if need.payload), None)
    token = HELD_BYTES + FLOAT32 * train.trainer_scores_reference
    token += sum(FLOAT32 * max(1, need.num_columns) for need in needs)
    token += payload is not None and max(
        payload.bytes_per_token(hidden=size * model.hidden, logits=size * model.vocab_size)
        for number, model in asked.worker_models.items()
        if asked.workers[number].mode == TEACHER
        for size in [asked.worker_bytes(number)]
    )
    samples = ceil(train.batching.batch_size * train.samples_per_slot / num_ranks)
    held = samples * train.sampling.max_generation_tokens * token
    return Line(
        "a batch for its later passes",
        held * (train.batching.num_passes > 1),
        f"{token} a token of B n / ranks longest outputs",
        not asked.on_cpu,
    )


def engine_bill_of(asked: Asked, number: int) -> Bill:
    """The bill of each device of an engine of a worker's table."""
    bill = memory.engine_bill(asked.worker_models[number], engine_of(asked, number))
    if asked.train.memory.colocated and number == asked.generation and not asked.on_cpu:
        asleep = next(line.num_bytes for line in bill.lines if line.name == "weights")
        bill = bill.plus(Line(ASLEEP, asleep, "e P / D", on_host=True))
    return _in_one_memory(asked, bill.plus(_process("engine", on_host=True)))


def turn_bytes(asked: Asked, num_ranks: int) -> int:
    """Bytes that move between a device and its host when the device changes hands."""
    bills = rank_bill_of(asked, num_ranks), engine_bill_of(asked, asked.generation)
    lines = (line for bill in bills for line in bill.lines)
    return sum(line.num_bytes for line in lines if line.name in (PARKED, ASLEEP))


def scorer_bill_of(asked: Asked, number: int) -> Bill:
    """The bill of each rank of a table's reference or teacher workers."""
    config = asked.workers[number]
    scoring = memory.Scoring(
        bytes_of_number=asked.worker_bytes(number),
        num_tokens=config.max_tokens_per_gpu,
        ranks=config.scorer_ranks,
        is_updated=config.mode == LOGPROB
        and asked.train.sampling.num_batches_per_ref_model_update
        < asked.train.batching.num_training_batches,
    )
    bill = memory.scorer_bill(asked.worker_models[number], scoring)
    context = Line("CUDA's own", CONTEXT_BYTES * (not asked.on_cpu), "assumed")
    return _in_one_memory(asked, bill.plus(context, _process("scorer", on_host=True)))


def _in_one_memory(asked: Asked, bill: Bill) -> Bill:
    """The bill of a worker; on CPUs its lines of the host count as those of the device."""
    if not asked.on_cpu:
        return bill
    return replace(bill, lines=tuple(replace(line, on_host=False) for line in bill.lines))


def _hosts(asked: Asked) -> Iterator[RoleBill]:
    """The bills of control process, verifiers, Ray, and Ray's object store."""
    sampling, count = asked.train.sampling, asked.num_verifiers
    samples = asked.num_samples * (sampling.max_staleness + 1)
    held = samples * sampling.max_generation_tokens * OUTPUT_BYTES
    if not asked.generates:
        return
    in_flight = Line(
        "samples in flight", held, f"{OUTPUT_BYTES} a token of B n (S + 1) longest outputs"
    )
    yield RoleBill("controller", 1, Bill((_process("controller"), in_flight)))
    if count:
        forked = Line("verifier processes", count * VERIFIER_BYTES,
                      f"{count} of 20 MiB (--verifier-memory-mib at most)")  # fmt: skip
        yield RoleBill("verifier pool", 1, Bill((_process("verifiers"), forked)))
    yield RoleBill("Ray and a dispatcher", 1, Bill((_process("Ray"),)))
    stored = Line("versions of the weights", NUM_SNAPSHOTS * asked.published_bytes,
                  f"{NUM_SNAPSHOTS} e P")  # fmt: skip
    yield RoleBill("object store of a machine", 1, Bill((stored,)))


def _process(role: str, *, on_host: bool = False) -> Line:
    return Line(LIBRARIES, PROCESS_BYTES[role], SOURCE_OF_PROCESS, on_host)


def check_fits(asked: Asked, *, as_placed: bool = False) -> None:
    """Raise `TooLargeError` for a role that does not fit: by how much, and which option to change.

    `as_placed`: the run starts with these ranks and workers; else some number of ranks must fit.
    """
    if as_placed and asked.train.memory.activation_checkpointing == "auto" and asked.on_cpu:
        asked = asked.with_train(activation_checkpointing="on")  # ranks choose by what is free then
    if not asked.on_cpu:
        _check_devices(asked, as_placed=as_placed)
    if as_placed or asked.on_cpu:
        check_hosts(asked, asked.own_split)


def check_hosts(asked: Asked, split: Split) -> None:
    """Raise `TooLargeError` where a machine's memory holds less than its processes need."""
    if not hosts_hold(asked, split):
        raise _host_refusal(asked, split, max(_of_machines(asked, split), key=_held))


def hosts_hold(asked: Asked, split: Split) -> bool:
    """Whether the memory of each machine is enough for its processes, as far as it is known."""
    return not asked.host_bytes or max(map(_held, _of_machines(asked, split))) <= asked.host_bytes


def _check_devices(asked: Asked, *, as_placed: bool) -> None:
    ranks = asked.num_ranks if as_placed else min(asked.num_ranks, asked.fleet.num_devices)
    most = ranks if as_placed else 1 if asked.is_shared else asked.fleet.num_devices
    if not rank_fits(asked, ranks) and (as_placed or not fewest_ranks(asked, most=most)):
        raise _rank_refusal(asked, ranks)
    for number in asked.worker_models:
        if asked.workers[number].mode in (LOGPROB, TEACHER):
            _check_scorer(asked, number)
        elif asked.workers[number].mode in ENGINES:
            _check_engine(asked, number)


def _of_machines(asked: Asked, split: Split) -> Iterator[tuple[RoleBill, ...]]:
    """The bills of what is on one machine: on that of the ranks, and on one without any."""
    bills, a_node = bills_of(asked, split), asked.fleet.of_a_node
    if len(asked.fleet.nodes) < 2:
        yield bills
        return
    ranks = -(-split.ranks // -(-split.ranks // a_node))
    for count in (ranks, 0):
        here, left = [replace(bills[0], count=count)], a_node - count
        for each in bills[1:]:
            fitting = min(each.count, left // each.devices) if each.devices else each.count
            left -= fitting * each.devices
            here.append(replace(each, count=fitting))
        yield tuple(here)


def _held(bills: tuple[RoleBill, ...]) -> int:
    """Bytes in the host's memory of all processes of one machine."""
    return sum(each.count * each.host_bytes for each in bills)


def _host_refusal(asked: Asked, split: Split, bills: tuple[RoleBill, ...]) -> TooLargeError:
    def fits(changed: Asked) -> bool:
        here = replace(
            split, scorers=split.scorers[: len(changed.scorers)]
        )  # an adapter's needs none
        is_held = max(map(_held, _of_machines(changed, here))) <= asked.host_bytes
        return is_held and (asked.on_cpu or rank_fits(changed, split.ranks))

    needed = _held(bills)
    most = max(bills, key=lambda each: each.count * each.host_bytes)
    lines = [each for each in most.bill.lines if each.on_host or not most.devices]
    found = remedies(asked, fits) or [
        "lower --max-tokens-per-gpu or --num-workers" if asked.on_cpu else "take more machines",
        "train a smaller model",
    ]
    return TooLargeError(
        f"{'this' if len(asked.fleet.nodes) < 2 else 'a'} machine has "
        f"{asked.host_bytes / GIB:.1f} GiB and the run needs about {needed / GIB:.1f} GiB, "
        f"{(needed - asked.host_bytes) / GIB:.1f} GiB more, most of it for {most.count} x "
        f"{most.role} ({max(lines, key=lambda line: line.num_bytes).name}): {', or '.join(found)}"
    )


def _rank_refusal(asked: Asked, num_ranks: int) -> TooLargeError:
    total, room = rank_bill_of(asked, num_ranks).total, _rank_room(asked)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    found = remedies(asked, lambda changed: rank_fits(changed, num_ranks))
    more = fewest_ranks(asked, first=num_ranks + 1)
    found += [f"train on {more} ranks or more (--nproc-per-node)"] if more else []
    return TooLargeError(
        f"--max-tokens-per-gpu {asked.train.batching.max_tokens_per_gpu} does not fit on {ranks}: "
        f"a rank needs {total / GIB:.1f} GiB and {_has(asked, asked.train.memory.gpus_per_rank)}, "
        f"{(total - room) / GIB:.1f} GiB too much: "
        f"{', or '.join(found) or 'take a device with more memory, or a smaller model'}"
    )


def _has(asked: Asked, share: float) -> str:
    of_it = "" if share == 1 else f"{share:.0%} of "
    return f"{of_it}{asked.fleet.kind.name} has {asked.room(share) / GIB:.1f} GiB"


def remedies(asked: Asked, is_enough: Callable[[Asked], bool]) -> list[str]:
    """Changes of options in words, each of which alone is enough."""

    def helps(**options: object) -> bool:
        try:
            return is_enough(asked.with_train(**options))
        except ConfigError:  # the options are refused for another reason
            return False

    def divides(parts: int) -> bool:
        changed = asked.with_worker(asked.generation, tensor_parallel_size=parts)
        engine = engine_of(changed, asked.generation)
        return is_enough(changed) and not memory.missing_bytes(asked.model, engine)

    tokens, parts = asked.train.batching.max_tokens_per_gpu, asked.engine_devices
    fewer = [n for n in _halves(tokens) if n > asked.train.sampling.max_generation_tokens]
    lower = next((n for n in fewer if helps(max_tokens_per_gpu=n)), 0)
    offload = next(
        (each for each in ("none", "optimizer", "parameters") if helps(offload=each)), ""
    )
    keeps = asked.train.memory.activation_checkpointing == "off"
    smaller = next((n for n in (16, 8, 4, 2, 1) if n < parts and divides(n)), 0)
    found = [f"lower --max-tokens-per-gpu to {lower}"] if lower else []
    if keeps and helps(activation_checkpointing="auto"):
        found.append("give --activation-checkpointing auto")
    found += [f"give --offload {offload}"] if offload else []
    if asked.train.memory.shard_ranks == 1 and helps(fsdp_sharding_strategy="FULL_SHARD"):
        found.append("give --fsdp-sharding-strategy FULL_SHARD")
    if asked.model.trained is None and helps(lora_rank=OFFERED_RANK):
        found.append(f"train an adapter (--lora-rank {OFFERED_RANK})")
    return found + ([f"lower --tensor-parallel-size to {smaller}"] if smaller else [])


def _halves(tokens: int) -> list[int]:
    """
    >>> _halves(2048)[:3]
    [1024, 512, 256]
    """
    return [tokens // 2**n for n in range(1, tokens.bit_length())]


def fewest_ranks(asked: Asked, *, first: int = 1, most: int = 4096) -> int:
    """The fewest ranks, from `first` on, that fit their devices; 0: no number up to `most` does."""
    if asked.on_cpu:
        return first
    if asked.train.memory.shard_ranks is None:  # the ranks of each machine hold a copy
        most = min(most, asked.fleet.of_a_node)
    powers = (2**power for power in range(13))
    tried = [first, *(n for n in powers if first < n < most), *[most] * (most > first)]
    fitting = next((n for n in tried if rank_fits(asked, n)), 0)
    below = max((n for n in tried if n < fitting), default=first - 1)
    return next((n for n in range(below + 1, fitting) if rank_fits(asked, n)), fitting)


def rank_fits(asked: Asked, num_ranks: int) -> bool:
    """Whether each of `num_ranks` ranks fits its device, or its share of one."""
    return rank_bill_of(asked, num_ranks).total <= _rank_room(asked)


def _rank_room(asked: Asked) -> int:
    return asked.room(asked.train.memory.gpus_per_rank)


def least_bytes(asked: Asked, number: int | None) -> int:
    """The least bytes of a device for a worker of a table, or for the only rank (None)."""
    if number is None:
        auto = asked.train.memory.activation_checkpointing == "auto"
        return rank_bill_of(
            asked.with_train(activation_checkpointing="on") if auto else asked, 1
        ).total
    if asked.workers[number].mode in (LOGPROB, TEACHER):
        return scorer_bill_of(asked, number).total
    own = memory.missing_bytes(
        asked.worker_models[number], replace(engine_of(asked, number), may_take=1)
    )
    in_turns = asked.train.memory.colocated and number == asked.generation
    return max(own, least_bytes(asked, None)) if in_turns else own


def _check_engine(asked: Asked, number: int) -> None:
    config, model = asked.workers[number], asked.worker_models[number]
    engine = engine_of(asked, number)
    lacking = memory.missing_bytes(model, engine)
    if not lacking:
        return
    enough = [
        parts
        for parts in (2, 4, 8, 16, 32)
        if parts > engine.devices
        and not memory.missing_bytes(model, replace(engine, devices=parts))
    ]
    found = [f"raise it to {enough[0]}"] if enough else []
    if not memory.missing_bytes(model, replace(engine, longest=engine.longest // 4)):
        found.append(f"lower --max-model-len {engine.longest}")
    found.append("lower max_num_batched_tokens of --engine-option")
    raise TooLargeError(
        f"--tensor-parallel-size {engine.devices} of the {config.role} worker is too few: each "
        f"device lacks {lacking / GIB:.1f} GiB for the weights and one sequence of "
        f"{engine.longest} tokens, vLLM may take {engine.may_take / GIB:.1f} GiB: "
        f"{', or '.join(found)}"
    )


def _check_scorer(asked: Asked, number: int) -> None:
    config = asked.workers[number]
    share = config.memory_share or 1.0
    room = asked.room(share)
    total = scorer_bill_of(asked, number).total
    if total <= room:
        return

    def fits(**options: int) -> bool:
        changed = asked.with_worker(number, **options)
        return scorer_bill_of(changed, number).total <= room

    fewer = [n for n in _halves(config.max_tokens_per_gpu) if n >= 256]
    lower = next((n for n in fewer if fits(max_tokens_per_gpu=n)), 0)
    enough = (n for n in (2, 4, 8, 16) if config.scorer_ranks < n <= asked.fleet.of_a_node)
    more = next((n for n in enough if share == 1 and fits(scorer_ranks=n)), 0)
    found = [f"lower it to {lower}"] if lower else []
    found += [f"shard it over --scorer-ranks {more}"] if more else []
    remedy = ", or ".join(found) or "take a device with more memory, or a smaller model"
    raise TooLargeError(
        f"--max-tokens-per-gpu {config.max_tokens_per_gpu} of the {config.role} worker does not "
        f"fit: it needs {total / GIB:.1f} GiB and {_has(asked, share)}, "
        f"{(total - room) / GIB:.1f} GiB too much: {remedy}"
    )
