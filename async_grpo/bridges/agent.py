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
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from async_grpo.bridges.hosted import Address, HostedEnvironment, Said, process_variables
from async_grpo.environments.base import EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import Cause, ModelError
from async_grpo.types import Episode, Question
from async_grpo.util.deadlines import AGENT_SAID_S

# The shell becomes the agent. What it leaves beside it waits for the end of this process, which
# alone can write to the pipe, and ends the group: nobody else would, when this one is killed.
WATCHED = 'exec 3<&0; (read _ <&3; kill -KILL 0) & exec "$@" 3<&- <"/dev/fd/$0"'


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


async def run_process(
    command: Sequence[str], *, text: str, variables: Mapping[str, str]
) -> tuple[int, str]:
    """The exit code of an agent, and the end of what it said; `text` is its stdin.

    It is ended with all that it has started.
    """
    (reads, writes), (lives, life) = os.pipe(), os.pipe()
    with (
        tempfile.TemporaryFile() as stdin,
        os.fdopen(reads, "rb", 0) as output,
        os.fdopen(life, "wb", 0),
    ):
        stdin.write(text.encode())
        stdin.flush()
        try:
            process = await asyncio.create_subprocess_exec(
                *("sh", "-c", WATCHED, str(stdin.fileno()), *command),
                stdin=lives,
                stdout=writes,
                stderr=writes,
                pass_fds=(stdin.fileno(),),
                env=dict(variables),
                start_new_session=True,
            )
        finally:
            os.close(writes)
            os.close(lives)
        said = Said()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: said, output)
        try:
            code = await process.wait()
        finally:
            # What it started in the background too, though it may have ended itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait({said.ended}, timeout=AGENT_SAID_S)
            transport.close()
        return code, said.text
