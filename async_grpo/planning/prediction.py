"""A run's scenario from its options, rates and lengths, and what the simulation makes of it. Pure.

A large run is simulated at a part of its size: a k-th of the questions, engines, ranks and scoring
workers, each as fast as the whole's, with a control process that is k times as busy. Where as many
samples as here meet so many workers, a batch takes as long (tests/planning/test_service.py); its
longest output is that of fewer samples. Where there are few workers for many questions, a batch is
thinned instead: an m-th of its questions, with an m-th of what a batch costs once, in an m-th of
the time; its last outputs count for more than they would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from async_grpo.config.roles import TEACHER
from async_grpo.devices.bill import cached_tokens
from async_grpo.planning.asked import Asked, Split, multiplied
from async_grpo.planning.bills import engine_of
from async_grpo.planning.rates import EngineRates, Lengths, Rates, SyncRates, TrainerRates
from async_grpo.planning.service import Scenario, Scorers, mean, simulate

WARM_UP = 2  # batches until generation is as far ahead as it may be
SIMULATED_SAMPLES = 2048  # of a batch, above which a part of the run is simulated
MEASURED_SAMPLES, MEASURED = 8_000, (3, 12)  # about so many samples, in so many batches
LOOKS, POLL_S = 200, 0.02  # of the batcher for a round: in a batch, and in truth
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
    asked, fleet, slowed = work.asked, work.asked.fleet, 1.0
    places = fleet.num_cores / fleet.threads or fleet.num_devices * asked.is_shared
    found = _predict(work, split, max_staleness, slowed)
    for _ in range(SHARES if places else 0):
        busy = (
            found.generating_s * split.engines
            + found.scoring_s * sum(split.scorers)
            + (found.training_s + found.optimizer_s) * split.ranks
            + found.control_s * asked.on_cpu / fleet.threads
        )
        # So many run at a time, on average: each has the rest of the places' time.
        wanted = max(1.0, busy / (places * found.step_s))
        if abs(wanted - slowed) < 0.01 * slowed:
            break
        slowed = (wanted + slowed) / 2
        found = _predict(work, split, max_staleness, slowed)
    return found


def _predict(work: Work, split: Split, max_staleness: int, slowed: float) -> Prediction:
    whole, part = scenario_of(work, split, max_staleness=max_staleness)
    scenario, thin = thinned(slower(whole, slowed))
    per_batch = scenario.steps_per_batch
    first = (WARM_UP + max_staleness) * per_batch
    steps = simulate(scenario)[first : first + _measured(scenario) * per_batch]
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
        slowed=slowed,
    )


def scenario_of(work: Work, split: Split, *, max_staleness: int) -> tuple[Scenario, int]:
    """What is simulated, and of how many equal parts of the run it is one."""
    asked, train = work.asked, work.asked.train
    part = part_of(asked, split)
    own = multiplied(asked.model)
    scorers = [
        Scorers(
            rates=replace(
                work.rates.scorer,
                cost_per_second=work.rates.scorer.cost_per_second
                * own / multiplied(asked.worker_models[number]),
            ),
            num_workers=max(1, round(count / part)),
            share=1 / _teachers(asked) if asked.workers[number].mode == TEACHER else 1.0,
        )
        for number, count in zip(asked.scorers, split.scorers, strict=True)
    ]  # fmt: skip
    config, engine = asked.workers[asked.generation], engine_of(asked, asked.generation)
    room = cached_tokens(asked.worker_models[asked.generation], engine) / work.lengths.context()
    control, steps = (
        work.rates.control,
        train.batching.batch_size // train.batching.questions_per_step,
    )
    questions = max(1, round(train.batching.batch_size / part / steps)) * steps
    engines, ranks = (max(1, round(count / part)) for count in (split.engines, split.ranks))
    capacity = max(1, min(engine.num_seqs, int(room)))
    # What rounding takes or gives is made up for by their speed.
    own_engine = slower_engine(work.rates.engine, engines * part / split.engines)
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
        control=replace(
            control,
            group_s=control.group_s * part,
            sample_s=control.sample_s * part,
            item_s=control.item_s * part,
            ping_s=control.ping_s * part,
        ),
        batch_size=questions,
        steps_per_batch=steps,
        samples_per_question=train.sampling.samples_per_question,
        prompt_tokens=work.lengths.prompt,
        max_staleness=max_staleness,
        contributing=work.contributing,
    )
    poll_s = max(_flow(scenario, work.lengths)[:2]) / LOOKS
    return replace(
        scenario,
        num_batches=WARM_UP + _measured(scenario) + 2 * max_staleness + 1,
        control=replace(scenario.control, poll_s=max(poll_s, POLL_S)),
    ), part


def _measured(scenario: Scenario) -> int:
    """Batches whose means are told."""
    samples = scenario.batch_size * scenario.samples_per_question
    return min(max(MEASURED_SAMPLES // samples, MEASURED[0]), MEASURED[1])


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
    scoring = max(
        (
            each.share * (num * cost / each.rates.cost_per_second
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
    return (
        asked.train.batching.batch_size
        * asked.train.sampling.samples_per_question
        // SIMULATED_SAMPLES
    )


def thinned(scenario: Scenario) -> tuple[Scenario, int]:
    """With so few questions as are worth simulating, and by how many times fewer."""
    steps = scenario.steps_per_batch
    samples = scenario.batch_size * scenario.samples_per_question
    times = min(samples // (2 * SIMULATED_SAMPLES), scenario.batch_size // steps)
    if times <= 1:
        return scenario, 1
    questions = max(1, round(scenario.batch_size / steps / times)) * steps
    sync, trainer = scenario.sync, scenario.trainer
    return replace(
        scenario,
        batch_size=questions,
        sync=SyncRates(
            gather_s=sync.gather_s / times,
            transfer_s=sync.transfer_s / times,
            load_s=sync.load_s / times,
        ),
        trainer=replace(trainer, step_s=trainer.step_s / times),
    ), times


def _teachers(asked: Asked) -> int:
    return max(1, sum(each.mode == TEACHER for each in asked.workers))


def slower(scenario: Scenario, times: float) -> Scenario:
    """With every process so many times as slow."""
    control = scenario.control
    return replace(
        scenario,
        engine=slower_engine(scenario.engine, times),
        trainer=slower_trainer(scenario.trainer, times),
        scorers=tuple(
            replace(each, rates=replace(each.rates, group_s=each.rates.group_s * times,
                    cost_per_second=each.rates.cost_per_second / times))
            for each in scenario.scorers
        ),
        control=replace(
            control,
            group_s=control.group_s * times,
            sample_s=control.sample_s * times,
            item_s=control.item_s * times,
        ),
    )  # fmt: skip


def slower_engine(engine: EngineRates, times: float) -> EngineRates:
    return replace(
        engine,
        step_s=engine.step_s * times,
        per_sequence_s=engine.per_sequence_s * times,
        per_kv_token_s=engine.per_kv_token_s * times,
        per_prefill_token_s=engine.per_prefill_token_s * times,
    )


def slower_trainer(trainer: TrainerRates, times: float) -> TrainerRates:
    return replace(
        trainer,
        cost_per_second=trainer.cost_per_second / times,
        round_overhead_s=trainer.round_overhead_s * times,
        step_s=trainer.step_s * times,
    )
