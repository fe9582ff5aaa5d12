"""What an episode of an evaluation asks for goes by its terms, not by training's."""

import asyncio
from functools import partial

import numpy as np
from scripted import make_completion, run
from test_controller import House, without_ray

from async_grpo.batching.leased_work import LAST
from async_grpo.config.roles import ENVIRONMENT, GENERATION, VERIFIER
from async_grpo.types import (
    EvaluationTerms,
    GenerationRequest,
    GradingRequest,
    SamplingContract,
    VerificationRequest,
    WeightsSnapshot,
    WeightsVersion,
)

__all__ = ["without_ray"]  # a fixture of every test here
VERSION = WeightsVersion(5, 0)
TURN = GenerationRequest(0, 0, np.arange(3, dtype=np.int32), 1, SamplingContract(1.0, (1,), 4))


class Played:
    """A run with two engines, and a lease under which a group of episodes is played."""

    async def begin(self):
        self.house, self.asked = House(), []
        self.run = await self.house.begin()
        for name in "ab":
            engine = await self.house.join(name, GENERATION)
            engine.generate = partial(self.answer, name)
        await self.house.join("player", ENVIRONMENT)
        snapshot = WeightsSnapshot(VERSION, ())
        await self.house.controller.publish(self.run, snapshot, (GENERATION,), 60.0)
        return self

    async def answer(self, name, request):
        self.asked.append((name, request.priority))
        await asyncio.sleep(1.0)
        return (make_completion(VERSION),)

    def registry(self, role):
        return self.house.controller.registry_of(role)

    async def turns(self, number, terms):
        """Of one group, asked side by side."""
        self.asked.clear()
        async with self.registry(ENVIRONMENT).lease(1.0, timeout_s=9.0, terms=terms) as own:
            ask = partial(
                self.house.controller.ask, self.run, GENERATION, "generate", TURN, cost=1.0,
                version=VERSION, owner=own.lease_id,
            )  # fmt: skip
            await asyncio.gather(*(ask() for _ in range(number)))
        return self.asked


def test_turns_of_an_evaluation_are_its_held_worker_s_and_come_after_training_s():
    async def scenario():
        played = await Played().begin()
        with played.registry(GENERATION).held(VERSION) as hold:
            turns = await played.turns(4, EvaluationTerms("math", hold=hold))
            assert turns == [(hold.worker_id, LAST)] * 4
            assert sorted(await played.turns(4, None)) == [("a", 0)] * 2 + [("b", 0)] * 2

    run(scenario())


def test_turns_of_an_evaluation_that_shares_its_workers_take_no_room_of_training():
    async def scenario():
        played = await Played().begin()
        played.registry(GENERATION).deregister("b")
        with played.registry(GENERATION).held(VERSION) as hold:
            terms = EvaluationTerms("math", hold=hold)
            assert not terms.is_counted
            turns = asyncio.create_task(played.turns(9, terms))  # of a worker that has room for 4
            await asyncio.sleep(0.5)
            assert len(played.asked) == 9
            async with played.registry(GENERATION).lease(4.0, version=VERSION, timeout_s=0.1):
                await turns

    run(scenario())


def test_outputs_of_an_evaluation_s_episode_are_graded_by_its_rewards():
    async def scenario():
        played, graded = await Played().begin(), []
        played.registry(VERIFIER)  # nobody is there: what is asked is looked at

        async def verdicts(outputs, *, rewards=()):
            graded.append(rewards)
            return ()

        served = played.house.controller._current(played.run)
        served.pipeline.grading.verdicts = verdicts
        request = GradingRequest((VerificationRequest(0, 0, None, None),))
        for terms in (EvaluationTerms("math", rewards=("mine",)), None):
            async with played.registry(ENVIRONMENT).lease(1.0, timeout_s=9.0, terms=terms) as own:
                await played.house.controller.ask(
                    played.run, VERIFIER, "verify", request, cost=1.0, owner=own.lease_id
                )
        assert graded == [("mine",), ()]

    run(scenario())
