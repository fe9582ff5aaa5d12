import pytest
from effort import histories
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from async_grpo.batching.admission import AdmissionWindow, StepKey
from async_grpo.types import WeightsVersion


def window(**changes):
    options = {"questions_per_step": 2, "max_staleness": 1, "num_batches": 5} | changes
    return AdmissionWindow(4, **options)


def test_without_staleness_only_the_current_batch_may_start():
    admission = window(max_staleness=0)
    assert admission.start() == range(4)
    assert not admission.start()
    admission.batch_published(1)
    assert admission.start() == range(4, 8)


def test_the_run_ends_with_its_last_batch():
    admission = window(max_staleness=9)
    assert admission.start() == range(20)
    assert not admission.start()
    admission.batch_published(5)
    assert not admission.start()


def test_slots_belong_to_the_step_of_the_design():
    admission = window()
    assert [admission.step_of(o) for o in (0, 2, 5, 7)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert admission.ordinals_of(StepKey(1, 1)) == range(6, 8)


def test_a_lease_asks_for_weights_at_most_max_staleness_old():
    admission = window(max_staleness=2, incarnation=7)
    assert [admission.oldest_weights(o).batches for o in (0, 8, 12, 19)] == [0, 0, 1, 2]
    assert admission.oldest_weights(12) == WeightsVersion(7, 1)


def test_a_batch_that_did_not_start_cannot_be_completed():
    admission = window()
    with pytest.raises(ValueError, match=r"must be in 0\.\.0.*got 1"):
        admission.batch_published(1)
    admission.start()
    with pytest.raises(ValueError, match=r"must be in 0\.\.2.*got 3"):
        admission.batch_published(3)


def test_completed_batches_never_go_back():
    admission = window()
    admission.start()
    admission.batch_published(2)
    with pytest.raises(ValueError, match="got 1"):
        admission.batch_published(1)


def test_a_resumed_run_starts_at_its_first_step_that_is_not_completed():
    assert window(first=StepKey(2, 0)).start() == range(8, 16)
    assert window(first=StepKey(2, 1)).start() == range(10, 16)


class WindowMachine(RuleBasedStateMachine):
    """Slots start, engines load weights when they please, batches complete in order."""

    @initialize(
        steps=st.integers(1, 3),
        questions=st.integers(1, 3),
        staleness=st.integers(0, 3),
        batches=st.integers(1, 6),
    )
    def begin(self, steps, questions, staleness, batches):
        self.size, self.staleness, self.batches = steps * questions, staleness, batches
        self.questions = questions
        self.admission = self.window()
        self.started, self.published = [], 0
        self.in_flight = {}  # ordinal -> the weights that were served when it started

    def window(self, **options):
        return AdmissionWindow(
            self.size,
            questions_per_step=self.questions,
            max_staleness=self.staleness,
            num_batches=self.batches,
            **options,
        )

    @rule()
    def start(self):
        for ordinal in self.admission.start():
            self.started.append(ordinal)
            self.in_flight[ordinal] = WeightsVersion(0, self.published)
        widest = min(self.published + self.staleness + 1, self.batches) * self.size
        assert len(self.started) == widest == self.admission.next_ordinal
        assert self.published == self.batches or widest > self.published * self.size

    @rule(data=st.data())
    def an_engine_answers_with_weights_it_has_had_since(self, data):
        """Or with any that its lease allows: the oldest that it asked for."""
        if not self.in_flight:
            return
        ordinal = data.draw(st.sampled_from(sorted(self.in_flight)))
        since = self.in_flight.pop(ordinal)
        oldest = self.admission.oldest_weights(ordinal)
        assert oldest <= since
        for batches in {oldest.batches, since.batches, self.published}:
            assert 0 <= ordinal // self.size - batches <= self.staleness
        if self.staleness == 0:
            assert oldest == since

    @rule()
    def restart_from_the_cut_after_the_last_batch(self):
        """Later batches are done again."""
        self.admission = self.window(first=StepKey(self.published, 0))
        self.started = self.started[: self.published * self.size]
        self.in_flight = {}

    @rule()
    def complete_batch(self):
        """Its slots have all answered by then."""
        stop = (self.published + 1) * self.size
        if len(self.started) >= stop and all(ordinal >= stop for ordinal in self.in_flight):
            self.published += 1
            self.admission.batch_published(self.published)

    @invariant()
    def every_slot_starts_once_and_in_order(self):
        assert self.started == list(range(len(self.started)))


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(max_examples=histories(60), stateful_step_count=20, deadline=None)
TestWindow = pytest.mark.timeout(1800)(TestWindow)
