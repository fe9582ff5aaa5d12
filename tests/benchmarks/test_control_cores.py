"""The cores that the control plane's benchmark times do the work that it says."""

import asyncio

import pytest

from benchmarks import control_cores
from benchmarks.control_cores import CORES, GROUP

DECISIONS = {"admission": 1 / GROUP, "leases": 2 / GROUP, "ledger": 1 + 1 / GROUP, "rounds": 1.0}


@pytest.mark.parametrize("name", CORES)
def test_a_core_decides_as_often_behind_many_samples_as_behind_few(name):
    for num_in_flight in (512, 8192):
        work = CORES[name](num_in_flight)
        assert work(4096) == work(4096) == 4096 * DECISIONS[name]


def test_the_desk_grants_every_lease_and_takes_back_all_but_the_last_ones():
    assert asyncio.run(control_cores.desk_decisions(3000)) == 3000 + 3000 - 999
