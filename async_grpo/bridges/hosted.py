"""Environments whose episodes are played elsewhere, by whoever asks the policy over HTTP.

Each worker has one gateway on loopback, and each episode a session of it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from async_grpo.environments.base import Environment, EpisodeFailed, Policy, Services
from async_grpo.environments.chat.find import find_tokenizer
from async_grpo.environments.episode import NoRoom
from async_grpo.gateway.app import LOOPBACK, Server, in_background, make_app
from async_grpo.gateway.sampler import Ask, Refused
from async_grpo.gateway.session import TOO_LONG, Limits, Session, Sessions
from async_grpo.types import Turn

ONE_PROCESS = Limits(requests=10_000)  # the episodes' own number is what bounds them
KEPT_BYTES = 1000  # of what a process says, the last ones
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Address:
    """Where one episode finds the policy."""

    url: str  # of the gateway
    session: str
    token: str

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's protocol."""
        return f"{self.url}/s/{self.session}/v1"


class HostedEnvironment(Environment):
    """One worker's episodes, and the gateway that they ask."""

    max_turns = 64  # after which an episode has no more room
    goes_on_without_room = False  # False: a request without room ends the episode

    def __init__(self, *, token: str = "") -> None:
        """`token`: of all sessions; by default each has its own."""
        self._token = token
        self._sessions = Sessions(limits=ONE_PROCESS)
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def hosted(
        self, policy: Policy, services: Services, work: Callable[[Address], Awaitable[T]]
    ) -> tuple[T, EpisodeSampler]:
        """What `work` returns; a policy that cannot answer ends it, and is what this raises."""
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
                sampler.end.result()  # raises what has ended the episode
            sampler.mistake = session.mistake
            return playing.result(), sampler
        finally:
            self._sessions.close(name)
            sampler.end.cancel()
            playing.cancel()
            await asyncio.wait({playing})  # it ends with all that it has started


class EpisodeSampler:
    """See `Sampler`: the policy of one episode."""

    name = ""
    max_model_len = sys.maxsize  # the policy ends an episode that has no more room
    decides_sampling = True

    def __init__(self, policy: Policy, *, max_turns: int, ends_full: bool) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_full = False  # there was no room for the last turn that was asked for
        self.mistake = (
            ""  # of the model in its last turn, see `Session`; once the episode has ended
        )
        self._policy = policy
        self._turns_left = max_turns
        self._ends_full = ends_full

    async def sample(self, ask: Ask) -> AsyncIterator[Turn]:
        """See `Sampler`; a policy that cannot answer ends the episode."""
        try:
            self._turns_left -= 1
            if self._turns_left < 0:
                raise NoRoom("it has had all the turns of an episode")
            turn = await self._policy.sample(
                ask.prompt_ids, max_tokens=ask.max_tokens, stop=ask.stop_ids, cut=ask.cut
            )
        except (NoRoom, EpisodeFailed) as error:
            raise self.refusal(error) from error
        self.is_full = False
        yield turn

    def refusal(self, error: NoRoom | EpisodeFailed) -> Refused:
        """What a request hears that cannot be answered; it may end the episode."""
        self.is_full = isinstance(error, NoRoom)
        if not self.end.done() and (self._ends_full or not self.is_full):
            self.end.set_exception(error)
        return Refused(f"the episode has ended: {error}", code=TOO_LONG if self.is_full else None)


def process_variables(python: str, **own: str) -> Mapping[str, str]:
    """The environment of a process that asks the gateway: this one's, and `own`.

    The programs beside `python` are found first, and no proxy stands between.
    """
    path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", "")])
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), LOOPBACK]))
    return {**os.environ, "PATH": path, "NO_PROXY": no_proxy, "no_proxy": no_proxy, **own}


class Said(asyncio.Protocol):
    """The end of a stream, however long it is."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept = b""

    def data_received(self, data: bytes) -> None:
        """More has come."""
        self._kept = (self._kept + data)[-KEPT_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing more comes."""
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def text(self) -> str:
        """In one line."""
        return " ".join(self._kept.decode(errors="replace").split())
