"""What caused a failure of an episode, and what follows from the cause.

              before the policy's first token   after it
    model     the episode starts again          it ends there, and is graded as it stands
    server    it starts again when it is back   the same request again, if it surely did not arrive
                                                or may arrive twice; else as for state
    state     the episode starts again          the whole group is played again, once
    unknown   the episode starts again          the group fails
    limit     the group fails                   the group fails

After the first token no member of a group is ever sampled again alone: such retries would select
the episodes in which the model did not do what had failed.

`reach` repeats a request to a server while that is away. Meanwhile it calls the controller, which
holds questions of that dataset type (`batching.failures`) and decides how long `reach` may wait.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from enum import StrEnum
from traceback import walk_tb
from typing import Literal, TypeVar

from async_grpo.types import Verdict
from async_grpo.util.deadlines import SERVER_PROBE_S
from async_grpo.util.errors import AsyncGrpoError, escaped

TRIES = 3  # of an episode that has sampled nothing
GROUP_TRIES = 2
# Names of exception classes: the libraries that define them need not be installed here.
NOT_SENT = frozenset(
    {"ConnectionRefusedError", "ServerAway", "gaierror"}
    | {"ConnectError", "ConnectTimeout", "PoolTimeout"}  # of httpx and requests
    | {"ClientConnectorError", "ConnectTimeoutError", "NewConnectionError", "NameResolutionError"}
)
CUT = frozenset(
    {"ConnectionError", "TimeoutError", "ConnectionClosed", "TransportError", "Timeout"}
    | {"APIConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead"}
    | {"ProtocolError"}
)
NO_WAY = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH})
HTTP_AWAY = {429: "not sent", 503: "not sent", 502: "cut", 504: "cut"}  # refused; unknown
T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # between tries: 0.25, 0.5, 1, ... 5, 5, 5
# Reports an outage, with its reason, to the controller for as long as it is awaited.
Tell = Callable[[str], Coroutine[object, object, None]]
TELL: ContextVar[Tell | None] = ContextVar("tell", default=None)  # of the task's episode


class ModelError(Exception):
    """What the model wrote cannot be carried out: the episode ends and is graded as it stands."""

    def __init__(self, message: str = "", *, verdict: Verdict | None = None) -> None:
        """`verdict`: the episode's, in an environment whose episodes have verdicts."""
        super().__init__(message)
        self.verdict = verdict


class Cause(StrEnum):
    """What caused a failure."""

    MODEL = "model"
    SERVER = "server"  # it refuses, resets, or does not answer
    STATE = "state"  # the state that the episode had built up is lost
    UNKNOWN = "unknown"
    LIMIT = "limit"  # one that the user has set


class Next(StrEnum):
    """What follows from a failure."""

    END = "end the episode"
    REQUEST = "ask the same again"
    MEMBER = "begin the episode again"
    GROUP = "play the group again"
    FAIL = "fail the group"


def decide(
    cause: Cause, *, has_sampled: bool, is_repeatable: bool = False, num_tries: int = 1
) -> Next:
    """What follows from a failure, the `num_tries`-th of its episode or group.

    `has_sampled`: the episode has requested a turn. `is_repeatable`: see the function.

    >>> decide(Cause.UNKNOWN, has_sampled=False), decide(Cause.UNKNOWN, has_sampled=True)
    (<Next.MEMBER: 'begin the episode again'>, <Next.FAIL: 'fail the group'>)
    """
    if cause is Cause.LIMIT:
        return Next.FAIL
    if cause is Cause.SERVER and is_repeatable:
        return Next.REQUEST
    if not has_sampled:
        is_over = num_tries >= TRIES and cause is not Cause.SERVER
        return Next.FAIL if is_over else Next.MEMBER
    if cause is Cause.MODEL:
        return Next.END
    is_again = cause in (Cause.SERVER, Cause.STATE) and num_tries < GROUP_TRIES
    return Next.GROUP if is_again else Next.FAIL


def cause_of(error: BaseException) -> Cause:
    """The cause of an exception, by its type, its attributes and what it was raised from.

    >>> cause_of(ConnectionResetError()), cause_of(KeyError("x")), cause_of(ModelError("x"))
    (<Cause.SERVER: 'server'>, <Cause.UNKNOWN: 'unknown'>, <Cause.MODEL: 'model'>)
    """
    if isinstance(error, ModelError):
        return Cause.MODEL
    found = getattr(error, "cause", None)  # an `EpisodeFailed` has one
    if isinstance(found, Cause):
        return found
    return Cause.SERVER if request_of(error) else Cause.UNKNOWN


def is_repeatable(error: BaseException, *, is_idempotent: bool) -> bool:
    """Whether the failed request may be repeated: it did not arrive, or may arrive twice."""
    return request_of(error) == "not sent" or (is_idempotent and cause_of(error) is Cause.SERVER)


def request_of(error: BaseException) -> Literal["not sent", "cut", ""]:
    """What became of the request to a server that failed; empty: no request failed.

    >>> request_of(ConnectionRefusedError()), request_of(ConnectionResetError())
    ('not sent', 'cut')
    >>> request_of(FileNotFoundError())
    ''
    """
    if isinstance(getattr(error, "cause", None), Cause):
        return ""  # the code that raised it has classified it
    kinds = [_kind(each) for each in _chain(error)]
    return "not sent" if "not sent" in kinds else "cut" if "cut" in kinds else ""


def _kind(error: BaseException) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, AsyncGrpoError) and "ServerAway" not in names:
        return ""  # a worker of this run, for which the controller has waited already
    answer = getattr(error, "response", None)
    statuses = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    statuses.append(getattr(answer, "status_code", None))
    if found := [each for each in statuses if isinstance(each, int) and 400 <= each < 600]:
        return HTTP_AWAY.get(found[0], "")
    if names & NOT_SENT or (isinstance(error, OSError) and error.errno in NO_WAY):
        return "not sent"
    return "cut" if names & CUT else ""


def address_of(error: BaseException) -> tuple[str, int] | None:
    """Host and port of the server that failed, out of the frames of its client; None: unknown."""
    for each in _chain(error):
        frames = [frame.f_locals for frame, _ in walk_tb(each.__traceback__)]
        clients = [getattr(names.get("self"), "__dict__", {}) for names in frames]
        for names in (vars(each), *frames, *clients):
            hosts = (names.get("host"), names.get("port"))
            for found in (names.get("address"), hosts, (names.get("remote_host"), hosts[1])):
                match found:
                    case (str(host), int(port), *_):
                        return host, port
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from, wherever clients' libraries store that."""
    if error is None:
        return
    yield error
    inner = (error.__cause__, getattr(error, "reason", None), *error.args[:1])
    for each in inner:
        if isinstance(each, BaseException) and each is not error:
            yield from _chain(each)


class Outage:
    """A server is away; the controller knows until `close`."""

    def __init__(self, telling: Coroutine[object, object, None]) -> None:
        self._telling = asyncio.create_task(telling, name="outage")
        self._pause_s = FIRST_PAUSE_S

    async def pause(self) -> None:
        """Wait before the next try; raises when the controller ends the waiting."""
        await asyncio.wait({self._telling}, timeout=self._pause_s)
        if self._telling.done():
            self._telling.result()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """End the report: the server is back, or the caller gives up."""
        self._telling.cancel()


async def reach(
    send: Callable[[], Awaitable[T]],
    *,
    is_idempotent: bool = False,
    who: str = "",
    tell: Tell | None = None,
    check: Callable[[Exception], None] = lambda error: None,
) -> T:
    """The result of `send`, which is called again while its server is away.

    Raises the first error with another cause, any error outside of an episode, and what `check`
    raises before a request is repeated.
    """
    tell, outage = tell or TELL.get(), None
    try:
        while True:
            try:
                return await send()
            except Exception as error:  # the user's code may raise anything
                may_repeat = is_repeatable(error, is_idempotent=is_idempotent)
                follows = decide(cause_of(error), has_sampled=True, is_repeatable=may_repeat)
                if not tell or follows is not Next.REQUEST:
                    raise
                check(error)
                outage = outage or Outage(tell(escaped(f"{who}{error!r}")))
            await outage.pause()
    finally:
        if outage:
            outage.close()


async def until_back(error: BaseException, tell: Tell) -> None:
    """Wait until the server that failed with `error` accepts a connection.

    Its address is that of `address_of`; the failed request itself cannot be repeated from here.
    """
    if address := address_of(error):

        async def connect() -> None:
            async with asyncio.timeout(SERVER_PROBE_S):
                _, writer = await asyncio.open_connection(*address)
            writer.close()

        await reach(connect, is_idempotent=True, who=f"{error!r}: ", tell=tell)
