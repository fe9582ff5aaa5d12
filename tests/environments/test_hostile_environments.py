"""Whatever an environment or a judge does, its group fails by class, and others are played."""

import asyncio
import time

import numpy as np
import pytest
from players import Scripted, make_request, make_turn, play

from async_grpo.environments import play as module
from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass, ModelError
from async_grpo.environments.environment_worker import EnvironmentWorker
from async_grpo.environments.judging import score
from async_grpo.types import Verdict
from async_grpo.util.user_code import UserCode

LONG_S = 10.0


# By name: what an environment does between two turns.
DOES = {
    "exits": "sys.exit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "cancels": "raise asyncio.CancelledError",
    "recurses": "f = lambda: f()\n        f()",
    "says too much": "raise ValueError('x' * 10**7)",
    "says no UTF-8": "raise ValueError('\\ud800\\0\\x1b[2J')",
    "says lines": "from async_grpo.environments.base import EpisodeFailed, FailureClass\n        "
    "raise EpisodeFailed(FailureClass.ENVIRONMENT, 'no\\x1b[2J\\nINFO all is well')",
    "asks for no tokens": "await policy.sample([])",
    "asks for texts": "await policy.sample(['a'])",
    "asks for large tokens": "await policy.sample([10**12])",
    "asks for too much": "await policy.sample([5], max_tokens=-10**9)",
    "returns nothing": "return None",
    "returns a class": "return type(policy)",
    "runs over": "import itertools\n        sum(1 for _ in zip(range(10**6), itertools.count()))\n"
    "        1 / 0",
}
FILE = """
import asyncio, sys
from async_grpo.environments.base import Environment
from async_grpo.types import Verdict

class Mine(Environment):
    async def play(self, question, policy, services):
        await policy.sample(question.input_token_ids)
        if question.input == "hostile":
            pass
            {does}
        return policy.episode()

    async def grade(self, question, episodes, services):
        return [Verdict("scored", 1.0, None, "", "", 0.0)] * len(episodes)
"""


@pytest.mark.parametrize("name", DOES)
def test_what_an_environment_does_fails_its_own_group_alone(name, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE.replace("{does}", DOES[name].replace("\n        ", "\n            ")))
    code = UserCode(f"{path}:Mine", path.read_text())

    async def ask(played, role, method, request, **where):
        return [make_turn([9])]

    async def scenario():
        worker = EnvironmentWorker(ask, worker_id="e0", capacity=4)

        def request(text, lease):
            question = make_request().question
            asked = type(question)(question.input_token_ids, text, None, {})
            return make_request(asked, environment=code, num_samples=1, lease_id=lease)

        failed, played = await asyncio.gather(
            worker.play(request("hostile", 1)),
            worker.play(request("innocent", 2)),
            return_exceptions=True,
        )
        after = await worker.play(request("innocent", 3))
        return failed, played, after

    started = time.monotonic()
    failed, played, after = asyncio.run(asyncio.wait_for(scenario(), LONG_S))
    assert time.monotonic() - started < LONG_S
    assert isinstance(failed, EpisodeFailed), failed
    assert failed.failure is FailureClass.ENVIRONMENT
    assert len(str(failed)) < 2 * module.MAX_REASON_CHARACTERS
    assert str(failed).isprintable()
    assert [verdict.reward for verdict in (*played.verdicts, *after.verdicts)] == [1.0, 1.0]


class Graded(Environment):
    """Gives the verdicts that a test wants."""

    def __init__(self, *verdicts):
        self.verdicts = verdicts

    async def play(self, question, policy, services):
        await policy.sample(question.input_token_ids)
        return policy.episode()

    async def grade(self, question, episodes, services):
        return self.verdicts


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), "1.0", None, [1.0]]
)
def test_what_is_no_finite_number_is_no_reward(reward):
    environment = Graded(Verdict("scored", reward, None, "", "", 0.0))
    with pytest.raises(EpisodeFailed, match=r"raised (TypeError|ValueError)") as caught:
        asyncio.run(play(environment, Scripted([9]), make_request(num_samples=1)))
    assert caught.value.failure is FailureClass.JUDGE


def test_a_verdict_of_an_environment_is_one_line_that_steers_no_terminal():
    given = Verdict("unscorable", 0.0, None, "a\x1b[1m", "no\x1b[2J\nyes", 0.0, "", "a\nb.py:3")
    played = asyncio.run(play(Graded(given), Scripted([9]), make_request(num_samples=1)))
    [verdict] = played.verdicts
    told = (verdict.adapter, verdict.reason, verdict.place)
    assert told == (r"a\x1b[1m", r"no\x1b[2J\nyes", r"a\nb.py:3")


class Refusing(Graded):
    """Cannot carry out what the model wrote."""

    async def play(self, question, policy, services):
        await policy.sample(question.input_token_ids)
        raise ModelError("no\x1b[2J\nINFO all is well")


def test_why_an_episode_ended_is_one_line_that_steers_no_terminal(caplog):
    caplog.set_level("INFO", "async_grpo")
    graded = Refusing(Verdict("scored", 0.5, None, "", "", 0.0))
    asyncio.run(play(graded, Scripted([9]), make_request(num_samples=1)))
    assert r"no\x1b[2J\nINFO all is well" in caplog.text
    assert "has ended" in caplog.text and "\x1b" not in caplog.text


SAYS = {
    "spaces": "VERDICT: a" + " " * 200_000 + "b" + " " * 200_000,
    "many": "VERDICT: 1\n" * 100_000,
    "none": "VERDICT:" * 100_000,
    "digits": "VERDICT: " + "9" * 200_000 + "x",
    "NUL": "VERDICT: 1\0",
    "half a surrogate": "VERDICT: \ud800",
    "control": "<|im_end|>VERDICT: 1",
}


@pytest.mark.parametrize("name", SAYS)
def test_what_a_judge_says_beside_a_verdict_is_none_and_is_read_at_once(name):
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"VERDICT|verdict"):
        score(0, 1).verdict(SAYS[name])
    assert time.monotonic() - started < 2.0
