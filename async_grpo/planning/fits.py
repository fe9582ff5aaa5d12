"""Whether the roles of a run fit their devices, and what to change where one does not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from async_grpo.devices.bill import GIB
from async_grpo.devices.worker_bill import missing_bytes
from async_grpo.errors import ConfigError
from async_grpo.planning.asked import Asked
from async_grpo.planning.bills import (
    RoleBill,
    bills_of,
    engine_of,
    rank_bill_of,
    scorer_bill_of,
)
from async_grpo.roles import GENERATION, JUDGE, LOGPROB, TEACHER


def check_fits(asked: Asked) -> None:
    """Raise `ConfigError` for what does not fit: by how much, and which option to change."""
    if asked.on_cpu:
        _check_machine(asked, bills_of(asked, asked.own_split))
        return
    if not fewest_ranks(asked, most=asked.fleet.num_devices):
        raise _rank_refusal(asked, min(asked.num_ranks, asked.fleet.num_devices))
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
    bill, room = rank_bill_of(asked, num_ranks), int(asked.fleet.kind.memory_bytes)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return ConfigError(
        f"--max-tokens-per-gpu {asked.train.max_tokens_per_gpu} does not fit on {ranks}: a rank "
        f"needs {bill.total / GIB:.1f} GiB and {_has(asked, room)}, "
        f"{(bill.total - room) / GIB:.1f} GiB too much: {_remedies(asked, num_ranks)}"
    )


def _has(asked: Asked, room: int) -> str:
    return f"{asked.fleet.kind.name} has {room / GIB:.1f} GiB"


def _remedies(asked: Asked, num_ranks: int) -> str:
    """What would make a rank fit, each by itself."""

    def fits(ranks: int = num_ranks, **options: object) -> bool:
        changed = replace(asked, train=replace(asked.train, **options))  # type: ignore[arg-type]
        return rank_bill_of(changed, ranks).total <= asked.fleet.kind.memory_bytes

    def tried(test: Callable[[], bool]) -> bool:
        try:
            return test()
        except ConfigError:  # such options are refused for another reason
            return False

    found = []
    tokens = asked.train.max_tokens_per_gpu // 2
    while tokens > asked.train.max_generation_tokens:
        if tried(lambda n=tokens: fits(max_tokens_per_gpu=n)):  # type: ignore[misc]
            found.append(f"lower it to {tokens}")
            break
        tokens //= 2
    more = fewest_ranks(asked, first=num_ranks + 1)
    found += [f"train on {more} ranks or more (--nproc-per-node)"] if more else []
    for offload in ("optimizer", "parameters"):
        if tried(lambda what=offload: fits(offload=what)):  # type: ignore[misc]
            found.append(f"give --offload {offload}")
            break
    return ", or ".join(found) or "take a device with more memory, or a smaller model"


def fewest_ranks(asked: Asked, *, first: int = 1, most: int = 4096) -> int:
    """Of which each fits its device, from `first` on; 0: no number up to `most` does."""
    room = asked.fleet.kind.memory_bytes * asked.train.gpus_per_rank
    if asked.on_cpu:
        return first
    tried = [first, *(2**power for power in range(13) if first < 2**power <= most)]
    fitting = next((n for n in tried if rank_bill_of(asked, n).total <= room), 0)
    below = max((n for n in tried if n < fitting), default=0)
    return next(
        (n for n in range(below + 1, fitting) if n >= first and _fits(asked, n, room)), fitting
    )


def _fits(asked: Asked, num_ranks: int, room: float) -> bool:
    return rank_bill_of(asked, num_ranks).total <= room


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
    config, room = asked.workers[number], int(asked.fleet.kind.memory_bytes)
    total = scorer_bill_of(asked, number).total
    if total <= room:
        return
    smaller = config
    while smaller.max_tokens_per_gpu > 512:
        smaller = replace(smaller, max_tokens_per_gpu=smaller.max_tokens_per_gpu // 2)
        changed = (*asked.workers[:number], smaller, *asked.workers[number + 1 :])
        if scorer_bill_of(replace(asked, workers=changed), number).total <= room:
            break
    else:
        smaller = config
    remedy = f"lower it to {smaller.max_tokens_per_gpu}" if smaller is not config else (
        "take a device with more memory, or a smaller model"
    )  # fmt: skip
    raise ConfigError(
        f"--max-tokens-per-gpu {config.max_tokens_per_gpu} of the {config.role} worker does not "
        f"fit: it needs {total / GIB:.1f} GiB and {_has(asked, room)}, "
        f"{(total - room) / GIB:.1f} GiB too much: {remedy}"
    )
