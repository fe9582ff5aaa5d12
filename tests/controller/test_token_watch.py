"""A lease is dead when no token came for it for long enough, however long its output is."""

from hypothesis import given
from hypothesis import strategies as st

from async_grpo.controller.members import TokenWatch
from async_grpo.types import Pulse, RequestPulse

INTERVAL_S, LIMIT_S = 5.0, 20.0
LEASE = 7


class Worker:
    """Pulses of a worker with one lease that is watched; `others` are tokens for the rest."""

    def __init__(self):
        self.watch = TokenWatch()
        self.watch.granted(LEASE, limit_s=LIMIT_S)
        self.num_tokens = self.num_others = 0

    def pulse(self, *, tokens=0, others=0, is_waiting=False):
        self.num_tokens += tokens
        self.num_others += others
        requests = {LEASE: RequestPulse(self.num_tokens, is_waiting), 8: RequestPulse(1, False)}
        made = self.num_tokens + self.num_others
        assert self.watch.heard(Pulse("0.1", made, requests), seconds=INTERVAL_S) == tokens + others
        return self.watch.dead().get(LEASE, "")


PULSES = st.lists(
    st.fixed_dictionaries(
        {
            "tokens": st.sampled_from((0, 0, 0, 1, 40)),
            "others": st.sampled_from((0, 0, 30)),
            "is_waiting": st.booleans(),
        }
    ),
    max_size=40,
)


@given(PULSES)
def test_a_lease_is_dead_after_as_many_pulses_without_progress_as_make_up_its_limit(pulses):
    worker, num_silent = Worker(), 0
    for pulse in pulses:
        is_dead = worker.pulse(**pulse) != ""
        lives = pulse["tokens"] or (pulse["is_waiting"] and pulse["others"])
        num_silent = 0 if lives else num_silent + 1
        assert is_dead == (num_silent * INTERVAL_S >= LIMIT_S)


def test_no_output_is_too_long_as_long_as_tokens_come():
    worker = Worker()
    assert not any(worker.pulse(tokens=1) for _ in range(1000))


def test_the_reason_tells_a_lost_request_from_a_worker_that_makes_nothing():
    worker = Worker()
    for _ in range(4):
        reason = worker.pulse(others=100)
    assert reason == "no token has come for 20 s, while its worker made 400 for others"
    worker = Worker()
    for _ in range(4):
        reason = worker.pulse()
    assert reason == "its worker has made no token for 20 s"


def test_a_request_that_the_worker_has_not_got_is_no_waiting_one():
    watch = TokenWatch()
    watch.granted(LEASE, limit_s=LIMIT_S)
    for num_tokens in (10, 20, 30, 40):
        watch.heard(Pulse("0.1", num_tokens, {}), seconds=INTERVAL_S)
    assert list(watch.dead()) == [LEASE]


def test_a_sequence_that_ends_takes_its_tokens_along_and_is_progress():
    watch = TokenWatch()
    watch.granted(LEASE, limit_s=LIMIT_S)
    for made, unfinished in enumerate((100, 90, 80, 70, 60, 50)):
        running = {LEASE: RequestPulse(unfinished, is_waiting=False)}
        watch.heard(Pulse("0.1", made, running), seconds=INTERVAL_S)
    assert watch.dead() == {}


def test_a_worker_that_computes_on_an_update_is_not_judged():
    worker = Worker()
    for _ in range(100):
        assert worker.watch.heard(Pulse("0.1"), seconds=INTERVAL_S) == 0
    assert worker.watch.dead() == {}


def test_a_lease_that_has_ended_is_forgotten():
    worker = Worker()
    worker.watch.granted(9, limit_s=LIMIT_S)
    worker.watch.keep((9,))
    for _ in range(4):
        worker.pulse()
    assert list(worker.watch.dead()) == [9]
