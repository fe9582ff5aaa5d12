"""The environment of an agent that knows OpenAI's protocol only, and runs unchanged.

    --environment "agent:python my_agent.py"

Each episode is one process of the agent with the question's text on its stdin. It finds the policy
at OPENAI_BASE_URL, with OPENAI_API_KEY; whatever model it names, and however it would sample, the
policy answers as the run samples. The rewards see the last answer. A class of your own may choose
the command, and what is graded:

    class Mine(AgentEnvironment):
        command = ("my-agent", "--once")
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from async_grpo.chat.find import find_tokenizer
from async_grpo.environments.base import (
    Environment,
    EpisodeFailed,
    FailureClass,
    Policy,
    Services,
)
from async_grpo.environments.episode import NoRoom
from async_grpo.gateway.app import make_app
from async_grpo.gateway.base import Ask, Refused
from async_grpo.gateway.process import run_process
from async_grpo.gateway.server import LOOPBACK, Server, in_background
from async_grpo.gateway.session import Session
from async_grpo.gateway.sessions import Limits, Sessions
from async_grpo.types import Episode, Question, Turn

ONE_PROCESS = Limits(requests=10_000)  # the agents' own number is what bounds them


class AgentEnvironment(Environment):
    """One worker's agents, and the gateway that they ask."""

    command: Sequence[str] = ()
    max_turns = 64  # after which the episode ends, as one that has no more room

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = command or self.command
        self._sessions = Sessions(limits=ONE_PROCESS)
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def text(self, question: Question) -> str:
        """What the agent reads on its stdin."""
        return question.input

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """The agent's requests, until it exits."""
        if self._server is None:
            self._server = Server(make_app(self._sessions))
            self._serving = in_background(self._server)
        sampler = EpisodeSampler(policy, max_turns=self.max_turns)
        tokenizer = await asyncio.to_thread(find_tokenizer, services.model)
        session = Session(
            sampler,
            tokenizer=tokenizer,
            make_dialogue=lambda tools: services.dialogue(tools=tools),
        )
        name, token = self._sessions.open(session)
        variables = agent_variables(f"{self._server.url}/s/{name}/v1", token)
        agent = asyncio.create_task(
            run_process(self.command, text=self.text(question), variables=variables), name="agent"
        )
        try:
            ends: set[asyncio.Future[Any]] = {agent, sampler.end}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if sampler.end.done():
                sampler.end.result()  # raises what has ended the episode
            code, said = agent.result()
        finally:
            self._sessions.close(name)
            sampler.end.cancel()
            agent.cancel()
            await asyncio.wait({agent})  # it is killed with all that it has started
        if code or not session.turns:
            what = f"exited with {code}" if code else "ended without a request to OPENAI_BASE_URL"
            said = said or "it has said nothing"
            raise EpisodeFailed(
                FailureClass.ENVIRONMENT, f"agent {' '.join(self.command)} {what}: {said}"
            )
        return policy.episode()


class EpisodeSampler:
    """See `Sampler`: the policy of one episode."""

    name = ""
    max_model_len = sys.maxsize  # the policy ends an episode that has no more room
    decides_sampling = True

    def __init__(self, policy: Policy, *, max_turns: int) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._policy = policy
        self._turns_left = max_turns

    async def sample(self, ask: Ask) -> AsyncIterator[Turn]:
        """See `Sampler`; a policy that cannot answer ends the episode."""
        try:
            self._turns_left -= 1
            if self._turns_left < 0:
                raise NoRoom("the agent has had all the turns of an episode")
            turn = await self._policy.sample(
                ask.prompt_ids, max_tokens=ask.max_tokens, stop=ask.stop_ids, cut=ask.cut
            )
        except (NoRoom, EpisodeFailed) as error:
            if not self.end.done():
                self.end.set_exception(error)
            raise Refused(f"the episode has ended: {error}") from error
        yield turn


def agent_variables(base_url: str, token: str) -> Mapping[str, str]:
    """The environment of an agent's process: this one's, with the policy in OpenAI's place."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), LOOPBACK]))
    own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": token}
    own |= {"PATH": path, "NO_PROXY": no_proxy, "no_proxy": no_proxy}
    return {**os.environ, **own}
