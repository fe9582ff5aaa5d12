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

import os
import sys
from collections.abc import Mapping, Sequence

from async_grpo.bridges.agent_process import run_process
from async_grpo.bridges.hosted import Address, HostedEnvironment, process_variables
from async_grpo.environments.base import EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import Cause, ModelError
from async_grpo.types import Episode, Question


class AgentEnvironment(HostedEnvironment):
    """Each episode is one process."""

    command: Sequence[str] = ()

    def __init__(self, command: Sequence[str] = ()) -> None:
        super().__init__()
        self.command = command or self.command

    def text(self, question: Question) -> str:
        """What the agent reads on its stdin."""
        return question.input

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """The agent's requests, until it exits."""
        (code, said), sampler = await self.hosted(
            policy,
            services,
            lambda address: run_process(
                self.command, text=self.text(question), variables=agent_variables(address)
            ),
        )
        episode = policy.episode()
        if code or not episode.turns:
            what = f"exited with {code}" if code else "ended without a request to OPENAI_BASE_URL"
            what = f"agent {' '.join(self.command)} {what}: {said or 'it has said nothing'}"
            if episode.turns and (sampler.mistake or code == os.EX_DATAERR):
                raise ModelError(
                    f"the model's last turn {sampler.mistake or 'was refused'}; {what}"
                )
            cause = Cause.STATE if code < 0 else None  # a signal: it was ended from outside
            raise EpisodeFailed(FailureClass.ENVIRONMENT, what, cause=cause)
        return episode


def agent_variables(address: Address) -> Mapping[str, str]:
    """The environment of an agent's process, with the policy in OpenAI's place."""
    url = address.base_url
    return process_variables(
        sys.executable, OPENAI_BASE_URL=url, OPENAI_API_BASE=url, OPENAI_API_KEY=address.token
    )
