"""Samples of one group share a process; what one of them does costs the others nothing."""

import asyncio
import os
import time

import pytest
from verifier_processes import sandbox, verdict_of

from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.fork_server import _Child
from async_grpo.verification.sandbox import MAX_PIECE

pytestmark = pytest.mark.integration

ADAPTER = """
import os, time

DONE = []

def grade(sample, **kwargs):
    DONE.append(sample["name"])
    kind = sample["kind"]
    if kind == "crash":
        os._exit(3)
    if kind == "leave":
        os._exit(0)
    if kind == "raise":
        raise LookupError("no such luck")
    if kind == "forge":
        os.write(3, b"{}\\n")
    if kind == "hang":
        while True: pass
    if kind == "nap":
        time.sleep(0.2)
    return {"reward": float(len(DONE)), "format_reward": float(os.getpid())}
"""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups") / "groups.py"
    path.write_text(ADAPTER)
    return f"{path}:grade"


def group(*kinds):
    return [{"name": f"{n}", "kind": kind} for n, kind in enumerate(kinds)]


def grade(adapter, *groups, **options):
    """Verdicts of each group, graded side by side after a first sample; and what happened."""

    async def all_of_them():
        async with sandbox(adapter, **options) as box:
            await verdict_of(box, group("fine")[0])
            box._seconds[adapter] = 1e-4  # on a busy machine too: a slow one's groups are divided
            verdicts = await asyncio.gather(*map(box.grade, groups))
            return verdicts, box.events

    return asyncio.run(all_of_them())


def rewards(verdicts):
    return [verdict.reward for verdict in verdicts]


def test_a_group_is_graded_one_by_one_in_one_process_and_no_two_groups_share_one(adapter):
    """The adapter counts what its process has graded."""
    graded, events = grade(adapter, group(*["fine"] * 8), group(*["fine"] * 3))
    assert list(map(rewards, graded)) == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3]]
    assert not any(events.values())


@pytest.mark.parametrize("kind", ["crash", "leave", "forge"])
def test_a_sample_that_ends_its_process_leaves_those_before_and_after_it_their_verdicts(
    adapter, kind
):
    (graded,), events = grade(adapter, group("fine", "fine", kind, "fine", "fine"))
    assert rewards(graded) == [1, 2, 0, 1, 2]  # the last two in a fresh process
    assert [verdict.status for verdict in graded].count("error") == 1
    assert events["retried"] == 1


def test_what_hangs_in_a_group_is_judged_by_a_control_and_the_rest_is_graded(adapter):
    (graded,), events = grade(adapter, group("fine", "hang", "fine"), timeout_s=0.5)
    assert [verdict.status for verdict in graded] == ["scored", "unscorable", "scored"]
    assert "--verifier-timeout-s 0.5" in graded[1].reason
    assert events["overrun"] == 2


def test_a_sample_that_raises_is_tried_again_alone_and_its_process_goes_on(adapter):
    (graded,), events = grade(adapter, group("fine", "raise", "fine"))
    assert rewards(graded) == [1, 0, 3]
    assert events["retried"] == 1


def test_each_answer_begins_the_limits_of_a_sample_anew():
    config = VerifierConfig(reward_names=(), timeout_s=10.0)
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    now, here = time.monotonic(), os.getpid()
    for spent, limit in (({"sample_since": now - 31.0}, "time"), ({"cpu_s": -11.0}, "processor")):
        child = _Child("7", here, ours, ends_at=now + 40.0, **spent)
        assert child.reached(config) == limit
        os.write(theirs, b"half of an answer, ")
        child.read()
        assert child.reached(config) == limit
        os.write(theirs, b"and the rest\n")
        child.read()
        assert child.reached(config) == ""
        assert child.answers == b"half of an answer, and the rest\n"
    assert _Child("7", here, ours, ends_at=now).reached(config) == "time"


def test_a_process_takes_no_more_of_a_group_than_a_sample_may_take(adapter):
    (graded,), _ = grade(adapter, group(*["nap"] * 6), timeout_s=0.5)
    assert rewards(graded)[:3] == [1, 2, 3]
    assert max(rewards(graded)) == 3


def test_a_group_for_a_slow_adapter_is_graded_side_by_side(adapter):
    async def sizes():
        async with sandbox(adapter, num_processes=8) as box:
            box._seconds[adapter] = 5.0
            slow = await box.grade(group(*["fine"] * 3))
            box._seconds[adapter] = 1e-4
            quick = await box.grade(group(*["fine"] * (MAX_PIECE + 2)))
            return rewards(slow), rewards(quick)

    slow, quick = asyncio.run(sizes())
    assert slow == [1, 1, 1]
    assert quick == [*range(1, MAX_PIECE + 1), 1, 2]
