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


def workers_of(grants):
    return [grant and grant.worker_id for grant in grants]


def test_work_goes_to_the_worker_with_the_least_load_for_its_capacity():
    balancer = Balancer()
    balancer.add_worker("small", capacity=10, overhead=0, version=V0)
    balancer.add_worker("large", capacity=30, overhead=0, version=V0)
    grants = [balancer.try_acquire(5, V0) for _ in range(4)]
    assert workers_of(grants) == ["small", "large", "large", "large"]


def test_a_group_may_overshoot_but_a_full_worker_gets_nothing():
    balancer = balancer_with(V0)  # full at 10
    grants = [balancer.try_acquire(cost, V0) for cost in (9.5, 64, 0.1)]
    assert workers_of(grants) == ["w0", "w0", None]
    assert balancer.loads()[0].load == 73.5


def test_a_released_worker_takes_work_again():
    balancer = balancer_with(V0)
    grant = balancer.try_acquire(64, V0)
    assert balancer.try_acquire(1, V0) is None
    assert balancer.release(grant.lease_id)
    assert balancer.try_acquire(1, V0).worker_id == "w0"


def test_a_lease_is_released_once():
    balancer = balancer_with(V0)
    grant = balancer.try_acquire(1, V0)
    assert balancer.leases_of("w0") == (grant.lease_id,)
    assert [balancer.release(grant.lease_id) for _ in range(2)] == [True, False]
    assert balancer.leases_of("w0") == ()
    assert not balancer.release(999)


def test_leases_of_a_removed_worker_are_revoked_and_its_answers_are_a_zombies():
    balancer = balancer_with(V0, V0)
    grants = [balancer.try_acquire(1, V0) for _ in range(4)]
    revoked = balancer.remove_worker("w0")
    assert revoked == tuple(g.lease_id for g in grants if g.worker_id == "w0")
    assert [balancer.release(grant.lease_id) for grant in grants] == [False, True, False, True]
    assert "w0" not in balancer


def test_a_worker_that_comes_back_starts_empty_with_new_leases():
    balancer = balancer_with(V0)
    old = balancer.try_acquire(64, V0)
    balancer.remove_worker("w0")
    balancer.add_worker("w0", capacity=8, overhead=0, version=V0)
    new = balancer.try_acquire(1, V0)
    assert new.lease_id != old.lease_id
    assert balancer.loads()[0].load == 1
    assert not balancer.release(old.lease_id)


def test_weights_must_be_of_this_run_and_at_least_as_new_as_asked():
    balancer = balancer_with(V0, V1)
    assert workers_of(balancer.try_acquire(1, V1) for _ in range(3)) == ["w1"] * 3
    assert balancer.try_acquire(1, WeightsVersion(0, 2)) is None
    assert balancer.try_acquire(1, NEXT_RUN) is None
    balancer.set_version("w0", NEXT_RUN)
    assert balancer.try_acquire(1, NEXT_RUN) == (3, "w0", NEXT_RUN)
    assert balancer.try_acquire(1, V0).worker_id == "w1"


def test_the_future_of_the_previous_incarnation_serves_nobody():
    balancer = balancer_with(WeightsVersion(0, 99))
    assert balancer.try_acquire(1, WeightsVersion(1, 3)) is None


def test_a_worker_without_weights_gets_no_lease():
    balancer = balancer_with(None)
    assert balancer.try_acquire(1, None) is None
    balancer.set_version("w0", V0)
    assert balancer.try_acquire(1, None).version == V0
    balancer.set_version("w0", None)
    assert balancer.try_acquire(1, None) is None


def test_a_draining_worker_finishes_what_it_has():
    balancer = balancer_with(V0, V0)
    grant = balancer.try_acquire(1, V0)
    balancer.drain("w0")
    assert workers_of(balancer.try_acquire(1, V0) for _ in range(3)) == ["w1"] * 3
    assert balancer.release(grant.lease_id)
    assert balancer.loads()[0].num_leases == 0
    assert balancer.try_acquire(1, V0).worker_id == "w1"


def test_nobody_there_means_waiting():
    balancer = balancer_with(V0)
    balancer.remove_worker("w0")
    assert balancer.try_acquire(1, None) is None
    assert Balancer().try_acquire(1, V0) is None


def test_impossible_requests_are_refused():
    balancer = balancer_with(V0)
    with pytest.raises(ValueError, match="cost of a lease must be positive, got 0"):
        balancer.try_acquire(0, V0)
    with pytest.raises(ValueError, match="w0 is a member already"):
        balancer.add_worker("w0", capacity=1, overhead=0, version=V0)
    with pytest.raises(ValueError, match="capacity > 0 and overhead >= 0, got 0 and 1"):
        balancer.add_worker("w1", capacity=0, overhead=1, version=V0)


def test_a_thousand_workers_do_not_slow_decisions_down():
    balancer = balancer_with(*[V0] * 1000, capacity=64)
    begin = time.process_time()
    for _ in range(5000):
        balancer.release(balancer.try_acquire(8, V0).lease_id)
    assert time.process_time() - begin < 1.0


class BalancerMachine(RuleBasedStateMachine):
    """Workers come, go, drain and change weights; leases are granted, released and revoked."""

    names = st.sampled_from(["a", "b", "c", "d"])
    versions = st.builds(WeightsVersion, st.integers(0, 1), st.integers(0, 2))

    def __init__(self):
        super().__init__()
        self.balancer = Balancer()
        self.workers = {}  # name -> [limit, capacity, version, draining]
        self.leases = {}  # lease id -> (name, cost)
        self.dead = set()

    def load(self, name):
        return sum(cost for holder, cost in self.leases.values() if holder == name)

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
            revoked = self.balancer.remove_worker(name)
            mine = {lease for lease, (holder, _) in self.leases.items() if holder == name}
            assert set(revoked) == mine
            self.dead |= mine
            self.leases = {k: v for k, v in self.leases.items() if k not in mine}
            del self.workers[name]

    @rule(name=names)
    def drain(self, name):
        if name in self.workers:
            self.balancer.drain(name)
            self.workers[name][3] = True

    @rule(name=names, version=st.none() | versions)
    def update(self, name, version):
        if name in self.workers:
            self.balancer.set_version(name, version)
            self.workers[name][2] = version

    @rule(cost=st.integers(1, 12), asked=st.none() | versions)
    def acquire(self, cost, asked):
        qualified = {
            name: self.load(name) / capacity
            for name, (limit, capacity, version, draining) in self.workers.items()
            if not draining and version is not None and self.load(name) < limit
            and (asked is None or (version[0] == asked[0] and version[1] >= asked[1]))
        }  # fmt: skip
        grant = self.balancer.try_acquire(cost, asked)
        assert (grant is None) == (not qualified)
        if grant is not None:
            assert qualified[grant.worker_id] == min(qualified.values())
            assert grant.version == self.workers[grant.worker_id][2]
            assert grant.lease_id not in self.leases.keys() | self.dead
            self.leases[grant.lease_id] = (grant.worker_id, cost)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        assert self.balancer.release(lease)
        del self.leases[lease]
        self.dead.add(lease)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def zombie(self, data):
        assert not self.balancer.release(data.draw(st.sampled_from(sorted(self.dead))))

    @invariant()
    def loads_are_those_of_the_leases(self):
        assert self.balancer.num_leases == len(self.leases)
        assert {w.worker_id: w.load for w in self.balancer.loads()} == {
            name: self.load(name) for name in self.workers
        }


TestBalancer = BalancerMachine.TestCase
