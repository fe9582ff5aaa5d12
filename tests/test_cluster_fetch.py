"""Objects of other processes, fetched by a rank that trains with them; in a real Ray."""

import time

import numpy as np
import pytest
import ray
from local_ray import local_ray

from async_grpo.cluster.cluster import Cluster
from async_grpo.util.errors import ProcessLostError

pytestmark = pytest.mark.integration
WHO = "the controller"


@pytest.fixture(scope="module")
def maker():
    """An actor's class, pickled whole: workers cannot import tests."""

    class Maker:
        def two(self):
            return None, np.ones(100_000)  # too large for the reply itself

        def own(self):
            return (ray.put(np.ones(100_000)),)

        def late(self):
            time.sleep(60)

    with local_ray(num_cpus=2):
        yield ray.remote(num_cpus=0)(Maker)


def test_objects_outlive_who_made_them_where_the_caller_owns_them(maker):
    actor = maker.remote()
    answer, reference = actor.two.options(num_returns=2).remote()
    assert ray.get(answer, timeout=60) is None
    ray.kill(actor)
    (found,) = Cluster().fetch([reference], timeout_s=60, owner=WHO)
    assert found.sum() == 100_000


def test_what_does_not_come_in_time_is_none_beside_what_does(maker):
    here, late = maker.remote(), maker.remote()
    references = [late.late.remote(), here.two.options(num_returns=2).remote()[1]]
    ray.wait(references[1:], timeout=60)
    began = time.monotonic()
    found = Cluster().fetch(references, timeout_s=1, owner=WHO)
    assert [value is None for value in found] == [True, False]
    assert time.monotonic() - began < 30
    ray.kill(late)


def test_the_end_of_the_owner_is_the_end_of_a_process(maker):
    actor = maker.remote()
    (reference,) = ray.get(actor.own.remote(), timeout=60)
    ray.kill(actor)
    with pytest.raises(ProcessLostError, match="the controller has ended"):
        for _ in range(150):  # until Ray has seen it, what lies here can still be read
            Cluster().fetch([reference], timeout_s=60, owner=WHO)
            time.sleep(0.2)


def test_nothing_is_fetched_at_once(maker):
    assert Cluster().fetch([], timeout_s=1, owner=WHO) == []
