"""Environments of turns: with a tool of a server between them and a judge, or behind a bridge."""

import asyncio
import sys
from pathlib import Path

import numpy as np

from async_grpo.bridges import agent, verifiers, verifiers_bridge
from async_grpo.environments.base import Environment
from async_grpo.environments.chat.messages import ToolCall
from async_grpo.environments.judging import score
from async_grpo.environments.tools.mcp import McpServer
from async_grpo.environments.tools.toolbox import Toolbox
from async_grpo.types import Verdict

NUM_TURNS = 4
TESTS = Path(__file__).parents[1]
SERVER = TESTS / "environments" / "tools" / "tool_server.py"
VOCABULARY = range(64)  # in the place of a tokenizer: nobody reads a text


class ToolUser(Environment):
    """Everything is tokens; the judge is shown the number that they add up to."""

    def __init__(self):
        self._opening = asyncio.Lock()
        self._box = None

    async def box(self):
        async with self._opening:
            if self._box is None:
                self._box = Toolbox(await McpServer([sys.executable, str(SERVER)]).tools())
            return self._box

    async def play(self, question, policy, services):
        box, history = await self.box(), question.input_token_ids
        for number in range(NUM_TURNS):
            turn = await policy.sample(history)
            call = ToolCall("add", {"a": int(turn.token_ids[0]), "b": number})
            (result,) = await box.answer([call])
            history = np.concatenate([history, turn.token_ids, [int(result.text)]])
        return policy.episode()

    async def grade(self, question, episodes, services):
        verdicts = []
        for episode in episodes:
            total = sum(int(turn.token_ids.sum()) for turn in episode.turns)
            asked = [{"role": "user", "content": str(total)}]
            (reward,) = await services.judge(["strict"], asked, form=score(0, 10**6))
            verdicts.append(Verdict.scored(reward, adapter="strict"))
        return verdicts


class Bridged(verifiers.VerifiersEnvironment):
    """A stand-in plays it in a process of its own, and asks the worker's gateway for tokens."""

    def __init__(self):
        agent.find_tokenizer = lambda model: VOCABULARY
        verifiers_bridge.__file__ = str(TESTS / "bridges" / "stand_in_bridge.py")
        super().__init__([sys.executable])
