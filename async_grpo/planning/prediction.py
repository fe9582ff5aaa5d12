"""Makes a run's scenario from its options, rates and lengths, and predicts it by simulation.

A large run is simulated in part: a k-th of the questions, engines, ranks and scoring workers, each
as fast as in the whole run, with a control process that is k times as busy. A batch of the part
takes as long (tests/planning/test_service.py), but its longest output is that of fewer samples.
A run of few workers and many questions is thinned instead: an m-th of a batch's questions, with an
m-th of the costs that a batch has once, in an m-th of the time. The last outputs of a batch then
count for too much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.roles import REFERENCE
from async_grpo.devices.bill import cached_tokens
from async_grpo.planning.asked import Asked, Split, multiplied
from async_grpo.planning.bills import engine_of, turn_bytes
from async_grpo.planning.rates import Lengths, Rates, slower
from async_grpo.planning.service import Scenario, Scorers, mean, simulate

WARM_UP = 2  # batches until generation is as far ahead as it may be
SIMULATED_SAMPLES = 2048  # of a batch, above which a part of the run is simulated
MEASURED_SAMPLES, MEASURED = 2_000, (2, 12)  # samples, roughly; least and most batches
PLACES_HELD = 0.45  # share of an engine's places that hold a sequence, for an even flow
LEAST_ENGINES = 8  # of a part
SHARES = 6  # most iterations that find how far shared cores or devices slow processes down


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A run with its rates and lengths, ready to be predicted."""

    asked: Asked
    rates: Rates
    lengths: Lengths
    contributing: float = 1.0  # share of the groups that are trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Means over the measured gradient steps; seconds are of one step."""

    split: Split
    max_staleness: int
    step_s: float
    samples_per_s: float
    tokens_per_s: float  # prompts and outputs trained
    generating_s: float  # an engine has at least one sequence, mean over engines
    reading_s: float  # of these, it reads prompts, loads weights, rebuilds caches
    scoring_s: float  # a scoring worker works, mean over workers
    training_s: float  # the slowest rank of each round computes
    rounds: float
    optimizer_s: float
    gathering_s: float  # ranks stand still for new weights
    blocked_s: float  # ranks wait until the weights before these have arrived
    control_s: float
    places: float  # share of the engines' places that hold a sequence
    part: int = 1  # a 1 / part of the run was simulated
    thin: int = 1  # a 1 / thin of the questions of a batch was simulated
    slowed: float = 1.0  # factor by which sharing cores or devices slows every process

    @property
    def waiting_s(self) -> float:
        """Seconds in which ranks have nothing to compute."""
        known = self.training_s + self.optimizer_s + self.gathering_s + self.blocked_s
        return max(0.0, self.step_s - known)


def predict(work: Work, split: Split, *, max_staleness: int) -> Prediction:
    """Predict the run by simulation; processes that share cores or devices slow each other."""
    asked, fleet, times = work.asked, work.asked.fleet, 1.0
    places = fleet.num_cores / fleet.threads or fleet.num_devices * asked.is_shared
    found = _predict(work, split, max_staleness, times)
    for _ in range(SHARES if places else 0):
        busy = (
            found.generating_s * split.engines
            + found.scoring_s * sum(split.scorers)
            + (found.training_s + found.optimizer_s) * split.ranks
            + found.control_s * asked.on_cpu / fleet.threads
        )
        # The mean number of processes that compute at a time, over the places that they share.
        wanted = max(1.0, busy / (places * found.step_s))
        if abs(wanted - times) < 0.01 * times:
            break
        times = (wanted + times) / 2
        found = _predict(work, split, max_staleness, times)
    return found


def _predict(work: Work, split: Split, max_staleness: int, times: float) -> Prediction:
    whole, part = scenario_of(work, split, max_staleness=max_staleness)
    scenario, thin = thinned(slowed(whole, times), most=2 * SIMULATED_SAMPLES)
    per_batch = scenario.steps_per_batch
    first = (WARM_UP + max_staleness) * per_batch
    last = first + _measured(scenario) * per_batch
    steps = simulate(scenario, num_steps=last)[first:]
    engines, scorers = scenario.num_engines, sum(each.num_workers for each in scenario.scorers)

    def of(name: str, by: float = 1.0) -> float:
        return thin * mean(steps, lambda step: float(getattr(step, name))) / by

    seconds = of("seconds")
    samples = thin * scenario.batch_size * scenario.samples_per_question / per_batch
    return Prediction(
        split=split,
        max_staleness=max_staleness,
        step_s=seconds,
        samples_per_s=part * samples / seconds,
        tokens_per_s=part * of("num_tokens") / seconds,
        generating_s=of("engines_busy_s", engines),
        reading_s=of("engines_stalled_s", engines),
        scoring_s=of("scoring_s", max(1, scorers)),
        training_s=of("busy_s"),
        rounds=of("num_rounds"),
        optimizer_s=thin * scenario.trainer.step_s * scenario.num_passes,
        gathering_s=of("gathering_s"),
        blocked_s=of("blocked_s"),
        control_s=of("control_s"),
        places=of("sequence_s") / (engines * scenario.engine.capacity * seconds),
        part=part,
        thin=thin,
        slowed=times,
    )


def scenario_of(work: Work, split: Split, *, max_staleness: int) -> tuple[Scenario, int]:
    """The scenario of one part of the run, and the number of equal parts."""
    asked, train = work.asked, work.asked.train
    part = part_of(asked, split)
    scorer = work.rates.scorer
    scorers = [
        Scorers(
            rates=replace(scorer, cost_per_second=scorer.cost_per_second
                          * asked.workers[number].scorer_ranks
                          * multiplied(asked.model) / multiplied(asked.worker_models[number])),
            num_workers=max(1, round(count / part)),
            role=asked.workers[number].role,
            max_tokens=asked.workers[number].scorer_ranks
            * asked.workers[number].max_tokens_per_gpu,
        )
        for number, count in zip(asked.scorers, split.scorers, strict=True)
    ]  # fmt: skip
    config, engine = asked.workers[asked.generation], engine_of(asked, asked.generation)
    room = cached_tokens(asked.worker_models[asked.generation], engine) / work.lengths.context()
    steps = train.batching.steps_per_pass
    questions = max(1, round(train.batching.batch_size / part / steps)) * steps
    engines, ranks = (max(1, round(count / part)) for count in (split.engines, split.ranks))
    capacity = max(1, min(engine.num_seqs, int(room)))
    # Rates make up for rounded numbers of engines and ranks.
    own_engine = slower(work.rates.engine, engines * part / split.engines)
    own_trainer = replace(
        work.rates.trainer,
        cost_per_second=work.rates.trainer.cost_per_second * split.ranks / (ranks * part),
        max_tokens=train.batching.max_tokens_per_gpu,
    )
    scenario = Scenario(
        engine=replace(own_engine, capacity=capacity, keeps_caches=config.keep_kv_cache),
        trainer=own_trainer,
        lengths=work.lengths.outputs,
        num_engines=engines,
        overhead_seqs=config.overhead(capacity),
        num_ranks=ranks,
        scorers=tuple(scorers),
        sync=work.rates.sync,
        control=slower(work.rates.control, part),
        batch_size=questions,
        steps_per_batch=steps,
        num_passes=train.batching.num_passes,
        samples_per_question=train.sampling.samples_per_question,
        prompt_tokens=work.lengths.prompt,
        max_staleness=max_staleness,
        contributing=work.contributing,
        colocated=train.memory.colocated,
        turn_s=turn_bytes(asked, split.ranks) / asked.fleet.kind.host_bytes_per_s,
        waits_for_step=train.batching.deterministic or find_algorithm(train).waits_for_step,
    )
    # More batches than are measured, so that generation goes on behind the last of these.
    num_batches = WARM_UP + _measured(scenario) + 2 * max_staleness + 1
    return replace(scenario, num_batches=num_batches), part


def _measured(scenario: Scenario) -> int:
    """How many batches are measured: whole turns of the S + 1 batches that are under way at once.

    Batches of one turn make steps of different lengths, and the first takes longest.
    """
    samples, turn = scenario.batch_size * scenario.samples_per_question, scenario.max_staleness + 1
    wanted = min(max(MEASURED_SAMPLES // samples, MEASURED[0]), MEASURED[1])
    return -(-wanted // turn) * turn


def even_flow(work: Work, split: Split) -> tuple[float, float, float]:
    """Seconds of generating, training and scoring one batch, if all samples took the mean time."""
    (scenario, _), lengths = scenario_of(work, split, max_staleness=1), work.lengths
    (length, square), prompt = lengths.moments(), lengths.prompt
    num = scenario.batch_size * scenario.samples_per_question
    engine, engines = scenario.engine, scenario.num_engines
    running = max(1.0, min(PLACES_HELD * engine.capacity, 1.5 * num / engines))
    step_s = engine.seconds_a_step(int(running), running * lengths.context())
    cost = length + prompt + (square + 2 * prompt * length) / scenario.trainer.attention_ratio
    training = num * cost * scenario.contributing / scenario.trainer.cost_per_second
    shares = {each.role: 1 / max(1, len(scenario.teachers)) for each in scenario.scorers}
    scoring = max(
        (
            (shares | {REFERENCE: 1.0})[each.role] * (num * cost / each.rates.cost_per_second
                          + scenario.batch_size * each.rates.group_s) / each.num_workers
            for each in scenario.scorers
        ),
        default=0.0,
    )  # fmt: skip
    generating = num * length * step_s / (engines * running)
    training *= scenario.num_passes / scenario.num_ranks
    return generating, training + scenario.sync.gather_s, scoring


def part_of(asked: Asked, split: Split) -> int:
    """The number of parts of which one is simulated; a part keeps `LEAST_ENGINES`, and ranks."""
    most = min(split.engines // LEAST_ENGINES, split.ranks // LEAST_ENGINES)
    return max(1, min(most, wanted_parts(asked)))


def wanted_parts(asked: Asked) -> int:
    """The number of parts of `SIMULATED_SAMPLES` samples."""
    return asked.num_samples // SIMULATED_SAMPLES


def thinned(scenario: Scenario, *, most: int) -> tuple[Scenario, int]:
    """The scenario with about `most` samples a batch, and the factor of its questions."""
    steps = scenario.steps_per_batch
    samples = scenario.batch_size * scenario.samples_per_question
    times = min(samples // most, scenario.batch_size // steps)
    if times <= 1:
        return scenario, 1
    questions = max(1, round(scenario.batch_size / steps / times)) * steps
    trainer = scenario.trainer
    return replace(
        scenario,
        batch_size=questions,
        sync=slower(scenario.sync, 1 / times),
        trainer=replace(trainer, step_s=trainer.step_s / times),
    ), times


def slowed(scenario: Scenario, times: float) -> Scenario:
    """The scenario with every process `times` as slow."""
    return replace(
        scenario,
        engine=slower(scenario.engine, times),
        trainer=slower(scenario.trainer, times),
        scorers=tuple(replace(each, rates=slower(each.rates, times)) for each in scenario.scorers),
        control=slower(scenario.control, times),
    )
