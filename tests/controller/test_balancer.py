import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_grpo.controller.balancer import Balancer
from async_grpo.types import WeightsVersion

V0, V1, NEXT_RUN = WeightsVersion(0, 0), WeightsVersion(0, 1), WeightsVersion(1, 0)


def balancer_with(*versions, capacity=8.0, overhead=2.0):
    balancer = Balancer()
    for number, version in enumerate(versions):
        balancer.add_worker(f"w{number}", capacity=capacity, overhead=overhead, version=version)
    return balancer


def test_work_goes_to_the_worker_with_the_least_load_for_its_capacity():
    balancer = Balancer()
    balancer.add_worker("small", capacity=10, overhead=0, version=V0)
    balancer.add_worker("large", capacity=30, overhead=0, version=V0)
    assert [balancer.try_acquire(5, V0) for _ in range(4)] == ["small", "large", "large", "large"]


def test_a_group_may_overshoot_but_a_full_worker_gets_nothing():
    balancer = balancer_with(V0)  # full at 10
    assert [balancer.try_acquire(cost, V0) for cost in (9.5, 64, 0.1)] == ["w0", "w0", None]
    balancer.release("w0", 64)
    assert balancer.try_acquire(0.5, V0) == "w0"
    assert balancer.try_acquire(0.1, V0) is None


def test_a_released_worker_takes_work_again():
    balancer = balancer_with(V0)
    assert balancer.try_acquire(64, V0) == "w0"
    assert balancer.try_acquire(1, V0) is None
    balancer.release("w0", 64)
    assert balancer.try_acquire(1, V0) == "w0"


def test_a_worker_that_comes_back_starts_empty():
    balancer = balancer_with(V0)
    balancer.try_acquire(64, V0)
    balancer.remove_worker("w0")
    balancer.add_worker("w0", capacity=8, overhead=0, version=V0)
    assert [balancer.try_acquire(8, V0) for _ in range(2)] == ["w0", None]


def test_a_preferred_worker_is_taken_before_less_loaded_ones_if_it_qualifies():
    balancer = balancer_with(V0, V0, V1)
    assert [balancer.try_acquire(4, V0, "w1") for _ in range(3)] == ["w1"] * 3
    assert balancer.try_acquire(4, V0, "w1") == "w0"  # it is full
    assert balancer.try_acquire(1, V1, "w0") == "w2"
    assert balancer.try_acquire(1, V0, "nobody") == "w2"


def test_weights_must_be_of_this_run_and_at_least_as_new_as_asked():
    balancer = balancer_with(V0, V1)
    assert [balancer.try_acquire(1, V1) for _ in range(3)] == ["w1"] * 3
    assert balancer.try_acquire(1, WeightsVersion(0, 2)) is None
    assert balancer.try_acquire(1, NEXT_RUN) is None
    balancer.set_version("w0", NEXT_RUN)
    assert balancer.try_acquire(1, NEXT_RUN) == "w0"
    assert balancer.try_acquire(1, V0) == "w1"


def test_the_future_of_the_previous_incarnation_serves_nobody():
    balancer = balancer_with(WeightsVersion(0, 99))
    assert balancer.try_acquire(1, WeightsVersion(1, 3)) is None


def test_a_worker_without_weights_gets_no_lease():
    balancer = balancer_with(None)
    assert balancer.try_acquire(1, None) is None
    balancer.set_version("w0", V0)
    assert balancer.try_acquire(1, None) == "w0"
    balancer.set_version("w0", None)
    assert balancer.try_acquire(1, None) is None


def test_a_draining_worker_finishes_what_it_has():
    balancer = balancer_with(V0, V0)
    assert balancer.try_acquire(1, V0) == "w0"
    balancer.drain("w0")
    assert len(balancer.draining) == 1
    assert [balancer.try_acquire(1, V0) for _ in range(3)] == ["w1"] * 3
    balancer.release("w0", 1)
    assert balancer.try_acquire(1, V0) == "w1"
    balancer.drain("w0", draining=False)
    assert balancer.try_acquire(1, V0) == "w0"


def test_nobody_there_means_waiting():
    balancer = balancer_with(V0)
    balancer.remove_worker("w0")
    assert balancer.try_acquire(1, None) is None
    assert Balancer().try_acquire(1, V0) is None


def test_a_worker_joins_once():
    balancer = balancer_with(V0)
    with pytest.raises(ValueError, match="w0 is a member already"):
        balancer.add_worker("w0", capacity=1, overhead=0, version=V0)


def test_a_thousand_workers_do_not_slow_decisions_down():
    balancer = balancer_with(*[V0] * 1000, capacity=64)
    begin = time.process_time()
    for _ in range(5000):
        balancer.release(balancer.try_acquire(8, V0), 8)
    assert time.process_time() - begin < 1.0


class BalancerMachine(RuleBasedStateMachine):
    """Workers come, go, drain and change weights; work is taken and released."""

    names = st.sampled_from(["a", "b", "c", "d"])
    versions = st.builds(WeightsVersion, st.integers(0, 1), st.integers(0, 2))

    def __init__(self):
        super().__init__()
        self.balancer = Balancer()
        self.workers = {}  # name -> [limit, capacity, version, draining]
        self.work = []  # (name, cost)

    def load(self, name):
        return sum(cost for holder, cost in self.work if holder == name)

    @rule(
        name=names,
        capacity=st.integers(1, 8),
        overhead=st.integers(0, 4),
        version=st.none() | versions,
    )
    def join(self, name, capacity, overhead, version):
        if name not in self.workers:
            self.balancer.add_worker(name, capacity=capacity, overhead=overhead, version=version)
            self.workers[name] = [capacity + overhead, capacity, version, False]

    @rule(name=names)
    def leave(self, name):
        if name in self.workers:
            self.balancer.remove_worker(name)
            self.work = [(holder, cost) for holder, cost in self.work if holder != name]
            del self.workers[name]

    @rule(name=names, draining=st.booleans())
    def drain(self, name, draining):
        if name in self.workers:
            self.balancer.drain(name, draining=draining)
            self.workers[name][3] = draining

    @rule(name=names, version=st.none() | versions)
    def update(self, name, version):
        if name in self.workers:
            self.balancer.set_version(name, version)
            self.workers[name][2] = version

    @rule(
        cost=st.integers(0, 12),
        asked=st.none() | versions,
        prefer=st.none() | names,
        only=st.just("") | names,
    )
    def acquire(self, cost, asked, prefer, only):
        serving = {
            name: self.load(name) / capacity
            for name, (limit, capacity, version, draining) in self.workers.items()
            if not draining and version is not None
            and (asked is None or (version[0] == asked[0] and version[1] >= asked[1]))
        }  # fmt: skip
        loads = [serving[name] for name in self.balancer.serving(asked)]
        assert loads == sorted(serving.values())
        qualified = {
            name: load
            for name, load in serving.items()
            if self.load(name) < self.workers[name][0] and only in ("", name)
        }
        prefer = only or prefer
        taken = self.balancer.try_acquire(cost, asked, prefer, only=only)
        assert (taken is None) == (not qualified)
        if taken is not None:
            assert taken == prefer or qualified[taken] == min(qualified.values())
            assert taken == prefer or prefer not in qualified
            self.work.append((taken, cost))

    @precondition(lambda self: self.work)
    @rule(data=st.data())
    def release(self, data):
        done = data.draw(st.sampled_from(self.work))
        self.balancer.release(*done)
        self.work.remove(done)

    @invariant()
    def loads_are_those_of_the_work(self):
        assert len(self.balancer.draining) == sum(worker[3] for worker in self.workers.values())
        assert {name: worker.load for name, worker in self.balancer._workers.items()} == {
            name: self.load(name) for name in self.workers
        }


TestBalancer = BalancerMachine.TestCase
