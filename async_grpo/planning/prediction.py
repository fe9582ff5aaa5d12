"""A run's scenario from its options, rates and lengths, and what the simulation makes of it.

A large run is simulated at a part of its size: a k-th of the questions, engines, ranks and scoring
workers, each as fast as the whole's, with a control process that is k times as busy. Where as many
samples as here meet so many workers, a batch takes as long (tests/planning/test_service.py); its
longest output is that of fewer samples. Where there are few workers for many questions, a batch is
thinned instead: an m-th of its questions, with an m-th of what a batch costs once, in an m-th of
the time; its last outputs count for more than they would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.roles import REFERENCE
from async_grpo.devices.bill import cached_tokens
from async_grpo.planning.asked import Asked, Split, multiplied
from async_grpo.planning.bills import engine_of
from async_grpo.planning.rates import Lengths, Rates, slower
from async_grpo.planning.service import Scenario, Scorers, mean, simulate

WARM_UP = 2  # batches until generation is as far ahead as it may be
SIMULATED_SAMPLES = 2048  # of a batch, above which a part of the run is simulated
MEASURED_SAMPLES, MEASURED = 2_000, (2, 12)  # about so many samples, in so many batches
PLACES_HELD = 0.45  # share of an engine's places that hold a sequence, for an even flow
LEAST_ENGINES = 8  # of a part
SHARES = 6  # times that speeds of shared cores or devices are looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be predicted, whatever the split."""

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
    generating_s: float  # an engine has any sequence, mean over engines
    reading_s: float  # of these, it reads prompts, loads weights, computes caches again
    scoring_s: float  # a scoring worker, mean over them
    training_s: float  # ranks compute, the slowest of each round
    rounds: float
    optimizer_s: float
    gathering_s: float  # ranks stand still for new weights
    blocked_s: float  # ranks wait for the weights before these to be through
    control_s: float
    places: float  # share of the engines' places that hold a sequence
    part: int = 1  # one of so many parts of the run was simulated
    thin: int = 1  # times as many questions as were simulated
    slowed: float = 1.0  # by sharing cores

    @property
    def waiting_s(self) -> float:
        """Ranks have nothing to compute."""
        known = self.training_s + self.optimizer_s + self.gathering_s + self.blocked_s
        return max(0.0, self.step_s - known)


def predict(work: Work, split: Split, *, max_staleness: int) -> Prediction:
    """The run on the virtual clock; all processes are slowed as they share cores, or devices."""
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
        # So many run at a time, on average: each has the rest of the places' time.
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
        optimizer_s=thin * scenario.trainer.step_s,
        gathering_s=of("gathering_s"),
        blocked_s=of("blocked_s"),
        control_s=of("control_s"),
        places=of("sequence_s") / (engines * scenario.engine.capacity * seconds),
        part=part,
        thin=thin,
        slowed=times,
    )


def scenario_of(work: Work, split: Split, *, max_staleness: int) -> tuple[Scenario, int]:
    """What is simulated, and of how many equal parts of the run it is one."""
    asked, train = work.asked, work.asked.train
    part = part_of(asked, split)
    scorer = work.rates.scorer
    scorers = [
        Scorers(
            rates=replace(scorer, cost_per_second=scorer.cost_per_second
                          * multiplied(asked.model) / multiplied(asked.worker_models[number])),
            num_workers=max(1, round(count / part)),
            role=asked.workers[number].role,
            max_tokens=asked.workers[number].max_tokens_per_gpu,
        )
        for number, count in zip(asked.scorers, split.scorers, strict=True)
    ]  # fmt: skip
    config, engine = asked.workers[asked.generation], engine_of(asked, asked.generation)
    room = cached_tokens(asked.worker_models[asked.generation], engine) / work.lengths.context()
    steps = train.batching.steps_per_batch
    questions = max(1, round(train.batching.batch_size / part / steps)) * steps
    engines, ranks = (max(1, round(count / part)) for count in (split.engines, split.ranks))
    capacity = max(1, min(engine.num_seqs, int(room)))
    # What rounding takes or gives is made up for by their speed.
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
        overhead_seqs=config.overhead_seqs,
        num_ranks=ranks,
        scorers=tuple(scorers),
        sync=work.rates.sync,
        control=slower(work.rates.control, part),
        batch_size=questions,
        steps_per_batch=steps,
        samples_per_question=train.sampling.samples_per_question,
        prompt_tokens=work.lengths.prompt,
        max_staleness=max_staleness,
        contributing=work.contributing,
        waits_for_step=train.batching.deterministic or find_algorithm(train).waits_for_step,
    )
    # Behind those that are measured, as many are generated as ever.
    num_batches = WARM_UP + _measured(scenario) + 2 * max_staleness + 1
    return replace(scenario, num_batches=num_batches), part


def _measured(scenario: Scenario) -> int:
    """Batches whose means are told: those that began together make steps of different lengths.

    Of S + 1 batches that are on their way at a time the first takes longest: whole turns of them
    are measured.
    """
    samples, turn = scenario.batch_size * scenario.samples_per_question, scenario.max_staleness + 1
    wanted = min(max(MEASURED_SAMPLES // samples, MEASURED[0]), MEASURED[1])
    return -(-wanted // turn) * turn


def even_flow(work: Work, split: Split) -> tuple[float, float, float]:
    """Seconds of generating, training and scoring one batch, were nothing to vary."""
    scenario, _ = scenario_of(work, split, max_staleness=1)
    return _flow(scenario, work.lengths)


def _flow(scenario: Scenario, lengths: Lengths) -> tuple[float, float, float]:
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
    return generating, training / scenario.num_ranks + scenario.sync.gather_s, scoring


def part_of(asked: Asked, split: Split) -> int:
    """Of how many equal parts one is simulated: no more than leave several engines and ranks."""
    most = min(split.engines // LEAST_ENGINES, split.ranks // LEAST_ENGINES)
    return max(1, min(most, wanted_parts(asked)))


def wanted_parts(asked: Asked) -> int:
    """So many that one has no more samples than are worth simulating."""
    return asked.num_samples // SIMULATED_SAMPLES


def thinned(scenario: Scenario, *, most: int) -> tuple[Scenario, int]:
    """With about as few questions as make `most` samples, and by how many times fewer."""
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
    """With every process so many times as slow."""
    return replace(
        scenario,
        engine=slower(scenario.engine, times),
        trainer=slower(scenario.trainer, times),
        scorers=tuple(replace(each, rates=slower(each.rates, times)) for each in scenario.scorers),
        control=slower(scenario.control, times),
    )
