"""What `async-grpo control` asks of a controller, and whom it refuses."""

import pytest
from scripted import run
from scripted_run import make_config
from test_controller import MATH, House, ends_with, without_ray  # noqa: F401 - for all tests

from async_grpo.types import Control
from async_grpo.util.errors import ConfigError

FOLDER = make_config().recording.output_dir


def request(name, action, **details):
    return Control(name, action, "somebody", "", **details)


def test_a_run_tells_what_may_be_asked_of_it_and_what_waits():
    async def scenario():
        house = House()
        await house.begin()
        await house.join("t1")
        await house.controller.control(FOLDER, request("a", "set", settings={"learning_rate": 0.0}))
        await house.controller.control(FOLDER, request("b", "drain", worker="t1"))
        return await house.controller.running(FOLDER)

    status = run(scenario())
    assert (status.batch, status.num_batches) == (0, 3)
    assert status.options == {"learning_rate": 1e-6, "max_staleness": 1}
    assert [each.id for each in status.waiting] == ["a"]
    assert status.workers == {"t1": (MATH, True)}


def counted(worker):
    """What the worker is asked from now on."""
    asked, generate = [], worker.generate

    async def generate_and_count(seconds):
        asked.append(seconds)
        return await generate(seconds)

    worker.generate = generate_and_count
    return asked


def test_a_drained_worker_gets_no_new_work_until_it_is_told_otherwise():
    async def scenario():
        house = House()
        run_id = await house.begin()
        first, second = counted(await house.join("t1")), counted(await house.join("t2"))
        await house.controller.control(FOLDER, request("a", "drain", worker="t1"))
        for _ in range(4):
            await house.ask(run_id, 0.1)
        drained = len(first), len(second)
        await house.controller.control(FOLDER, request("b", "undrain", worker="t1"))
        await house.controller.control(FOLDER, request("c", "drain", worker="t2"))
        await house.ask(run_id, 0.1)
        return drained, (len(first), len(second))

    assert run(scenario()) == ((0, 4), (1, 4))


@pytest.mark.parametrize(
    "folder, asked, sentence",
    [
        ("elsewhere", request("a", "stop"), "must be the one that trains here, in"),
        (FOLDER, request("a", "drain", worker="t9"), "must be one of t1, got 't9'"),
        (FOLDER, request("a", "set", settings={"learning_rate": 9.0}), "--learning-rate must be"),
        (FOLDER, request("a", "evaluate"), "needs held-out questions"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(folder, asked, sentence):
    async def scenario():
        house = House()
        await house.begin()
        await house.join("t1")
        assert sentence in await ends_with(house.controller.control(folder, asked), ConfigError)
        return await house.controller.running(FOLDER)

    status = run(scenario())
    assert status.waiting == () and status.workers == {"t1": (MATH, False)}


def test_a_run_that_has_ended_is_refused():
    async def scenario():
        house = House()
        run_id = await house.begin()
        await house.controller.end_run(run_id)
        return await ends_with(house.controller.running(FOLDER), ConfigError)

    assert "this controller serves none: it has ended" in run(scenario())
