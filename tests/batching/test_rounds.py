import pytest
from effort import histories
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from async_grpo.batching.admission import StepKey
from async_grpo.batching.packing import Item, estimate_cost
from async_grpo.batching.rounds import Round, RoundFormer

BUDGET = 100
FIRST, SECOND = StepKey(0, 0), StepKey(0, 1)


def former(**changes):
    options = {"max_tokens": BUDGET, "steps_per_batch": 2, "fill_target": 0.8, "patience_s": 10.0}
    return RoundFormer(2, **options | changes)


def item(ordinal, num_tokens, index=0):
    return Item((ordinal, index), num_tokens, estimate_cost(num_tokens))


def keys_of(formed):
    return sorted(key for keys in formed.bins for key in keys)


def test_a_well_filled_round_goes_out_at_once():
    rounds = former()
    for ordinal in range(3):
        rounds.offer(FIRST, item=item(ordinal, 50))
        assert rounds.next_round(0.0, hungry=False) is None
    rounds.offer(FIRST, item=item(3, 10))  # 160 of 200 tokens: the target
    assert keys_of(rounds.next_round(0.0, hungry=False)) == [(o, 0) for o in range(4)]


def test_hungry_trainers_get_less_and_less_filled_rounds():
    rounds = former()
    rounds.offer(FIRST, item=item(0, 80))  # a fill of 0.4, asked for after half of the patience
    assert rounds.next_round(100.0, hungry=True) is None
    assert rounds.next_round(104.9, hungry=True) is None
    assert keys_of(rounds.next_round(105.0, hungry=True)) == [(0, 0)]


def test_a_round_that_nothing_but_time_is_missing_from_goes_out_when_it_is_due():
    rounds = former()
    assert rounds.due_in(0.0) is None
    rounds.offer(FIRST, item=item(0, 80))
    assert rounds.next_round(1.0, hungry=False) is None and rounds.due_in(1.0) is None
    assert rounds.next_round(2.0, hungry=True) is None
    assert rounds.due_in(4.0) == pytest.approx(3.0, abs=0.01)  # half of the patience, of which 2 s
    assert rounds.next_round(6.99, hungry=True) is None
    assert isinstance(rounds.next_round(4.0 + rounds.due_in(4.0), hungry=True), Round)
    assert rounds.due_in(7.1) is None


def test_hunger_is_measured_from_the_last_time_the_trainers_were_busy():
    rounds = former()
    rounds.offer(FIRST, item=item(0, 80))
    rounds.next_round(0.0, hungry=True)
    assert rounds.next_round(50.0, hungry=False) is None
    assert rounds.next_round(51.0, hungry=True) is None
    assert rounds.next_round(56.0, hungry=True) is not None


def test_the_first_sample_waits_for_company_however_long_nothing_was_there():
    rounds = former()
    for now_s in (0.0, 50.0):
        assert rounds.next_round(now_s, hungry=True) is None
    rounds.offer(FIRST, item=item(0, 80))
    assert rounds.next_round(51.0, hungry=True) is None
    rounds.offer(FIRST, item=item(1, 40))
    assert keys_of(rounds.next_round(56.0, hungry=True)) == [(0, 0), (1, 0)]


def test_a_round_that_went_out_ends_the_hunger():
    rounds = former()
    rounds.offer(FIRST, item=item(0, 80))
    rounds.next_round(0.0, hungry=True)
    assert rounds.next_round(9.0, hungry=True) is not None
    rounds.offer(FIRST, item=item(1, 80))
    assert rounds.next_round(9.5, hungry=True) is None


def test_without_patience_anything_goes_out():
    rounds = former(patience_s=0.0)
    assert rounds.next_round(0.0, hungry=True) is None
    rounds.offer(FIRST, item=item(0, 1))
    assert rounds.next_round(0.0, hungry=False) is None
    assert rounds.next_round(0.0, hungry=True).bins == (((0, 0),), ())


def test_a_complete_step_drains_in_as_few_rounds_as_it_needs():
    rounds = former()
    for ordinal in range(5):
        rounds.offer(FIRST, item=item(ordinal, 40))
    rounds.step_complete(FIRST)
    first, last, end = (rounds.next_round(0.0, hungry=False) for _ in range(3))
    assert (first.index, last.index, end) == (0, 1, FIRST)
    assert (len(keys_of(first)), len(keys_of(last))) == (3, 2)  # 80 and 40 tokens long
    assert rounds.num_ready == 0


def test_a_step_ends_with_its_last_round_and_not_before():
    rounds = former()
    for ordinal in range(5):
        rounds.offer(FIRST, item=item(ordinal, 40))
    assert rounds.end_step() is None  # more may come
    rounds.step_complete(FIRST)
    assert rounds.end_step() is None
    rounds.next_round(0.0, hungry=False)
    assert rounds.end_step() is None
    rounds.next_round(0.0, hungry=False)
    assert (rounds.end_step(), rounds.current_step) == (FIRST, SECOND)
    assert rounds.end_step() is None


def test_rounds_are_numbered_within_their_step():
    rounds = former()
    for step in (FIRST, SECOND):
        rounds.offer(step, item=item(0, 40))
        rounds.step_complete(step)
    sent = [rounds.next_round(0.0, hungry=False) for _ in range(4)]
    assert [out.index for out in sent if isinstance(out, Round)] == [0, 0]


def test_early_finishers_of_later_steps_wait():
    rounds = former()
    for ordinal in range(4):
        rounds.offer(SECOND, item=item(ordinal, 50))
    rounds.step_complete(SECOND)
    assert rounds.next_round(0.0, hungry=True) is None
    assert rounds.next_round(99.0, hungry=True) is None
    rounds.step_complete(FIRST)
    assert rounds.next_round(99.0, hungry=True) == FIRST
    formed = rounds.next_round(99.0, hungry=True)
    assert (formed.step, formed.index, len(keys_of(formed))) == (SECOND, 0, 4)
    assert rounds.next_round(99.0, hungry=True) == SECOND
    assert rounds.current_step == StepKey(1, 0)


def test_deterministic_rounds_wait_for_the_whole_step_and_forget_the_order_of_arrival():
    outcomes = []
    for order in (range(6), reversed(range(6))):
        rounds = former(deterministic=True, patience_s=0.0)
        for ordinal in order:
            rounds.offer(FIRST, item=item(ordinal, 60))
            assert rounds.next_round(0.0, hungry=True) is None
        rounds.step_complete(FIRST)
        outcomes.append([rounds.next_round(0.0, hungry=True) for _ in range(4)])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][-1] == FIRST


def test_a_sample_beyond_the_budget_is_refused_when_it_is_offered():
    with pytest.raises(ValueError, match=r"got 101 tokens in sample \(4, 0\)"):
        former().offer(FIRST, item=item(4, 101))


class RoundsMachine(RuleBasedStateMachine):
    """Samples arrive for any open step, trainers ask at any time."""

    @initialize(ranks=st.integers(1, 4), steps=st.integers(1, 3), deterministic=st.booleans())
    def begin(self, ranks, steps, deterministic):
        self.ranks, self.steps, self.deterministic = ranks, steps, deterministic
        self.former = RoundFormer(
            ranks, max_tokens=BUDGET, steps_per_batch=steps, deterministic=deterministic
        )
        self.now, self.next_ordinal = 0.0, 0
        self.tokens, self.step_of = {}, {}
        self.complete, self.ended = set(), 0

    def key(self, number):
        return StepKey(*divmod(number, self.steps))

    @rule(ahead=st.integers(0, 3), lengths=st.lists(st.integers(1, BUDGET), max_size=8))
    def offer(self, ahead, lengths):
        step = self.key(self.ended + ahead)
        if step in self.complete:
            return
        for num_tokens in lengths:
            new = item(self.next_ordinal, num_tokens)
            self.former.offer(step, item=new)
            self.tokens[new.key], self.step_of[new.key] = num_tokens, step
            self.next_ordinal += 1

    @rule(ahead=st.integers(0, 3))
    def complete_step(self, ahead):
        step = self.key(self.ended + ahead)
        if step not in self.complete:
            self.former.step_complete(step)
            self.complete.add(step)

    @rule(seconds=st.floats(0, 5), hungry=st.booleans())
    def ask(self, seconds, hungry):
        self.now += seconds
        self.receive(self.former.next_round(self.now, hungry=hungry))

    @rule()
    def starving_trainers_get_what_there_is(self):
        current = self.key(self.ended)
        out = self.former.next_round(self.now, hungry=True)
        if out is None:
            self.now += 1000.0
            out = self.former.next_round(self.now, hungry=True)
        if current in self.step_of.values() and not self.deterministic:
            assert isinstance(out, Round)
        self.receive(out)

    def receive(self, out):
        current = self.key(self.ended)
        if isinstance(out, StepKey):
            assert out == current
            assert current in self.complete
            assert current not in self.step_of.values(), "a sample of the step was left behind"
            self.ended += 1
        elif isinstance(out, Round):
            assert out.step == current
            assert len(out.bins) == self.ranks
            assert any(out.bins)
            for keys in out.bins:
                assert sum(self.tokens[key] for key in keys) <= BUDGET
                for key in keys:
                    assert self.step_of.pop(key) == current  # KeyError: it went out before

    def teardown(self):
        if not hasattr(self, "former"):
            return
        last = self.ended + 4
        for number in range(self.ended, last):
            if self.key(number) not in self.complete:
                self.former.step_complete(self.key(number))
                self.complete.add(self.key(number))
        while self.ended < last:
            self.receive(self.former.next_round(self.now, hungry=False))
        assert not self.step_of
        assert self.former.num_ready == 0


TestRounds = RoundsMachine.TestCase
TestRounds.settings = settings(max_examples=histories(60), stateful_step_count=20, deadline=None)
TestRounds = pytest.mark.timeout(1800)(TestRounds)
