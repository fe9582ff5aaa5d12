"""The environment of a model that calls tools until it answers.

    class Countdown(ToolEnvironment):
        tools = (calculate,)
        max_turns = 4

The rewards grade its last turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_grpo.environments.base import Environment, Policy, Services
from async_grpo.environments.chat.messages import Message
from async_grpo.environments.tools.base import Tool
from async_grpo.environments.tools.toolbox import Toolbox
from async_grpo.types import Episode, Question


class ToolEnvironment(Environment):
    """Derive from it, and set `tools`."""

    tools: Sequence[Tool] = ()
    max_turns = 8
    last_turn = ""  # what the model reads after that many turns with calls, to answer without; "":
    # the episode ends with its calls

    def __init__(self) -> None:
        self._toolbox: Toolbox | None = None
        self._opening = asyncio.Lock()  # many episodes begin at once

    def messages(self, question: Question) -> list[Message]:
        """The messages before the model's first turn."""
        return [{"role": "user", "content": question.input}]

    async def open(self) -> Toolbox:
        """Open the tools, once for all episodes; override it for the tools of a server."""
        return Toolbox(self.tools)

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """See `Environment`: turns with the results of their calls, until one has no calls."""
        async with self._opening:
            self._toolbox = toolbox = self._toolbox or await self.open()
        dialogue = await services.dialogue(tools=toolbox.specs)
        messages = self.messages(question)
        for _ in range(self.max_turns):
            reply = await dialogue.reply(policy, messages)
            if not reply.tool_calls:
                break
            results = await toolbox.answer(reply.tool_calls)
            messages += [reply.message(), *(result.message() for result in results)]
        else:
            if self.last_turn:  # whose calls nobody carries out
                asked: Message = {"role": "user", "content": self.last_turn}
                await dialogue.reply(policy, [*messages, asked])
        return policy.episode()
