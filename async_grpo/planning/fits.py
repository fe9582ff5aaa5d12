"""Whether the roles of a run fit their devices, and what to change where one does not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from async_grpo.devices.bill import GIB, missing_bytes
from async_grpo.planning.asked import Asked
from async_grpo.planning.bills import (
    RoleBill,
    bills_of,
    engine_of,
    rank_bill_of,
    scorer_bill_of,
)
from async_grpo.types.roles import GENERATION, JUDGE, LOGPROB, TEACHER
from async_grpo.util.errors import ConfigError


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
        f"--max-tokens-per-gpu {asked.train.max_tokens_per_gpu} does not fit on {ranks}: a rank "
        f"needs {total / GIB:.1f} GiB and {_has(asked, asked.train.gpus_per_rank)}, "
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
            return is_enough(replace(asked, train=replace(asked.train, **options)))  # type: ignore[arg-type]
        except ConfigError:  # such options are refused for another reason
            return False

    def divides(parts: int) -> bool:
        own = replace(asked.workers[asked.generation], tensor_parallel_size=parts)
        others = asked.workers[asked.generation + 1 :]
        changed = replace(asked, workers=(*asked.workers[: asked.generation], own, *others))
        engine = engine_of(changed, asked.generation)
        return is_enough(changed) and not missing_bytes(asked.model, engine)

    tokens, parts = asked.train.max_tokens_per_gpu, asked.engine_devices
    fewer = [n for n in _halves(tokens) if n > asked.train.max_generation_tokens]
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
    if asked.train.shard_ranks is None:  # more than a machine's are further copies
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
    return asked.fleet.kind.memory_bytes * asked.train.gpus_per_rank


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
