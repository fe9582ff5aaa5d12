"""The environment of an agent that knows OpenAI's protocol only, and runs unchanged.

    --environment "agent:python my_agent.py"

Each episode is one process of the agent with the question's text on its stdin. It finds the policy
at OPENAI_BASE_URL, with OPENAI_API_KEY; whatever model it names, and however it would sample, the
policy answers as the run samples. The rewards see the last answer. A class of your own may choose
the command, and what is graded:

    class Mine(AgentEnvironment):
        command = ("my-agent", "--once")

    --environment "agent:https://host:8000/run --listen 0.0.0.0"

is an agent served elsewhere: each episode is one POST with the question and the policy's address,
whose answer holds the reward. What trains is what the gateway has recorded.

`HostedEnvironment` is the base of every environment whose episodes another process plays by asking
the policy over HTTP. Each worker has one gateway on loopback, and each episode a session of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import HTTP_AWAY, Cause, ModelError
from async_grpo.environments.chat.find import find_tokenizer
from async_grpo.environments.episode import NoRoom
from async_grpo.environments.find import agent_address
from async_grpo.gateway.app import Server, in_background, make_app
from async_grpo.gateway.session import TOO_LONG, Limits, Session, Sessions, TurnRequest
from async_grpo.gateway.wire import Refused
from async_grpo.types import Episode, Question, Turn, Verdict
from async_grpo.util.deadlines import AGENT_CONNECTED_S, AGENT_SAID_S
from async_grpo.util.errors import ConfigError
from async_grpo.util.ports import LOOPBACK, is_here

ONE_PROCESS = Limits(requests=10_000)  # the number of episodes bounds them before
REPLY_BYTES = 1 << 20
EVERY = "0.0.0.0"  # interface
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
    listens_at = LOOPBACK  # the address of the gateway

    def __init__(self, *, token: str = "") -> None:
        """`token`: of all sessions; by default each has another."""
        self._token = token
        self._sessions = Sessions(limits=ONE_PROCESS)
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def server(self) -> Server:
        """The gateway; raises `ConfigError` where it cannot listen."""
        if self._server is None:
            self._server = Server(make_app(self._sessions), host=self.listens_at)
        return self._server

    async def hosted(
        self, policy: Policy, services: Services, work: Callable[[Address], Awaitable[T]]
    ) -> tuple[T, EpisodeSampler]:
        """Open a session for one episode and return what `work` does.

        A policy that cannot answer cancels `work`; this then raises the policy's error.
        """
        if self._serving is None:
            self._serving = in_background(self.server)
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
        playing = asyncio.ensure_future(work(Address(self.server.url, name, token)))
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
    """Plays each episode by one process, or by one request to an agent that is served elsewhere."""

    command: Sequence[str] = ()

    def __init__(self, command: Sequence[str] = ()) -> None:
        super().__init__()
        self.command = command or self.command
        self._elsewhere: RemoteAgent | None = None
        if found := agent_address(self.command):
            url, self.listens_at = found
            self.goes_on_without_room = True  # the agent learns it, and says what that is worth
            self._elsewhere = RemoteAgent(url, self.server.url)

    def text(self, question: Question) -> str:
        """The text that the agent reads on its stdin."""
        return question.input

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """Run the agent until it exits; the episode holds the turns that it requested."""
        if self._elsewhere:
            return await self._graded_elsewhere(self._elsewhere, question, policy, services)
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

    async def _graded_elsewhere(
        self, agent: RemoteAgent, question: Question, policy: Policy, services: Services
    ) -> Episode:
        """Ask the agent; what fails once the model has made a mistake ends the episode ungraded."""

        async def ask(address: Address) -> Verdict | EpisodeFailed:
            try:
                return await agent.ask(question, self.text(question), address)
            except EpisodeFailed as error:
                return error

        found, sampler = await self.hosted(policy, services, ask)
        episode = policy.episode(is_cut=sampler.is_full)
        if sampler.is_full and not episode.turns:
            raise NoRoom("the agent's first request does not fit")
        if not episode.turns and isinstance(found, Verdict):
            found = agent.failed(
                f"answered without a request to {agent.gateway}: let it use base_url and api_key, "
                "and where it cannot reach that address, name another one by --listen"
            )
        if isinstance(found, EpisodeFailed):
            if not episode.turns or not (sampler.is_full or sampler.mistake):
                raise found
            found = Verdict("unscorable", 0.0, None, "agent", str(found), 0.0)
        return replace(episode, verdict=found)


class RemoteAgent:
    """An agent served elsewhere, which answers one POST an episode with its reward."""

    def __init__(self, url: str, gateway: str) -> None:
        """`gateway`: where this worker's listens; of every interface, the agent's way is named."""
        import httpx2

        self._url, self.gateway = url, gateway
        if EVERY in gateway:
            self.gateway = gateway.replace(EVERY, address_towards(url))
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=AGENT_CONNECTED_S), limits=httpx2.Limits(),
            trust_env=not is_here(url),
        )  # fmt: skip

    async def ask(self, question: Question, text: str, address: Address) -> Verdict:
        """The agent's verdict; raises `EpisodeFailed`, or the client's error for a lost server."""
        asked = {
            "input": text, "answer": question.answer, "columns": dict(question.columns),
            "base_url": replace(address, url=self.gateway).base_url, "api_key": address.token,
            "model": "policy",
        }  # fmt: skip
        body, data = json.dumps(asked, default=str), bytearray()
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as answer:
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > REPLY_BYTES:
                    raise self.failed(f"must answer with at most {REPLY_BYTES} bytes, got more")
        if answer.status_code in HTTP_AWAY:
            answer.raise_for_status()
        said = " ".join(data.decode(errors="replace").split())
        if not answer.is_success:
            raise self.failed(f"answered {answer.status_code}: {said[:KEPT_BYTES]}")
        return self._verdict(said)

    def failed(self, what: str) -> EpisodeFailed:
        """An error of the agent; its URL may hold a password."""
        host = urlsplit(self._url).hostname
        return EpisodeFailed(FailureClass.ENVIRONMENT, f"agent {host} {what}")

    def _verdict(self, said: str) -> Verdict:
        try:
            reply = json.loads(said)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or "reward" not in reply:
            raise self.failed(f"must answer with a JSON object that has a reward, got {said[:200]}")
        if others := sorted(reply.keys() - {"reward", "info"}):
            raise self.failed(
                f"must answer with reward and info alone, got {', '.join(others)[:200]}: what "
                "trains is what the gateway recorded, no trace of another engine"
            )
        reward = reply["reward"]
        if not isinstance(reward, int | float) or not abs(reward) < sys.float_info.max:
            raise self.failed(f"must answer with a finite reward, got {reward!r}")
        return Verdict.scored(reward, adapter="agent")


def address_towards(url: str) -> str:
    """This machine's address on the way to a URL; raises `ConfigError` where there is no way."""
    parts = urlsplit(url)
    try:
        # Of datagrams: to connect sends nothing, and finds the way.
        with socket.socket(type=socket.SOCK_DGRAM) as way:
            way.connect((parts.hostname, parts.port or 80))
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--environment agent: must be a URL that this worker can reach, got {parts.hostname}: "
            f"{error}: correct it, or the network"
        ) from error


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
