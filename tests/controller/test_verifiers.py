import asyncio
from dataclasses import replace

import pytest

from async_grpo.config.roles import VERIFIER
from async_grpo.controller.members import Member
from async_grpo.controller.verifier_terms import VerifierTerms
from async_grpo.types import Rewards, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError

MINE = Rewards(("mine.py:grade",), "registry", {"mine.py": "a" * 64}, 8, num_cores=16)
EDITED = replace(MINE, hashes={"mine.py": "b" * 64})


class Handle:
    """A pool that notes its shares."""

    def __init__(self):
        self.shares = []
        self.take_share = self

    def remote(self, share):
        async def noted():
            self.shares.append(share)

        return noted()


class Scene:
    def __init__(self):
        self.members, self.run = {}, ""
        self.terms = VerifierTerms(
            pools=lambda: tuple(self.members.values()), trainer=lambda: self.run
        )

    async def register(self, name, rewards, *, takes_s=0.0):
        info = WorkerInfo(
            name, VERIFIER, f"node of {name}", 1, "", 0, 16.0, 0.0, 0,
            rewards=rewards, owner=f"dispatcher {name}",
        )  # fmt: skip
        async with self.terms.admitted(info):
            await asyncio.sleep(takes_s)
            self.members[name] = Member(info, Handle(), None, None)
        return self.members[name].handle

    async def tell(self):
        self.terms.tell_shares()
        await asyncio.sleep(0.01)


def play(scenario):
    """In a loop whose clock jumps."""
    from scripted import run

    return run(scenario(Scene()))


def test_other_rewards_are_refused_after_a_while_and_their_users_are_named():
    async def scenario(scene):
        await scene.register("a", MINE)
        started = asyncio.get_running_loop().time()
        with pytest.raises(ConfigError, match="edited since dispatcher a and trainer 7 began"):
            scene.run = "trainer 7"
            await scene.register("b", EDITED)
        assert asyncio.get_running_loop().time() - started == deadlines.OTHER_REWARDS_GONE_S
        await scene.register("c", replace(MINE, num_verifiers=3))
        assert list(scene.members) == ["a", "c"]

    play(scenario)


def test_the_pool_of_a_dispatcher_that_was_just_killed_keeps_nobody_out():
    async def scenario(scene):
        await scene.register("a", MINE)
        asyncio.get_running_loop().call_later(2.0, scene.members.clear)
        await scene.register("b", EDITED)
        assert list(scene.members) == ["b"]

    play(scenario)


def test_a_run_keeps_its_rewards_when_all_its_pools_have_gone():
    async def scenario(scene):
        await scene.register("a", MINE)
        scene.members.clear()
        scene.run = "trainer 7"
        with pytest.raises(ConfigError, match="since trainer 7 began"):
            await scene.register("b", EDITED)
        scene.run = ""
        await scene.register("b", EDITED)

    play(scenario)


def test_of_two_that_register_at_once_the_first_fixes_the_rewards():
    async def scenario(scene):
        first = asyncio.create_task(scene.register("a", MINE, takes_s=60.0))
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="edited since dispatcher a began"):
            await scene.register("b", EDITED)
        await first

    play(scenario)


def test_each_pool_is_told_its_share_once_and_again_when_it_changes():
    async def scenario(scene):
        a, b = await scene.register("a", MINE), await scene.register("b", MINE)
        await scene.tell()
        await scene.tell()
        assert (a.shares, b.shares) == ([4], [4])
        del scene.members["a"]
        await scene.tell()
        assert (a.shares, b.shares) == ([4], [4, 8])

    play(scenario)
