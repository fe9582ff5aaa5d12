"""One run of the whole service: questions go round from admission to new weights.

    admission ─▶ batcher ─▶ registry ─▶ engine ─▶ batcher ─▶ registry ─▶ pool ─▶ verifiers
        ▲                                                                          │
    published ◀─ engines load ◀─ weights ◀─ trainers ◀─ rounds ◀─ batcher ◀────────┘

Admission window, balancer, ledger, packing and rounds are the service's own code. Each batcher,
registry and the pool's actor is a process that serves one call at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from async_grpo.batching.admission import AdmissionWindow, StepKey
from async_grpo.batching.ledger import Ledger
from async_grpo.batching.packing import Item, estimate_cost
from async_grpo.types import WeightsVersion
from benchmarks.scaling.clock import Actor, Clock, Slots
from benchmarks.scaling.engine import Engine
from benchmarks.scaling.fleet import Fleet
from benchmarks.scaling.outcome import Books, Outcome, measured
from benchmarks.scaling.references import References
from benchmarks.scaling.rounds import Rounds
from benchmarks.scaling.scenario import Scenario
from benchmarks.scaling.shared_cores import SharedCores
from benchmarks.scaling.trainers import Trainers


def simulate(
    scenario: Scenario, *, deterministic: bool = False, cores: SharedCores | None = None
) -> Outcome:
    """Run all batches. `deterministic`: a step is trained when it is complete, never before.

    `cores`: one engine, one rank and all other processes share two cores; by default everybody has
    one of their own.
    """
    return _Service(scenario, deterministic, cores).run()


class _Service:
    def __init__(self, scenario: Scenario, deterministic: bool, cores: SharedCores | None) -> None:
        self._scenario = scenario
        self._clock = clock = Clock()
        self._cores = cores
        self._make_processes(scenario, cores)
        engines = [
            Engine(clock, scenario.engine, on_busy=cores.engine if cores else _nobody)
            for _ in range(scenario.num_engines)
        ]
        self._fleet = Fleet(clock, scenario, engines, self._registries)
        self._trainers = Trainers(
            clock,
            scenario,
            trained=self._trained,
            publish=self._publish,
            on_busy=cores.trainer if cores else _nobody,
        )
        if cores:
            cores.connect(engines[0], self._trainers.runner, self._pool.runner)
        self._rounds = Rounds(
            clock,
            scenario,
            self._batchers,
            send=self._trainers.receive,
            deterministic=deterministic,
        )
        self._trainers.rounds = self._rounds
        self._window = AdmissionWindow(
            scenario.batch_size,
            questions_per_step=scenario.batch_size,
            max_staleness=scenario.max_staleness,
            num_batches=scenario.num_batches,
        )
        self._ledgers = [Ledger() for _ in self._batchers]  # one a batcher
        self._unsettled: dict[tuple[int, int], int] = {}  # questions, by batcher and batch
        self._books: list[Books] = []  # at the end of each batch

    def _make_processes(self, scenario: Scenario, cores: SharedCores | None) -> None:
        _check_shards(scenario)
        if cores is None:
            self._batchers = [Actor(self._clock) for _ in range(scenario.num_batchers)]
            self._registries = [Actor(self._clock) for _ in range(scenario.num_registries)]
            self._pool = Actor(self._clock)
        else:
            services = Actor(self._clock, on_busy=cores.services)
            self._batchers, self._registries, self._pool = [services], [services], services
        self._verifiers = Slots(self._clock, scenario.num_verifiers)
        reference = scenario.reference
        self._references = References(self._clock, reference) if reference else None

    def run(self) -> Outcome:
        """Until the last batch is trained; raises when the ledger does not balance."""
        self._trainers.start()
        self._admit()
        self._fleet.keep_pinging(while_running=lambda: not self._has_ended())
        self._clock.run(until=self._has_ended)
        if not self._has_ended():
            raise RuntimeError(f"everybody waits after {len(self._books)} batches")
        for ledger in self._ledgers:
            ledger.check()
        return measured(self._scenario, self._books, num_events=self._clock.num_events)

    def _has_ended(self) -> bool:
        return len(self._books) == self._scenario.num_batches

    def _admit(self) -> None:
        for ordinal in self._window.admissible():
            self._window.start(ordinal)
            step = self._window.step_of(ordinal)
            number = ordinal % len(self._batchers)
            num_samples = self._scenario.samples_per_question
            self._ledgers[number].admit(ordinal, num_samples=num_samples, step=step)
            share = self._scenario.batch_size // len(self._batchers)
            self._unsettled.setdefault((number, step.batch), share)
            self._start(ordinal, step, self._window.oldest_weights(ordinal))

    def _start(self, ordinal: int, step: StepKey, oldest: WeightsVersion) -> None:
        """A question goes its way; each callback is the next station."""
        scenario, control = self._scenario, self._scenario.control
        batcher = self._batchers[ordinal % len(self._batchers)]
        lengths = scenario.drawn(ordinal)
        num_samples = len(lengths)
        receiving_s = num_samples * control.batcher_sample_s / 2
        receiving_s += sum(lengths) * control.batcher_token_s / 2

        def lease() -> None:
            self._fleet.acquire(ordinal, oldest, lambda grant: generate(*grant))

        def generate(lease_id: int, worker_id: str, _version: WeightsVersion) -> None:
            engine = self._fleet.engines[int(worker_id)]
            engine.generate(scenario.prompt_tokens, lengths, lambda: receive(lease_id))

        def receive(lease_id: int) -> None:
            batcher.call(
                receiving_s, lambda: self._fleet.release(ordinal, lease_id, send_to_verifiers)
            )

        def send_to_verifiers() -> None:
            self._pool.call(num_samples * control.pool_sample_s, verify)

        def verify() -> None:
            self._verifiers.do(num_samples, seconds=control.verification_s, done=grade)

        def grade() -> None:
            batcher.call(control.batcher_group_s / 2, score)

        def score() -> None:
            if self._references is None:
                self._ready(ordinal, step, lengths)
                return
            num_tokens = [scenario.prompt_tokens + length for length in lengths]
            self._references.score(num_tokens, lambda: self._ready(ordinal, step, lengths))

        batcher.call(control.batcher_group_s / 2, lease)

    def _ready(self, ordinal: int, step: StepKey, lengths: Sequence[int]) -> None:
        number = ordinal % len(self._batchers)
        ratio, prompt = self._scenario.trainer.attention_ratio, self._scenario.prompt_tokens
        self._rounds.offer(
            number,
            step,
            [
                Item((ordinal, index), prompt + n, estimate_cost(prompt + n, attention_ratio=ratio))
                for index, n in enumerate(lengths)
            ],
        )
        self._unsettled[number, step.batch] -= 1
        if not self._unsettled[number, step.batch]:
            del self._unsettled[number, step.batch]
            self._rounds.complete(number, step)

    def _trained(self, items: Sequence[Item]) -> None:
        for ordinal, num in Counter(item.key[0] for item in items).items():
            ledger = self._ledgers[ordinal % len(self._ledgers)]
            ledger.settle(ordinal, fate="trained", num_samples=num)

    def _publish(self, batches: int) -> None:
        """The weights after so many batches are on their way; trainers go on."""
        for ledger in self._ledgers:
            ledger.close_step(StepKey(batches - 1, 0))
        self._books.append(self._books_now())
        version = WeightsVersion(0, batches)

        def served() -> None:
            self._window.batch_published(batches)
            self._trainers.published()
            self._admit()

        def arrived() -> None:
            self._fleet.update(version, served)

        self._clock.after(self._scenario.sync.transfer_s, arrived)

    def _books_now(self) -> Books:
        for engine in self._fleet.engines:
            engine.settle_books()
        return Books.of(
            self._clock.now_s,
            engines=self._fleet.engines,
            trainers=self._trainers.books,
            batchers=self._batchers,
            registries=self._registries,
            pool=self._pool,
            verifiers=self._verifiers,
            references=self._references,
        )


def _nobody(_is_busy: bool) -> None:
    """Nobody shares the process's core."""


def _check_shards(scenario: Scenario) -> None:
    batchers, registries = scenario.num_batchers, scenario.num_registries
    if scenario.batch_size % batchers or scenario.num_ranks % batchers:
        raise ValueError(
            f"batch_size ({scenario.batch_size}) and num_ranks ({scenario.num_ranks}) must be "
            f"multiples of num_batchers, got {batchers}"
        )
    if registries > scenario.num_engines:
        raise ValueError(
            f"every registry must have an engine, got {registries} registries for "
            f"{scenario.num_engines} engines: nobody would lease the others' questions"
        )
