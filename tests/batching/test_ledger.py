import json
from collections import Counter

import pytest
from effort import histories
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_grpo.batching.admission import StepKey
from async_grpo.batching.ledger import FATES, FATES_WITH_REASON, Ledger, LedgerError

STEP = StepKey(0, 0)


def ledger_with(*, num_samples=8, slots=1):
    ledger = Ledger()
    for ordinal in range(slots):
        ledger.admit(ordinal, num_samples=num_samples, step=STEP)
    return ledger


def test_every_sample_is_counted_by_its_fate():
    ledger = ledger_with(slots=2)
    ledger.settle(0, fate="trained", num_samples=5)
    ledger.settle(0, fate="zero_contribution", num_samples=3)
    ledger.settle(1, fate="failed", num_samples=8, reason="verification")
    assert ledger.fates.samples == {"trained": 5, "zero_contribution": 3, "failed": 8}
    assert ledger.fates.reasons == {"failed: verification": 8}
    assert ledger.fates.slots == {"trained": 1, "failed": 1}
    assert (ledger.in_flight, tuple(ledger.open_slots)) == (0, ())


def test_a_slot_cannot_be_settled_twice():
    ledger = ledger_with()
    ledger.settle(0, fate="trained", num_samples=8)
    with pytest.raises(LedgerError, match="slot 0 is not open"):
        ledger.settle(0, fate="trained", num_samples=8)


def test_more_samples_than_in_flight_cannot_be_settled():
    ledger = ledger_with()
    ledger.settle(0, fate="trained", num_samples=6)
    with pytest.raises(LedgerError, match="slot 0 has 2 samples and 0 tokens in flight, got 3 a"):
        ledger.settle(0, fate="trained", num_samples=3)


def test_an_unknown_slot_cannot_be_settled():
    with pytest.raises(LedgerError, match="slot 7 is not open"):
        ledger_with().settle(7, fate="trained", num_samples=1)


def test_a_slot_cannot_be_admitted_twice_even_after_it_was_settled():
    ledger = ledger_with()
    ledger.settle(0, fate="trained", num_samples=8)
    with pytest.raises(LedgerError, match="got 0 after 0"):
        ledger.admit(0, num_samples=8, step=STEP)


@pytest.mark.parametrize(("fate", "reason"), [("failed", ""), ("trained", "why")])
def test_a_reason_is_given_exactly_for_failures_and_discards(fate, reason):
    with pytest.raises(LedgerError, match="a reason belongs to"):
        ledger_with().settle(0, fate=fate, num_samples=1, reason=reason)


def test_work_done_again_is_discarded_once_and_trained_once():
    ledger = ledger_with()
    ledger.reissue(0, fate="discarded", reason="worker died")
    ledger.check()
    ledger.settle(0, fate="trained", num_samples=8)
    assert (ledger.admitted_samples, ledger.admitted_slots) == (16, 1)
    assert ledger.fates.samples == {"discarded": 8, "trained": 8}
    assert ledger.fates.slots == {"trained": 1}


def test_tokens_given_up_after_the_last_sample_leave_the_slot_open():
    ledger = ledger_with(num_samples=1)
    ledger.receive(0, num_tokens=5)
    ledger.settle(0, fate="trained", num_samples=1, num_tokens=2)
    ledger.reissue(0, fate="replaced")
    assert ledger.tokens_in_flight(0) == 0 and not ledger.fates.slots
    ledger.settle(0, fate="trained")
    assert ledger.fates.slots == {"trained": 1}


def test_a_step_is_counted_apart_and_forgotten_when_closed():
    ledger = ledger_with(num_samples=4)
    later = StepKey(0, 1)
    ledger.admit(1, num_samples=4, step=later)
    ledger.settle(1, fate="trained", num_samples=4)
    with pytest.raises(LedgerError, match=r"in flight, by slot: {0: \(4, 0\)}"):
        ledger.close_step(STEP)
    ledger.settle(0, fate="zero_contribution", num_samples=4)
    assert ledger.close_step(STEP).samples == {"zero_contribution": 4}
    assert ledger.close_step(later).samples == {"trained": 4}
    assert ledger.state()["steps"] == []
    with pytest.raises(LedgerError, match="not open"):
        ledger.close_step(STEP)


def test_a_lost_sample_is_told_with_the_numbers():
    state = ledger_with().state()
    state["admitted_samples"] = 9
    with pytest.raises(LedgerError, match=r"samples admitted .* got 9 != 8 \+"):
        Ledger.restore(state)


def test_received_tokens_are_known_to_the_next_ledger():
    ledger = ledger_with()
    ledger.receive(0, num_tokens=123)
    again = Ledger.restore(json.loads(json.dumps(ledger.state())))
    assert (again.output_tokens, again.tokens_in_flight(0)) == (123, 123)


def test_a_checkpoint_that_says_how_many_tokens_there_were_and_no_more_can_be_read():
    ledger = ledger_with(num_samples=4)
    ledger.receive(0, num_tokens=9)
    ledger.settle(0, fate="trained")
    ledger.close_step(STEP)
    state = ledger.state()
    del state["tokens"], state["token_reasons"]
    assert Ledger.restore(state).fates == ledger.fates


def test_a_step_whose_tokens_have_no_fate_cannot_be_closed():
    ledger = ledger_with(num_samples=2)
    ledger.receive(0, num_tokens=9)
    ledger.settle(0, fate="trained", num_samples=2, num_tokens=8)
    with pytest.raises(LedgerError, match=r"tokens in flight, by slot: {0: \(0, 1\)}"):
        ledger.close_step(STEP)
    ledger.settle(0, fate="trained", num_tokens=1, num_samples=0)
    assert ledger.close_step(STEP).tokens == {"trained": 9}


def test_tokens_that_nobody_received_have_no_fate():
    ledger = ledger_with()
    ledger.receive(0, num_tokens=9)
    with pytest.raises(LedgerError, match="8 samples and 9 tokens in flight, got 1 and 10"):
        ledger.settle(0, fate="trained", num_samples=1, num_tokens=10)


def test_episodes_that_are_played_again_count_as_often_as_they_were_played():
    ledger = ledger_with(num_samples=2)
    ledger.receive(0, num_tokens=50)
    ledger.reissue(0, fate="discarded", num_samples=3, num_tokens=30, reason="tool")
    ledger.settle(0, fate="failed", reason="tool")
    step = ledger.close_step(STEP)
    assert (ledger.admitted_samples, step.samples) == (5, {"discarded": 3, "failed": 2})
    assert step.token_reasons == {"discarded: tool": 30, "failed: tool": 20}


def test_earlier_steps_keep_what_they_have_when_later_ones_are_done_again():
    ledger = ledger_with(num_samples=4)
    ledger.settle(0, fate="trained", num_samples=4)
    ledger.admit(1, num_samples=4, step=StepKey(0, 1))
    ledger.settle(1, fate="failed", num_samples=4, reason="verification")
    again = ledger.rolled_back(first=StepKey(0, 1), reason="restart")
    assert again._steps[STEP].fates.samples == {"trained": 4}
    assert again._steps[StepKey(0, 1)].fates.samples == {"discarded": 4}
    assert tuple(again.open_slots) == (1,)
    assert again.fates.reasons == {"discarded: restart": 4}


SLOTS_A_STEP = 3


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving of admissions, fates, replacements, closed steps and restarts balances."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.next_ordinal = 0
        self.open = {}  # ordinal -> samples in flight
        self.sizes = {}  # ordinal -> samples of its latest issue
        self.fates_of = {}  # ordinal -> fates that its samples reached
        self.by_step = {}  # step -> samples by fate
        self.closed = Counter()
        self.tokens_open = {}  # ordinal -> tokens in flight
        self.tokens_by_step = {}  # step -> tokens by fate
        self.closed_tokens = Counter()
        self.admitted = self.tokens = 0

    def step_of(self, ordinal):
        return StepKey(*divmod(ordinal // SLOTS_A_STEP, 2))

    def count(self, ordinal, fate, num_samples, num_tokens):
        self.by_step[self.step_of(ordinal)][fate] += num_samples
        self.tokens_by_step[self.step_of(ordinal)][fate] += num_tokens
        self.tokens_open[ordinal] -= num_tokens
        if num_samples:
            self.fates_of[ordinal].add(fate)

    @rule(num_samples=st.integers(1, 8))
    def admit(self, num_samples):
        ordinal, self.next_ordinal = self.next_ordinal, self.next_ordinal + 1
        step = self.step_of(ordinal)
        self.ledger.admit(ordinal, num_samples=num_samples, step=step)
        self.open[ordinal], self.fates_of[ordinal] = num_samples, set()
        self.sizes[ordinal], self.tokens_open[ordinal] = num_samples, 0
        self.by_step.setdefault(step, Counter())
        self.tokens_by_step.setdefault(step, Counter())
        self.admitted += num_samples

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fate=st.sampled_from(FATES))
    def settle(self, data, fate):
        ordinal = data.draw(st.sampled_from(sorted(self.open)))
        reason = "broken" if fate in FATES_WITH_REASON else ""
        if data.draw(st.booleans(), label="all"):
            num_samples, num_tokens = self.open[ordinal], self.tokens_open[ordinal]
            self.ledger.settle(ordinal, fate=fate, reason=reason)
        else:
            num_samples = data.draw(st.integers(0, self.open[ordinal]))
            num_tokens = data.draw(st.integers(0, self.tokens_open[ordinal]))
            numbers = {"num_samples": num_samples, "num_tokens": num_tokens}
            self.ledger.settle(ordinal, fate=fate, reason=reason, **numbers)
        self.count(ordinal, fate, num_samples, num_tokens)
        self.open[ordinal] -= num_samples
        if not self.open[ordinal] and not self.tokens_open[ordinal] and self.fates_of[ordinal]:
            del self.open[ordinal], self.tokens_open[ordinal]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fate=st.sampled_from(["replaced", "discarded"]))
    def reissue(self, data, fate):
        ordinal = data.draw(st.sampled_from(sorted(self.open)))
        reason = "again" if fate == "discarded" else ""
        if data.draw(st.booleans(), label="all"):
            num_samples, num_tokens = self.open[ordinal], self.tokens_open[ordinal]
            self.ledger.reissue(ordinal, fate=fate, reason=reason)
        else:
            num_samples = data.draw(st.integers(0, 9))
            num_tokens = data.draw(st.integers(0, self.tokens_open[ordinal]))
            numbers = {"num_samples": num_samples, "num_tokens": num_tokens}
            self.ledger.reissue(ordinal, fate=fate, reason=reason, **numbers)
        self.count(ordinal, fate, num_samples, num_tokens)
        self.admitted += num_samples

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_tokens=st.integers(0, 100))
    def receive(self, data, num_tokens):
        ordinal = data.draw(st.sampled_from(sorted(self.open)))
        self.ledger.receive(ordinal, num_tokens=num_tokens)
        self.tokens_open[ordinal] += num_tokens
        self.tokens += num_tokens

    @precondition(lambda self: self.by_step)
    @rule()
    def close_the_oldest_step(self):
        step = min(self.by_step)
        if any(self.step_of(ordinal) == step for ordinal in self.open):
            with pytest.raises(LedgerError, match="in flight"):
                self.ledger.close_step(step)
        elif self.step_of(self.next_ordinal) > step:
            counts, tokens = self.by_step.pop(step), self.tokens_by_step.pop(step)
            ended = self.ledger.close_step(step)
            assert (ended.samples, ended.tokens) == (counts, tokens)
            for reasons, by_fate in ((ended.reasons, counts), (ended.token_reasons, tokens)):
                assert reasons.total() == sum(by_fate[fate] for fate in FATES_WITH_REASON)
            self.closed += counts
            self.closed_tokens += tokens

    @precondition(lambda self: self.next_ordinal)
    @rule(data=st.data())
    def work_that_is_not_in_flight_is_refused(self, data):
        ordinal = data.draw(st.integers(0, self.next_ordinal + 1))
        too_many = self.open.get(ordinal, 0) + 1
        with pytest.raises(LedgerError):
            self.ledger.settle(ordinal, fate="trained", num_samples=too_many)

    @rule()
    def restart_from_a_checkpoint(self):
        self.ledger = Ledger.restore(json.loads(json.dumps(self.ledger.state())))

    @precondition(lambda self: self.by_step)
    @rule(data=st.data())
    def go_on_from_an_earlier_step(self, data):
        """What later steps had done is discarded; as much as was admitted is in flight again."""
        first = data.draw(st.sampled_from(sorted(self.by_step)))
        before = json.dumps(self.ledger.state())
        ledger = self.ledger.rolled_back(first=first, reason="restart")
        assert json.dumps(self.ledger.state()) == before, "the run goes on with the original"
        assert Ledger.restore(json.loads(json.dumps(ledger.state()))).state() == ledger.state()
        for step in self.by_step:
            if step < first:
                assert ledger._steps[step] == self.ledger._steps[step]
        self.ledger = ledger
        for ordinal in [o for o in self.sizes if self.step_of(o) in self.by_step]:
            if self.step_of(ordinal) >= first:
                self.by_step[self.step_of(ordinal)]["discarded"] += self.open.get(ordinal, 0)
                self.open[ordinal], self.fates_of[ordinal] = self.sizes[ordinal], {"discarded"}
                self.tokens_by_step[self.step_of(ordinal)]["discarded"] += self.tokens_open.get(
                    ordinal, 0
                )
                self.tokens_open[ordinal] = 0
                self.admitted += self.sizes[ordinal]
        for step, counts in self.by_step.items():
            if step >= first:
                self.by_step[step] = Counter(discarded=counts.total())
                tokens = self.tokens_by_step[step]
                self.tokens_by_step[step] = Counter(discarded=tokens.total())

    @invariant()
    def it_balances_and_agrees_with_the_model(self):
        self.ledger.check()
        assert self.ledger.fates.samples == sum(self.by_step.values(), self.closed)
        assert self.ledger.admitted_samples == self.admitted
        assert self.ledger.in_flight == sum(self.open.values())
        assert self.ledger.output_tokens == self.tokens
        tokens = sum(self.tokens_by_step.values(), self.closed_tokens)
        assert self.ledger.fates.tokens == tokens
        assert self.tokens == tokens.total() + sum(self.tokens_open.values())
        assert tuple(self.ledger.open_slots) == tuple(sorted(self.open))

    @invariant()
    def a_settled_slot_has_the_strongest_fate_of_its_samples(self):
        settled = self.fates_of.keys() - self.open.keys()
        expected = Counter(min(self.fates_of[ordinal], key=FATES.index) for ordinal in settled)
        assert self.ledger.fates.slots == expected
        assert self.ledger.admitted_slots == self.next_ordinal


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=histories(60), stateful_step_count=20, deadline=None)
TestLedger = pytest.mark.timeout(1800)(TestLedger)
