"""While a server of a type of questions is away, nothing of that type starts or is trained."""

import asyncio

import pytest
from script import Script
from scripted import run
from scripted_run import Run, make_config, split_steps

from async_grpo.types import OutageRequest
from async_grpo.util.errors import WorkerError

AWAY_S = 40.0
CONFIG = make_config(batch_size=4, num_training_batches=3)


def trained_with_an_outage(dataset_type="", *, stays=False):
    """(the run, when its groups began, when its items came, how the outage was shown)."""
    running = Run(Script(config=CONFIG, max_rows=2))
    play, began, came, shown = running.cluster.play, [], [], []

    async def watched(request):
        began.append(asyncio.get_running_loop().time())
        return await play(request)

    running.cluster.play = watched

    async def scenario():
        why = OutageRequest(dataset_type, "tool look: ConnectionRefusedError()")
        outage = asyncio.create_task(running.served.outage(why))
        training = asyncio.create_task(running.train())
        await asyncio.sleep(AWAY_S / 2)
        shown.append(running.served.status())
        came.append((asyncio.get_running_loop().time(), len(began)))
        if not stays:
            await asyncio.sleep(AWAY_S / 2)
            outage.cancel()
        try:
            return await training
        finally:
            await asyncio.gather(outage, return_exceptions=True)

    return run(scenario()), began, shown[0]


def test_a_type_whose_server_is_away_begins_when_it_is_back_and_is_then_trained_whole():
    items, began, shown = trained_with_an_outage()
    assert min(began) >= AWAY_S and len(began) == 12
    ends = [end for _, end in split_steps(items[0])]
    assert [end.num_samples for end in ends] == [12] * 3
    assert str(shown.problem) == "environment: tool look: ConnectionRefusedError()"
    (said,) = shown.warnings
    assert said == (
        "a server is away, no question is begun or trained meanwhile; it is asked again for up "
        "to --stall-timeout-s 60: tool look: ConnectionRefusedError()"
    )


def test_a_type_goes_on_while_the_server_of_another_is_away():
    _, began, _ = trained_with_an_outage("other")
    assert min(began) < AWAY_S and len(began) == 12


def test_a_server_that_stays_away_ends_the_run_by_the_deadline_of_a_reward_server():
    with pytest.raises(WorkerError, match="back within --stall-timeout-s 60: tool look"):
        trained_with_an_outage(stays=True)


def test_what_has_been_played_meanwhile_is_trained_when_the_server_is_back():
    running = Run(Script(config=CONFIG, max_rows=2))
    play, delivered = running.cluster.play, []

    async def watched(request):
        if request.ordinal == 0:  # it calls, and waits in the middle of its episodes
            why = OutageRequest("", "away")
            outage = asyncio.create_task(running.served.outage(why))
            await asyncio.sleep(AWAY_S)
            delivered.append(running.served.status().ready)
            outage.cancel()
        return await play(request)

    running.cluster.play = watched
    items = run(running.train())
    assert delivered == [0]  # of the others, which were done by then
    assert [end.num_samples for _, end in split_steps(items[0])] == [12] * 3
    (end, *_) = [end for _, end in split_steps(items[0])]
    assert end.fates["failed"] == end.fates["discarded"] == 0
