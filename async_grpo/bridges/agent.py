"""The environment of an agent that knows OpenAI's protocol only, and runs unchanged.

    --environment "agent:python my_agent.py"

Each episode is one process of the agent with the question's text on its stdin. It finds the policy
at OPENAI_BASE_URL, with OPENAI_API_KEY; whatever model it names, and however it would sample, the
policy answers as the run samples. The rewards see the last answer. A class of your own may choose
the command, and what is graded:

    class Mine(AgentEnvironment):
        command = ("my-agent", "--once")

`HostedEnvironment` is the base of every environment whose episodes another process plays by asking
the policy over HTTP. Each worker has one gateway on loopback, and each episode a session of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import Cause, ModelError
from async_grpo.environments.chat.find import find_tokenizer
from async_grpo.environments.episode import NoRoom
from async_grpo.gateway.app import LOOPBACK, Server, in_background, make_app
from async_grpo.gateway.session import TOO_LONG, Limits, Session, Sessions, TurnRequest
from async_grpo.gateway.wire import Refused
from async_grpo.types import Episode, Question, Turn
from async_grpo.util.deadlines import AGENT_SAID_S

ONE_PROCESS = Limits(requests=10_000)  # the number of episodes bounds them before
KEPT_BYTES = 1000  # at the end of what a process has written
# The shell becomes the agent. Its background process waits until the worker, which alone holds the
# other end of the pipe, has ended or is killed, and then kills the agent's process group.
WATCHED = 'exec 3<&0; (read _ <&3; kill -KILL 0) & exec "$@" 3<&- <"/dev/fd/$0"'
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Address:
    """Where one episode finds the policy."""

    url: str  # of the gateway
    session: str
    token: str

    @property
    def base_url(self) -> str:
        """The session's URL for clients of OpenAI's protocol."""
        return f"{self.url}/s/{self.session}/v1"


class HostedEnvironment(Environment):
    """One worker's episodes, and the gateway that their processes ask."""

    max_turns = 64  # after which an episode has no more room
    goes_on_without_room = False  # False: a request without room ends the episode

    def __init__(self, *, token: str = "") -> None:
        """`token`: of all sessions; by default each has another."""
        self._token = token
        self._sessions = Sessions(limits=ONE_PROCESS)
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def hosted(
        self, policy: Policy, services: Services, work: Callable[[Address], Awaitable[T]]
    ) -> tuple[T, EpisodeSampler]:
        """Open a session for one episode and return what `work` does.

        A policy that cannot answer cancels `work`; this then raises the policy's error.
        """
        if self._server is None:
            self._server = Server(make_app(self._sessions))
            self._serving = in_background(self._server)
        ends_full = not self.goes_on_without_room
        sampler = EpisodeSampler(policy, max_turns=self.max_turns, ends_full=ends_full)
        tokenizer = await asyncio.to_thread(find_tokenizer, services.model)
        session = Session(
            sampler,
            tokenizer=tokenizer,
            make_dialogue=lambda tools: services.dialogue(tools=tools),
            room=policy.max_row_tokens,
            full=lambda why: sampler.refusal(NoRoom(why)),
        )
        name, token = self._sessions.open(session, token=self._token)
        playing = asyncio.ensure_future(work(Address(self._server.url, name, token)))
        try:
            ends: set[asyncio.Future[Any]] = {playing, sampler.end}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if sampler.end.done():
                sampler.end.result()  # raises the error that has ended the episode
            sampler.mistake = session.mistake
            return playing.result(), sampler
        finally:
            self._sessions.close(name)
            sampler.end.cancel()
            playing.cancel()
            await asyncio.wait({playing})  # until all processes that it has started are ended


class EpisodeSampler:
    """See `Sampler`: the policy of one episode."""

    name = ""
    max_model_len = sys.maxsize  # the policy ends an episode that has no more room
    decides_sampling = True

    def __init__(self, policy: Policy, *, max_turns: int, ends_full: bool) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_full = False  # the last request for a turn had no room
        self.mistake = ""  # the model's in its last turn, see `Session`; set after the episode
        self._policy = policy
        self._turns_left = max_turns
        self._ends_full = ends_full

    async def sample(self, ask: TurnRequest) -> AsyncIterator[Turn]:
        """See `Sampler`; a policy that cannot answer ends the episode."""
        try:
            self._turns_left -= 1
            if self._turns_left < 0:
                raise NoRoom("it has had all the turns of an episode")
            turn = await self._policy.sample(
                ask.prompt_ids,
                max_tokens=ask.max_tokens,
                stop=ask.stop_ids,
                grammar=ask.grammar,
                cut=ask.cut,
            )
        except (NoRoom, EpisodeFailed) as error:
            raise self.refusal(error) from error
        self.is_full = False
        yield turn

    def refusal(self, error: NoRoom | EpisodeFailed) -> Refused:
        """The answer to a request that the policy cannot answer; it may end the episode."""
        self.is_full = isinstance(error, NoRoom)
        if not self.end.done() and (self._ends_full or not self.is_full):
            self.end.set_exception(error)
        return Refused(f"the episode has ended: {error}", code=TOO_LONG if self.is_full else None)


class AgentEnvironment(HostedEnvironment):
    """Plays each episode by one process."""

    command: Sequence[str] = ()

    def __init__(self, command: Sequence[str] = ()) -> None:
        super().__init__()
        self.command = command or self.command

    def text(self, question: Question) -> str:
        """The text that the agent reads on its stdin."""
        return question.input

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """Run the agent until it exits; the episode holds the turns that it requested."""
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
    """The environment variables of an agent's process, with the policy's address as OpenAI's."""
    url = address.base_url
    return process_variables(
        sys.executable, OPENAI_BASE_URL=url, OPENAI_API_BASE=url, OPENAI_API_KEY=address.token
    )


def process_variables(python: str, **own: str) -> Mapping[str, str]:
    """The environment variables of a process that asks the gateway: this process', and `own`.

    PATH begins with the folder of `python`, and no proxy is used for the gateway.
    """
    path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", "")])
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), LOOPBACK]))
    return {**os.environ, "PATH": path, "NO_PROXY": no_proxy, "no_proxy": no_proxy, **own}


async def run_process(
    command: Sequence[str], *, text: str, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Run an agent with `text` as its stdin; its exit code, and the end of its output in one line.

    At the end, also when cancelled, its whole process group is killed.
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
        tail = OutputTail()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, output)
        try:
            code = await process.wait()
        finally:
            # Also processes that the agent has left in the background.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait({tail.ended}, timeout=AGENT_SAID_S)
            transport.close()
        return code, tail.text


class OutputTail(asyncio.Protocol):
    """Keeps the last `KEPT_BYTES` of a stream."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept = b""

    def data_received(self, data: bytes) -> None:
        """Append bytes; called by asyncio, and by the reader of a bridge's stderr."""
        self._kept = (self._kept + data)[-KEPT_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        """Mark the end of the stream; called by asyncio."""
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def text(self) -> str:
        """The bytes that were kept, as one line."""
        return " ".join(self._kept.decode(errors="replace").split())
