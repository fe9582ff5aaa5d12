"""Episodes find their controller once an epoch, and another one in the next."""

import asyncio
from dataclasses import replace

import pytest
from fake_cluster import FakeCluster
from players import make_request
from scripted import Handle

from async_grpo.cluster import handles
from async_grpo.types import RunId
from async_grpo.util.errors import ProcessLostError


class Controller:
    async def ask(self, run, role, method, request, *, owner, cost):
        return run, role, method, request, owner, cost


def test_a_controller_is_looked_for_once_an_epoch_and_again_where_there_was_none():
    found, looked = [None, Handle(Controller()), Handle(Controller())], []
    cluster = FakeCluster()
    cluster.find_actor = lambda name: looked.append(name) or found.pop(0)
    played = make_request(run=RunId(7, 1), lease_id=3)

    def asked(request):
        return asyncio.run(
            handles.ask_controller(cluster, request, "generation", "generate", "x", cost=1.0)
        )

    with pytest.raises(ProcessLostError, match="the controller has ended"):
        asked(played)
    expected = (RunId(7, 1), "generation", "generate", "x", 3, 1.0)
    assert asked(played) == asked(played) == expected
    later = asked(replace(played, run=RunId(7, 2)))
    assert later == (RunId(7, 2), *expected[1:])
    assert looked == [handles.CONTROLLER] * 3
