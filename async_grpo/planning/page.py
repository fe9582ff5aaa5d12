"""A plan as text: memory, the time of a step and its causes, the options to set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.bill import GIB, MIB
from async_grpo.planning.asked import Asked
from async_grpo.planning.bills import RoleBill, rank_bill_of
from async_grpo.planning.prediction import Prediction, Work
from async_grpo.planning.search import SearchResult

LITTLE = 0.05  # of a step: less is not mentioned


@dataclass(frozen=True, slots=True)
class Plan:
    """All that `async-grpo plan` finds."""

    work: Work  # of the best split
    bills: tuple[RoleBill, ...]
    found: SearchResult

    @property
    def asked(self) -> Asked:
        return self.work.asked

    @property
    def best(self) -> Prediction:
        return self.found.best


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of a gradient step."""

    name: str
    seconds: float
    beside: bool  # ranks go on meanwhile
    formula: str
    source: str


def in_words(plan: Plan) -> str:
    """The whole page."""
    blocks = [
        "\n".join(
            [_head(plan), "to set in the file:", *(f"    {line}" for line in settings(plan))]
        ),
        what_bounds(plan),
        "\n".join(["memory, each:", *(_bill(each) for each in plan.bills)]),
        "\n".join(["a gradient step:", *_phases(plan)]),
        "\n".join(_curve(plan.found.curve)),
        "\n".join(["what this rests on:", *(f"  - {line}" for line in assumptions(plan))]),
    ]
    return "\n\n".join(blocks)


def as_text(plan: Plan) -> str:
    """The plan as JSON."""
    content = {
        "devices": str(plan.asked.fleet),
        "parameters": plan.asked.model.num_parameters,
        "bills": [
            {"role": each.role, "count": each.count, "room": each.room,
             "total": each.bill.total, "on_host": each.bill.on_host,
             "lines": [asdict(line) for line in each.bill.lines]}
            for each in plan.bills
        ],
        "phases": [asdict(each) for each in phases(plan)],
        "bound": what_bounds(plan),
        "best": asdict(plan.best),
        "as_asked": asdict(plan.found.as_asked) if plan.found.as_asked else None,
        "staleness": [asdict(each) for each in plan.found.curve],
        "splits": [asdict(each) for each in plan.found.tried],
        "settings": settings(plan),
        "unused_devices": unused_devices(plan),
        "rates": asdict(plan.work.rates),
        "assumptions": [*assumptions(plan)],
    }  # fmt: skip
    return json.dumps(content, indent=1)


def _head(plan: Plan) -> str:
    best, asked = plan.best, plan.asked
    lines = [
        f"{asked.train.places.model_name_or_path} ({asked.model.num_parameters / 1e9:.3g} billion "
        f"parameters) on {asked.fleet}",
        f"{_split_in_words(plan, best)}, --max-staleness {best.max_staleness}: "
        f"{best.samples_per_s:,.3g} samples/s, a gradient step in {duration(best.step_s)}",
    ]
    own = plan.found.as_asked
    if own is not None and (own.split, own.max_staleness) != (best.split, best.max_staleness):
        lines.append(
            f"as the file has it ({_split_in_words(plan, own)}, staleness {own.max_staleness}): "
            f"{own.samples_per_s:,.3g} samples/s, {duration(own.step_s)}"
        )
    if asked.model.trained:
        lines.append(adapter_in_words(asked, best.split.ranks))
    if unused := unused_devices(plan):
        lines.append(
            f"{_count(unused, 'device')} of {asked.fleet.num_devices:,} would stand unused: ranks "
            "are as many on each of their machines, and an engine's devices stand in one"
        )
    return "\n".join(lines)


def adapter_in_words(asked: Asked, num_ranks: int) -> str:
    """What an adapter changes in the memory of each of so many ranks."""
    own, full = (rank_bill_of(e, num_ranks).total for e in (asked, asked.without_adapter()))
    share, kind = asked.train.memory.gpus_per_rank, asked.fleet.kind.name
    room = asked.room(share)
    fits = "" if asked.on_cpu else f", which would {'' if full <= room else 'not '}fit on {kind}"
    return (
        f"an adapter of {asked.model.num_trained / 1e6:,.3g} million parameters trains: a rank "
        f"holds {size(own)}, and {size(full)} where all parameters train{fits}"
    )


def unused_devices(plan: Plan) -> int:
    """Devices that the recommended split leaves unused."""
    if plan.asked.on_cpu or plan.asked.is_shared:
        return 0
    return plan.asked.fleet.num_devices - plan.asked.devices_of(plan.best.split)


def _split_in_words(plan: Plan, found: Prediction) -> str:
    asked, split = plan.asked, found.split
    each = f" of {asked.engine_devices} devices" if asked.engine_devices > 1 else ""
    parts = [_count(split.engines, "engine") + each, _count(split.ranks, "trainer rank")]
    parts += [
        _count(count, f"{asked.workers[number].role} worker") + _of_ranks(asked.workers[number])
        for number, count in zip(asked.scorers, split.scorers, strict=True)
    ]
    return ", ".join(parts)


def _of_ranks(config: WorkerConfig) -> str:
    return f" of {config.scorer_ranks} ranks" if config.scorer_ranks > 1 else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _bill(role: RoleBill) -> str:
    bill, of_room = role.bill, ""
    if role.room and bill.total:
        of_room = f" of {role.room / GIB:.1f}"
    lines = [f"  {role.role} (x {role.count:,}): {size(bill.total)}{of_room}"
             + (f", and {size(bill.on_host)} of the host" if bill.on_host else "")]  # fmt: skip
    lines += [
        f"    {size(line.num_bytes):>11}  {line.name}{' (host)' if line.on_host else ''}: "
        f"{line.formula}"
        for line in bill.lines
    ]
    return "\n".join(lines)


def phases(plan: Plan) -> tuple[Phase, ...]:
    """The parts of one gradient step with the recommended split."""
    best, rates, train = plan.best, plan.work.rates, plan.asked.train
    samples = train.batching.questions_per_step * train.sampling.samples_per_question
    verifiers = max(1, plan.asked.num_verifiers)
    engine, trainer, sync = rates.engine, rates.trainer, rates.sync
    passes = train.batching.num_passes
    again = f", {passes} times" if passes > 1 else ""
    found = [
        Phase("generation", best.generating_s, True,
              f"steps of {_ms(engine.step_s)} + {_ms(engine.per_sequence_s)} a sequence + "
              f"{engine.per_kv_token_s * 1e9:.3g} ns a cached token; {best.places:.0%} of the "
              "places held", rates.source("engine")),
        Phase("verification", samples * rates.control.verification_s / verifiers, True,
              f"{samples:,} samples x {_ms(rates.control.verification_s)} / "
              f"{verifiers} processes", rates.source("control")),
        Phase("training", best.training_s, False,
              f"{best.rounds:.3g} rounds{again}; a rank trains "
              f"{trainer.cost_per_second:,.0f} tokens/s", rates.source("trainer")),
        Phase("optimizer", best.optimizer_s, False, "a constant + 28 bytes a parameter of a shard",
              rates.source("trainer")),
        Phase("weights leave the ranks", best.gathering_s, False, "e P / ranks",
              rates.source("sync")),
        Phase("weights on their way", sync.transfer_s / train.batching.steps_per_pass, True,
              _way(plan), rates.source("sync")),
        Phase("engines load", sync.load_s / train.batching.steps_per_pass, True,
              "e P / D; and what runs is read again", rates.source("sync")),
    ]  # fmt: skip
    if plan.asked.scorers:
        found.insert(1, Phase("log-probabilities", best.scoring_s, True,
                              f"a worker scores {rates.scorer.cost_per_second:,.0f} tokens/s",
                              rates.source("scorer")))  # fmt: skip
    return tuple(found)


def _way(plan: Plan) -> str:
    is_one = len(plan.asked.fleet.nodes) < 2
    return "through the machine's memory" if is_one else "e P to all machines of engines"


def _phases(plan: Plan) -> Iterator[str]:
    for each in phases(plan):
        beside = "beside the rest" if each.beside else "ranks work"
        words = f"{each.name}, {beside}: {each.formula} ({each.source})"
        yield f"  {duration(each.seconds):>9}  {words}"
    best = plan.best
    yield f"  {duration(best.waiting_s + best.blocked_s):>9}  ranks wait"
    yield f"  {duration(best.step_s):>9}  in all, by simulation"


def what_bounds(plan: Plan) -> str:
    """A sentence or two on what bounds the time of a step."""
    best = plan.best
    busy = (best.training_s + best.optimizer_s) / best.step_s
    blocked, gathering = best.blocked_s / best.step_s, best.gathering_s / best.step_s
    waiting, generating = best.waiting_s / best.step_s, best.generating_s / best.step_s
    scoring, control = best.scoring_s / best.step_s, best.control_s / best.step_s
    if control > 1 - 2 * LITTLE:
        return "The control process bounds the step: samples are more than one process can book."
    sync = plan.work.rates.sync
    carried = (
        (sync.transfer_s + sync.load_s) / plan.asked.train.batching.steps_per_pass / best.step_s
    )
    if blocked > max(waiting, LITTLE) or carried > 1 - 2 * LITTLE:
        return (
            f"The way of the weights bounds the step: a version is carried {carried:.0%} of it, "
            f"and ranks wait {blocked + waiting:.0%}; --weight-transport nccl, or more questions "
            "a batch, help."
        )
    if waiting < 2 * LITTLE:
        text = f"Training bounds the step: ranks compute {busy:.0%} of it"
        text += f" and stand still {gathering:.0%} for new weights" * (gathering > LITTLE)
        return f"{text}, and engines have work {generating:.0%} of it."
    if plan.asked.scorers and scoring > 1 - 2 * LITTLE:
        return f"Scoring bounds the step: ranks wait {waiting:.0%} of it for log-probabilities."
    slowest = f"ranks wait {waiting:.0%} of the step for samples"
    again = best.reading_s / best.step_s
    if again > 0.25 and not plan.asked.workers[plan.asked.generation].keep_kv_cache:
        return (
            f"Generation bounds the step: {slowest}, and engines take {again:.0%} of it to load "
            "new weights and read again what runs: --keep-kv-cache leaves that out."
        )
    if generating > 1 - 2 * LITTLE and best.places > 0.5:
        return f"Generation bounds the step: {slowest}, and engines' places are full."
    return (
        f"The longest outputs bound the step: {slowest}, while {best.places:.0%} of the engines' "
        "places are held; more questions a batch, or a larger --max-staleness, fill them."
    )


def _curve(curve: Sequence[Prediction]) -> Iterator[str]:
    yield "staleness  samples/s       step  ranks compute  ranks wait  engines have work"
    for each in curve:
        busy = (each.training_s + each.optimizer_s) / each.step_s
        waiting = (each.waiting_s + each.blocked_s) / each.step_s
        yield (
            f"{each.max_staleness:>9}  {each.samples_per_s:>9,.4g}  {duration(each.step_s):>9}  "
            f"{busy:>13.0%}  {waiting:>10.0%}  {each.generating_s / each.step_s:>17.0%}"
        )


def settings(plan: Plan) -> tuple[str, ...]:
    """Lines for run.toml that set the recommended split."""
    best, asked = plan.best, plan.asked
    machines = -(-best.split.ranks // asked.fleet.of_a_node) if not asked.on_cpu else 1
    lines = ["[launch]", f"trainer_nodes = {machines}"] if machines > 1 else []
    lines += ["[train]", f"nproc_per_node = {best.split.ranks // machines}"]
    lines.append(f"max_staleness = {best.max_staleness}")
    if asked.is_shared:
        lines.append(f"gpus_per_rank = {asked.train.memory.gpus_per_rank:g}")
    counts = (best.split.engines, *best.split.scorers)
    for number, count in zip((asked.generation, *asked.scorers), counts, strict=True):
        config = asked.workers[number]
        name = f', name = "{config.name}"' if config.name else ""
        lines += [f'[[worker]]  # mode = "{config.mode}"{name}', f"num_workers = {count}"]
        if asked.is_shared:
            lines.append(f"gpus_per_worker = {config.gpus_per_worker:g}")
    return tuple(lines)


def threads_in_words(plan: Plan) -> str:
    """A sentence on the cores that the processes of the recommended split can use."""
    split, fleet = plan.best.split, plan.asked.fleet
    computing = split.ranks + split.engines + sum(split.scorers)
    text = (
        f"each of {computing} processes that compute has {_count(fleet.threads, 'thread')} "
        f"(OMP_NUM_THREADS) on {_count(fleet.num_cores, 'core')}"
    )
    fitting = fleet.num_cores // computing
    return f"{text}: {fitting} would leave none idle" if fitting > fleet.threads else text


def assumptions(plan: Plan) -> Iterator[str]:
    """Sentences on what was measured, given and assumed."""
    best, asked, work = plan.best, plan.asked, plan.work
    rates, lengths = work.rates, work.lengths
    mean, _ = lengths.moments()
    yield (f"lengths: {lengths.source}; mean output {mean:,.0f} tokens, prompts of "
           f"{lengths.prompt}")  # fmt: skip
    yield (f"{work.contributing:.0%} of the questions are trained: groups without variance are "
           "counted and not sent")  # fmt: skip
    for table in ("engine", "trainer", "scorer", "sync", "control"):
        if table != "scorer" or asked.scorers:
            yield f"rates of [{table}]: {rates.source(table)}"
    if best.part > 1:
        yield (f"one of {best.part} equal parts of the run was simulated, its control process as "
               "busy as the whole one's")  # fmt: skip
    if best.thin > 1:
        yield (f"batches of one in {best.thin} questions were simulated, with as small a part of "
               "what a batch costs once")  # fmt: skip
    if asked.on_cpu:
        yield threads_in_words(plan)
    if best.slowed > 1:
        yield f"processes share {asked.fleet}: each is slowed {best.slowed:.2f} times"
    if asked.train.environments != {"single_turn"}:
        yield "episodes of several turns count as one: without --from-run their length is a guess"
    if asked.train.objective.ref_answer_coefficient:
        yield "reference answers are not modelled: ranks train one more sample of each question"
    yield "not modelled: failures, evaluation, checkpoints, preemption in engines"


def size(num_bytes: float) -> str:
    """
    >>> size(3 * 2**29), size(5 * 2**20)
    ('1.5 GiB', '5.0 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def duration(seconds: float) -> str:
    """
    >>> duration(0.012), duration(12.34), duration(600)
    ('12 ms', '12.3 s', '10.0 min')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds > 1e-6 else "0 ms"
    return f"{seconds:.1f} s" if seconds < 300 else f"{seconds / 60:.1f} min"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
